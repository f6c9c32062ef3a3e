package pybind

/*
#include <stdint.h>

// VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: how ATen calls it.
static const int64_t mode = 0x2 | 0x140000 | 0x100;

typedef void (*vms_sqrt)(int, const float *, float *, int64_t);

static void call_vms_sqrt(void *function, int n, const float *x, float *y) {
	((vms_sqrt)function)(n, x, y, mode);
}
*/
import "C"

import (
	"sync/atomic"
	"unsafe"

	"roundpipe-go/kernel"
)

// librarySquareRoot is a C function of the signature of oneMKL's vmsSqrt, which torch's wheels export.
type librarySquareRoot struct{ address unsafe.Pointer }

var library atomic.Pointer[librarySquareRoot]

// SetLibrarySquareRoot makes the C function at address, void (int n, const float *x, float *y, int64_t mode), the library
// square root of all later calls.
func SetLibrarySquareRoot(address int64) (int64, error) {
	library.Store(&librarySquareRoot{*(*unsafe.Pointer)(unsafe.Pointer(&address))})
	return address, nil
}

// function is nil while no address is set.
func (l *librarySquareRoot) function() kernel.LibrarySquareRoot {
	if l == nil || l.address == nil {
		return nil
	}
	return func(y, x []float32) {
		if len(x) > 0 {
			C.call_vms_sqrt(l.address, C.int(len(x)), (*C.float)(unsafe.SliceData(x)), (*C.float)(unsafe.SliceData(y)))
		}
	}
}
