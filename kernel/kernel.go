package kernel

import (
	"fmt"
	"slices"
)

// Float is an element of parameters and their state.
type Float interface{ float32 | float64 }

// Scalars are the constants of one step, each narrowed once from float64 to T. Assembly reads the fields in place.
type Scalars[T Float] struct {
	Decay               T // L2Decay: weight_decay; DecoupledDecay: 1 - lr*weight_decay
	OneMinusBeta1       T // the weight of the new gradient in exp_avg
	Beta2               T
	OneMinusBeta2       T
	BiasCorrection2Sqrt T
	Eps                 T
	NegStepSize         T // -step_size
	Reciprocal          T // of BiasCorrection2Sqrt, from Invert, with ReciprocalLow; zero: kernels divide
	ReciprocalLow       T
	MXCSR               uint32 // control word in force while a kernel works; it must mask all exceptions, as NearestNoFlush does
}

// Span is a run of elements that a kernel updates in place. The slices have one length and do not overlap, except that
// MaxExpAvgSq is nil unless the variant has AMSGrad. Grad is only read.
type Span[T Float] struct {
	Param, Grad, ExpAvg, ExpAvgSq, MaxExpAvgSq []T
}

// slice is the part [begin, end) of the span.
func (s Span[T]) slice(begin, end int) Span[T] {
	part := Span[T]{Param: s.Param[begin:end], Grad: s.Grad[begin:end], ExpAvg: s.ExpAvg[begin:end], ExpAvgSq: s.ExpAvgSq[begin:end]}
	if s.MaxExpAvgSq != nil {
		part.MaxExpAvgSq = s.MaxExpAvgSq[begin:end]
	}
	return part
}

// TileLen, in elements, is how much of a span a Library kernel takes at a time: its six arrays, of 4 KiB for float32, stay in a
// first-level cache, of float64 in a second-level one, and the call costs little in comparison.
const TileLen = 1024

// Tile holds the square roots of one tile. Each worker needs its own.
type Tile[T Float] [TileLen]T

// LibrarySquareRoot sets y[i] = sqrt(x[i]). The slices have one length, at most TileLen, and do not overlap. It is called with
// the calling thread's own control word, not with Scalars.MXCSR.
type LibrarySquareRoot[T Float] func(y, x []T)

// A spanFunc works on a whole span: all of the update, or its first stage up to exp_avg_sq and max_exp_avg_sq.
type spanFunc[T Float] func(span Span[T], s *Scalars[T])

// An updateFunc is the second stage: param, by the square roots in root. The span has at most TileLen elements.
type updateFunc[T Float] func(span Span[T], root *Tile[T], s *Scalars[T])

// stages are the functions that make up a kernel: step, or, around a Library square root, moments and update. Where Multiplies says
// so there is also reciprocal, which is step with multiplications by Scalars.Reciprocal in the place of a division.
type stages[T Float] struct {
	step, reciprocal spanFunc[T]
	moments          spanFunc[T]
	update           updateFunc[T]
}

// codes are the addresses of the functions that stages has, where these are assembly; zero where there are none.
type codes struct{ step, reciprocal, moments, update uintptr }

// A sqrtFunc sets y[i] = sqrt(x[i]) under a control word.
type sqrtFunc[T Float] func(y, x []T, mxcsr uint32)

// Kernel is one variant on one backend, for elements T.
type Kernel[T Float] struct {
	stages[T]
	codes   *codes // nil for the portable kernels
	library LibrarySquareRoot[T]
	amsgrad bool
}

// Lookup finds the kernel of a variant on a backend. A caller does so once for many spans. The library function is nil unless
// the variant's square root is Library.
func Lookup[T Float](b Backend, v Variant, library LibrarySquareRoot[T]) (Kernel[T], error) {
	switch {
	case !slices.Contains(available, b):
		return Kernel[T]{}, fmt.Errorf("kernel: backend %v is not available here", b)
	case !Has[T](b, v.SquareRoot):
		return Kernel[T]{}, fmt.Errorf("kernel: backend %v has no square root %v of %T", b, v.SquareRoot, *new(T))
	case v.SquareRoot == Library && library == nil:
		return Kernel[T]{}, fmt.Errorf("kernel: square root %v needs a function", v.SquareRoot)
	}
	k := Kernel[T]{amsgrad: v.AMSGrad}
	if v.SquareRoot == Library {
		k.library = library
	}
	if b == Generic {
		k.stages = genericStages[T](v)
	} else {
		k.stages, k.codes = assemblyStages[T](b, v)
	}
	return k, nil
}

// Step updates a span in place, by the algorithm in the package's documentation. It allocates nothing. The tile may be nil
// unless the square root is Library.
func (k *Kernel[T]) Step(span Span[T], s *Scalars[T], tile *Tile[T]) {
	if k.codes != nil {
		markSpan(span)
	}
	if k.library == nil {
		if k.multiplies(s) {
			k.reciprocal(span, s)
		} else {
			k.step(span, s)
		}
		return
	}
	for begin, n := 0, len(span.Param); begin < n; begin += TileLen {
		part := span.slice(begin, min(begin+TileLen, n))
		second := part.ExpAvgSq
		if k.amsgrad {
			second = part.MaxExpAvgSq
		}
		k.moments(part, s)
		k.library(tile[:len(second)], second)
		k.update(part, tile, s)
	}
}

// multiplies reports whether the kernel that multiplies by the reciprocal is there and may be taken.
func (k *Kernel[T]) multiplies(s *Scalars[T]) bool {
	return k.reciprocal != nil && s.Reciprocal != 0 && s.MXCSR&roundingMask == 0
}

// Call is a call of a kernel's assembly as C can make it. The assembly neither needs a goroutine nor grows the stack, and keeps only
// the stack and frame pointers; its arguments lie above the return address, in this order.
type Call[T Float] struct {
	Span    Span[T]
	Scalars *Scalars[T]
	// Step is the address of the whole step, func(Span, *Scalars), or else of its part before a Library square root.
	Step uintptr
	// Update is the address of the part after that square root, func(Span, *Tile, *Scalars), or 0. Where it is not, both parts take at
	// most TileLen elements at a time: see Kernel.Step.
	Update uintptr
}

// IsAssembly reports whether there is a Call for what Step does.
func (k *Kernel[T]) IsAssembly() bool { return k.codes != nil }

// Call is what Step does for a span, for an assembly kernel.
func (k *Kernel[T]) Call(span Span[T], s *Scalars[T]) Call[T] {
	switch {
	case k.library != nil:
		return Call[T]{span, s, k.codes.moments, k.codes.update}
	case k.multiplies(s):
		return Call[T]{span, s, k.codes.reciprocal, 0}
	default:
		return Call[T]{span, s, k.codes.step, 0}
	}
}

// Sqrt sets y[i] = sqrt(x[i]) by the very instructions of backend b's kernels, rounding to nearest without flushing. It is for
// finding out which square root reproduces another one.
func Sqrt[T Float](b Backend, r SquareRoot, y, x []T) error {
	switch {
	case !slices.Contains(available, b):
		return fmt.Errorf("kernel: backend %v is not available here", b)
	case r == Library, !Has[T](b, r):
		return fmt.Errorf("kernel: backend %v has no square root %v of %T", b, r, *new(T))
	case b == Generic:
		sqrtGeneric(y, x, NearestNoFlush)
	default:
		assemblySqrt[T](b, r)(y, x, NearestNoFlush)
	}
	return nil
}
