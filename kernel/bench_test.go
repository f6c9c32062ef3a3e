package kernel

import (
	"fmt"
	"testing"
)

// BenchmarkStep runs over 16 Ki elements, which fit in a second-level cache, and 4 Mi, which come from memory. A step moves 28 bytes an
// element: it reads param, grad, exp_avg and exp_avg_sq, and writes all but grad. The generic backend is the naive loop.
func BenchmarkStep(b *testing.B) {
	for _, n := range []int{1 << 14, 1 << 22} {
		span := ordinarySpan(n)
		copy(span.Grad, span.Param) // nowhere zero: there exp_avg would sink into the denormals, which are slow on some CPUs
		for _, backend := range Available() {
			for _, root := range []SquareRoot{IEEE, Goldschmidt, Newton, Library} {
				v := Variant{Decay: DecoupledDecay, SquareRoot: root}
				k, err := Lookup(backend, v, func(y, x []float32) {
					if err := Sqrt(backend, IEEE, y, x); err != nil {
						b.Error(err)
					}
				})
				if err != nil {
					continue // the backend has no such square root
				}
				b.Run(fmt.Sprintf("%v/%v/n=%d", backend, v, n), func(b *testing.B) {
					span, s, tile := forVariant(clone(span), v), scalarCases[0].scalars, new(Tile)
					s.Decay = 1 // so that param stays where it is, however often
					b.SetBytes(28 * int64(n))
					for b.Loop() {
						k.Step(span, &s, tile)
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/element")
				})
			}
		}
	}
}
