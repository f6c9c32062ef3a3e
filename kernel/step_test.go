package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
)

// controlWords are the default, flushing, and the other rounding directions.
var controlWords = []uint32{NearestNoFlush, NearestNoFlush | FlushMask, 0x3F80, 0x5F80, 0x7F80 | FlushMask}

// forEachKernel runs a test on every variant of every backend, under names such as avx2/l2_amsgrad/fma/ieee.
func forEachKernel(t *testing.T, test func(t *testing.T, id string, b Backend, v Variant)) {
	for _, b := range backends() {
		for _, v := range variants(b) {
			id := fmt.Sprintf("%v/%v", b, v)
			t.Run(id, func(t *testing.T) { test(t, id, b, v) })
		}
	}
}

// checkStep compares one step of a kernel with the reference.
func checkStep(t testing.TB, id string, b Backend, v Variant, span Span, s *Scalars) bool {
	t.Helper()
	span = forVariant(span, v)
	got, want := clone(span), clone(span)
	k, ref := lookup(t, b, v), reference(t, b, v)
	k.Step(got, s, new(Tile))
	ref.Step(want, s, new(Tile))
	return sameSpan(t, id, got, want) && sameValues(t, id+": grad after the step", got.Grad, span.Grad)
}

func TestStepMatchesGeneric(t *testing.T) {
	ordinary, special := ordinarySpan(999), specialSpan()
	if testing.Short() {
		special = everyNth(special, 5)
	}
	forEachKernel(t, func(t *testing.T, id string, b Backend, v Variant) {
		for i, c := range scalarCases {
			if testing.Short() && i%3 != v.index()%3 {
				continue
			}
			checkStep(t, id+"/"+c.name+"/ordinary", b, v, ordinary, &c.scalars)
			checkStep(t, id+"/"+c.name+"/special", b, v, special, &c.scalars)
		}
	})
}

func TestStepFollowsControlWord(t *testing.T) {
	span := ordinarySpan(499)
	for i := range span.Param { // results among the denormals, to be flushed or not
		if i%2 == 0 {
			span.Grad[i] *= 0x1p-60
			span.ExpAvg[i] *= 0x1p-124
			span.ExpAvgSq[i] *= 0x1p-120
			span.MaxExpAvgSq[i] *= 0x1p-122
		}
	}
	forEachKernel(t, func(t *testing.T, id string, b Backend, v Variant) {
		if v.SquareRoot.Estimated() {
			return // the reference would take its square roots under another control word: see TestEstimatedStepFollowsControlWord
		}
		s := scalarCases[0].scalars
		for _, s.MXCSR = range controlWords {
			checkStep(t, fmt.Sprintf("%s/mxcsr=%04x", id, s.MXCSR), b, v, span, &s)
		}
	})
}

func TestControlWordMatters(t *testing.T) {
	if !hasControlWord {
		assert.EqualValues(t, NearestNoFlush, MXCSR())
		return
	}
	v, span := Variant{}, ordinarySpan(499)
	for _, b := range backends() {
		k := lookup(t, b, v)
		results := make([]Span, len(controlWords))
		for i, word := range controlWords {
			s := scalarCases[0].scalars
			s.MXCSR = word
			results[i] = forVariant(clone(span), v)
			for range 3 {
				k.Step(results[i], &s, nil)
			}
		}
		assert.NotEqual(t, results[0].Param, results[2].Param, "%v: rounding down gives what rounding to nearest gives", b)
		assert.NotEqual(t, results[2].Param, results[3].Param, "%v: rounding up gives what rounding down gives", b)
	}
}

func TestStepRestoresControlWord(t *testing.T) {
	const flags = 0x3f // a Library function may raise them
	span := ordinarySpan(99)
	forEachKernel(t, func(t *testing.T, _ string, b Backend, v Variant) {
		k, s, span := lookup(t, b, v), scalarCases[0].scalars, forVariant(clone(span), v)
		initial := enterControl(0x5F80) // rounding up, as no kernel would by itself
		before := MXCSR()
		k.Step(span, &s, new(Tile))
		after := MXCSR()
		leaveControl(initial)
		assert.Equal(t, before&^flags, after&^flags, "%04x is not %04x", after, before)
	})
}

func TestStepOverTiles(t *testing.T) {
	lengths := []int{0, 1, TileLen - 1, TileLen, TileLen + 1, 2*TileLen - 1, 2 * TileLen, 2*TileLen + 1, 3*TileLen + 17}
	if testing.Short() {
		lengths = []int{0, TileLen - 1, TileLen + 1}
	}
	span, s := ordinarySpan(slices.Max(lengths)), scalarCases[0].scalars
	forEachKernel(t, func(t *testing.T, id string, b Backend, v Variant) {
		whole := v
		if v.SquareRoot == Library {
			whole.SquareRoot = IEEE
		}
		for _, n := range lengths {
			// A library that takes the IEEE square root makes the two stages equal to the one pass.
			var tiles []int
			k, err := Lookup(b, v, func(y, x []float32) {
				tiles = append(tiles, len(x))
				sqrtGeneric(y, x, NearestNoFlush)
			})
			if !assert.NoError(t, err) {
				return
			}
			got, want := forVariant(clone(span.slice(0, n)), v), forVariant(clone(span.slice(0, n)), v)
			k.Step(got, &s, new(Tile))
			ref := reference(t, b, whole)
			ref.Step(want, &s, new(Tile))
			sameSpan(t, fmt.Sprintf("%s/n=%d", id, n), got, want)
			if v.SquareRoot == Library {
				var wantTiles []int
				for left := n; left > 0; left -= TileLen {
					wantTiles = append(wantTiles, min(left, TileLen))
				}
				assert.Equal(t, wantTiles, tiles, "lengths of tiles, n=%d", n)
			}
		}
	})
}

func TestStepAllocatesNothing(t *testing.T) {
	span, s, tile := ordinarySpan(TileLen+5), scalarCases[0].scalars, new(Tile)
	forEachKernel(t, func(t *testing.T, _ string, b Backend, v Variant) {
		k, span := lookup(t, b, v), forVariant(clone(span), v)
		assert.Zero(t, testing.AllocsPerRun(3, func() { k.Step(span, &s, tile) }))
	})
}

func TestMaximumIsNaNIfEitherIs(t *testing.T) {
	nan := float32(math.NaN())
	s := Scalars{OneMinusBeta1: 0.1, Beta2: 1, BiasCorrection2Sqrt: 1, Eps: 1, MXCSR: NearestNoFlush} // exp_avg_sq stays as it is
	cases := []struct{ max, expAvgSq, want float32 }{{nan, 1, nan}, {1, nan, nan}, {nan, nan, nan}, {1, 2, 2}, {2, 1, 2}, {0, 0, 0}}
	for _, b := range backends() {
		k := lookup(t, b, Variant{AMSGrad: true})
		for _, c := range cases {
			for _, n := range []int{1, 16} { // tail, body
				span := Span{make([]float32, n), make([]float32, n), make([]float32, n), slices.Repeat([]float32{c.expAvgSq}, n), slices.Repeat([]float32{c.max}, n)}
				k.Step(span, &s, nil)
				id := fmt.Sprintf("%v: maximum(%x, %x)", b, c.max, c.expAvgSq)
				sameValues(t, id, span.MaxExpAvgSq, slices.Repeat([]float32{c.want}, n))
			}
		}
	}
}

// FuzzStep takes four float32 an element, bit patterns as they come.
func FuzzStep(f *testing.F) {
	f.Add(uint8(0), uint8(0), uint8(0), []byte("sixteen bytes of four float32 values, and some more for the tail"))
	f.Add(uint8(40), uint8(7), uint8(3), make([]byte, 16*21))
	f.Fuzz(func(t *testing.T, variant, scalarCase, word uint8, data []byte) {
		v, n := Variants()[int(variant)%numVariants], len(data)/16
		s := scalarCases[int(scalarCase)%len(scalarCases)].scalars
		if !v.SquareRoot.Estimated() {
			s.MXCSR = controlWords[int(word)%len(controlWords)]
		}
		column := func(k int) []float32 {
			x := make([]float32, n)
			for i := range x {
				x[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[16*i+4*k:]))
			}
			return x
		}
		span := Span{column(0), column(1), column(2), column(3), column(1)}
		for _, b := range backends() {
			if b != Generic {
				checkStep(t, fmt.Sprintf("%v/%v/n=%d", b, v, n), b, v, span, &s)
			}
		}
	})
}
