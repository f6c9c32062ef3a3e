package goadam

import (
	"fmt"
	"sync"

	"roundpipe-go/kernel"
)

// serialBelow, in elements of a whole call, is where waking a second thread starts to pay: under it the hand-off of 25 to
// 100 µs costs more than it brings.
const serialBelow = 1 << 18

// rowElements is what the search for overlapping rows costs for a row, in elements: 0.1 to 0.5 µs (BenchmarkRowsOverlap), in which
// one thread updates up to a thousand. Where rows are smaller on average, a second thread brings less than the search costs.
const rowElements = 1 << 10

// maxThreads bounds Config.Threads: Go's scheduler takes memory for every thread it is told of, needed or not.
const maxThreads = 1 << 10

// Config says how to compute, not what: results depend on Arithmetic and SquareRoot alone.
type Config struct {
	// Threads is the most threads to use, the caller's own included; less than 1 means 1. GOMAXPROCS is raised to it if need be.
	Threads    int
	Backend    kernel.Backend
	Arithmetic kernel.Arithmetic
	SquareRoot kernel.SquareRoot
	// Library is the square root of kernel.Library. It also stands in where an estimated one cannot run.
	Library kernel.LibrarySquareRoot
}

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
func Step(params []Param, groups []Group, config Config) error {
	mxcsr := kernel.MXCSR()&kernel.ControlMask | kernel.NearestNoFlush
	steppers, err := newSteppers(groups, config, mxcsr)
	if err != nil {
		return err
	}
	numel := 0
	for i := range params {
		if err := params[i].check(i, groups); err != nil {
			return err
		}
		numel += len(params[i].Param)
	}

	update := func(s span, tile *kernel.Tile) {
		row := &params[s.row]
		steppers[row.Group].step(row.part(s.begin, s.end), tile)
	}
	threads := min(config.Threads, maxThreads)
	if threads > 1 && numel >= max(serialBelow, rowElements*len(params)) && !rowsOverlap(params) {
		err = updateParallel(params, pieceLen(numel, threads), threads, update)
	} else {
		err = updateSerial(params, update)
	}
	if err != nil {
		return err
	}
	for i := range params {
		params[i].Step.set(groups[params[i].Group].Scalars.Step)
	}
	return nil
}

// stepper is a group ready to run: its kernel and its narrowed scalars.
type stepper struct {
	kernel  kernel.Kernel
	scalars kernel.Scalars
}

func (s *stepper) step(part kernel.Span, tile *kernel.Tile) { s.kernel.Step(part, &s.scalars, tile) }

func newSteppers(groups []Group, config Config, mxcsr uint32) ([]stepper, error) {
	if config.Arithmetic > kernel.Plain || config.SquareRoot > kernel.Library {
		return nil, fmt.Errorf("goadam: unknown arithmetic %d or square root %d", config.Arithmetic, config.SquareRoot)
	}
	root := config.squareRoot(mxcsr)
	steppers := make([]stepper, len(groups))
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
		steppers[i] = stepper{k, g.Scalars.narrow(mxcsr)}
	}
	return steppers, nil
}

// squareRoot replaces an estimated square root by the library function it reproduces where the formula does not hold: on a
// backend without the estimate, and when small intermediate results would be flushed to zero or rounded another way, of which
// the library takes no notice.
func (c Config) squareRoot(mxcsr uint32) kernel.SquareRoot {
	if c.SquareRoot.Estimated() && (!c.Backend.Has(c.SquareRoot) || mxcsr != kernel.NearestNoFlush) {
		return kernel.Library
	}
	return c.SquareRoot
}

// part is [begin, end) of the row.
func (p *Param) part(begin, end int) kernel.Span {
	s := kernel.Span{Param: p.Param[begin:end], Grad: p.Grad[begin:end], ExpAvg: p.ExpAvg[begin:end], ExpAvgSq: p.ExpAvgSq[begin:end]}
	if len(p.MaxExpAvgSq) > 0 {
		s.MaxExpAvgSq = p.MaxExpAvgSq[begin:end]
	}
	return s
}

// tiles are scratch for the library square root, kept apart per thread of a call.
var tiles = sync.Pool{New: func() any { return new(kernel.Tile) }}

// updateSerial runs the rows in order on the calling thread.
func updateSerial(params []Param, update func(span, *kernel.Tile)) error {
	return runPieces(1, 1, func(int) {
		tile := tiles.Get().(*kernel.Tile)
		defer tiles.Put(tile)
		for row := range params {
			numel := len(params[row].Param)
			for begin := 0; begin < numel; begin += maxSpan {
				update(span{row, begin, min(begin+maxSpan, numel)}, tile)
			}
		}
	})
}

func updateParallel(params []Param, length, threads int, update func(span, *kernel.Tile)) error {
	p := newPlan(params, length)
	return runPieces(p.pieces(), threads, func(piece int) {
		tile := tiles.Get().(*kernel.Tile)
		defer tiles.Put(tile)
		for _, s := range p.piece(piece) {
			update(s, tile)
		}
	})
}
