package goadam

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// settled waits until workers that were started late have ended too.
func settled(t *testing.T, goroutines int) {
	t.Helper()
	assert.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+1 }, 10*time.Second, time.Millisecond,
		"goroutines are left") // Eventually has one of its own
}

func TestRunPiecesRunsEachPieceOnce(t *testing.T) {
	before, r := runtime.NumGoroutine(), newRand()
	for call := range 3000 {
		pieces, threads := r.IntN(40), r.IntN(10)
		runs := make([]int, pieces) // plain memory: the join must order it for the race detector too
		require.NoError(t, runPieces(pieces, threads, func(piece int) { runs[piece]++ }))
		for piece, n := range runs {
			require.Equal(t, 1, n, "call %d: piece %d of %d on %d threads", call, piece, pieces, threads)
		}
	}
	settled(t, before)
}

func TestRunPiecesUsesAllThreads(t *testing.T) {
	const threads = 4
	var together sync.WaitGroup // opens only when as many pieces run at once as there are threads
	together.Add(threads)
	assert.NoError(t, runPieces(threads, threads, func(int) {
		together.Done()
		together.Wait()
	}))
}

// TestLateWorkerTouchesNothing plays the worker that the scheduler starts when the call has returned.
func TestLateWorkerTouchesNothing(t *testing.T) {
	runs := 0
	q := &queue{pieces: 3, run: func(int) { runs++ }, last: make(chan struct{}, 1)}
	q.work()
	<-q.last
	require.Equal(t, 3, runs)
	for range 5 {
		q.work()
	}
	assert.Equal(t, 3, runs, "a late worker ran a piece")
	assert.Empty(t, q.last, "a late worker reported an end")
}

func TestPanicLeavesOutTheRest(t *testing.T) {
	before := runtime.NumGoroutine()
	for threads := 1; threads <= 8; threads++ {
		var runs atomic.Int64
		err := runPieces(1000, threads, func(int) {
			runs.Add(1)
			panic("boom")
		})
		assert.EqualError(t, err, "goadam: panic in the update: boom", "threads=%d", threads)
		assert.LessOrEqual(t, runs.Load(), int64(threads), "threads=%d: pieces began after the panic", threads)
	}
	settled(t, before)
}

func TestPanicComesBackAndTheNextCallWorks(t *testing.T) {
	forEachElement(t, testPanicComesBackAndTheNextCallWorks[float32], testPanicComesBackAndTheNextCallWorks[float64])
}

func testPanicComesBackAndTheNextCallWorks[T kernel.Float](t *testing.T) {
	before := runtime.NumGoroutine()
	groups := newGroups(t, kernel.Variant{})
	for _, threads := range []int{1, 4} {
		for _, reason := range []any{"boom", errors.New("boom")} {
			rows := newRows[T](false, motley...)
			config := Config[T]{Threads: threads, SquareRoot: kernel.Library, Library: func(y, x []T) { panic(reason) }}
			assert.EqualError(t, Step(rows, groups, config), "goadam: panic in the update: boom")
			for i, p := range rows {
				if p.Step.Float32 != nil {
					assert.EqualValues(t, 6, *p.Step.Float32, "row %d: the counter advanced", i)
				} else {
					assert.EqualValues(t, 6, *p.Step.Float64, "row %d: the counter advanced", i)
				}
			}
			config.Library = skewedSqrt[T]
			want := clone(rows)
			reference(t, want, groups, config, kernel.NearestNoFlush)
			require.NoError(t, Step(rows, groups, config))
			sameRows(t, "after the panic", rows, want)
		}
	}
	settled(t, before)
}

func TestThreadsBeyondReason(t *testing.T) {
	procs := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(procs)
	groups := newGroups(t, kernel.Variant{})
	for _, threads := range []int{math.MinInt, 0, 1 << 60, math.MaxInt} {
		rows := newRows[float32](false, motley...)
		want := clone(rows)
		reference(t, want, groups, Config[float32]{}, kernel.NearestNoFlush)
		require.NoError(t, Step(rows, groups, Config[float32]{Threads: threads}), "threads=%d", threads)
		sameRows(t, fmt.Sprintf("threads=%d", threads), rows, want)
		assert.LessOrEqual(t, runtime.GOMAXPROCS(0), maxThreads, "threads=%d", threads)
	}
}

func TestGOMAXPROCSIsRaisedNotLowered(t *testing.T) {
	procs := runtime.GOMAXPROCS(1)
	defer runtime.GOMAXPROCS(procs)
	nothing := func(int) {}
	for _, c := range []struct{ pieces, threads, want int }{{100, 1, 1}, {100, 3, 3}, {100, 2, 3}, {2, 9, 3}, {100, 5, 5}} {
		assert.NoError(t, runPieces(c.pieces, c.threads, nothing))
		assert.Equal(t, c.want, runtime.GOMAXPROCS(0), "after %d pieces on %d threads", c.pieces, c.threads)
	}
}

func TestCallsAtTheSameTime(t *testing.T) {
	forEachElement(t, testCallsAtTheSameTime[float32], testCallsAtTheSameTime[float64])
}

func testCallsAtTheSameTime[T kernel.Float](t *testing.T) {
	groups := newGroups(t, kernel.Variant{})
	rows := newRows[T](false, motley...)
	want := clone(rows)
	config := Config[T]{Threads: 3, Backend: kernel.Best()}
	reference(t, want, groups, config, kernel.NearestNoFlush)
	var calls sync.WaitGroup
	results, errs := make([][]Param[T], 6), make([]error, 6)
	for i := range results {
		results[i] = clone(rows)
		calls.Go(func() { errs[i] = Step(results[i], groups, config) })
	}
	calls.Wait()
	for i := range results {
		require.NoError(t, errs[i])
		sameRows(t, fmt.Sprintf("call %d", i), results[i], want)
	}
}
