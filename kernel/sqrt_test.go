package kernel

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// sqrtInputs has values from every binade, the denormals and the edges, about n in all.
func sqrtInputs(n int) []float32 {
	x := append([]float32{}, specials...)
	for _, edge := range []uint32{0, 0x00800000, 0x3f800000, 0x40800000, 0x7f7ff800, 0x7f800000, 0x80000000, 0x80800000} {
		for d := range uint32(32) {
			x = append(x, math.Float32frombits(edge+d-16))
		}
	}
	for bits := uint64(0); bits < 1<<32; bits += 1 << 32 / uint64(n) {
		x = append(x, math.Float32frombits(uint32(bits)+uint32(bits>>17)))
	}
	return x
}

func TestSqrtIEEE(t *testing.T) {
	x := sqrtInputs(1 << 18)
	want := make([]float32, len(x))
	for i := range x {
		want[i] = float32(math.Sqrt(float64(x[i])))
	}
	for _, b := range backends() {
		got := make([]float32, len(x))
		require.NoError(t, Sqrt(b, IEEE, got, x))
		sameValues(t, fmt.Sprintf("%v/ieee", b), got, want)
	}
}

func TestEstimatedIsWithinOneULP(t *testing.T) {
	x := sqrtInputs(1 << 18)
	for _, b := range backends() {
		for _, r := range []SquareRoot{Goldschmidt, Newton} {
			if !b.Has(r) {
				continue
			}
			id := fmt.Sprintf("%v/%v", b, r)
			t.Run(id, func(t *testing.T) {
				got := make([]float32, len(x))
				require.NoError(t, Sqrt(b, r, got, x))
				for i := range x {
					want := sqrt(x[i])
					if !same(got[i], want) && !same(got[i], math.Nextafter32(want, 0)) && !same(got[i], math.Nextafter32(want, math.MaxFloat32)) {
						t.Fatalf("%s: sqrt(%x) = %x, want %x: %s", id, x[i], got[i], want, ulps(got[i], want))
					}
				}
			})
		}
	}
}
