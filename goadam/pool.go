package goadam

import (
	"fmt"
	"runtime"
	"sync/atomic"
)

// job is a number of pieces that the caller and its helpers claim one by one.
//
// The join is on finished pieces, not on goroutines: a helper that the scheduler starts late finds nothing left and ends,
// and nobody waited for it. Such a helper touches the job alone, never the caller's memory.
type job struct {
	pieces   int64
	run      func(piece int)
	claimed  atomic.Int64
	finished atomic.Int64
	last     chan struct{} // receives one value when all pieces are finished
	failure  atomic.Pointer[error]
}

// runPieces calls run for every piece in [0, pieces), on up to threads threads of which the caller is one. A panic in run
// comes back as an error; pieces not yet begun are then left out.
func runPieces(pieces, threads int, run func(piece int)) error {
	j := &job{pieces: int64(pieces), run: run, last: make(chan struct{}, 1)}
	if pieces == 0 {
		return nil
	}
	helpers := min(threads, pieces) - 1
	if helpers > 0 {
		if helpers+1 > runtime.GOMAXPROCS(0) {
			// Go took its idea of the machine from the importing thread's affinity; the caller knows better.
			runtime.GOMAXPROCS(helpers + 1)
		}
		for range helpers {
			go j.work()
		}
		// The goroutine made last waits in the spawning thread's own slot, from which others steal only after a pause of
		// 50 to 75 µs; let that one be of no consequence.
		go func() {}()
	}
	j.work()
	<-j.last
	if failure := j.failure.Load(); failure != nil {
		return *failure
	}
	return nil
}

func (j *job) work() {
	for {
		piece := j.claimed.Add(1) - 1
		if piece >= j.pieces {
			return
		}
		if j.failure.Load() == nil {
			j.runPiece(int(piece))
		}
		if j.finished.Add(1) == j.pieces {
			j.last <- struct{}{}
		}
	}
}

func (j *job) runPiece(piece int) {
	defer func() {
		if reason := recover(); reason != nil {
			err := fmt.Errorf("goadam: panic in the update: %v", reason)
			j.failure.CompareAndSwap(nil, &err)
		}
	}()
	j.run(piece)
}
