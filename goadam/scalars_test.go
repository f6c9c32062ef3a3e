package goadam

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

var defaults = Options{LR: 1e-3, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8}

func TestGroupRefuses(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		spoil func(o *Options)
		step  float64
		want  string
	}{
		{func(o *Options) { o.LR = -1 }, 1, "goadam: lr is -1, want a value in [0, +Inf)"},
		{func(o *Options) { o.LR = nan }, 1, "goadam: lr is NaN, want a value in [0, +Inf)"},
		{func(o *Options) { o.LR = inf }, 1, "goadam: lr is +Inf, want a value in [0, +Inf)"},
		{func(o *Options) { o.Beta1 = 1 }, 1, "goadam: beta1 is 1, want a value in [0, 1)"},
		{func(o *Options) { o.Beta1 = nan }, 1, "goadam: beta1 is NaN, want a value in [0, 1)"},
		{func(o *Options) { o.Beta2 = -0.1 }, 1, "goadam: beta2 is -0.1, want a value in [0, 1)"},
		{func(o *Options) { o.Eps = -1e-9 }, 1, "goadam: eps is -1e-09, want a value in [0, +Inf)"},
		{func(o *Options) { o.WeightDecay = -2 }, 1, "goadam: weight_decay is -2, want a value in [0, +Inf)"},
		{func(*Options) {}, 0, "goadam: step is 0, want at least 1"},
		{func(*Options) {}, nan, "goadam: step is NaN, want at least 1"},
	} {
		o := defaults
		c.spoil(&o)
		_, err := o.Group(c.step)
		assert.EqualError(t, err, c.want)
	}
}

func TestGroupFormulas(t *testing.T) {
	g, err := defaults.Group(1)
	require.NoError(t, err)
	assert.Equal(t, kernel.NoDecay, g.Decay)
	// At step 1 the bias corrections are 1-beta, up to a rounding of pow.
	assert.InEpsilon(t, 1e-3/(1-0.9), g.Scalars.StepSize, 1e-12)
	assert.InEpsilon(t, math.Sqrt(1-0.999), g.Scalars.BiasCorrection2Sqrt, 1e-12)
	assert.Equal(t, 1.0, g.Scalars.Step)

	g, err = defaults.Group(3)
	require.NoError(t, err)
	assert.InEpsilon(t, 1e-3/(1-0.9*0.9*0.9), g.Scalars.StepSize, 1e-12)
	assert.InEpsilon(t, math.Sqrt(1-0.999*0.999*0.999), g.Scalars.BiasCorrection2Sqrt, 1e-12)
	beta1, beta2 := defaults.Beta1, defaults.Beta2 // not constants, whose difference would be exact
	assert.Equal(t, Scalars{OneMinusBeta1: 1 - beta1, Beta2: beta2, OneMinusBeta2: 1 - beta2, Eps: 1e-8, Step: 3,
		BiasCorrection2Sqrt: g.Scalars.BiasCorrection2Sqrt, StepSize: g.Scalars.StepSize}, g.Scalars)
}

func TestGroupKindsOfDecay(t *testing.T) {
	for _, c := range []struct {
		weightDecay float64
		decoupled   bool
		decay       kernel.Decay
		scalar      float64
	}{
		{0, false, kernel.NoDecay, 0}, {0, true, kernel.NoDecay, 0},
		{0.25, false, kernel.L2Decay, 0.25}, {0.25, true, kernel.DecoupledDecay, 1 - 0.5*0.25},
	} {
		o := defaults
		o.LR, o.WeightDecay, o.DecoupledWeightDecay, o.AMSGrad, o.Maximize = 0.5, c.weightDecay, c.decoupled, true, c.decoupled
		g, err := o.Group(2)
		require.NoError(t, err)
		assert.Equal(t, c.decay, g.Decay)
		assert.Equal(t, c.scalar, g.Scalars.WeightDecay)
		assert.True(t, g.AMSGrad)
		assert.Equal(t, c.decoupled, g.Maximize)
	}
}

func TestNarrowRoundsOnce(t *testing.T) {
	s := Scalars{WeightDecay: 1 + 0x1p-25, OneMinusBeta1: 0.1, Beta2: 0.999, OneMinusBeta2: 1e-50, BiasCorrection2Sqrt: math.Inf(1),
		StepSize: 1e39, Eps: math.NaN()}
	got := narrow[float32](s, 0x9FC0)
	assert.True(t, got.Eps != got.Eps, "eps: got %x, want NaN", got.Eps)
	got.Eps = 0
	assert.Equal(t, kernel.Scalars[float32]{Decay: 1, OneMinusBeta1: 0x1.99999ap-4, Beta2: 0x1.ff7cee000p-1, BiasCorrection2Sqrt: float32(math.Inf(1)),
		NegStepSize: float32(math.Inf(-1)), MXCSR: 0x9FC0}, got)
}

func TestNarrowKeepsDoubles(t *testing.T) {
	s := Scalars{WeightDecay: 0.1, OneMinusBeta1: 0.2, Beta2: 0.3, OneMinusBeta2: 0.4, BiasCorrection2Sqrt: 0.5, StepSize: 1e300, Eps: 1e-300}
	assert.Equal(t, kernel.Scalars[float64]{Decay: 0.1, OneMinusBeta1: 0.2, Beta2: 0.3, OneMinusBeta2: 0.4, BiasCorrection2Sqrt: 0.5,
		NegStepSize: -1e300, Eps: 1e-300, MXCSR: 0x1F80}, narrow[float64](s, 0x1F80))
}
