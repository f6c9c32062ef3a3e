package pybind

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

func rootsOf(numel int) []float32 {
	x := make([]float32, numel)
	for i := range x {
		x[i] = float32(i) * 0x1.23456p-9
	}
	return x
}

func TestSqrtIsTheKernels(t *testing.T) {
	x := rootsOf(3*kernel.TileLen + 5)
	want := make([]float32, len(x))
	for _, b := range kernel.Available() {
		for _, root := range []kernel.SquareRoot{kernel.IEEE, kernel.Goldschmidt, kernel.Newton} {
			if !b.Has(root) {
				continue // TestSqrtRefuses
			}
			a := newArena(t, 1<<16)
			in, out := a.floats(x...), a.take(4*len(x))
			count, err := Sqrt(out, in, int64(len(x)), int64(b), int64(root))
			require.NoError(t, err)
			assert.EqualValues(t, len(x), count)
			require.NoError(t, kernel.Sqrt(b, root, want, x))
			sameValues(t, fmt.Sprintf("%v/%v", b, root), a.copy(out, len(x)), want)
			if root == kernel.IEEE {
				assert.Equal(t, float32(math.Sqrt(float64(x[777]))), want[777])
			}
		}
	}
}

func TestSqrtRefuses(t *testing.T) {
	a := newArena(t, 1<<12)
	address := a.floats(4, 4, 4, 4)
	for _, c := range []struct {
		y, x, numel, backend, squareRoot int64
		want                             string
	}{
		{0, address, 4, 0, 0, "pybind: y is at 0x0 with 4 elements, want an address that holds them"},
		{address, -1, 4, 0, 0, "pybind: x is at -0x1 with 4 elements, want an address that holds them"},
		{address, address, -4, 0, 0, "pybind: y has -4 elements, want 0 to what fits an address"},
		{address, address, 4, 5, 0, "pybind: backend is 5, want 0 to 2"},
		{address, address, 4, 0, 5, "pybind: square root is 5, want 0 to 3"},
		{address, address, 4, 0, int64(kernel.Goldschmidt), "kernel: backend generic has no square root goldschmidt"},
		{address, address, 4, 0, int64(kernel.Library), "pybind: no library square root is set"},
	} {
		_, err := Sqrt(c.y, c.x, c.numel, c.backend, c.squareRoot)
		assert.EqualError(t, err, c.want)
		assert.Equal(t, []float32{4, 4, 4, 4}, a.copy(address, 4), c.want)
	}
}
