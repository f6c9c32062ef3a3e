package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// seed makes every random number here; failures print what they got and wanted, so nothing else is needed to repeat them.
const seed = 20250607

func newRand() *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

// forEachElement runs a test of both types of elements, under their names.
func forEachElement(t *testing.T, ofFloat32, ofFloat64 func(t *testing.T)) {
	t.Run("float32", ofFloat32)
	t.Run("float64", ofFloat64)
}

// bitsOf is the bit pattern of x.
func bitsOf[T Float](x T) uint64 {
	if x, ok := any(x).(float32); ok {
		return uint64(math.Float32bits(x))
	}
	return math.Float64bits(float64(x))
}

// fromBits is the inverse of bitsOf. A float32 takes the lower bits.
func fromBits[T Float](bits uint64) T {
	if _, ok := any(*new(T)).(float32); ok {
		return T(math.Float32frombits(uint32(bits)))
	}
	return T(math.Float64frombits(bits))
}

// array is one of the arrays of a span, by name.
type array[T Float] struct {
	name   string
	values []T
}

func arrays[T Float](s Span[T]) []array[T] {
	return []array[T]{{"param", s.Param}, {"grad", s.Grad}, {"exp_avg", s.ExpAvg}, {"exp_avg_sq", s.ExpAvgSq}, {"max_exp_avg_sq", s.MaxExpAvgSq}}
}

func clone[T Float](s Span[T]) Span[T] {
	return Span[T]{slices.Clone(s.Param), slices.Clone(s.Grad), slices.Clone(s.ExpAvg), slices.Clone(s.ExpAvgSq), slices.Clone(s.MaxExpAvgSq)}
}

// forVariant is the span as a variant wants it: without max_exp_avg_sq unless it has AMSGrad.
func forVariant[T Float](s Span[T], v Variant) Span[T] {
	if !v.AMSGrad {
		s.MaxExpAvgSq = nil
	}
	return s
}

// ordinarySpan has n elements as training has them, and every seventh with no second moment yet.
func ordinarySpan[T Float](n int) Span[T] {
	r := newRand()
	s := Span[T]{make([]T, n), make([]T, n), make([]T, n), make([]T, n), make([]T, n)}
	for i := range n {
		s.Param[i] = T(r.NormFloat64())
		s.Grad[i] = T(r.NormFloat64() * math.Exp2(float64(r.IntN(40)-30)))
		s.ExpAvg[i] = T(r.NormFloat64() * 0.1)
		s.ExpAvgSq[i] = T(r.ExpFloat64() * math.Exp2(float64(r.IntN(40)-30)))
		s.MaxExpAvgSq[i] = s.ExpAvgSq[i] * T(r.Float64()*2)
		if i%7 == 3 {
			s.Grad[i], s.ExpAvgSq[i], s.MaxExpAvgSq[i] = 0, 0, 0
		}
	}
	return s
}

// specials are the values at which formulas change their minds: among them numbers whose squares are just too small or too
// large.
func specials[T Float]() []T {
	inf, one := math.Inf(1), T(1)
	smallestNormal, largest, square := math.SmallestNonzeroFloat32*0x1p23, math.MaxFloat32, 1e20
	if _, ok := any(one).(float64); ok {
		smallestNormal, largest, square = math.SmallestNonzeroFloat64*0x1p52, math.MaxFloat64, 1e155
	}
	return []T{
		0, T(math.Copysign(0, -1)), one, -one, 0.1, -3, T(1 / square), T(-1 / square), T(square), T(5 * square),
		fromBits[T](1), T(-smallestNormal / 118), T(smallestNormal), fromBits[T](bitsOf(T(smallestNormal)) - 1),
		fromBits[T](bitsOf(T(largest)) - 0x801), T(-largest), T(inf), T(-inf), T(math.NaN()),
	}
}

// specialSpan has every triple of specials in grad, exp_avg and exp_avg_sq, random ones in the rest.
func specialSpan[T Float]() Span[T] {
	r, s, specials := newRand(), Span[T]{}, specials[T]()
	pick := func() T { return specials[r.IntN(len(specials))] }
	for _, grad := range specials {
		for _, expAvg := range specials {
			for _, expAvgSq := range specials {
				s.Param = append(s.Param, pick())
				s.Grad = append(s.Grad, grad)
				s.ExpAvg = append(s.ExpAvg, expAvg)
				s.ExpAvgSq = append(s.ExpAvgSq, expAvgSq)
				s.MaxExpAvgSq = append(s.MaxExpAvgSq, pick())
			}
		}
	}
	return s
}

// everyNth is a sample of a span. Every is not to divide the number of specials.
func everyNth[T Float](s Span[T], every int) Span[T] {
	var sample Span[T]
	for i := 0; i < len(s.Param); i += every {
		sample.Param = append(sample.Param, s.Param[i])
		sample.Grad = append(sample.Grad, s.Grad[i])
		sample.ExpAvg = append(sample.ExpAvg, s.ExpAvg[i])
		sample.ExpAvgSq = append(sample.ExpAvgSq, s.ExpAvgSq[i])
		sample.MaxExpAvgSq = append(sample.MaxExpAvgSq, s.MaxExpAvgSq[i])
	}
	return sample
}

// scalarCase is one set of scalars, by name.
type scalarCase[T Float] struct {
	name    string
	scalars Scalars[T]
}

// scalarCases differ in the branches and extremes they reach.
func scalarCases[T Float]() []scalarCase[T] {
	huge, tiny := 1e30, 1e-38
	if _, ok := any(T(0)).(float64); ok {
		huge, tiny = 1e300, 1e-308
	}
	return []scalarCase[T]{
		{"defaults", scalars[T](1e-3, 0.9, 0.999, 1e-8, 0.01, 100)},
		{"first_step", scalars[T](1e-3, 0.9, 0.999, 1e-8, 0.1, 1)},
		{"beta1=0", scalars[T](1e-2, 0, 0.99, 1e-8, 0.1, 3)},                      // weight 1: exp_avg is grad
		{"beta1=0.5", scalars[T](1e-2, 0.5, 0.9, 1e-8, 0.1, 3)},                   // weight on the border, on the far side
		{"beta1=0.5+", scalars[T](1e-2, 0.5000001, 0.9, 1e-8, 0.1, 3)},            // just on the near side
		{"beta1=0.3", scalars[T](1e-2, 0.3, 0, 1e-8, 0.1, 3)},                     // far side; exp_avg_sq forgets
		{"divided", scalars[T](1e-3, 0.9, 0.999, 1e-8, 0.1, 24)},                  // by a number that has no reciprocal
		{"eps=0", scalars[T](1e-3, 0.9, 0.999, 0, 0.1, 10)},                       // 0/0 where there is no second moment
		{"eps=inf", scalars[T](1e-3, 0.9, 0.999, math.Inf(1), 0.1, 10)},           //
		{"huge", scalars[T](huge, 0.9, 0.999, huge, huge*1e-10, 10)},              // overflows
		{"tiny", scalars[T](tiny, 0.9, 0.9999999, tiny/1e7, tiny/100, 1_000_000)}, // denormal scalars
	}
}

// ordinaryScalars are the first of scalarCases.
func ordinaryScalars[T Float]() Scalars[T] { return scalarCases[T]()[0].scalars }

// scalars are what the Python side would pass, except that Decay serves both kinds of decay.
func scalars[T Float](lr, beta1, beta2, eps, decay, step float64) Scalars[T] {
	s := Scalars[T]{
		Decay:               T(decay),
		OneMinusBeta1:       T(1 - beta1),
		Beta2:               T(beta2),
		OneMinusBeta2:       T(1 - beta2),
		BiasCorrection2Sqrt: T(math.Sqrt(1 - math.Pow(beta2, step))),
		Eps:                 T(eps),
		NegStepSize:         T(-lr / (1 - math.Pow(beta1, step))),
		MXCSR:               NearestNoFlush,
	}
	s.Invert()
	return s
}

// skewedSqrt is a library's square root that no backend would compute by itself.
func skewedSqrt[T Float](y, x []T) {
	for i := range x {
		y[i] = fromBits[T](bitsOf(sqrt(x[i])) ^ 1)
	}
}

// lookup finds a kernel. Its library function, if it wants one, is skewedSqrt.
func lookup[T Float](t testing.TB, b Backend, v Variant) Kernel[T] {
	t.Helper()
	k, err := Lookup(b, v, skewedSqrt[T])
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// reference finds the portable kernel that must give the same bits. An estimated square root, which Go has no instruction for,
// is the backend's own, taken as a library's.
func reference[T Float](t testing.TB, b Backend, v Variant) Kernel[T] {
	t.Helper()
	if !v.SquareRoot.Estimated() {
		return lookup[T](t, Generic, v)
	}
	root := v.SquareRoot
	v.SquareRoot = Library
	k, err := Lookup(Generic, v, func(y, x []T) {
		if err := Sqrt(b, root, y, x); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// sameSpan reports the first difference between two spans. NaNs are equal.
func sameSpan[T Float](t testing.TB, id string, got, want Span[T]) bool {
	t.Helper()
	wanted := arrays(want)
	for a, x := range arrays(got) {
		if !sameValues(t, id+": "+x.name, x.values, wanted[a].values) {
			return false
		}
	}
	return true
}

// sameValues reports the first difference between two slices. NaNs are equal.
func sameValues[T Float](t testing.TB, id string, got, want []T) bool {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s has %d elements, want %d", id, len(got), len(want))
		return false
	}
	for i := range got {
		if !same(got[i], want[i]) {
			t.Errorf("%s[%d] = %x (%#x), want %x (%#x): %s", id, i, got[i], bitsOf(got[i]), want[i], bitsOf(want[i]), ulps(got[i], want[i]))
			return false
		}
	}
	return true
}

func same[T Float](x, y T) bool { return bitsOf(x) == bitsOf(y) || x != x && y != y }

// ulps says how many numbers of the type lie between two.
func ulps[T Float](x, y T) string {
	if x != x || y != y {
		return "one is NaN"
	}
	ordinal := func(f T) int64 {
		if math.Signbit(float64(f)) {
			return -int64(bitsOf(-f))
		}
		return int64(bitsOf(f))
	}
	return fmt.Sprintf("%d ulp", ordinal(x)-ordinal(y))
}
