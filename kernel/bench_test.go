package kernel

import (
	"fmt"
	"testing"
	"unsafe"
)

// BenchmarkStep runs over 16 Ki elements, which fit in a second-level cache, and 4 Mi, which come from memory. A step moves each
// element seven times: it reads param, grad, exp_avg and exp_avg_sq, and writes all but grad. The generic backend is the naive loop.
func BenchmarkStep(b *testing.B) {
	b.Run("float32", benchmarkStep[float32])
	b.Run("float64", benchmarkStep[float64])
}

func benchmarkStep[T Float](b *testing.B) {
	for _, n := range []int{1 << 14, 1 << 22} {
		span := ordinarySpan[T](n)
		copy(span.Grad, span.Param) // nowhere zero: there exp_avg would sink into the denormals, which are slow on some CPUs
		for _, backend := range Available() {
			for _, root := range []SquareRoot{IEEE, Goldschmidt, Newton, Library} {
				v := Variant{Decay: DecoupledDecay, SquareRoot: root}
				k, err := Lookup(backend, v, func(y, x []T) {
					if err := Sqrt(backend, IEEE, y, x); err != nil {
						b.Error(err)
					}
				})
				if err != nil {
					continue // the backend has no such square root
				}
				b.Run(fmt.Sprintf("%v/%v/n=%d", backend, v, n), func(b *testing.B) {
					span, s, tile := forVariant(clone(span), v), ordinaryScalars[T](), new(Tile[T])
					s.Decay = 1 // so that param stays where it is, however often
					b.SetBytes(7 * int64(n) * int64(unsafe.Sizeof(span.Param[0])))
					for b.Loop() {
						k.Step(span, &s, tile)
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/element")
				})
			}
		}
	}
}
