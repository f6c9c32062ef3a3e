package pybind

/*
#include <stdint.h>

// VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: how ATen calls it.
static const int64_t mode = 0x2 | 0x140000 | 0x100;

typedef void (*vms_sqrt)(int, const float *, float *, int64_t);
typedef void (*vmd_sqrt)(int, const double *, double *, int64_t);

typedef int (*set_num_threads_local)(int);

// oneMKL would cut a call over threads of OpenMP, from 128 elements on by some of its code paths: that takes longer than the
// square roots, and these threads are not ours to start. 0 is what a thread has that has not set anything.
static int set_threads(void *set, int threads) {
	return set ? ((set_num_threads_local)set)(threads) : 0;
}

static void call_vms_sqrt(void *function, void *set, int n, const float *x, float *y) {
	int before = set_threads(set, 1);
	((vms_sqrt)function)(n, x, y, mode);
	set_threads(set, before);
}

static void call_vmd_sqrt(void *function, void *set, int n, const double *x, double *y) {
	int before = set_threads(set, 1);
	((vmd_sqrt)function)(n, x, y, mode);
	set_threads(set, before);
}
*/
import "C"

import (
	"sync/atomic"
	"unsafe"

	"roundpipe-go/kernel"
)

// librarySquareRoot is a C function of the signature of oneMKL's vmsSqrt or vmdSqrt, which torch's wheels export.
type librarySquareRoot struct {
	address    unsafe.Pointer
	setThreads unsafe.Pointer // oneMKL's MKL_Set_Num_Threads_Local, or nil
}

// libraries has the function of each dtype.
var libraries [float64Code + 1]atomic.Pointer[librarySquareRoot]

// SetLibrarySquareRoot makes the C function at address the library square root of all later calls on a dtype. It is of the type
// void (int n, const float *x, float *y, int64_t mode), or the same with double. The C function at setThreads, if that is not 0,
// says how many threads it may use when called from the calling thread; it is of the type int (int), and returns what held before.
func SetLibrarySquareRoot(dtype, address, setThreads int64) (int64, error) {
	if dtype < 0 || dtype >= int64(len(libraries)) {
		return 0, unknownDtype(dtype)
	}
	libraries[dtype].Store(&librarySquareRoot{*(*unsafe.Pointer)(unsafe.Pointer(&address)), *(*unsafe.Pointer)(unsafe.Pointer(&setThreads))})
	return address, nil
}

// library is the C function of a dtype, nil while none is set.
func library(dtype int) *librarySquareRoot {
	if l := libraries[dtype].Load(); l != nil && l.address != nil {
		return l
	}
	return nil
}

// vmsSqrt is the library square root of float32, or nil.
func vmsSqrt() kernel.LibrarySquareRoot[float32] {
	vms := library(float32Code)
	if vms == nil {
		return nil
	}
	return func(y, x []float32) {
		if len(x) > 0 {
			C.call_vms_sqrt(vms.address, vms.setThreads, C.int(len(x)), (*C.float)(unsafe.SliceData(x)), (*C.float)(unsafe.SliceData(y)))
		}
	}
}

// vmdSqrt is the library square root of float64, or nil.
func vmdSqrt() kernel.LibrarySquareRoot[float64] {
	vmd := library(float64Code)
	if vmd == nil {
		return nil
	}
	return func(y, x []float64) {
		if len(x) > 0 {
			C.call_vmd_sqrt(vmd.address, vmd.setThreads, C.int(len(x)), (*C.double)(unsafe.SliceData(x)), (*C.double)(unsafe.SliceData(y)))
		}
	}
}
