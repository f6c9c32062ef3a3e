//go:build unix

package goadam

import (
	"fmt"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// guarded is memory between two pages that cannot be touched.
type guarded struct{ inside []byte }

func newGuarded(t *testing.T, nbytes int) *guarded {
	t.Helper()
	page := syscall.Getpagesize()
	nbytes = (nbytes + page - 1) / page * page
	memory, err := syscall.Mmap(-1, 0, nbytes+2*page, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(memory)) })
	g := &guarded{memory[page : page+nbytes]}
	g.protect(t, syscall.PROT_READ|syscall.PROT_WRITE)
	return g
}

func (g *guarded) protect(t *testing.T, protection int) {
	t.Helper()
	require.NoError(t, syscall.Mprotect(g.inside, protection))
}

// placed copies values behind the first guard page or, from the end, before the second.
func placed[T kernel.Float](g *guarded, values []T, fromEnd bool) []T {
	if len(values) == 0 {
		return nil
	}
	begin := 0
	if fromEnd {
		begin = len(g.inside) - len(values)*int(unsafe.Sizeof(values[0]))
	}
	memory := unsafe.Slice((*T)(unsafe.Pointer(&g.inside[begin])), len(values))
	copy(memory, values)
	return memory
}

// TestStepStaysInside has a whole step between guard pages, short and cut over threads; nothing can be written to the gradient. It
// takes every nineteenth variant: the kernels have their own such test for all.
func TestStepStaysInside(t *testing.T) {
	forEachElement(t, testStepStaysInside[float32], testStepStaysInside[float64])
}

func testStepStaysInside[T kernel.Float](t *testing.T) {
	lengths := []int{1, 7, 8, 9, 63, 64, 65, 1000, 4097, maxSpan, maxSpan + 1, serialBelow + 5}
	var tensors [5]*guarded
	for i := range tensors {
		tensors[i] = newGuarded(t, 8*lengths[len(lengths)-1])
	}
	rows := map[bool][]Param[T]{false: newRows[T](false, lengths...), true: newRows[T](true, lengths...)}
	forEachKernel[T](t, 19, func(t *testing.T, id string, v kernel.Variant, config Config[T]) {
		groups := newGroups(t, v)
		for i := range lengths {
			row := rows[v.AMSGrad][i : i+1 : i+1]
			want := clone(row)
			reference(t, want, groups, config, kernel.NearestNoFlush)
			for _, fromEnd := range []bool{false, true} {
				got := clone(row)
				p := &got[0]
				for k, data := range []*[]T{&p.Param, &p.Grad, &p.ExpAvg, &p.ExpAvgSq, &p.MaxExpAvgSq} {
					*data = placed(tensors[k], *data, fromEnd)
				}
				tensors[1].protect(t, syscall.PROT_READ)
				config.Threads = 1 + 2*(i%2)
				err := Step(got, groups, config)
				tensors[1].protect(t, syscall.PROT_READ|syscall.PROT_WRITE)
				require.NoError(t, err, id)
				sameRows(t, fmt.Sprintf("%s/n=%d/fromEnd=%t", id, lengths[i], fromEnd), got, want)
			}
		}
	})
}
