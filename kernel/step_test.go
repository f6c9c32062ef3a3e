package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

// controlWords are the default, flushing, and the other rounding directions.
var controlWords = []uint32{NearestNoFlush, NearestNoFlush | FlushMask, 0x3F80, 0x5F80, 0x7F80 | FlushMask}

// forEachKernel runs a test on every variant of every backend, under names such as avx2/l2_amsgrad/fma/ieee.
func forEachKernel[T Float](t *testing.T, test func(t *testing.T, id string, b Backend, v Variant)) {
	for _, b := range backends() {
		for _, v := range variants[T](b) {
			id := fmt.Sprintf("%v/%v", b, v)
			t.Run(id, func(t *testing.T) { test(t, id, b, v) })
		}
	}
}

// checkStep compares one step of a kernel with the reference.
func checkStep[T Float](t testing.TB, id string, b Backend, v Variant, span Span[T], s *Scalars[T]) bool {
	t.Helper()
	span = forVariant(span, v)
	got, want := clone(span), clone(span)
	k, ref := lookup[T](t, b, v), reference[T](t, b, v)
	k.Step(got, s, new(Tile[T]))
	ref.Step(want, s, new(Tile[T]))
	return sameSpan(t, id, got, want) && sameValues(t, id+": grad after the step", got.Grad, span.Grad)
}

func TestStepMatchesGeneric(t *testing.T) {
	forEachElement(t, testStepMatchesGeneric[float32], testStepMatchesGeneric[float64])
}

func testStepMatchesGeneric[T Float](t *testing.T) {
	ordinary, special := ordinarySpan[T](999), specialSpan[T]()
	if testing.Short() {
		special = everyNth(special, 5)
	}
	forEachKernel[T](t, func(t *testing.T, id string, b Backend, v Variant) {
		for i, c := range scalarCases[T]() {
			if testing.Short() && i%3 != v.index()%3 {
				continue
			}
			checkStep(t, id+"/"+c.name+"/ordinary", b, v, ordinary, &c.scalars)
			checkStep(t, id+"/"+c.name+"/special", b, v, special, &c.scalars)
		}
	})
}

func TestStepFollowsControlWord(t *testing.T) {
	forEachElement(t, testStepFollowsControlWord[float32], testStepFollowsControlWord[float64])
}

func testStepFollowsControlWord[T Float](t *testing.T) {
	span := ordinarySpan[T](499)
	smallestNormal := specials[T]()[12]
	for i := range span.Param { // results among the denormals, to be flushed or not
		if i%2 == 0 {
			span.Grad[i] *= sqrt(smallestNormal) * 8
			span.ExpAvg[i] *= smallestNormal * 4
			span.ExpAvgSq[i] *= smallestNormal * 64
			span.MaxExpAvgSq[i] *= smallestNormal * 16
		}
	}
	forEachKernel[T](t, func(t *testing.T, id string, b Backend, v Variant) {
		if v.SquareRoot.Estimated() {
			return // the reference would take its square roots under another control word: see TestEstimatedStepFollowsControlWord
		}
		s := ordinaryScalars[T]()
		for _, s.MXCSR = range controlWords {
			checkStep(t, fmt.Sprintf("%s/mxcsr=%04x", id, s.MXCSR), b, v, span, &s)
		}
	})
}

func TestControlWordMatters(t *testing.T) {
	forEachElement(t, testControlWordMatters[float32], testControlWordMatters[float64])
}

func testControlWordMatters[T Float](t *testing.T) {
	if !hasControlWord {
		assert.EqualValues(t, NearestNoFlush, MXCSR())
		return
	}
	v, span := Variant{}, ordinarySpan[T](499)
	for _, b := range backends() {
		k := lookup[T](t, b, v)
		results := make([]Span[T], len(controlWords))
		for i, word := range controlWords {
			s := ordinaryScalars[T]()
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
	forEachElement(t, testStepRestoresControlWord[float32], testStepRestoresControlWord[float64])
}

func testStepRestoresControlWord[T Float](t *testing.T) {
	const flags = 0x3f // a Library function may raise them
	span := ordinarySpan[T](99)
	forEachKernel[T](t, func(t *testing.T, _ string, b Backend, v Variant) {
		k, s, span := lookup[T](t, b, v), ordinaryScalars[T](), forVariant(clone(span), v)
		initial := enterControl(0x5F80) // rounding up, as no kernel would by itself
		before := MXCSR()
		k.Step(span, &s, new(Tile[T]))
		after := MXCSR()
		leaveControl(initial)
		assert.Equal(t, before&^flags, after&^flags, "%04x is not %04x", after, before)
	})
}

func TestStepOverTiles(t *testing.T) {
	forEachElement(t, testStepOverTiles[float32], testStepOverTiles[float64])
}

func testStepOverTiles[T Float](t *testing.T) {
	lengths := []int{0, 1, TileLen - 1, TileLen, TileLen + 1, 2*TileLen - 1, 2 * TileLen, 2*TileLen + 1, 3*TileLen + 17}
	if testing.Short() {
		lengths = []int{0, TileLen - 1, TileLen + 1}
	}
	span, s := ordinarySpan[T](slices.Max(lengths)), ordinaryScalars[T]()
	forEachKernel[T](t, func(t *testing.T, id string, b Backend, v Variant) {
		whole := v
		if v.SquareRoot == Library {
			whole.SquareRoot = IEEE
		}
		for _, n := range lengths {
			// A library that takes the IEEE square root makes the two stages equal to the one pass.
			var tiles []int
			k, err := Lookup(b, v, func(y, x []T) {
				tiles = append(tiles, len(x))
				sqrtGeneric(y, x, NearestNoFlush)
			})
			if !assert.NoError(t, err) {
				return
			}
			got, want := forVariant(clone(span.slice(0, n)), v), forVariant(clone(span.slice(0, n)), v)
			k.Step(got, &s, new(Tile[T]))
			ref := reference[T](t, b, whole)
			ref.Step(want, &s, new(Tile[T]))
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
	forEachElement(t, testStepAllocatesNothing[float32], testStepAllocatesNothing[float64])
}

func testStepAllocatesNothing[T Float](t *testing.T) {
	span, s, tile := ordinarySpan[T](TileLen+5), ordinaryScalars[T](), new(Tile[T])
	forEachKernel[T](t, func(t *testing.T, _ string, b Backend, v Variant) {
		k, span := lookup[T](t, b, v), forVariant(clone(span), v)
		assert.Zero(t, testing.AllocsPerRun(3, func() { k.Step(span, &s, tile) }))
	})
}

func TestMaximumIsNaNIfEitherIs(t *testing.T) {
	forEachElement(t, testMaximumIsNaNIfEitherIs[float32], testMaximumIsNaNIfEitherIs[float64])
}

func testMaximumIsNaNIfEitherIs[T Float](t *testing.T) {
	nan := T(math.NaN())
	s := Scalars[T]{OneMinusBeta1: 0.1, Beta2: 1, BiasCorrection2Sqrt: 1, Eps: 1, MXCSR: NearestNoFlush} // exp_avg_sq stays as it is
	cases := []struct{ max, expAvgSq, want T }{{nan, 1, nan}, {1, nan, nan}, {nan, nan, nan}, {1, 2, 2}, {2, 1, 2}, {0, 0, 0}}
	for _, b := range backends() {
		k := lookup[T](t, b, Variant{AMSGrad: true})
		for _, c := range cases {
			for _, n := range []int{1, 16} { // tail, body
				span := Span[T]{make([]T, n), make([]T, n), make([]T, n), slices.Repeat([]T{c.expAvgSq}, n), slices.Repeat([]T{c.max}, n)}
				k.Step(span, &s, nil)
				id := fmt.Sprintf("%v: maximum(%x, %x)", b, c.max, c.expAvgSq)
				sameValues(t, id, span.MaxExpAvgSq, slices.Repeat([]T{c.want}, n))
			}
		}
	}
}

func FuzzStepFloat32(f *testing.F) { fuzzStep[float32](f) }

func FuzzStepFloat64(f *testing.F) { fuzzStep[float64](f) }

// fuzzStep takes four elements of a span from the data one after another, bit patterns as they come.
func fuzzStep[T Float](f *testing.F) {
	nbytes := int(unsafe.Sizeof(*new(T)))
	f.Add(uint8(0), uint8(0), uint8(0), []byte("sixteen bytes of four float32 values, and some more for the tail"))
	f.Add(uint8(40), uint8(7), uint8(3), make([]byte, 4*nbytes*21))
	f.Fuzz(func(t *testing.T, variant, scalarCase, word uint8, data []byte) {
		v, n, cases := Variants()[int(variant)%numVariants], len(data)/(4*nbytes), scalarCases[T]()
		s := cases[int(scalarCase)%len(cases)].scalars
		if !v.SquareRoot.Estimated() {
			s.MXCSR = controlWords[int(word)%len(controlWords)]
		}
		column := func(k int) []T {
			x := make([]T, n)
			if _, err := binary.Decode(data[k*n*nbytes:], binary.LittleEndian, x); err != nil {
				t.Fatal(err)
			}
			return x
		}
		span := Span[T]{column(0), column(1), column(2), column(3), column(1)}
		for _, b := range backends() {
			if b != Generic && Has[T](b, v.SquareRoot) {
				checkStep(t, fmt.Sprintf("%v/%v/n=%d", b, v, n), b, v, span, &s)
			}
		}
	})
}
