package pybind

import (
	"encoding/binary"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// identity is a C function void (int n, const float *x, float *y, int64_t mode) that keeps the mode and copies x to y, or the
// same with double. It is written in machine code because a test file cannot hold C.
func identity(dtype int64) []byte {
	code := []byte{
		0x48, 0x89, 0x0D, 0x39, 0, 0, 0, // mov [rip+0x39], rcx   the mode, to offset 64
		0x89, 0xF9, // mov ecx, edi
		0x48, 0x89, 0xD7, // mov rdi, rdx
	}
	if dtype == float64Code {
		return append(code, 0xF3, 0x48, 0xA5, 0xC3) // rep movsq; ret
	}
	return append(code, 0xF3, 0xA5, 0xC3) // rep movsd; ret
}

// setThreads is a C function int (int threads) at offset 256 that keeps the number at offset 512, returns the one before, and
// counts its calls at offset 516.
var setThreads = []byte{
	0x8B, 0x05, 0xFA, 0, 0, 0, // mov eax, [rip+0xfa]
	0x89, 0x3D, 0xF4, 0, 0, 0, // mov [rip+0xf4], edi
	0xFF, 0x05, 0xF2, 0, 0, 0, // inc dword [rip+0xf2]
	0xC3, // ret
}

// setIdentity makes identity the library square root of a dtype until the test ends. The result is the memory that it, and
// setThreads, leave words in.
func setIdentity(t *testing.T, dtype int64) []byte {
	t.Helper()
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE|syscall.PROT_EXEC, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	copy(page, identity(dtype))
	copy(page[256:], setThreads)
	code := &arena{bytes: page}
	_, err = SetLibrarySquareRoot(dtype, code.address(0), code.address(256))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := SetLibrarySquareRoot(dtype, 0, 0)
		require.NoError(t, err)
		require.NoError(t, syscall.Munmap(page))
	})
	return page
}

// TestSqrtCallsTheLibrary with lengths around a tile, and all elements once.
func TestSqrtCallsTheLibrary(t *testing.T) {
	forEachElement(t, testSqrtCallsTheLibrary[float32], testSqrtCallsTheLibrary[float64])
}

func testSqrtCallsTheLibrary[T kernel.Float](t *testing.T) {
	page := setIdentity(t, codeOf[T]())
	binary.NativeEndian.PutUint32(page[512:], 5)
	tiles := 0
	for _, numel := range []int{0, 1, kernel.TileLen - 1, kernel.TileLen, kernel.TileLen + 1, 3*kernel.TileLen + 5} {
		x := rootsOf[T](numel)
		a := newArena(t, 1<<17)
		in, out := a.take(8*numel), a.take(8*numel+8)
		copy(elementsAt[T](a, in, numel), x)
		written := elementsAt[T](a, out, numel+1)
		written[numel] = 42
		count, err := Sqrt(out, in, int64(numel), codeOf[T](), 0, int64(kernel.Library))
		require.NoError(t, err)
		assert.EqualValues(t, numel, count)
		sameValues(t, fmt.Sprintf("numel=%d", numel), written, append(x, 42))
		tiles += (numel + kernel.TileLen - 1) / kernel.TileLen
	}
	mode := binary.NativeEndian.Uint64(page[64:])
	assert.EqualValues(t, 0x140102, mode, "VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: got %#x", mode)
	assert.EqualValues(t, 5, binary.NativeEndian.Uint32(page[512:]), "the caller's number of threads is put back")
	assert.EqualValues(t, 2*tiles, binary.NativeEndian.Uint32(page[516:]), "set and put back around each call")
}

func TestStepCallsTheLibrary(t *testing.T) {
	forEachElement(t, testStepCallsTheLibrary[float32], testStepCallsTheLibrary[float64])
}

func testStepCallsTheLibrary[T kernel.Float](t *testing.T) {
	setIdentity(t, codeOf[T]())
	for _, b := range kernel.Available() {
		a := newArena(t, 1<<17)
		r := newRow[T](a, kernel.TileLen+9)
		g := seventhStep(0)
		g.biasCorrection2Sqrt, g.eps, g.beta2, g.oneMinusBeta2, g.oneMinusBeta1, g.stepSize = 1, 0, 1, 0, 0, 1
		values := func(address int64) []T { return elementsAt[T](a, address, int(r.numel)) }
		want := slices.Clone(values(r.param))
		for i := range want { // with these scalars: param - exp_avg/root, and the root of exp_avg_sq is itself
			want[i] -= values(r.expAvg)[i] / values(r.expAvgSq)[i]
		}
		unserved, err := stepOne(a.rows(r), 1, a.groups(g), 1, codeOf[T](), 1, int64(b), 0, int64(kernel.Library))
		require.NoError(t, err)
		require.Zero(t, unserved)
		sameValues(t, fmt.Sprintf("%v: param", b), values(r.param), want)
	}
}

func TestLibraryCanBeTakenBack(t *testing.T) {
	setIdentity(t, float32Code)
	_, err := SetLibrarySquareRoot(float32Code, 0, 0)
	require.NoError(t, err)
	a := newArena(t, 1<<12)
	address := a.floats(4)
	_, err = Sqrt(address, address, 1, float32Code, 0, int64(kernel.Library))
	assert.EqualError(t, err, "pybind: no library square root is set")
}
