package pybind

/*
#include <stdint.h>

extern void roundpipe_go_work(uintptr_t handle);

typedef void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

static void work(void *handle) { roundpipe_go_work((uintptr_t)handle); }

static void run_team(void *parallel, uintptr_t handle, unsigned threads) {
	((gomp_parallel)parallel)(work, (void *)handle, threads, 0);
}
*/
import "C"

import (
	"runtime/cgo"
	"sync/atomic"
	"unsafe"

	"roundpipe-go/goadam"
)

// team is the address of OpenMP's GOMP_parallel, or nil.
var team atomic.Pointer[unsafe.Pointer]

// SetTeam makes the C function at address, GOMP_parallel of the OpenMP that torch runs on, provide the threads of all later
// steps. torch's threads spin for milliseconds after each of its operations: they are there at once, and threads of our own
// would have to share the cores with them. 0 goes back to goroutines.
func SetTeam(address int64) (int64, error) {
	parallel := *(*unsafe.Pointer)(unsafe.Pointer(&address))
	team.Store(&parallel)
	return address, nil
}

// newTeam is nil while no address is set.
func newTeam() goadam.Team {
	parallel := team.Load()
	if parallel == nil || *parallel == nil {
		return nil
	}
	return func(threads int, work func()) {
		handle := cgo.NewHandle(work)
		defer handle.Delete()
		C.run_team(*parallel, C.uintptr_t(handle), C.unsigned(threads))
	}
}

//export roundpipe_go_work
func roundpipe_go_work(handle C.uintptr_t) { cgo.Handle(handle).Value().(func())() }
