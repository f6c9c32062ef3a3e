package goadam

import (
	"fmt"

	"roundpipe-go/kernel"
)

// Param is one row of a step: a parameter, its gradient and its state, as flat memory in one order.
//
// Param, Grad, ExpAvg and ExpAvgSq have one length; MaxExpAvgSq has it too when the group asks for AMSGrad and is empty
// otherwise. A complex tensor is passed as its real view. Nothing in a row may overlap.
type Param[T kernel.Float] struct {
	Param, Grad, ExpAvg, ExpAvgSq, MaxExpAvgSq []T

	// Step counts the updates of this parameter; Step writes the group's step there once all elements are updated.
	Step Counter

	// Group is the index of the row's Group.
	Group int
}

// Counter points at a step counter as torch keeps it: a float32, or a float64 where that is the default dtype.
// Exactly one of the two is set.
type Counter struct {
	Float32 *float32
	Float64 *float64
}

func (c Counter) set(step float64) {
	if c.Float64 != nil {
		*c.Float64 = step
		return
	}
	*c.Float32 = float32(step)
}

// Group is what rows of the same hyperparameters and the same step count share.
type Group struct {
	Decay    kernel.Decay
	AMSGrad  bool
	Maximize bool
	Scalars  Scalars
}

// check says what is wrong with the row at index, by itself: shapes, group, counter, then memory.
func (p *Param[T]) check(index int, groups []Group) error {
	if p.Group < 0 || p.Group >= len(groups) {
		return fmt.Errorf("goadam: param %d: group is %d, want 0 to %d", index, p.Group, len(groups)-1)
	}
	numel := len(p.Param)
	numMax := 0
	if groups[p.Group].AMSGrad {
		numMax = numel
	}
	if len(p.Grad) != numel || len(p.ExpAvg) != numel || len(p.ExpAvgSq) != numel || len(p.MaxExpAvgSq) != numMax {
		return p.lengthError(index, numMax)
	}
	if (p.Step.Float32 == nil) == (p.Step.Float64 == nil) {
		return fmt.Errorf("goadam: param %d: step must be a float32 or a float64, and not both", index)
	}
	if reason := p.unservedMemory(); reason != "" {
		return &UnservedError{Param: index, Reason: reason}
	}
	return nil
}

// lengthError names the first tensor that is not as long as the parameter.
func (p *Param[T]) lengthError(index, numMax int) error {
	numel := len(p.Param)
	for _, s := range []struct {
		name      string
		got, want int
	}{
		{"grad", len(p.Grad), numel}, {"exp_avg", len(p.ExpAvg), numel}, {"exp_avg_sq", len(p.ExpAvgSq), numel},
		{"max_exp_avg_sq", len(p.MaxExpAvgSq), numMax},
	} {
		if s.got != s.want {
			return fmt.Errorf("goadam: param %d: %s has %d elements, want %d", index, s.name, s.got, s.want)
		}
	}
	return nil
}

// UnservedError says that a row is valid for torch, but not for the kernels: they read an element of every tensor before
// they write one, so a row whose tensors share memory needs torch's order of passes. Nothing was written.
type UnservedError struct {
	Param  int
	Reason string
}

func (e *UnservedError) Error() string {
	return fmt.Sprintf("goadam: param %d: %s", e.Param, e.Reason)
}
