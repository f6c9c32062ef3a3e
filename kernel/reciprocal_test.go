package kernel

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

// inverted are the scalars of a division by c.
func inverted(c float32) Scalars[float32] {
	s := Scalars[float32]{BiasCorrection2Sqrt: c, MXCSR: NearestNoFlush}
	s.Invert()
	return s
}

// firstMistake is the first x of 24 bits of which h and l do not make x/c, or 0.
func firstMistake(c, h, l float32) float32 {
	for bits := math.Float32bits(1); bits < math.Float32bits(2); bits++ {
		x := math.Float32frombits(bits)
		if fusedMultiplyAdd32(x, h, x*l) != x/c {
			return x
		}
	}
	return 0
}

// TestInvertIsRightForEveryRoot tries all significands: the verdict rests on eight of them.
func TestInvertIsRightForEveryRoot(t *testing.T) {
	r, rounds := newRand(), 30
	if testing.Short() {
		rounds = 2
	}
	some := []float32{1, 0.5, 0x1.fffffep-1, 0x1.000002p-1, 0x1p-60, 0x1.8p-30}
	for range rounds {
		some = append(some, math.Float32frombits(math.Float32bits(0.5)+r.Uint32N(1<<23)))
	}
	refused := scalars[float32](1e-3, 0.9, 0.999, 1e-8, 0, 24).BiasCorrection2Sqrt // as in scalarCases
	for _, c := range append(some, refused, refused/8) {
		s := inverted(c)
		h, l := reciprocal(c)
		mistake := firstMistake(c, h, l)
		if s.Reciprocal == 0 {
			assert.NotZero(t, mistake, "%x has a reciprocal, and was refused", c)
			assert.Zero(t, s.ReciprocalLow)
		} else {
			assert.Zero(t, mistake, "%x / %x is wrong", mistake, c)
			assert.Equal(t, [2]float32{h, l}, [2]float32{s.Reciprocal, s.ReciprocalLow})
		}
	}
	assert.Zero(t, inverted(refused).Reciprocal)
	assert.NotZero(t, inverted(1).Reciprocal)
}

func TestInvertKeepsSpecialRoots(t *testing.T) {
	inf, negativeZero := float32(math.Inf(1)), float32(math.Copysign(0, -1))
	smallest, largest := sqrt[float32](math.SmallestNonzeroFloat32), sqrt[float32](math.MaxFloat32)
	r := newRand()
	for i := range 10_000 {
		c := math.Float32frombits(math.Float32bits(0x1p-60) + r.Uint32N(60<<23+1))
		if i < 61 {
			c = float32(math.Ldexp(1, -i))
		}
		s := inverted(c)
		if s.Reciprocal == 0 {
			continue
		}
		for _, x := range []float32{0, negativeZero, inf, smallest, largest, float32(math.NaN())} {
			got := fusedMultiplyAdd32(x, s.Reciprocal, x*s.ReciprocalLow)
			if !same(got, x/c) {
				t.Fatalf("%x / %x = %x, want %x", x, c, got, x/c)
			}
		}
	}
}

func TestInvertRefuses(t *testing.T) {
	for _, c := range []float32{0, -1, -0.5, 0x1.000002p0, 2, 0x1.fffffep-61, math.SmallestNonzeroFloat32, float32(math.Inf(1)), float32(math.NaN())} {
		s := Scalars[float32]{BiasCorrection2Sqrt: c, Reciprocal: 3, ReciprocalLow: 4}
		s.Invert()
		assert.Zero(t, s.Reciprocal, "%x", c)
		assert.Zero(t, s.ReciprocalLow, "%x", c)
	}
	double := Scalars[float64]{BiasCorrection2Sqrt: 1}
	double.Invert()
	assert.Zero(t, double.Reciprocal)

	refused, r := 0, newRand()
	const n = 10_000
	for range n {
		if inverted(math.Float32frombits(math.Float32bits(0.5)+r.Uint32N(1<<23))).Reciprocal == 0 {
			refused++
		}
	}
	assert.InDelta(t, 1./13, float64(refused)/n, 0.01)
}
