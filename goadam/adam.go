package goadam

import (
	"fmt"
	"sync"

	"roundpipe-go/kernel"
)

// serialBelow, in elements of a whole call, is where waking a goroutine starts to pay: under it the hand-off of 25 to 100 µs costs
// more than it brings. The threads of a team mostly wait for work already; that they enter Go costs some 40 µs.
const (
	serialBelow     = 1 << 18
	serialBelowTeam = 1 << 17
)

// rowElements is what the search for overlapping rows costs for a row, in elements: 0.3 to 2 µs where it has to search
// (BenchmarkRowsOverlap), 15 ns where the rows are those of the last step. Where rows are smaller on average, a second thread brings
// less than that.
const rowElements = 1 << 9

// maxThreads bounds Config.Threads: Go's scheduler takes memory for every thread it is told of, needed or not.
const maxThreads = 1 << 10

// Config says how to compute, not what: results depend on Arithmetic and SquareRoot alone.
type Config[T kernel.Float] struct {
	// Threads is the most threads to use, the caller's own included; less than 1 means 1. GOMAXPROCS is raised to a few more if need be.
	Threads    int
	Backend    kernel.Backend
	Arithmetic kernel.Arithmetic
	SquareRoot kernel.SquareRoot
	// Library is the square root of kernel.Library. It also stands in where an estimated one cannot run.
	Library kernel.LibrarySquareRoot[T]
	// Team lends threads; without one, nil, goroutines work.
	Team Team
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

func update[T kernel.Float](params []Param[T], steppers []stepper[T], numel int, config Config[T]) error {
	step := func(s span, tile *kernel.Tile[T]) {
		row := &params[s.row]
		steppers[row.Group].step(row.part(s.begin, s.end), tile)
	}
	threads, least := min(config.Threads, maxThreads), serialBelow
	if config.Team != nil {
		least = serialBelowTeam
	}
	if threads > 1 && numel >= max(least, rowElements*len(params)) && !rowsOverlap(params) {
		return updateParallel(params, pieceLen(numel, threads), threads, config.Team, step)
	}
	return updateSerial(params, step)
}

// stepper is a group ready to run: its kernel and its narrowed scalars.
type stepper[T kernel.Float] struct {
	kernel  kernel.Kernel[T]
	scalars kernel.Scalars[T]
}

func (s *stepper[T]) step(part kernel.Span[T], tile *kernel.Tile[T]) {
	s.kernel.Step(part, &s.scalars, tile)
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

// tiles are scratch for the library square root, kept apart per thread of a call: of float32 and of float64.
var tiles [2]sync.Pool

func tilesOf[T kernel.Float]() *sync.Pool {
	if _, double := any(*new(T)).(float64); double {
		return &tiles[1]
	}
	return &tiles[0]
}

func borrowTile[T kernel.Float]() *kernel.Tile[T] {
	if tile, ok := tilesOf[T]().Get().(*kernel.Tile[T]); ok {
		return tile
	}
	return new(kernel.Tile[T])
}

func returnTile[T kernel.Float](tile *kernel.Tile[T]) { tilesOf[T]().Put(tile) }

// updateSerial runs the rows in order on the calling thread.
func updateSerial[T kernel.Float](params []Param[T], step func(span, *kernel.Tile[T])) error {
	return runPieces(1, 1, nil, func(int) {
		tile := borrowTile[T]()
		defer returnTile(tile)
		for row := range params {
			numel := len(params[row].Param)
			if row+1 < len(params) {
				next := &params[row+1]
				kernel.Prefetch(next.part(0, len(next.Param)))
			}
			for begin := 0; begin < numel; begin += maxSpan {
				step(span{row, begin, min(begin+maxSpan, numel)}, tile)
			}
		}
	})
}

func updateParallel[T kernel.Float](params []Param[T], length, threads int, team Team, step func(span, *kernel.Tile[T])) error {
	p := newPlan(params, length)
	return runPieces(p.pieces(), threads, team, func(piece int) {
		tile := borrowTile[T]()
		defer returnTile(tile)
		spans := p.piece(piece)
		for i, s := range spans {
			if i+1 < len(spans) {
				next := spans[i+1]
				kernel.Prefetch(params[next.row].part(next.begin, next.end))
			}
			step(s, tile)
		}
	})
}
