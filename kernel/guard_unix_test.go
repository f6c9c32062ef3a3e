//go:build unix

package kernel

import (
	"fmt"
	"math"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// guarded is a page of float32 between two pages that cannot be touched. Where no slice was placed it holds canaries.
type guarded struct {
	page []float32
}

var canary = math.Float32frombits(0x7fdeadbf)

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	size := syscall.Getpagesize()
	memory, err := syscall.Mmap(-1, 0, 3*size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	require.NoError(t, syscall.Mprotect(memory[:size], syscall.PROT_NONE))
	require.NoError(t, syscall.Mprotect(memory[2*size:], syscall.PROT_NONE))
	t.Cleanup(func() { _ = syscall.Munmap(memory) })
	return &guarded{unsafe.Slice((*float32)(unsafe.Pointer(&memory[size])), size/4)}
}

// place copies values to offset elements behind the first guard page or, from the end, before the second.
func (g *guarded) place(values []float32, offset int, fromEnd bool) []float32 {
	for i := range g.page {
		g.page[i] = canary
	}
	begin := offset
	if fromEnd {
		begin = len(g.page) - offset - len(values)
	}
	placed := g.page[begin : begin+len(values) : begin+len(values)]
	copy(placed, values)
	return placed
}

// intact reports whether all canaries around the placed slice are alive.
func (g *guarded) intact(placed []float32) bool {
	want, kept := math.Float32bits(canary), 0
	for _, x := range g.page {
		if math.Float32bits(x) == want {
			kept++
		}
	}
	return kept == len(g.page)-len(placed)
}

// TestStepStaysInside runs every kernel over every short length at every offset, at both ends of a page whose neighbours cannot
// be touched.
func TestStepStaysInside(t *testing.T) {
	const longest, farthest = 130, 16
	span, s, tile := ordinarySpan(longest), scalarCases[0].scalars, new(Tile)
	var pages [5]*guarded
	for i := range pages {
		pages[i] = newGuarded(t)
	}
	forEachKernel(t, func(t *testing.T, id string, b Backend, v Variant) {
		k, ref := lookup(t, b, v), reference(t, b, v)
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
					checkInside(t, fmt.Sprintf("%s/n=%d/offset=%d/fromEnd=%t", id, n, offset, fromEnd), &pages, &k, all.slice(0, n), want.slice(0, n), offset, fromEnd, &s, tile)
					if t.Failed() {
						return
					}
				}
			}
		}
	})
}

// checkInside runs a kernel on a span placed in guarded pages and looks at what is in and around it afterwards.
func checkInside(t *testing.T, id string, pages *[5]*guarded, k *Kernel, span, want Span, offset int, fromEnd bool, s *Scalars, tile *Tile) {
	got := Span{
		Param:    pages[0].place(span.Param, offset, fromEnd),
		Grad:     pages[1].place(span.Grad, offset, fromEnd),
		ExpAvg:   pages[2].place(span.ExpAvg, offset, fromEnd),
		ExpAvgSq: pages[3].place(span.ExpAvgSq, offset, fromEnd),
	}
	if span.MaxExpAvgSq != nil {
		got.MaxExpAvgSq = pages[4].place(span.MaxExpAvgSq, offset, fromEnd)
	}
	k.Step(got, s, tile)
	sameSpan(t, id, got, want)
	for i, x := range arrays(got) {
		if x.values != nil && !pages[i].intact(x.values) {
			t.Errorf("%s: %s was written outside its span", id, x.name)
		}
	}
}
