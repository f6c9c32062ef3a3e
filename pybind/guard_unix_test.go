//go:build unix

package pybind

import (
	"fmt"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// guard is an arena whose last byte is next to a page that cannot be touched.
type guard struct {
	*arena
	all []byte
}

func newGuard(t *testing.T, nbytes int) *guard {
	t.Helper()
	page := syscall.Getpagesize()
	pages := (nbytes + page - 1) / page * page
	all, err := syscall.Mmap(-1, 0, pages+2*page, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(all)) })
	inside := all[page : page+pages]
	require.NoError(t, syscall.Mprotect(inside, syscall.PROT_READ|syscall.PROT_WRITE))
	return &guard{&arena{bytes: inside, used: pages - nbytes}, inside}
}

func (g *guard) protect(t *testing.T, protection int) {
	t.Helper()
	require.NoError(t, syscall.Mprotect(g.all, protection))
}

// end is where nbytes at the end begin.
func (g *guard) end(nbytes int) int64 { return g.address(len(g.bytes) - nbytes) }

// TestTablesAndGradientsAreOnlyRead has both tables and the gradients in memory that cannot be written, each up to the last
// byte before a page that cannot be touched.
func TestTablesAndGradientsAreOnlyRead(t *testing.T) {
	forEachElement(t, testTablesAndGradientsAreOnlyRead[float32], testTablesAndGradientsAreOnlyRead[float64])
}

func testTablesAndGradientsAreOnlyRead[T kernel.Float](t *testing.T) {
	nbytes := int(unsafe.Sizeof(*new(T)))
	for _, backend := range kernel.Available() {
		for numel := 1; numel < 40; numel++ {
			id := fmt.Sprintf("%v/n=%d", backend, numel)
			a, want := newArena(t, 1<<14), newArena(t, 1<<14)
			grads, rowTable, groupTable := newGuard(t, numel*nbytes), newGuard(t, 3*64), newGuard(t, 2*72)
			var rows, plain []row
			for i := range 3 {
				r := newRow[T](a, numel)
				plain = append(plain, newRow[T](want, numel))
				r.layout, plain[i].layout = int64(i%2), int64(i%2)
				grad := elementsAt[T](grads.arena, grads.end(numel*nbytes), numel)
				copy(grad, elementsAt[T](a, r.grad, numel)) // all three have one gradient
				r.grad = addressOf(grad)
				rows = append(rows, r)
			}
			groups := []group{seventhStep(0), seventhStep(1)}
			rowsAt, groupsAt := rowTable.end(3*64), groupTable.end(2*72)
			copy(elementsAt[row](rowTable.arena, rowsAt, 3), rows)
			copy(elementsAt[group](groupTable.arena, groupsAt, 2), groups)
			for _, g := range []*guard{grads, rowTable, groupTable} {
				g.protect(t, syscall.PROT_READ)
			}
			unserved, err := stepOne(rowsAt, 3, groupsAt, 2, codeOf[T](), 2, int64(backend), 0, 0)
			require.NoError(t, err, id)
			require.Zero(t, unserved, id)
			_, err = stepOne(want.rows(plain...), 3, want.groups(groups...), 2, codeOf[T](), 1, int64(backend), 0, 0)
			require.NoError(t, err, id)
			for i := range rows {
				sameValues(t, id, elementsAt[T](a, rows[i].param, numel), elementsAt[T](want, plain[i].param, numel))
				assert.Equal(t, float32(7), a.float32(rows[i].step, 0), id)
			}
		}
	}
}
