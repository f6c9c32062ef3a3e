//go:build !purego

package kernel

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

const hasControlWord = true

// estimates are the functions that give RSQRTPS as it is.
var estimates = map[Backend]func(y, x []float32, mxcsr uint32){AVX2: sqrtAVX2_float32_estimate, AVX512: sqrtAVX512_float32_estimate}

// goldschmidt is the formula in Go, from the CPU's estimate of 1/sqrt(x).
func goldschmidt(x, estimate float32) float32 {
	if bits := math.Float32bits(x); bits < 0x00800000 || bits >= 0x7f7ff800 {
		return sqrt(x)
	}
	root, h := float32(x*estimate), float32(0.5*estimate)
	e := 0.5 - float32(root*h)
	root += float32(root * e)
	h += float32(h * e)
	return root + float32((x-float32(root*root))*h)
}

func TestGoldschmidtIsItsFormula(t *testing.T) {
	x := sqrtInputs[float32](1 << 20)
	estimate, want := make([]float32, len(x)), make([]float32, len(x))
	for _, b := range backends() {
		if b == Generic {
			continue
		}
		estimates[b](estimate, x, NearestNoFlush)
		for i := range x {
			want[i] = goldschmidt(x[i], estimate[i])
		}
		got := make([]float32, len(x))
		require.NoError(t, Sqrt(b, Goldschmidt, got, x))
		sameValues(t, fmt.Sprintf("%v/goldschmidt", b), got, want)
	}
}

// newton is the formula in Go, from the CPU's estimates of 1/sqrt(x) and 1/sqrt(x*2^64).
func newton(x, estimate, scaledEstimate float32) float32 {
	step := func(x, y float32) float32 {
		root, h := float32(x*y), float32(0.5*y)
		return fusedMultiplyAdd(fusedMultiplyAdd(-root, root, x), h, root)
	}
	switch bits := math.Float32bits(x); {
	case bits == 0 || bits >= 0x7f800000:
		return sqrt(x)
	case x < 0x1p-102:
		return float32(step(x*0x1p64, scaledEstimate) * 0x1p-32)
	}
	return step(x, estimate)
}

func TestNewtonIsItsFormula(t *testing.T) {
	x := sqrtInputs[float32](1 << 20)
	for bits := uint32(0x0c800000 - 1000); bits < 0x0c800000+1000; bits++ {
		x = append(x, math.Float32frombits(bits))
	}
	n := len(x)
	scaled, estimate, scaledEstimate := make([]float32, n), make([]float32, n), make([]float32, n)
	got, want := make([]float32, n), make([]float32, n)
	for _, b := range backends() {
		if !Has[float32](b, Newton) {
			continue
		}
		for i := range x {
			scaled[i] = x[i] * 0x1p64
		}
		sqrtAVX512_float32_estimate14(estimate, x, NearestNoFlush)
		sqrtAVX512_float32_estimate14(scaledEstimate, scaled, NearestNoFlush)
		for i := range x {
			want[i] = newton(x[i], estimate[i], scaledEstimate[i])
		}
		require.NoError(t, Sqrt(b, Newton, got, x))
		sameValues(t, fmt.Sprintf("%v/newton", b), got, want)
	}
}

func TestBackendsAgreeOnEstimate(t *testing.T) {
	x := sqrtInputs[float32](1 << 16)
	want := make([]float32, len(x))
	for i, b := range backends()[1:] {
		got := make([]float32, len(x))
		estimates[b](got, x, NearestNoFlush)
		if i == 0 {
			want = got
		}
		sameValues(t, fmt.Sprintf("%v/estimate", b), got, want)
	}
}

// TestEstimatedStepFollowsControlWord compares a step under each control word with the portable one around the same square
// root under the same control word.
func TestEstimatedStepFollowsControlWord(t *testing.T) {
	span := ordinarySpan[float32](499)
	for _, b := range backends() {
		for _, v := range variants[float32](b) {
			if !v.SquareRoot.Estimated() {
				continue
			}
			for _, word := range controlWords {
				s, around := ordinaryScalars[float32](), v
				s.MXCSR, around.SquareRoot = word, Library
				k := lookup[float32](t, b, v)
				ref, err := Lookup(Generic, around, func(y, x []float32) { assemblySqrt[float32](b, v.SquareRoot)(y, x, word) })
				require.NoError(t, err)
				got, want := forVariant(clone(span), v), forVariant(clone(span), v)
				k.Step(got, &s, nil)
				ref.Step(want, &s, new(Tile[float32]))
				sameSpan(t, fmt.Sprintf("%v/%v/mxcsr=%04x", b, v, word), got, want)
			}
		}
	}
}
