package goadam

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"roundpipe-go/kernel"
)

func BenchmarkStep(b *testing.B) {
	b.Run("float32", benchmarkStep[float32])
	b.Run("float64", benchmarkStep[float64])
}

func benchmarkStep[T kernel.Float](b *testing.B) {
	groups := newGroups(b, kernel.Variant{})
	for _, c := range []struct{ rows, numel int }{{1, 64}, {2_000, 64}, {200, 5_000}, {1, 1 << 18}, {1, 1 << 20}, {4, 1 << 22}} {
		rows := newRows[T](false, slices.Repeat([]int{c.numel}, c.rows)...)
		for _, threads := range slices.Compact([]int{1, runtime.NumCPU()}) {
			b.Run(fmt.Sprintf("rows=%d/numel=%d/threads=%d", c.rows, c.numel, threads), func(b *testing.B) {
				b.SetBytes(int64(7 * c.rows * c.numel * int(unsafe.Sizeof(*new(T))))) // four arrays are read, three written
				b.ReportAllocs()
				for b.Loop() {
					if err := Step(rows, groups, Config[T]{Threads: threads, Backend: kernel.Best()}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkRowsOverlap is what a parallel call of many rows pays before its first element. A block is how many rows lie in
// memory one after the other: hundreds from an allocator, 1 at worst.
func BenchmarkRowsOverlap(b *testing.B) {
	for _, count := range []int{100, 1_000, 10_000} {
		for _, block := range []int{100, 1} {
			buffer, rows, order := make([]float32, 5*16*count), make([]Param[float32], count), newRand().Perm(count/block)
			for i := range rows {
				column := func(k int) []float32 { return buffer[16*(k*count+order[i/block]*block+i%block):][:16] }
				rows[i] = Param[float32]{Param: column(0), Grad: column(1), ExpAvg: column(2), ExpAvgSq: column(3), MaxExpAvgSq: column(4)}
			}
			b.Run(fmt.Sprintf("as before/block=%d/rows=%d", block, count), func(b *testing.B) {
				for b.Loop() {
					if rowsOverlap(rows) {
						b.Fatal("rows overlap")
					}
				}
			})
			b.Run(fmt.Sprintf("block=%d/rows=%d", block, count), func(b *testing.B) {
				for b.Loop() {
					lastApartOf[float32]().Store(nil)
					if rowsOverlap(rows) {
						b.Fatal("rows overlap")
					}
				}
			})
		}
	}
}
