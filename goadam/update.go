package goadam

import (
	"runtime"
	"slices"
	"sync"

	"roundpipe-go/kernel"
)

// serialBelow, in elements of a whole call, is where waking a goroutine starts to pay: under it the hand-off of 25 to 100 µs costs
// more than it brings. The threads of a team mostly wait for work already, and take 5 to 20 µs.
const (
	serialBelow     = 1 << 18
	serialBelowTeam = 1 << 16
)

// rowElements is what the search for overlapping rows costs for a row, in elements: 0.3 to 2 µs where it has to search
// (BenchmarkRowsOverlap), 15 ns where the rows are those of the last step. Where rows are smaller on average, a second thread brings
// less than that.
const rowElements = 1 << 9

func update[T kernel.Float](params []Param[T], steppers []stepper[T], numel int, config Config[T]) error {
	team, least := config.Team, serialBelowTeam
	if team == nil || !allAssembly(steppers) {
		team, least = nil, serialBelow
	}
	threads := min(config.Threads, maxThreads)
	switch {
	case threads <= 1 || numel < max(least, rowElements*len(params)) || rowsOverlap(params):
		return updateSerial(params, steppers)
	case team != nil:
		return updateByTeam(params, steppers, pieceLen(numel, threads), threads, team)
	default:
		return updateParallel(params, steppers, pieceLen(numel, threads), threads)
	}
}

// lent is what a team works from.
type lent[T kernel.Float] struct {
	plan  plan
	calls []kernel.Call[T]
}

// Memory of steps that are over, for the next: of float32 and of float64.
var (
	tiles [2]sync.Pool // of *kernel.Tile
	lents [2]sync.Pool // of *lent
)

// borrow takes one from the pool of the elements T, or makes one.
func borrow[X any, T kernel.Float](pools *[2]sync.Pool) (x *X, pool *sync.Pool) {
	pool = &pools[0]
	if _, double := any(*new(T)).(float64); double {
		pool = &pools[1]
	}
	if x, ok := pool.Get().(*X); ok {
		return x, pool
	}
	return new(X), pool
}

// updateSerial runs the rows in order on the calling thread.
func updateSerial[T kernel.Float](params []Param[T], steppers []stepper[T]) error {
	return runPieces(1, 1, func(int) {
		tile, pool := borrow[kernel.Tile[T], T](&tiles)
		defer pool.Put(tile)
		for row := range params {
			numel := len(params[row].Param)
			if row+1 < len(params) {
				next := &params[row+1]
				kernel.Prefetch(next.part(0, len(next.Param)))
			}
			for begin := 0; begin < numel; begin += maxSpan {
				steppers[params[row].Group].step(params[row].part(begin, min(begin+maxSpan, numel)), tile)
			}
		}
	})
}

// updateParallel runs the rows on goroutines.
func updateParallel[T kernel.Float](params []Param[T], steppers []stepper[T], length, threads int) error {
	p := newPlan(params, length)
	return runPieces(p.pieces(), threads, func(piece int) {
		tile, pool := borrow[kernel.Tile[T], T](&tiles)
		defer pool.Put(tile)
		spans := p.piece(piece)
		for i, s := range spans {
			if i+1 < len(spans) {
				next := spans[i+1]
				kernel.Prefetch(params[next.row].part(next.begin, next.end))
			}
			steppers[params[s.row].Group].step(params[s.row].part(s.begin, s.end), tile)
		}
	})
}

// updateByTeam runs the rows on a host's threads.
func updateByTeam[T kernel.Float](params []Param[T], steppers []stepper[T], length, threads int, team Team[T]) (err error) {
	defer recoverTo(func(failure error) { err = failure })
	l, pool := borrow[lent[T], T](&lents)
	defer func() {
		clear(l.calls) // Go may come to own memory at these addresses, and its collector would take them for pointers
		pool.Put(l)
	}()
	fill(&l.plan, params, length)
	l.calls = slices.Grow(l.calls[:0], len(l.plan.spans))
	for _, s := range l.plan.spans {
		row := &params[s.row]
		stepper := &steppers[row.Group]
		l.calls = append(l.calls, stepper.kernel.Call(row.part(s.begin, s.end), &stepper.scalars))
	}
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&l.calls[0])
	pinner.Pin(&l.plan.starts[0])
	pinner.Pin(&steppers[0])
	team(threads, l.calls, l.plan.starts)
	return nil
}
