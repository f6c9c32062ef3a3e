//go:build race

package kernel

import (
	"runtime"
	"unsafe"
)

// markSpan tells the race detector what an assembly kernel is about to read and write, since it cannot see assembly do it.
func markSpan[T Float](span Span[T]) {
	mark(span.Grad, runtime.RaceReadRange)
	for _, written := range [...][]T{span.Param, span.ExpAvg, span.ExpAvgSq, span.MaxExpAvgSq} {
		mark(written, runtime.RaceWriteRange)
	}
}

func mark[T Float](x []T, report func(unsafe.Pointer, int)) {
	if len(x) > 0 {
		report(unsafe.Pointer(unsafe.SliceData(x)), len(x)*int(unsafe.Sizeof(x[0])))
	}
}
