package pybind

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// identity is a C function void (int n, const float *x, float *y, int64_t mode) that keeps the mode and copies x to y. It is
// written in machine code because a test file cannot hold C.
var identity = []byte{
	0x48, 0x89, 0x0D, 0x39, 0, 0, 0, // mov [rip+0x39], rcx   the mode, to offset 64
	0x89, 0xF9, // mov ecx, edi
	0x48, 0x89, 0xD7, // mov rdi, rdx
	0xF3, 0xA5, // rep movsd
	0xC3, // ret
}

// setIdentity makes identity the library square root until the test ends. The result says with which mode it was called last.
func setIdentity(t *testing.T) (mode func() uint64) {
	t.Helper()
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE|syscall.PROT_EXEC, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	copy(page, identity)
	code := &arena{bytes: page}
	_, err = SetLibrarySquareRoot(code.address(0))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := SetLibrarySquareRoot(0)
		require.NoError(t, err)
		require.NoError(t, syscall.Munmap(page))
	})
	return func() uint64 { return binary.NativeEndian.Uint64(page[64:]) }
}

// TestSqrtCallsTheLibrary with lengths around a tile, and all elements once.
func TestSqrtCallsTheLibrary(t *testing.T) {
	mode := setIdentity(t)
	for _, numel := range []int{0, 1, kernel.TileLen - 1, kernel.TileLen, kernel.TileLen + 1, 3*kernel.TileLen + 5} {
		x := rootsOf(numel)
		a := newArena(t, 1<<16)
		in, out := a.floats(x...), a.take(4*numel+4)
		a.setFloat32(out, numel, 42)
		count, err := Sqrt(out, in, int64(numel), 0, int64(kernel.Library))
		require.NoError(t, err)
		assert.EqualValues(t, numel, count)
		sameValues(t, fmt.Sprintf("numel=%d", numel), a.copy(out, numel), x)
		assert.Equal(t, float32(42), a.float32(out, numel), "numel=%d: written beyond the end", numel)
	}
	assert.EqualValues(t, 0x140102, mode(), "VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: got %#x", mode())
}

func TestStepCallsTheLibrary(t *testing.T) {
	setIdentity(t)
	for _, b := range kernel.Available() {
		a := newArena(t, 1<<16)
		r := a.newRow(kernel.TileLen + 9)
		g := seventhStep(0)
		g.biasCorrection2Sqrt, g.eps, g.beta2, g.oneMinusBeta2, g.oneMinusBeta1, g.stepSize = 1, 0, 1, 0, 0, 1
		want := a.copy(r.param, int(r.numel))
		for i := range want { // with these scalars: param - exp_avg/root, and the root of exp_avg_sq is itself
			want[i] -= a.float32(r.expAvg, i) / a.float32(r.expAvgSq, i)
		}
		unserved, err := Step(a.rows(r), 1, a.groups(g), 1, 1, int64(b), 0, int64(kernel.Library))
		require.NoError(t, err)
		require.Zero(t, unserved)
		sameValues(t, fmt.Sprintf("%v: param", b), a.copy(r.param, int(r.numel)), want)
	}
}

func TestLibraryCanBeTakenBack(t *testing.T) {
	setIdentity(t)
	_, err := SetLibrarySquareRoot(0)
	require.NoError(t, err)
	a := newArena(t, 1<<12)
	address := a.floats(4)
	_, err = Sqrt(address, address, 1, 0, int64(kernel.Library))
	assert.EqualError(t, err, "pybind: no library square root is set")
}
