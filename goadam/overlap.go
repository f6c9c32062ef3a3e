package goadam

import (
	"sync/atomic"
	"unsafe"

	"roundpipe-go/kernel"
)

// cacheLine is in bytes; it holds for every x86-64 and all common arm64 CPUs.
const cacheLine = 64

// extent is a half-open range of addresses, the zero one where there is no memory.
type extent struct {
	begin, end uintptr
	written    bool
}

func (e extent) overlaps(o extent) bool { return e.begin < o.end && o.begin < e.end }

func extentOf[T kernel.Float](data []T, written bool) extent {
	if len(data) == 0 {
		return extent{}
	}
	begin := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	return extent{begin, begin + uintptr(len(data))*unsafe.Sizeof(data[0]), written}
}

func (c Counter) extent() extent {
	if c.Float64 != nil {
		begin := uintptr(unsafe.Pointer(c.Float64))
		return extent{begin, begin + unsafe.Sizeof(*c.Float64), true}
	}
	begin := uintptr(unsafe.Pointer(c.Float32))
	return extent{begin, begin + unsafe.Sizeof(*c.Float32), true}
}

// tensors lists where the row's elements are. Only the gradient is not written.
func (p *Param[T]) tensors() [5]extent {
	return [5]extent{
		extentOf(p.Param, true), extentOf(p.Grad, false), extentOf(p.ExpAvg, true),
		extentOf(p.ExpAvgSq, true), extentOf(p.MaxExpAvgSq, true),
	}
}

// unservedMemory says why the row's memory does not suit the kernels, or nothing. The tensors have one length.
func (p *Param[T]) unservedMemory() string {
	size := uintptr(len(p.Param)) * unsafe.Sizeof(*new(T))
	if size == 0 {
		return ""
	}
	begins := [...]uintptr{address(p.Param), address(p.Grad), address(p.ExpAvg), address(p.ExpAvgSq), address(p.MaxExpAvgSq)}
	num := len(begins)
	if len(p.MaxExpAvgSq) == 0 {
		num--
	}
	step := p.Step.extent()
	// A float64 counter needs no more than the alignment of a float32: it is one number.
	unaligned := step.begin % unsafe.Alignof(float32(0))
	for i, begin := range begins[:num] {
		unaligned |= begin % unsafe.Alignof(*new(T))
		for _, other := range begins[:i] {
			if begin-other+size-1 < 2*size-1 { // they are less than size apart, in either direction
				return "tensors of one parameter share memory"
			}
		}
		if step.begin < begin+size && begin < step.end {
			return "tensors of one parameter share memory"
		}
	}
	if unaligned != 0 {
		return "a tensor is not aligned to its elements"
	}
	return ""
}

func address[T kernel.Float](data []T) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(data)))
}

// place is where a row's tensors are; with their length, all that overlap depends on.
type place struct {
	begins [5]uintptr
	numel  int
}

func (p *Param[T]) place() place {
	begins := [5]uintptr{address(p.Param), address(p.Grad), address(p.ExpAvg), address(p.ExpAvgSq), address(p.MaxExpAvgSq)}
	return place{begins, len(p.Param)}
}

// lastApart has the places of the rows that were last found free of overlap: those of the next step are mostly the same, to the
// last address.
var lastApart [2]atomic.Pointer[[]place] // of float32 and of float64

func lastApartOf[T kernel.Float]() *atomic.Pointer[[]place] {
	return &lastApart[unsafe.Sizeof(*new(T))/8]
}

func sameAsLast[T kernel.Float](params []Param[T]) bool {
	last := lastApartOf[T]().Load()
	if last == nil || len(*last) != len(params) {
		return false
	}
	for i := range params {
		if params[i].place() != (*last)[i] {
			return false
		}
	}
	return true
}

// rowsOverlap reports whether any row writes memory that another row reads or writes. Rows are known to be free of overlap
// in themselves. Gradients may be shared: nobody writes them. Counters do not matter: they are written after all elements.
func rowsOverlap[T kernel.Float](params []Param[T]) bool {
	if sameAsLast(params) {
		return false
	}
	all := make([]extent, 5*len(params))
	places := make([]place, len(params))
	for i := range params {
		places[i] = params[i].place()
		for column, e := range params[i].tensors() {
			all[column*len(params)+i] = e
		}
	}
	all = sortByBegin(all)
	var writtenEnd, anyEnd uintptr
	for _, e := range all {
		if e.begin < writtenEnd || e.written && e.begin < anyEnd {
			return true
		}
		anyEnd = max(anyEnd, e.end)
		if e.written {
			writtenEnd = max(writtenEnd, e.end)
		}
	}
	lastApartOf[T]().Store(&places)
	return false
}

// sortByBegin merges the ascending runs that it finds, and returns the list or a copy. Allocators mostly go upwards, so that the
// tensors of thousands of rows, column by column, are some hundred runs, which takes 0.4 of the time of slices.SortFunc
// (BenchmarkRowsOverlap).
func sortByBegin(list []extent) []extent {
	var ends []int // of the runs
	for i := 1; i < len(list); i++ {
		if list[i].begin < list[i-1].begin {
			ends = append(ends, i)
		}
	}
	ends = append(ends, len(list))
	spare := make([]extent, len(list))
	for len(ends) > 1 {
		begin, merged := 0, ends[:0]
		for i := 0; i < len(ends); i += 2 {
			middle, end := ends[i], ends[min(i+1, len(ends)-1)]
			merge(spare[begin:end], list[begin:middle], list[middle:end])
			merged = append(merged, end)
			begin = end
		}
		ends, list, spare = merged, spare, list
	}
	return list
}

// merge fills out, whose length is that of a and b together.
func merge(out, a, b []extent) {
	i, j := 0, 0
	for i < len(a) && j < len(b) {
		if a[i].begin <= b[j].begin {
			out[i+j] = a[i]
			i++
		} else {
			out[i+j] = b[j]
			j++
		}
	}
	copy(out[i+j:], a[i:])
	copy(out[len(a)+j:], b[j:])
}

// elementsToLine is how many elements after begin the next cache line of the parameter starts, 0 if one starts there.
func (p *Param[T]) elementsToLine(begin int) int {
	address := uintptr(unsafe.Pointer(unsafe.SliceData(p.Param))) + uintptr(begin)*unsafe.Sizeof(*new(T))
	return int(-address % cacheLine / unsafe.Sizeof(*new(T)))
}
