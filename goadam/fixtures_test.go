package goadam

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// seed makes every random number here, so a failure can be repeated.
const seed = 20250607

func newRand() *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

// motley has empty, tiny and large rows, neighbours of the sizes where cuts change, and enough elements to go parallel.
var motley = []int{0, 1, 3, 16, 17, 64, 1000, 4096, 40_000, 5, 0, 70_001, 2, minPiece, maxSpan + 1, 120_000, 33}

// newRows has one row of each length, in group 0 and 1 by turns, with a float32 and a float64 counter by turns.
func newRows[T kernel.Float](amsgrad bool, lengths ...int) []Param[T] {
	r := newRand()
	rows := make([]Param[T], len(lengths))
	for i, n := range lengths {
		p := &rows[i]
		*p = Param[T]{Param: make([]T, n), Grad: make([]T, n), ExpAvg: make([]T, n), ExpAvgSq: make([]T, n), Group: i % 2}
		if amsgrad {
			p.MaxExpAvgSq = make([]T, n)
		}
		for j := range n {
			p.Param[j] = T(r.NormFloat64())
			p.Grad[j] = T(r.NormFloat64())
			p.ExpAvg[j] = T(r.NormFloat64() * 0.1)
			p.ExpAvgSq[j] = T(r.ExpFloat64())
			if amsgrad {
				p.MaxExpAvgSq[j] = p.ExpAvgSq[j] * T(2*r.Float64())
			}
		}
		if i%2 == 0 {
			p.Step.Float32 = new(float32)
			*p.Step.Float32 = 6
		} else {
			p.Step.Float64 = new(float64)
			*p.Step.Float64 = 6
		}
	}
	return rows
}

// newGroups has the seventh step of two groups that differ in their scalars only.
func newGroups(t testing.TB, v kernel.Variant) []Group {
	t.Helper()
	o := Options{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, AMSGrad: v.AMSGrad, Maximize: v.Maximize}
	if v.Decay != kernel.NoDecay {
		o.WeightDecay, o.DecoupledWeightDecay = 0.1, v.Decay == kernel.DecoupledDecay
	}
	first, err := o.Group(7)
	require.NoError(t, err)
	o.LR, o.Beta1 = 0.5, 0.3
	second, err := o.Group(7)
	require.NoError(t, err)
	return []Group{first, second}
}

// skewedSqrt is a library's square root that no backend would compute by itself: about half the exponent, from the bits, so that
// it does not depend on the control word either.
func skewedSqrt[T kernel.Float](y, x []T) {
	switch y := any(y).(type) {
	case []float32:
		for i := range x {
			y[i] = math.Float32frombits(math.Float32bits(float32(x[i]))>>1 + 0x1FBD0000)
		}
	case []float64:
		for i := range x {
			y[i] = math.Float64frombits(math.Float64bits(float64(x[i]))>>1 + 0x1FF7A00000000000)
		}
	}
}

// forEachElement runs a test of both types of elements, under their names.
func forEachElement(t *testing.T, ofFloat32, ofFloat64 func(t *testing.T)) {
	t.Run("float32", ofFloat32)
	t.Run("float64", ofFloat64)
}

// forEachKernel runs a test on every stride-th variant of every backend, a third of them in short mode, under names such as avx2/l2_amsgrad/fma/ieee.
func forEachKernel[T kernel.Float](t *testing.T, stride int, test func(t *testing.T, id string, v kernel.Variant, config Config[T])) {
	if testing.Short() {
		stride *= 3
	}
	for _, b := range kernel.Available() {
		for i := 0; i < len(kernel.Variants()); i += stride {
			v := kernel.Variants()[i]
			id := fmt.Sprintf("%v/%v", b, v)
			config := Config[T]{Threads: 1, Backend: b, Arithmetic: v.Arithmetic, SquareRoot: v.SquareRoot, Library: skewedSqrt[T]}
			t.Run(id, func(t *testing.T) { test(t, id, v, config) })
		}
	}
}

// reference updates the rows one by one, each by a single call of its kernel, with nothing of the planning.
func reference[T kernel.Float](t testing.TB, rows []Param[T], groups []Group, config Config[T], mxcsr uint32) {
	t.Helper()
	for i := range rows {
		p := &rows[i]
		g := groups[p.Group]
		v := kernel.Variant{Decay: g.Decay, AMSGrad: g.AMSGrad, Maximize: g.Maximize, Arithmetic: config.Arithmetic, SquareRoot: config.squareRoot(mxcsr)}
		k, err := kernel.Lookup(config.Backend, v, config.Library)
		require.NoError(t, err)
		scalars := narrow[T](g.Scalars, mxcsr)
		k.Step(kernel.Span[T]{Param: p.Param, Grad: p.Grad, ExpAvg: p.ExpAvg, ExpAvgSq: p.ExpAvgSq, MaxExpAvgSq: p.MaxExpAvgSq}, &scalars, new(kernel.Tile[T]))
		p.Step.set(g.Scalars.Step)
	}
}

// clone copies rows and all that they point at.
func clone[T kernel.Float](rows []Param[T]) []Param[T] {
	rows = slices.Clone(rows)
	for i := range rows {
		p := &rows[i]
		for _, s := range []*[]T{&p.Param, &p.Grad, &p.ExpAvg, &p.ExpAvgSq, &p.MaxExpAvgSq} {
			*s = slices.Clone(*s)
		}
		if p.Step.Float32 != nil {
			p.Step.Float32 = &[]float32{*p.Step.Float32}[0]
		}
		if p.Step.Float64 != nil {
			p.Step.Float64 = &[]float64{*p.Step.Float64}[0]
		}
	}
	return rows
}

// sameRows reports the first difference between two lists of rows. NaNs are equal.
func sameRows[T kernel.Float](t testing.TB, id string, got, want []Param[T]) {
	t.Helper()
	require.Len(t, got, len(want), id)
	for i := range got {
		g, w := &got[i], &want[i]
		sameValues(t, fmt.Sprintf("%s: row %d: param", id, i), g.Param, w.Param)
		sameValues(t, fmt.Sprintf("%s: row %d: grad", id, i), g.Grad, w.Grad)
		sameValues(t, fmt.Sprintf("%s: row %d: exp_avg", id, i), g.ExpAvg, w.ExpAvg)
		sameValues(t, fmt.Sprintf("%s: row %d: exp_avg_sq", id, i), g.ExpAvgSq, w.ExpAvgSq)
		sameValues(t, fmt.Sprintf("%s: row %d: max_exp_avg_sq", id, i), g.MaxExpAvgSq, w.MaxExpAvgSq)
		require.Equal(t, w.Step, g.Step, "%s: row %d: step", id, i)
	}
}

func sameValues[T kernel.Float](t testing.TB, id string, got, want []T) {
	t.Helper()
	require.Len(t, got, len(want), id)
	for i := range got {
		if g, w := float64(got[i]), float64(want[i]); math.Float64bits(g) != math.Float64bits(w) && (g == g || w == w) {
			t.Fatalf("%s[%d] = %x, want %x", id, i, g, w)
		}
	}
}
