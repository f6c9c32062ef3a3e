package pybind

/*
#include <stdint.h>

// VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: how ATen calls it.
static const int64_t mode = 0x2 | 0x140000 | 0x100;

typedef void (*vms_sqrt)(int, const float *, float *, int64_t);
typedef void (*vmd_sqrt)(int, const double *, double *, int64_t);

static void call_vms_sqrt(void *function, int n, const float *x, float *y) {
	((vms_sqrt)function)(n, x, y, mode);
}

static void call_vmd_sqrt(void *function, int n, const double *x, double *y) {
	((vmd_sqrt)function)(n, x, y, mode);
}
*/
import "C"

import (
	"sync/atomic"
	"unsafe"

	"roundpipe-go/kernel"
)

// librarySquareRoot is a C function of the signature of oneMKL's vmsSqrt or vmdSqrt, which torch's wheels export.
type librarySquareRoot struct{ address unsafe.Pointer }

// libraries has the function of each dtype.
var libraries [float64Code + 1]atomic.Pointer[librarySquareRoot]

// SetLibrarySquareRoot makes the C function at address the library square root of all later calls on a dtype. It is of the type
// void (int n, const float *x, float *y, int64_t mode), or the same with double.
func SetLibrarySquareRoot(dtype, address int64) (int64, error) {
	if dtype < 0 || dtype >= int64(len(libraries)) {
		return 0, unknownDtype(dtype)
	}
	libraries[dtype].Store(&librarySquareRoot{*(*unsafe.Pointer)(unsafe.Pointer(&address))})
	return address, nil
}

// function is the C function of a dtype, nil while none is set.
func function(dtype int) unsafe.Pointer {
	if l := libraries[dtype].Load(); l != nil {
		return l.address
	}
	return nil
}

// vmsSqrt is the library square root of float32, or nil.
func vmsSqrt() kernel.LibrarySquareRoot[float32] {
	vms := function(float32Code)
	if vms == nil {
		return nil
	}
	return func(y, x []float32) {
		if len(x) > 0 {
			C.call_vms_sqrt(vms, C.int(len(x)), (*C.float)(unsafe.SliceData(x)), (*C.float)(unsafe.SliceData(y)))
		}
	}
}

// vmdSqrt is the library square root of float64, or nil.
func vmdSqrt() kernel.LibrarySquareRoot[float64] {
	vmd := function(float64Code)
	if vmd == nil {
		return nil
	}
	return func(y, x []float64) {
		if len(x) > 0 {
			C.call_vmd_sqrt(vmd, C.int(len(x)), (*C.double)(unsafe.SliceData(x)), (*C.double)(unsafe.SliceData(y)))
		}
	}
}
