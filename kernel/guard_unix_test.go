//go:build unix

package kernel

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// guarded is a page between two pages that cannot be touched. Around what was placed in it, it holds canaries.
type guarded struct {
	page []byte
}

// canaries are what a page of nothing else holds.
var canaries = bytes.Repeat([]byte{0xbf, 0xad, 0xde, 0x7f}, syscall.Getpagesize()/4)

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	size := syscall.Getpagesize()
	memory, err := syscall.Mmap(-1, 0, 3*size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	require.NoError(t, syscall.Mprotect(memory[:size], syscall.PROT_NONE))
	require.NoError(t, syscall.Mprotect(memory[2*size:], syscall.PROT_NONE))
	t.Cleanup(func() { _ = syscall.Munmap(memory) })
	return &guarded{memory[size : 2*size]}
}

// place copies values to offset elements behind the first guard page or, from the end, before the second.
func place[T Float](g *guarded, values []T, offset int, fromEnd bool) []T {
	copy(g.page, canaries)
	begin := nbytes[T](offset)
	if fromEnd {
		begin = len(g.page) - nbytes[T](offset+len(values))
	}
	if len(values) == 0 {
		return []T{}
	}
	placed := unsafe.Slice((*T)(unsafe.Pointer(&g.page[begin])), len(values))
	copy(placed, values)
	return placed
}

// nbytes is how many bytes n elements have.
func nbytes[T Float](n int) int { return n * int(unsafe.Sizeof(*new(T))) }

// intact reports whether all canaries around n placed values are alive.
func intact[T Float](g *guarded, n, offset int, fromEnd bool) bool {
	begin, end := nbytes[T](offset), nbytes[T](offset+n)
	if fromEnd {
		begin, end = len(g.page)-end, len(g.page)-begin
	}
	return bytes.Equal(g.page[:begin], canaries[:begin]) && bytes.Equal(g.page[end:], canaries[end:])
}

// TestStepStaysInside runs every kernel over every short length at every offset, at both ends of a page whose neighbours cannot
// be touched.
func TestStepStaysInside(t *testing.T) {
	forEachElement(t, testStepStaysInside[float32], testStepStaysInside[float64])
}

func testStepStaysInside[T Float](t *testing.T) {
	const longest, farthest = 130, 16
	span, s, tile := ordinarySpan[T](longest), ordinaryScalars[T](), new(Tile[T])
	divided := s
	divided.Reciprocal, divided.ReciprocalLow = 0, 0 // for the kernels that divide
	scalars := [...]*Scalars[T]{&s, &divided}
	var pages [5]*guarded
	for i := range pages {
		pages[i] = newGuarded(t)
	}
	forEachKernel[T](t, func(t *testing.T, id string, b Backend, v Variant) {
		k, ref := lookup[T](t, b, v), reference[T](t, b, v)
		all := forVariant(span, v)
		want := clone(all)
		ref.Step(want, &s, tile)
		for n := 0; n <= longest; n++ {
			if testing.Short() && n > 36 && n%31 != 0 {
				continue
			}
			for offset := 0; offset <= farthest; offset++ {
				if testing.Short() && (n+offset)%6 != 0 {
					continue
				}
				for _, fromEnd := range []bool{false, true} {
					checkInside(t, fmt.Sprintf("%s/n=%d/offset=%d/fromEnd=%t", id, n, offset, fromEnd), &pages, &k, all.slice(0, n), want.slice(0, n), offset, fromEnd, scalars[offset%2], tile)
					if t.Failed() {
						return
					}
				}
			}
		}
	})
}

// checkInside runs a kernel on a span placed in guarded pages and looks at what is in and around it afterwards.
func checkInside[T Float](t *testing.T, id string, pages *[5]*guarded, k *Kernel[T], span, want Span[T], offset int, fromEnd bool, s *Scalars[T], tile *Tile[T]) {
	got := Span[T]{
		Param:    place(pages[0], span.Param, offset, fromEnd),
		Grad:     place(pages[1], span.Grad, offset, fromEnd),
		ExpAvg:   place(pages[2], span.ExpAvg, offset, fromEnd),
		ExpAvgSq: place(pages[3], span.ExpAvgSq, offset, fromEnd),
	}
	if span.MaxExpAvgSq != nil {
		got.MaxExpAvgSq = place(pages[4], span.MaxExpAvgSq, offset, fromEnd)
	}
	Prefetch(got)
	k.Step(got, s, tile)
	sameSpan(t, id, got, want)
	for i, x := range arrays(got) {
		if x.values != nil && !intact[T](pages[i], len(x.values), offset, fromEnd) {
			t.Errorf("%s: %s was written outside its span", id, x.name)
		}
	}
}
