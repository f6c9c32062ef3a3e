package goadam

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

// queue is a number of pieces that the caller and its workers claim one by one.
//
// The join is on finished pieces, not on goroutines: a worker that the scheduler starts late finds nothing left and ends,
// and nobody waited for it. Such a worker touches the queue alone, never the caller's memory.
type queue struct {
	pieces   int64
	run      func(piece int)
	claimed  atomic.Int64
	finished atomic.Int64
	last     chan struct{} // receives one value when all pieces are finished
	failure  atomic.Pointer[error]
}

// runPieces calls run for every piece in [0, pieces), on up to threads goroutines of which the caller's is one. A panic in run comes
// back as an error; pieces not yet begun are then left out.
func runPieces(pieces, threads int, run func(piece int)) error {
	q := &queue{pieces: int64(pieces), run: run, last: make(chan struct{}, 1)}
	if pieces == 0 {
		return nil
	}
	threads = min(threads, pieces)
	if threads > 1 {
		raiseGOMAXPROCS(threads)
		for range threads - 1 {
			go q.work()
		}
		// The goroutine made last waits in the spawning thread's own slot, from which others steal only after a pause of
		// 50 to 75 µs; let that one be of no consequence.
		go func() {}()
	}
	q.work()
	<-q.last
	if failure := q.failure.Load(); failure != nil {
		return *failure
	}
	return nil
}

var raising sync.Mutex

// raiseGOMAXPROCS makes room for the caller's threads. Go took its idea of the machine from the affinity of the thread that
// loaded it; the caller knows better.
func raiseGOMAXPROCS(threads int) {
	if threads <= runtime.GOMAXPROCS(0) {
		return
	}
	raising.Lock() // or a second caller could lower it again
	defer raising.Unlock()
	if threads > runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(threads)
	}
}

func (q *queue) work() {
	for {
		piece := q.claimed.Add(1) - 1
		if piece >= q.pieces {
			return
		}
		if q.failure.Load() == nil {
			q.runPiece(int(piece))
		}
		if q.finished.Add(1) == q.pieces {
			q.last <- struct{}{}
		}
	}
}

func (q *queue) runPiece(piece int) {
	defer recoverTo(func(err error) { q.failure.CompareAndSwap(nil, &err) })
	q.run(piece)
}

// recoverTo makes a panic an error.
func recoverTo(set func(error)) {
	if reason := recover(); reason != nil {
		set(fmt.Errorf("goadam: panic in the update: %v", reason))
	}
}
