package kernel

import "math"

// generic is a variant in portable Go. Every conversion to T around a product is there to be a rounding: without it the
// compiler may fuse the product with a following addition, and does so on some CPUs.
type generic[T Float] struct{ Variant }

// genericStages makes the kernel of a variant.
func genericStages[T Float](v Variant) stages[T] {
	g := generic[T]{v}
	if v.SquareRoot == Library {
		return stages[T]{moments: g.moments, update: g.update}
	}
	return stages[T]{step: g.step}
}

// step is the whole update with the IEEE square root.
func (v generic[T]) step(span Span[T], s *Scalars[T]) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		second := v.momentsAt(i, &span, s)
		v.updateAt(i, &span, sqrt(second), s)
	}
}

// moments is the first stage of the update around a Library square root.
func (v generic[T]) moments(span Span[T], s *Scalars[T]) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		v.momentsAt(i, &span, s)
	}
}

// update is the second stage of the update around a Library square root.
func (v generic[T]) update(span Span[T], root *Tile[T], s *Scalars[T]) {
	defer leaveControl(enterControl(s.MXCSR))
	for i := range span.Param {
		v.updateAt(i, &span, root[i], s)
	}
}

// momentsAt updates exp_avg, exp_avg_sq and max_exp_avg_sq, and returns the one whose square root is to be taken. It leaves param
// alone: only L2 decay reads param here, and only decoupled decay changes it before the end.
func (v generic[T]) momentsAt(i int, span *Span[T], s *Scalars[T]) (second T) {
	grad := span.Grad[i]
	if v.Maximize {
		grad = -grad
	}
	if v.Decay == L2Decay {
		grad = v.multiplyAdd(span.Param[i], s.Decay, grad)
	}
	span.ExpAvg[i] = v.lerp(span.ExpAvg[i], grad, s.OneMinusBeta1)
	expAvgSq := T(span.ExpAvgSq[i] * s.Beta2)
	expAvgSq = v.multiplyAdd(T(s.OneMinusBeta2*grad), grad, expAvgSq)
	span.ExpAvgSq[i] = expAvgSq
	if !v.AMSGrad {
		return expAvgSq
	}
	second = maximum(span.MaxExpAvgSq[i], expAvgSq)
	span.MaxExpAvgSq[i] = second
	return second
}

// updateAt updates param by the square root of the second moment.
func (v generic[T]) updateAt(i int, span *Span[T], root T, s *Scalars[T]) {
	param := span.Param[i]
	if v.Decay == DecoupledDecay {
		param = T(param * s.Decay)
	}
	denom := T(root/s.BiasCorrection2Sqrt) + s.Eps
	span.Param[i] = param + T(T(s.NegStepSize*span.ExpAvg[i])/denom)
}

// lerp goes from start to end by weight, from the nearer side, so that weight 1 gives end.
func (v generic[T]) lerp(start, end, weight T) T {
	difference := end - start
	if -0.5 < weight && weight < 0.5 {
		return v.multiplyAdd(weight, difference, start)
	}
	return v.multiplyAdd(weight-1, difference, end)
}

// multiplyAdd is x*y + z, rounded once or twice.
func (v generic[T]) multiplyAdd(x, y, z T) T {
	if v.Arithmetic == Plain {
		return T(x*y) + z
	}
	return fusedMultiplyAdd(x, y, z)
}

// maximum is the larger of two numbers, or NaN if either is NaN. x86's own maximum would drop a NaN in its first operand.
func maximum[T Float](a, b T) T {
	if a > b || a != a {
		return a
	}
	return b
}

// sqrt is correctly rounded, of a float32 too: a root with 53 bits, narrowed, is the nearest one with 24.
func sqrt[T Float](x T) T { return T(math.Sqrt(float64(x))) }

// sqrtGeneric sets y[i] = sqrt(x[i]).
func sqrtGeneric[T Float](y, x []T, mxcsr uint32) {
	defer leaveControl(enterControl(mxcsr))
	for i := range x {
		y[i] = sqrt(x[i])
	}
}
