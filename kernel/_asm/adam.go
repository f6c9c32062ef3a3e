package main

import (
	"fmt"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"roundpipe-go/kernel"
)

// The formulas of package kernel's documentation, one vector of elements at a time. This file reads the same for every
// instruction set and element; isa.go and element.go have what differs, frame.go what surrounds the formulas.

// stepKernel defines the whole update of one variant.
func stepKernel(m isa, v kernel.Variant) { wholeKernel(m, v, stepSymbol(m, v), false) }

// reciprocalKernel is stepKernel without its first division.
func reciprocalKernel(m isa, v kernel.Variant) { wholeKernel(m, v, reciprocalSymbol(m, v), true) }

func wholeKernel(m isa, v kernel.Variant, symbol string, multiplies bool) {
	TEXT(symbol, NOSPLIT, signature(m, "func(span Span[T], s *Scalars[T])"))
	Doc(fmt.Sprintf("%s is the update %v. It works like generic.step.", symbol, v))
	span, s := loadSpan(v), Dereference(Param("s"))
	underControl(address(s.Field("MXCSR")), func() {
		moments, root := newMoments(m, v, span, s), newRoot(m, v.SquareRoot.String())
		update := newUpdate(m, v, span, s, multiplies)
		forEachVector(m, span.n, func(at place) {
			prefetch(m, span, at)
			expAvg, second := moments.at(at)
			update.at(at, expAvg, root(second, at))
		})
	})
}

// momentsKernel defines the stage of the update that comes before a library's square root.
func momentsKernel(m isa, v kernel.Variant) {
	symbol := momentsSymbol(m, v)
	TEXT(symbol, NOSPLIT, signature(m, "func(span Span[T], s *Scalars[T])"))
	Doc(symbol + " is the stage before a library's square root. It works like generic.moments.")
	span, s := loadSpan(v), Dereference(Param("s"))
	underControl(address(s.Field("MXCSR")), func() {
		moments := newMoments(m, v, span, s)
		forEachVector(m, span.n, func(at place) { moments.at(at) })
	})
}

// updateKernel defines the stage of the update that comes after a library's square root.
func updateKernel(m isa, v kernel.Variant) {
	symbol := updateSymbol(m, v)
	TEXT(symbol, NOSPLIT, signature(m, "func(span Span[T], root *Tile[T], s *Scalars[T])"))
	Doc(symbol + " is the stage after a library's square root. It works like generic.update.")
	span, roots, s := loadSpan(v), Load(Param("root"), GP64()), Dereference(Param("s"))
	underControl(address(s.Field("MXCSR")), func() {
		update := newUpdate(m, v, span, s, false)
		forEachVector(m, span.n, func(at place) { update.at(at, load(m, span.expAvg, at), load(m, roots, at)) })
	})
}

// sqrtKernel defines one of the square roots alone, or, for tests, the "estimate" of 1/sqrt(x) that goldschmidt starts from and
// the "estimate14" of newton.
func sqrtKernel(m isa, name string) {
	symbol := sqrtSymbol(m, name)
	TEXT(symbol, NOSPLIT, signature(m, "func(y, x []T, mxcsr uint32)"))
	if strings.HasPrefix(name, "estimate") {
		Doc(symbol + " sets y[i] to the CPU's estimate of 1/sqrt(x[i]).")
	} else {
		Doc(symbol + " sets y[i] = sqrt(x[i]).")
	}
	y, x, n := Load(Param("y").Base(), GP64()), Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	underControl(address(Param("mxcsr")), func() {
		root := newRoot(m, name)
		forEachVector(m, n, func(at place) { store(m, root(load(m, x, at), at), y, at) })
	})
}

// span holds the addresses of the arrays, and the number of elements.
type span struct {
	param, grad, expAvg, expAvgSq, maxExpAvgSq, n reg.Register
}

func loadSpan(v kernel.Variant) span {
	base := func(field string) reg.Register { return Load(Param("span").Field(field).Base(), GP64()) }
	s := span{param: base("Param"), grad: base("Grad"), expAvg: base("ExpAvg"), expAvgSq: base("ExpAvgSq")}
	if v.AMSGrad {
		s.maxExpAvgSq = base("MaxExpAvgSq")
	}
	s.n = Load(Param("span").Field("Param").Len(), GP64())
	return s
}

// moments is the first stage of the update with its scalars, each in every lane of a register.
type moments struct {
	isa
	kernel.Variant
	span span

	signBit                             Op
	decay, weight, beta2, oneMinusBeta2 reg.VecVirtual
	far                                 lanes // all or none: |weight| is not below 0.5
}

func newMoments(m isa, v kernel.Variant, span span, s gotypes.Component) moments {
	k := moments{isa: m, Variant: v, span: span}
	if v.Maximize {
		k.signBit = m.Constant("signBit", m.Element().signBit())
	}
	if v.Decay == kernel.L2Decay {
		k.decay = broadcast(m, s.Field("Decay"))
	}
	weight := broadcast(m, s.Field("OneMinusBeta1"))
	Comment("weight = weight-1 unless |weight| < 0.5")
	k.far = m.Far(weight)
	k.weight = m.Select(k.far, add(m, weight, m.Constant("minusOne", m.Element().bits(-1))), weight)
	k.beta2 = broadcast(m, s.Field("Beta2"))
	k.oneMinusBeta2 = broadcast(m, s.Field("OneMinusBeta2"))
	return k
}

// at updates the moments of one vector. It returns exp_avg and the second moment whose square root is wanted.
func (k moments) at(at place) (expAvg, second reg.VecVirtual) {
	grad := load(k.isa, k.span.grad, at)
	if k.Maximize {
		Comment("grad = -grad")
		k.Negate(grad, k.signBit)
	}
	if k.Decay == kernel.L2Decay {
		Comment("grad = " + sumText(k.Arithmetic, "param", "decay", "grad"))
		multiplyAdd(k.isa, k.Arithmetic, load(k.isa, k.span.param, at), k.decay, grad)
	}

	Comment("exp_avg = " + sumText(k.Arithmetic, "weight", "(grad-exp_avg)", "(exp_avg or grad)"))
	expAvg = load(k.isa, k.span.expAvg, at)
	difference := sub(k.isa, grad, expAvg)
	expAvg = k.Select(k.far, grad, expAvg)
	multiplyAdd(k.isa, k.Arithmetic, k.weight, difference, expAvg)
	store(k.isa, expAvg, k.span.expAvg, at)

	Comment("exp_avg_sq = " + sumText(k.Arithmetic, "((1-beta2)*grad)", "grad", "exp_avg_sq*beta2"))
	expAvgSq := mul(k.isa, load(k.isa, k.span.expAvgSq, at), k.beta2)
	multiplyAdd(k.isa, k.Arithmetic, mul(k.isa, grad, k.oneMinusBeta2), grad, expAvgSq)
	store(k.isa, expAvgSq, k.span.expAvgSq, at)
	if !k.AMSGrad {
		return expAvg, expAvgSq
	}

	Comment("max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)")
	second = k.Maximum(load(k.isa, k.span.maxExpAvgSq, at), expAvgSq)
	store(k.isa, second, k.span.maxExpAvgSq, at)
	return expAvg, second
}

// update is the second stage of the update with its scalars, each in every lane of a register.
type update struct {
	isa
	kernel.Variant
	span span

	decay, biasCorrection2Sqrt, eps, negStepSize reg.VecVirtual
	reciprocal, reciprocalLow                    reg.VecVirtual // instead of biasCorrection2Sqrt in a kernel that multiplies
}

func newUpdate(m isa, v kernel.Variant, span span, s gotypes.Component, multiplies bool) update {
	k := update{isa: m, Variant: v, span: span}
	if v.Decay == kernel.DecoupledDecay {
		k.decay = broadcast(m, s.Field("Decay"))
	}
	if multiplies {
		k.reciprocal, k.reciprocalLow = broadcast(m, s.Field("Reciprocal")), broadcast(m, s.Field("ReciprocalLow"))
	} else {
		k.biasCorrection2Sqrt = broadcast(m, s.Field("BiasCorrection2Sqrt"))
	}
	k.eps = broadcast(m, s.Field("Eps"))
	k.negStepSize = broadcast(m, s.Field("NegStepSize"))
	return k
}

// at updates the parameters of one vector by exp_avg and the square root of the second moment.
func (k update) at(at place, expAvg, root reg.VecVirtual) {
	denom := add(k.isa, k.corrected(root), k.eps)
	param := load(k.isa, k.span.param, at)
	if k.Decay == kernel.DecoupledDecay {
		Comment("param = param*decay")
		param = mul(k.isa, param, k.decay)
	}
	Comment("param = param + (-step_size*exp_avg)/denom")
	param = add(k.isa, param, div(k.isa, mul(k.isa, expAvg, k.negStepSize), denom))
	store(k.isa, param, k.span.param, at)
}

// corrected is root / bias_correction2_sqrt.
func (k update) corrected(root reg.VecVirtual) reg.VecVirtual {
	if k.reciprocal == nil {
		Comment("denom = root/bias_correction2_sqrt + eps")
		return div(k.isa, root, k.biasCorrection2Sqrt)
	}
	Comment("denom = fma(root, reciprocal, root*reciprocal_low) + eps, which is root/bias_correction2_sqrt + eps: Scalars.Invert")
	quotient := mul(k.isa, root, k.reciprocalLow)
	k.Element().multiplyAdd(k.reciprocal, root, quotient)
	return quotient
}

// newRoot loads what a square root needs and returns the function that takes it.
func newRoot(m isa, name string) func(x reg.VecVirtual, at place) reg.VecVirtual {
	switch name {
	case "ieee":
		return func(x reg.VecVirtual, _ place) reg.VecVirtual {
			Comment("root = sqrt(second)")
			return result(m, func(z Op) { m.Element().sqrt(x, z) })
		}
	case "estimate":
		return func(x reg.VecVirtual, _ place) reg.VecVirtual { return m.ReciprocalRootEstimate(x) }
	case "estimate14":
		return func(x reg.VecVirtual, _ place) reg.VecVirtual { return result(m, func(z Op) { VRSQRT14PS(x, z) }) }
	case "newton":
		m := m.(avx512) // no other set has VRSQRT14PS
		half, ordinary := m.Constant("half", 0x3f000000), m.newtonBounds()
		newton := func(x reg.VecVirtual) reg.VecVirtual {
			Comment("root = x*y and h = y/2, where y is nearly 1/sqrt(x) and x is the second moment")
			y, remainder := m.Vector(), m.Vector()
			VRSQRT14PS(x, y)
			root, h := mul(m, x, y), mul(m, y, half)
			Comment("root = fma(fma(-root, root, x), h, root)")
			VMOVAPS(x, remainder)
			VFNMADD231PS(root, root, remainder)
			VFMADD231PS(h, remainder, root)
			return root
		}
		return func(x reg.VecVirtual, at place) reg.VecVirtual {
			root := newton(x)
			m.newtonUnless(ordinary, x, root, newton, "ordinary_"+at.name)
			return root
		}
	case "goldschmidt":
		half := result(m, func(z Op) { VMOVUPS(m.Constant("half", 0x3f000000), z) })
		ordinary := m.Ordinary()
		return func(x reg.VecVirtual, at place) reg.VecVirtual {
			Comment("root = x*y and h = y/2, where y is nearly 1/sqrt(x) and x is the second moment")
			y := m.ReciprocalRootEstimate(x)
			root, h := mul(m, x, y), mul(m, y, half)
			Comment("e = 0.5 - root*h; root = root + root*e; h = h + h*e")
			e := sub(m, half, mul(m, root, h))
			root = add(m, root, mul(m, root, e))
			h = add(m, h, mul(m, h, e))
			Comment("root = root + (x - root*root)*h")
			root = add(m, root, mul(m, sub(m, x, mul(m, root, root)), h))
			Comment("root = sqrt(x) in lanes where x is not in [0x00800000, 0x7f7ff800)")
			m.SqrtUnless(ordinary, x, root, "ordinary_"+at.name)
			return root
		}
	}
	panic("no square root " + name)
}

// multiplyAdd is sum = x*y + sum, rounded once or twice.
func multiplyAdd(m isa, a kernel.Arithmetic, x, y, sum reg.VecVirtual) {
	if a == kernel.FMA {
		m.Element().multiplyAdd(y, x, sum)
		return
	}
	m.Element().add(mul(m, x, y), sum, sum)
}

// sumText is the formula of multiplyAdd.
func sumText(a kernel.Arithmetic, x, y, sum string) string {
	if a == kernel.FMA {
		return fmt.Sprintf("fma(%s, %s, %s)", x, y, sum)
	}
	return fmt.Sprintf("%s*%s + %s", x, y, sum)
}

// The operations return a new register each: x+y, x-y, x*y, x/y.

func add(m isa, x reg.VecVirtual, y Op) reg.VecVirtual {
	return result(m, func(z Op) { m.Element().add(y, x, z) })
}

func sub(m isa, x, y reg.VecVirtual) reg.VecVirtual {
	return result(m, func(z Op) { m.Element().sub(y, x, z) })
}

func mul(m isa, x reg.VecVirtual, y Op) reg.VecVirtual {
	return result(m, func(z Op) { m.Element().mul(y, x, z) })
}

func div(m isa, x, y reg.VecVirtual) reg.VecVirtual {
	return result(m, func(z Op) { m.Element().div(y, x, z) })
}

func result(m isa, operation func(z Op)) reg.VecVirtual {
	z := m.Vector()
	operation(z)
	return z
}
