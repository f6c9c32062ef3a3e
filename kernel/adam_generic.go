package kernel

import "math"

// generic is a variant in portable Go. Every conversion to float32 around a product is there to be a rounding: without it the
// compiler may fuse the product with a following addition, and does so on some CPUs.
type generic struct{ Variant }

// genericStages makes the kernel of a variant.
func genericStages(v Variant) stages {
	g := generic{v}
	if v.SquareRoot == Library {
		return stages{moments: g.moments, update: g.update}
	}
	return stages{step: g.step}
}

// step is the whole update with the IEEE square root.
func (v generic) step(span Span, s *Scalars) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		second := v.momentsAt(i, &span, s)
		v.updateAt(i, &span, sqrt(second), s)
	}
}

// moments is the first stage of the update around a Library square root.
func (v generic) moments(span Span, s *Scalars) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		v.momentsAt(i, &span, s)
	}
}

// update is the second stage of the update around a Library square root.
func (v generic) update(span Span, root *Tile, s *Scalars) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		v.updateAt(i, &span, root[i], s)
	}
}

// momentsAt updates exp_avg, exp_avg_sq and max_exp_avg_sq, and returns the one whose square root is to be taken. It leaves param
// alone: only L2 decay reads param here, and only decoupled decay changes it before the end.
func (v generic) momentsAt(i int, span *Span, s *Scalars) (second float32) {
	grad := span.Grad[i]
	if v.Maximize {
		grad = -grad
	}
	if v.Decay == L2Decay {
		grad = v.multiplyAdd(span.Param[i], s.Decay, grad)
	}
	span.ExpAvg[i] = v.lerp(span.ExpAvg[i], grad, s.OneMinusBeta1)
	expAvgSq := float32(span.ExpAvgSq[i] * s.Beta2)
	expAvgSq = v.multiplyAdd(float32(s.OneMinusBeta2*grad), grad, expAvgSq)
	span.ExpAvgSq[i] = expAvgSq
	if !v.AMSGrad {
		return expAvgSq
	}
	second = maximum(span.MaxExpAvgSq[i], expAvgSq)
	span.MaxExpAvgSq[i] = second
	return second
}

// updateAt updates param by the square root of the second moment.
func (v generic) updateAt(i int, span *Span, root float32, s *Scalars) {
	param := span.Param[i]
	if v.Decay == DecoupledDecay {
		param = float32(param * s.Decay)
	}
	denom := float32(root/s.BiasCorrection2Sqrt) + s.Eps
	span.Param[i] = param + float32(float32(s.NegStepSize*span.ExpAvg[i])/denom)
}

// lerp goes from start to end by weight, from the nearer side, so that weight 1 gives end.
func (v generic) lerp(start, end, weight float32) float32 {
	difference := end - start
	if -0.5 < weight && weight < 0.5 {
		return v.multiplyAdd(weight, difference, start)
	}
	return v.multiplyAdd(weight-1, difference, end)
}

// multiplyAdd is x*y + z, rounded once or twice.
func (v generic) multiplyAdd(x, y, z float32) float32 {
	if v.Arithmetic == Plain {
		return float32(x*y) + z
	}
	return fusedMultiplyAdd(x, y, z)
}

// maximum is the larger of two numbers, or NaN if either is NaN. x86's own maximum would drop a NaN in its first operand.
func maximum(a, b float32) float32 {
	if a > b || a != a {
		return a
	}
	return b
}

// sqrt is correctly rounded: the compiler makes one float32 square root of it.
func sqrt(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// sqrtGeneric sets y[i] = sqrt(x[i]).
func sqrtGeneric(y, x []float32, mxcsr uint32) {
	defer leaveControl(enterControl(mxcsr))
	for i := range x {
		y[i] = sqrt(x[i])
	}
}
