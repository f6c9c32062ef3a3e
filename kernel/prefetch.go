package kernel

import "unsafe"

// prefetchMost, in lines of 64 bytes, is how much of an array is worth asking for: then the CPU itself goes on.
const prefetchMost = 16

// Prefetch asks for the beginning of a span that a kernel will soon work on. It neither reads nor writes, and never faults.
func Prefetch[T Float](span Span[T]) {
	lines := min((len(span.Param)*int(unsafe.Sizeof(*new(T)))+63)/64, prefetchMost)
	for _, array := range [...][]T{span.Grad, span.ExpAvg, span.ExpAvgSq, span.MaxExpAvgSq, span.Param} {
		if len(array) > 0 {
			prefetchLines(unsafe.Pointer(unsafe.SliceData(array)), lines)
		}
	}
}
