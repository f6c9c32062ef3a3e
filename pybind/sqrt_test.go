package pybind

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

func rootsOf[T kernel.Float](numel int) []T {
	x := make([]T, numel)
	for i := range x {
		x[i] = T(i) * 0x1.23456p-9
	}
	return x
}

func TestSqrtIsTheKernels(t *testing.T) {
	forEachElement(t, testSqrtIsTheKernels[float32], testSqrtIsTheKernels[float64])
}

func testSqrtIsTheKernels[T kernel.Float](t *testing.T) {
	x := rootsOf[T](3*kernel.TileLen + 5)
	want := make([]T, len(x))
	for _, b := range kernel.Available() {
		for _, root := range []kernel.SquareRoot{kernel.IEEE, kernel.Goldschmidt, kernel.Newton} {
			if !kernel.Has[T](b, root) {
				continue // TestSqrtRefuses
			}
			a := newArena(t, 1<<17)
			in, out := a.take(8*len(x)), a.take(8*len(x))
			copy(elementsAt[T](a, in, len(x)), x)
			count, err := Sqrt(out, in, int64(len(x)), codeOf[T](), int64(b), int64(root))
			require.NoError(t, err)
			assert.EqualValues(t, len(x), count)
			require.NoError(t, kernel.Sqrt(b, root, want, x))
			sameValues(t, fmt.Sprintf("%v/%v", b, root), elementsAt[T](a, out, len(x)), want)
			if root == kernel.IEEE {
				assert.Equal(t, T(math.Sqrt(float64(x[777]))), want[777])
			}
		}
	}
}

func TestSqrtRefuses(t *testing.T) {
	a := newArena(t, 1<<12)
	address := a.floats(4, 4, 4, 4)
	for _, c := range []struct {
		y, x, numel, dtype, backend, squareRoot int64
		want                                    string
	}{
		{0, address, 4, float32Code, 0, 0, "pybind: y is at 0x0 with 4 elements, want an address that holds them"},
		{address, -1, 4, float32Code, 0, 0, "pybind: x is at -0x1 with 4 elements, want an address that holds them"},
		{address, address, -4, float32Code, 0, 0, "pybind: y has -4 elements, want 0 to what fits an address"},
		{address, address, 4, float32Code, 5, 0, "pybind: backend is 5, want 0 to 2"},
		{address, address, 4, float32Code, 0, 5, "pybind: square root is 5, want 0 to 3"},
		{address, address, 4, float32Code, 0, int64(kernel.Goldschmidt), "kernel: backend generic has no square root goldschmidt of float32"},
		{address, address, 2, float64Code, 0, int64(kernel.Newton), "kernel: backend generic has no square root newton of float64"},
		{address, address, 2, float64Code, 0, int64(kernel.Library), "pybind: no library square root is set"},
		{address, address, 4, float32Code, 0, int64(kernel.Library), "pybind: no library square root is set"},
	} {
		_, err := Sqrt(c.y, c.x, c.numel, c.dtype, c.backend, c.squareRoot)
		assert.EqualError(t, err, c.want)
		assert.Equal(t, []float32{4, 4, 4, 4}, a.copy(address, 4), c.want)
	}
}
