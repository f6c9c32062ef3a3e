package goadam

import (
	"fmt"

	"roundpipe-go/kernel"
)

// maxThreads bounds Config.Threads: Go's scheduler takes memory for every thread it is told of, needed or not.
const maxThreads = 1 << 10

// Config says how to compute, not what: results depend on Arithmetic and SquareRoot alone.
type Config[T kernel.Float] struct {
	// Threads is the most threads to use, the caller's own included; less than 1 means 1. GOMAXPROCS is raised to as many if need be.
	Threads    int
	Backend    kernel.Backend
	Arithmetic kernel.Arithmetic
	SquareRoot kernel.SquareRoot
	// Library is the square root of kernel.Library. It also stands in where an estimated one cannot run.
	Library kernel.LibrarySquareRoot[T]
	// Team lends threads for assembly kernels; without one, nil, and for portable kernels, goroutines work.
	Team Team[T]
}

// A Team makes calls of kernels on up to threads threads at once, of which the caller's is one, and returns when all are made:
// calls[starts[i]:starts[i+1]] in order by one thread, for each i. It is how a host lends threads that it has at hand, and that need
// not enter Go: so where a call has two parts, the team itself takes the square roots between them, by Config.Library's function.
// All that the calls point to stays where it is meanwhile.
type Team[T kernel.Float] func(threads int, calls []kernel.Call[T], starts []int)

// Step updates all params, or refuses and changes nothing. It is, for every row in order,
//
//	row.Step = groups[row.Group].Scalars.Step
//	kernel step of groups[row.Group] over row.Param, row.Grad, row.ExpAvg, row.ExpAvgSq, row.MaxExpAvgSq
//
// Rows that share memory with each other are computed in order on the calling thread. The caller's floating-point control
// word (flush-to-zero, rounding) holds on every thread that takes part.
//
// The error is an *UnservedError if a row is well formed but must be left to torch. After a panic, which comes back as an
// error too, elements may have been written; the counters have not.
func Step[T kernel.Float](params []Param[T], groups []Group, config Config[T]) error {
	run, err := Prepare(params, groups, config)
	if err != nil {
		return err
	}
	return run()
}

// Prepare is Step in two parts: all that can be refused is refused here, and the function it returns updates. So a caller can
// have several steps taken all or none.
func Prepare[T kernel.Float](params []Param[T], groups []Group, config Config[T]) (run func() error, err error) {
	mxcsr := kernel.MXCSR()&kernel.ControlMask | kernel.NearestNoFlush
	steppers, err := newSteppers(groups, config, mxcsr)
	if err != nil {
		return nil, err
	}
	numel := 0
	for i := range params {
		if err := params[i].check(i, groups); err != nil {
			return nil, err
		}
		numel += len(params[i].Param)
	}
	return func() error {
		if err := update(params, steppers, numel, config); err != nil {
			return err
		}
		for i := range params {
			params[i].Step.set(groups[params[i].Group].Scalars.Step)
		}
		return nil
	}, nil
}

// stepper is a group ready to run: its kernel and its narrowed scalars.
type stepper[T kernel.Float] struct {
	kernel  kernel.Kernel[T]
	scalars kernel.Scalars[T]
}

func (s *stepper[T]) step(part kernel.Span[T], tile *kernel.Tile[T]) {
	s.kernel.Step(part, &s.scalars, tile)
}

func allAssembly[T kernel.Float](steppers []stepper[T]) bool {
	for i := range steppers {
		if !steppers[i].kernel.IsAssembly() {
			return false
		}
	}
	return true
}

func newSteppers[T kernel.Float](groups []Group, config Config[T], mxcsr uint32) ([]stepper[T], error) {
	if config.Arithmetic > kernel.Plain || config.SquareRoot > kernel.Library {
		return nil, fmt.Errorf("goadam: unknown arithmetic %d or square root %d", config.Arithmetic, config.SquareRoot)
	}
	root := config.squareRoot(mxcsr)
	steppers := make([]stepper[T], len(groups))
	for i, g := range groups {
		if g.Decay > kernel.DecoupledDecay {
			return nil, fmt.Errorf("goadam: group %d: unknown decay %d", i, g.Decay)
		}
		variant := kernel.Variant{Decay: g.Decay, AMSGrad: g.AMSGrad, Maximize: g.Maximize,
			Arithmetic: config.Arithmetic, SquareRoot: root}
		k, err := kernel.Lookup(config.Backend, variant, config.Library)
		if err != nil {
			return nil, fmt.Errorf("goadam: group %d: %w", i, err)
		}
		steppers[i] = stepper[T]{k, narrow[T](g.Scalars, mxcsr)}
	}
	return steppers, nil
}

// squareRoot replaces an estimated square root by the library function it reproduces where the formula does not hold: on a
// backend without the estimate, and when small intermediate results would be flushed to zero or rounded another way, of which
// the library takes no notice.
func (c Config[T]) squareRoot(mxcsr uint32) kernel.SquareRoot {
	if c.SquareRoot.Estimated() && (!kernel.Has[T](c.Backend, c.SquareRoot) || mxcsr != kernel.NearestNoFlush) {
		return kernel.Library
	}
	return c.SquareRoot
}

// part is [begin, end) of the row.
func (p *Param[T]) part(begin, end int) kernel.Span[T] {
	s := kernel.Span[T]{Param: p.Param[begin:end], Grad: p.Grad[begin:end], ExpAvg: p.ExpAvg[begin:end], ExpAvgSq: p.ExpAvgSq[begin:end]}
	if len(p.MaxExpAvgSq) > 0 {
		s.MaxExpAvgSq = p.MaxExpAvgSq[begin:end]
	}
	return s
}
