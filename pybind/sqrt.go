package pybind

// #include "team.h"
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
func library(dtype int64) *librarySquareRoot {
	if l := libraries[dtype].Load(); l != nil && l.address != nil {
		return l
	}
	return nil
}

// function is the library square root as the kernels call it; nil without one.
func function[T kernel.Float](l *librarySquareRoot) kernel.LibrarySquareRoot[T] {
	if l == nil {
		return nil
	}
	return func(y, x []T) {
		if len(x) > 0 {
			C.library_sqrt(l.address, l.setThreads, C.int64_t(unsafe.Sizeof(x[0])), C.int(len(x)),
				unsafe.Pointer(unsafe.SliceData(x)), unsafe.Pointer(unsafe.SliceData(y)))
		}
	}
}
