package pybind

import (
	"fmt"
	"testing"

	"roundpipe-go/kernel"
)

// BenchmarkStep measures what a row costs besides its arithmetic: many small tensors on one thread.
func BenchmarkStep(b *testing.B) {
	for _, c := range []struct{ rows, numel int }{{1, 64}, {2_000, 64}, {10_000, 16}, {100, 1 << 14}} {
		b.Run(fmt.Sprintf("rows=%d/numel=%d", c.rows, c.numel), func(b *testing.B) {
			a := newArena(b, c.rows*(6*64+16*c.numel+64)+1<<12)
			rows := make([]row, c.rows)
			for i := range rows {
				rows[i] = a.newRow(c.numel)
			}
			rowTable, groupTable := a.rows(rows...), a.groups(seventhStep(0))
			b.SetBytes(int64(c.rows * c.numel * 4 * 7)) // four arrays read, three written
			b.ReportAllocs()
			for b.Loop() {
				if _, err := stepOne(rowTable, int64(c.rows), groupTable, 1, float32Code, 1, int64(kernel.Best()), 0, 0); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(c.rows), "ns/row")
		})
	}
}
