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

// array is one of the arrays of a span, by name.
type array struct {
	name   string
	values []float32
}

func arrays(s Span) []array {
	return []array{{"param", s.Param}, {"grad", s.Grad}, {"exp_avg", s.ExpAvg}, {"exp_avg_sq", s.ExpAvgSq}, {"max_exp_avg_sq", s.MaxExpAvgSq}}
}

func clone(s Span) Span {
	return Span{slices.Clone(s.Param), slices.Clone(s.Grad), slices.Clone(s.ExpAvg), slices.Clone(s.ExpAvgSq), slices.Clone(s.MaxExpAvgSq)}
}

// forVariant is the span as a variant wants it: without max_exp_avg_sq unless it has AMSGrad.
func forVariant(s Span, v Variant) Span {
	if !v.AMSGrad {
		s.MaxExpAvgSq = nil
	}
	return s
}

// ordinarySpan has n elements as training has them, and every seventh with no second moment yet.
func ordinarySpan(n int) Span {
	r := newRand()
	s := Span{make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n)}
	for i := range n {
		s.Param[i] = float32(r.NormFloat64())
		s.Grad[i] = float32(r.NormFloat64() * math.Exp2(float64(r.IntN(40)-30)))
		s.ExpAvg[i] = float32(r.NormFloat64() * 0.1)
		s.ExpAvgSq[i] = float32(r.ExpFloat64() * math.Exp2(float64(r.IntN(40)-30)))
		s.MaxExpAvgSq[i] = s.ExpAvgSq[i] * float32(r.Float64()*2)
		if i%7 == 3 {
			s.Grad[i], s.ExpAvgSq[i], s.MaxExpAvgSq[i] = 0, 0, 0
		}
	}
	return s
}

// specials are the values at which formulas change their minds.
var specials = []float32{
	0, float32(math.Copysign(0, -1)), 1, -1, 0.1, -3, 1e-20, -1e-20, 1e20, 5e20,
	math.SmallestNonzeroFloat32, -1e-40, 0x1p-126, 0x1.fffffep-127, 0x1.ffefffp127, -math.MaxFloat32,
	float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()),
}

// specialSpan has every triple of specials in grad, exp_avg and exp_avg_sq, random ones in the rest.
func specialSpan() Span {
	r, s := newRand(), Span{}
	pick := func() float32 { return specials[r.IntN(len(specials))] }
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
func everyNth(s Span, every int) Span {
	var sample Span
	for i := 0; i < len(s.Param); i += every {
		sample.Param = append(sample.Param, s.Param[i])
		sample.Grad = append(sample.Grad, s.Grad[i])
		sample.ExpAvg = append(sample.ExpAvg, s.ExpAvg[i])
		sample.ExpAvgSq = append(sample.ExpAvgSq, s.ExpAvgSq[i])
		sample.MaxExpAvgSq = append(sample.MaxExpAvgSq, s.MaxExpAvgSq[i])
	}
	return sample
}

// scalarCases differ in the branches and extremes they reach.
var scalarCases = []struct {
	name    string
	scalars Scalars
}{
	{"defaults", scalars(1e-3, 0.9, 0.999, 1e-8, 0.01, 100)},
	{"first_step", scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)},
	{"beta1=0", scalars(1e-2, 0, 0.99, 1e-8, 0.1, 3)},                 // weight 1: exp_avg is grad
	{"beta1=0.5", scalars(1e-2, 0.5, 0.9, 1e-8, 0.1, 3)},              // weight on the border, on the far side
	{"beta1=0.5+", scalars(1e-2, 0.5000001, 0.9, 1e-8, 0.1, 3)},       // just on the near side
	{"beta1=0.3", scalars(1e-2, 0.3, 0, 1e-8, 0.1, 3)},                // far side; exp_avg_sq forgets
	{"eps=0", scalars(1e-3, 0.9, 0.999, 0, 0.1, 10)},                  // 0/0 where there is no second moment
	{"eps=inf", scalars(1e-3, 0.9, 0.999, math.Inf(1), 0.1, 10)},      //
	{"huge", scalars(1e30, 0.9, 0.999, 1e30, 1e20, 10)},               // overflows
	{"tiny", scalars(1e-38, 0.9, 0.9999999, 1e-45, 1e-40, 1_000_000)}, // denormal scalars
}

// scalars are what the Python side would pass, except that Decay serves both kinds of decay.
func scalars(lr, beta1, beta2, eps, decay, step float64) Scalars {
	return Scalars{
		Decay:               float32(decay),
		OneMinusBeta1:       float32(1 - beta1),
		Beta2:               float32(beta2),
		OneMinusBeta2:       float32(1 - beta2),
		BiasCorrection2Sqrt: float32(math.Sqrt(1 - math.Pow(beta2, step))),
		Eps:                 float32(eps),
		NegStepSize:         float32(-lr / (1 - math.Pow(beta1, step))),
		MXCSR:               NearestNoFlush,
	}
}

// skewedSqrt is a library's square root that no backend would compute by itself.
func skewedSqrt(y, x []float32) {
	for i := range x {
		y[i] = math.Float32frombits(math.Float32bits(sqrt(x[i])) ^ 1)
	}
}

// lookup finds a kernel. Its library function, if it wants one, is skewedSqrt.
func lookup(t testing.TB, b Backend, v Variant) Kernel {
	t.Helper()
	k, err := Lookup(b, v, skewedSqrt)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// reference finds the portable kernel that must give the same bits. An estimated square root, which Go has no instruction for,
// is the backend's own, taken as a library's.
func reference(t testing.TB, b Backend, v Variant) Kernel {
	t.Helper()
	if !v.SquareRoot.Estimated() {
		return lookup(t, Generic, v)
	}
	root := v.SquareRoot
	v.SquareRoot = Library
	k, err := Lookup(Generic, v, func(y, x []float32) {
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
func sameSpan(t testing.TB, id string, got, want Span) bool {
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
func sameValues(t testing.TB, id string, got, want []float32) bool {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s has %d elements, want %d", id, len(got), len(want))
		return false
	}
	for i := range got {
		if !same(got[i], want[i]) {
			t.Errorf("%s[%d] = %x (%08x), want %x (%08x): %s", id, i, got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]), ulps(got[i], want[i]))
			return false
		}
	}
	return true
}

func same(x, y float32) bool {
	return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
}

// ulps says how many float32 lie between two numbers.
func ulps(x, y float32) string {
	if x != x || y != y {
		return "one is NaN"
	}
	ordinal := func(f float32) int64 {
		bits := int64(math.Float32bits(f))
		if bits >= 1<<31 {
			return 1<<31 - bits
		}
		return bits
	}
	return fmt.Sprintf("%d ulp", ordinal(x)-ordinal(y))
}
