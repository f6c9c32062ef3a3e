package kernel

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// sqrtInputs has values from every binade, the denormals and the edges, about n in all.
func sqrtInputs[T Float](n int) []T {
	x := specials[T]()
	for _, edge := range []T{0, specials[T]()[12], 1, 4, T(math.Float32frombits(0x7f7ff800)), T(math.Inf(1))} {
		for d := range uint64(32) {
			x = append(x, fromBits[T](bitsOf(edge)+d-16), fromBits[T](bitsOf(-edge)+d-16))
		}
	}
	bits := uint64(0)
	for range n {
		bits += 0x9E3779B97F4A7C15 // 2^64 divided by the golden ratio: evenly spread in the upper bits, of every kind in the lower ones
		x = append(x, fromBits[T](bits>>(64-8*unsafe.Sizeof(*new(T)))))
	}
	return x
}

func TestSqrtIEEE(t *testing.T) { forEachElement(t, testSqrtIEEE[float32], testSqrtIEEE[float64]) }

func testSqrtIEEE[T Float](t *testing.T) {
	x := sqrtInputs[T](1 << 18)
	want := make([]T, len(x))
	for i := range x {
		want[i] = T(math.Sqrt(float64(x[i])))
	}
	for _, b := range backends() {
		got := make([]T, len(x))
		require.NoError(t, Sqrt(b, IEEE, got, x))
		sameValues(t, fmt.Sprintf("%v/ieee", b), got, want)
	}
}

func TestEstimatedIsWithinOneULP(t *testing.T) {
	x := sqrtInputs[float32](1 << 18)
	for _, b := range backends() {
		for _, r := range []SquareRoot{Goldschmidt, Newton} {
			if !Has[float32](b, r) {
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
