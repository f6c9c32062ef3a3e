package pybind

import (
	"encoding/binary"
	"math"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// arena is memory that Go does not manage, as the memory of tensors: a table holds its addresses as integers.
type arena struct {
	bytes []byte
	used  int
}

func newArena(t testing.TB, nbytes int) *arena {
	t.Helper()
	bytes, err := syscall.Mmap(-1, 0, nbytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(bytes)) })
	return &arena{bytes: bytes}
}

// address is where the byte at offset lies.
func (a *arena) address(offset int) int64 { return int64(uintptr(unsafe.Pointer(&a.bytes[offset]))) }

// take hands out the next nbytes, from a cache line on, as torch's allocator does.
func (a *arena) take(nbytes int) int64 {
	a.used = (a.used + 63) &^ 63
	address := a.address(a.used)
	a.used += nbytes
	return address
}

func (a *arena) offset(address int64) int { return int(address - a.address(0)) }

func (a *arena) float32(address int64, i int) float32 {
	return math.Float32frombits(binary.NativeEndian.Uint32(a.bytes[a.offset(address)+4*i:]))
}

// copy is what numel float32 at an address are now.
func (a *arena) copy(address int64, numel int) []float32 {
	values := make([]float32, numel)
	for i := range values {
		values[i] = a.float32(address, i)
	}
	return values
}

func (a *arena) setFloat32(address int64, i int, value float32) {
	binary.NativeEndian.PutUint32(a.bytes[a.offset(address)+4*i:], math.Float32bits(value))
}

func (a *arena) float64(address int64) float64 {
	return math.Float64frombits(binary.NativeEndian.Uint64(a.bytes[a.offset(address):]))
}

// floats stores values.
func (a *arena) floats(values ...float32) int64 {
	address := a.take(4 * len(values))
	for i, v := range values {
		a.setFloat32(address, i, v)
	}
	return address
}

// words stores a table of 64-bit words.
func (a *arena) words(words ...uint64) int64 {
	address := a.take(8 * len(words))
	for i, w := range words {
		binary.NativeEndian.PutUint64(a.bytes[a.offset(address)+8*i:], w)
	}
	return address
}

// rows stores a row table.
func (a *arena) rows(rows ...row) int64 {
	var words []uint64
	for _, r := range rows {
		for _, w := range []int64{r.param, r.grad, r.expAvg, r.expAvgSq, r.maxExpAvgSq, r.step, r.numel, r.layout} {
			words = append(words, uint64(w))
		}
	}
	return a.words(words...)
}

// groups stores a group table.
func (a *arena) groups(groups ...group) int64 {
	var words []uint64
	for _, g := range groups {
		for _, w := range []float64{g.weightDecay, g.oneMinusBeta1, g.beta2, g.oneMinusBeta2, g.biasCorrection2Sqrt, g.stepSize, g.eps, g.step, g.flags} {
			words = append(words, math.Float64bits(w))
		}
	}
	return a.words(words...)
}

// newRow is a row over fresh float32 tensors, of group 0, with a float32 counter and without a maximum.
func (a *arena) newRow(numel int) row { return newRow[float32](a, numel) }

// newRow is the same of any elements.
func newRow[T kernel.Float](a *arena, numel int) row {
	r := row{numel: int64(numel)}
	for k, address := range []*int64{&r.param, &r.grad, &r.expAvg, &r.expAvgSq} {
		*address = a.take(numel * int(unsafe.Sizeof(*new(T))))
		elements := elementsAt[T](a, *address, numel)
		for i := range elements {
			elements[i] = T(i%13+1) * []T{0.5, -0.25, 0.125, 0.03125}[k]
		}
	}
	r.step = a.floats(6)
	return r
}

// elementsAt is the memory of numel elements at an address.
func elementsAt[T any](a *arena, address int64, numel int) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(a.bytes[a.offset(address):]))), numel)
}

// codeOf is the dtype of elements.
func codeOf[T kernel.Float]() int64 {
	if _, double := any(*new(T)).(float64); double {
		return float64Code
	}
	return float32Code
}

// forEachElement runs a test of both types of elements, under their names.
func forEachElement(t *testing.T, ofFloat32, ofFloat64 func(t *testing.T)) {
	t.Run("float32", ofFloat32)
	t.Run("float64", ofFloat64)
}

// seventhStep is a group with the constants of step 7 at torch's defaults.
func seventhStep(flags float64) group {
	return group{
		weightDecay: 0.01, oneMinusBeta1: 0.1, beta2: 0.999, oneMinusBeta2: 0.001,
		biasCorrection2Sqrt: math.Sqrt(1 - math.Pow(0.999, 7)), stepSize: 1e-3 / (1 - math.Pow(0.9, 7)), eps: 1e-8, step: 7, flags: flags,
	}
}

// sameValues reports the first difference between two slices. NaNs are equal.
func sameValues[T kernel.Float](t testing.TB, id string, got, want []T) {
	t.Helper()
	require.Len(t, got, len(want), id)
	for i := range got {
		if g, w := float64(got[i]), float64(want[i]); math.Float64bits(g) != math.Float64bits(w) && (g == g || w == w) {
			t.Fatalf("%s[%d] = %x, want %x", id, i, g, w)
		}
	}
}

// stepOne is Step of one call.
func stepOne(rows, numRows, groups, numGroups, dtype, threads, backend, arithmetic, squareRoot int64) (int64, error) {
	return Step(tableOf(call{rows, numRows, groups, numGroups, dtype, threads, backend, arithmetic, squareRoot}), 1)
}

var kept []call // on the heap, where Go moves nothing

// tableOf is the address of a table of calls, until the next.
func tableOf(calls ...call) int64 {
	kept = calls
	return int64(uintptr(unsafe.Pointer(unsafe.SliceData(kept))))
}
