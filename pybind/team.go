package pybind

// #include "team.h"
import "C"

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

// The two sides of team.h agree.
var (
	_ [kernel.TileLen]byte                               = [C.TILE_LEN]byte{}
	_ [unsafe.Sizeof(kernel.Call[float32]{})]byte        = [C.sizeof_kernel_call]byte{}
	_ [unsafe.Offsetof(kernel.Call[float64]{}.Step)]byte = [unsafe.Offsetof(C.kernel_call{}.step)]byte{}
)

// team has the functions of an OpenMP, or is nil.
var team atomic.Pointer[C.openmp]

// SetTeam makes the OpenMP that torch runs on provide the threads of all later steps; its functions GOMP_parallel,
// omp_get_thread_num and omp_get_max_threads are at the addresses. torch's threads spin for milliseconds after each of its
// operations: they are there at once, and threads of our own would have to share the cores with them. Three zeros go back to
// goroutines.
func SetTeam(parallel, threadNum, maxThreads int64) (int64, error) {
	if parallel == 0 && threadNum == 0 && maxThreads == 0 {
		team.Store(nil)
		return 0, nil
	}
	if parallel == 0 || threadNum == 0 || maxThreads == 0 {
		return 0, errors.New("pybind: a team needs all its functions")
	}
	var lent C.openmp
	lent.parallel, lent.thread_num = *(*unsafe.Pointer)(unsafe.Pointer(&parallel)), *(*unsafe.Pointer)(unsafe.Pointer(&threadNum))
	lent.max_threads = *(*unsafe.Pointer)(unsafe.Pointer(&maxThreads))
	team.Store(&lent)
	return parallel, nil
}

// newTeam is nil while no team is set.
func newTeam[T kernel.Float](library *librarySquareRoot) goadam.Team[T] {
	lent := team.Load()
	if lent == nil {
		return nil
	}
	// The addresses go as numbers, of which cgo does not ask what they lead to: that took longer than all else here.
	return func(threads int, calls []kernel.Call[T], starts []int) {
		w := C.work{
			calls:  C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(calls)))),
			starts: C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(starts)))),
			pieces: C.int64_t(len(starts) - 1),
			nbytes: C.int64_t(unsafe.Sizeof(*new(T))),
		}
		if library != nil {
			w.sqrt, w.set_threads = library.address, library.setThreads
		}
		C.run_work(&w, lent, C.unsigned(threads))
	}
}
