package goadam

import (
	"fmt"
	"math"

	"roundpipe-go/kernel"
)

// Options are the hyperparameters under torch's names; lr, eps and weight decay are not negative, betas are in [0, 1).
type Options struct {
	LR, Beta1, Beta2, Eps, WeightDecay      float64
	AMSGrad, Maximize, DecoupledWeightDecay bool
}

// Scalars are the constants of one step in double precision, before they are narrowed.
//
// WeightDecay multiplies the parameter: weight_decay itself under L2Decay, 1 - lr*weight_decay under DecoupledDecay.
// Step is the count after the increment.
type Scalars struct {
	WeightDecay         float64
	OneMinusBeta1       float64
	Beta2               float64
	OneMinusBeta2       float64
	BiasCorrection2Sqrt float64
	StepSize            float64
	Eps                 float64
	Step                float64
}

// Group derives the constants of the given step, counted from 1.
//
// Python does not use it: torch's bits need the C library's pow, by which Python computes beta**step and which may differ
// from Go's in the last place.
func (o Options) Group(step float64) (Group, error) {
	for _, f := range []struct {
		name         string
		value, bound float64
	}{
		{"lr", o.LR, math.Inf(1)}, {"beta1", o.Beta1, 1}, {"beta2", o.Beta2, 1},
		{"eps", o.Eps, math.Inf(1)}, {"weight_decay", o.WeightDecay, math.Inf(1)},
	} {
		if !(f.value >= 0 && f.value < f.bound) {
			return Group{}, fmt.Errorf("goadam: %s is %v, want a value in [0, %v)", f.name, f.value, f.bound)
		}
	}
	if !(step >= 1) {
		return Group{}, fmt.Errorf("goadam: step is %v, want at least 1", step)
	}
	g := Group{AMSGrad: o.AMSGrad, Maximize: o.Maximize, Scalars: Scalars{
		OneMinusBeta1:       1 - o.Beta1,
		Beta2:               o.Beta2,
		OneMinusBeta2:       1 - o.Beta2,
		BiasCorrection2Sqrt: math.Sqrt(1 - math.Pow(o.Beta2, step)),
		StepSize:            o.LR / (1 - math.Pow(o.Beta1, step)),
		Eps:                 o.Eps,
		Step:                step,
	}}
	switch {
	case o.WeightDecay == 0:
	case o.DecoupledWeightDecay:
		g.Decay, g.Scalars.WeightDecay = kernel.DecoupledDecay, 1-o.LR*o.WeightDecay
	default:
		g.Decay, g.Scalars.WeightDecay = kernel.L2Decay, o.WeightDecay
	}
	return g, nil
}

// narrow rounds each scalar once to the type of the elements, as torch does when it hands a Python number to a kernel. NaN
// and infinities pass: torch computes with them.
func narrow[T kernel.Float](s Scalars, mxcsr uint32) kernel.Scalars[T] {
	narrowed := kernel.Scalars[T]{
		Decay:               T(s.WeightDecay),
		OneMinusBeta1:       T(s.OneMinusBeta1),
		Beta2:               T(s.Beta2),
		OneMinusBeta2:       T(s.OneMinusBeta2),
		BiasCorrection2Sqrt: T(s.BiasCorrection2Sqrt),
		Eps:                 T(s.Eps),
		NegStepSize:         T(-s.StepSize),
		MXCSR:               mxcsr,
	}
	narrowed.Invert()
	return narrowed
}
