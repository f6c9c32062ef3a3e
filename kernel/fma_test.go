package kernel

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// hardTriple makes operands for which x*y + z is hard to round: the kinds are random bits, cancellation, a product near half a
// unit in the last place of z, and a result among the denormals. A NaN or Inf comes up in the first kind.
func hardTriple(r *rand.Rand, x float32) (y, z float32) {
	bits := func() float32 { return math.Float32frombits(r.Uint32()) }
	nudge := func(f float32) float32 { return math.Float32frombits(math.Float32bits(f) + r.Uint32N(5) - 2) }
	switch r.IntN(4) {
	case 0:
		return bits(), bits()
	case 1:
		y = bits()
		return y, nudge(float32(-x * y))
	case 2:
		z = bits()
		half := (math.Nextafter32(z, float32(math.Inf(1))) - z) / 2
		if r.IntN(2) == 0 {
			half = -half
		}
		return nudge(half / x), z
	default:
		tiny := math.Ldexp(r.Float64()+0.5, -126-r.IntN(26))
		return nudge(float32(tiny / float64(x))), nudge(float32(math.Ldexp(r.NormFloat64(), -126-r.IntN(26))))
	}
}

func TestFusedMultiplyAddIsExactlyRounded(t *testing.T) {
	r, triples := newRand(), 200_000
	if testing.Short() {
		triples = 20_000
	}
	for range triples {
		x := math.Float32frombits(r.Uint32())
		y, z := hardTriple(r, x)
		got := fusedMultiplyAdd(x, y, z)
		product := float64(x) * float64(y)
		want := float32(product + float64(z)) // right for Inf, NaN and the sign of zero
		if finite := !math.IsInf(product+float64(z), 0) && product+float64(z) == product+float64(z); finite && want != 0 {
			exact := new(big.Float).SetPrec(2000).SetFloat64(product)
			want, _ = exact.Add(exact, new(big.Float).SetFloat64(float64(z))).Float32()
		}
		if !same(got, want) {
			t.Fatalf("fma(%x, %x, %x) = %x, want %x: %s", x, y, z, got, want, ulps(got, want))
		}
	}
}

// TestFusedMultiplyAddMatchesHardware takes the hardware's result out of the kernels: with exp_avg 0 and beta1 0, exp_avg becomes
// fma(param, decay, grad) by L2 decay. That form loses the sign of zero and infinite results, so those are left to the test above.
func TestFusedMultiplyAddMatchesHardware(t *testing.T) {
	const n = 4096
	rounds := 500
	if testing.Short() {
		rounds = 20
	}
	for _, b := range backends() {
		k, r := lookup[float32](t, b, Variant{Decay: L2Decay}), newRand()
		for range rounds {
			x := math.Float32frombits(r.Uint32())
			s := Scalars[float32]{Decay: x, OneMinusBeta1: 1, BiasCorrection2Sqrt: 1, Eps: 1}
			for _, s.MXCSR = range []uint32{NearestNoFlush, 0x3F80} {
				span := Span[float32]{make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n), nil}
				for i := range n {
					span.Param[i], span.Grad[i] = hardTriple(r, x)
				}
				before := clone(span)
				k.Step(span, &s, nil)
				word := enterControl(s.MXCSR)
				var mistake string
				for i, got := range span.ExpAvg {
					y, z := before.Param[i], before.Grad[i]
					want := fusedMultiplyAdd(x, y, z)
					if want == 0 || math.IsInf(float64(want), 0) || same(got, want) {
						continue
					}
					mistake = fmt.Sprintf("%v, mxcsr=%04x: hardware fma(%x, %x, %x) = %x, portable %x: %s", b, s.MXCSR, x, y, z, got, want, ulps(got, want))
					break
				}
				leaveControl(word)
				if mistake != "" {
					t.Fatal(mistake)
				}
			}
		}
	}
}
