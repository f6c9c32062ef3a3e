package kernel

import (
	"fmt"
	"slices"
)

// Scalars are the constants of one step, each narrowed once from float64. Assembly reads the fields in place.
type Scalars struct {
	Decay               float32 // L2Decay: weight_decay; DecoupledDecay: 1 - lr*weight_decay
	OneMinusBeta1       float32 // the weight of the new gradient in exp_avg
	Beta2               float32
	OneMinusBeta2       float32
	BiasCorrection2Sqrt float32
	Eps                 float32
	NegStepSize         float32 // -step_size
	MXCSR               uint32  // control word in force while a kernel works; it must mask all exceptions, as NearestNoFlush does
}

// Span is a run of elements that a kernel updates in place. The slices have one length and do not overlap, except that
// MaxExpAvgSq is nil unless the variant has AMSGrad. Grad is only read.
type Span struct {
	Param, Grad, ExpAvg, ExpAvgSq, MaxExpAvgSq []float32
}

// slice is the part [begin, end) of the span.
func (s Span) slice(begin, end int) Span {
	part := Span{Param: s.Param[begin:end], Grad: s.Grad[begin:end], ExpAvg: s.ExpAvg[begin:end], ExpAvgSq: s.ExpAvgSq[begin:end]}
	if s.MaxExpAvgSq != nil {
		part.MaxExpAvgSq = s.MaxExpAvgSq[begin:end]
	}
	return part
}

// TileLen, in elements, is how much of a span a Library kernel takes at a time: its six arrays of 4 KiB stay in a first-level
// cache of 32 KiB, and oneMKL starts threads of its own only for some ten times as many elements.
const TileLen = 1024

// Tile holds the square roots of one tile. Each worker needs its own.
type Tile [TileLen]float32

// LibrarySquareRoot sets y[i] = sqrt(x[i]). The slices have one length, at most TileLen, and do not overlap. It is called with
// the calling thread's own control word, not with Scalars.MXCSR.
type LibrarySquareRoot func(y, x []float32)

// A spanFunc works on a whole span: all of the update, or its first stage up to exp_avg_sq and max_exp_avg_sq.
type spanFunc func(span Span, s *Scalars)

// An updateFunc is the second stage: param, by the square roots in root. The span has at most TileLen elements.
type updateFunc func(span Span, root *Tile, s *Scalars)

// stages are the functions that make up a kernel: step alone, or, around a Library square root, moments and update.
type stages struct {
	step    spanFunc
	moments spanFunc
	update  updateFunc
}

// Kernel is one variant on one backend.
type Kernel struct {
	stages
	library  LibrarySquareRoot
	amsgrad  bool
	assembly bool
}

// Lookup finds the kernel of a variant on a backend. A caller does so once for many spans. The library function is nil unless
// the variant's square root is Library.
func Lookup(b Backend, v Variant, library LibrarySquareRoot) (Kernel, error) {
	switch {
	case !slices.Contains(available, b):
		return Kernel{}, fmt.Errorf("kernel: backend %v is not available here", b)
	case !b.Has(v.SquareRoot):
		return Kernel{}, fmt.Errorf("kernel: backend %v has no square root %v", b, v.SquareRoot)
	case v.SquareRoot == Library && library == nil:
		return Kernel{}, fmt.Errorf("kernel: square root %v needs a function", v.SquareRoot)
	}
	k := Kernel{amsgrad: v.AMSGrad, assembly: b != Generic}
	if v.SquareRoot == Library {
		k.library = library
	}
	if b == Generic {
		k.stages = genericStages(v)
	} else {
		k.stages = assemblyStages(b, v)
	}
	return k, nil
}

// Step updates a span in place, by the algorithm in the package's documentation. It allocates nothing. The tile may be nil
// unless the square root is Library.
func (k *Kernel) Step(span Span, s *Scalars, tile *Tile) {
	if k.assembly {
		markSpan(span)
	}
	if k.library == nil {
		k.step(span, s)
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

// Sqrt sets y[i] = sqrt(x[i]) by the very instructions of backend b's kernels, rounding to nearest without flushing. It is for
// finding out which square root reproduces another one.
func Sqrt(b Backend, r SquareRoot, y, x []float32) error {
	switch {
	case !slices.Contains(available, b):
		return fmt.Errorf("kernel: backend %v is not available here", b)
	case r == Library, !b.Has(r):
		return fmt.Errorf("kernel: backend %v has no square root %v", b, r)
	case b == Generic:
		sqrtGeneric(y, x, NearestNoFlush)
	default:
		assemblySqrt(b, r)(y, x, NearestNoFlush)
	}
	return nil
}
