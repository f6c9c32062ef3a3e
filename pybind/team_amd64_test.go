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

// alone has the type of GOMP_parallel and calls the function once, on the calling thread. It counts its calls at offset 64. It is
// written in machine code because a test file cannot hold C.
var alone = []byte{
	0xFF, 0x05, 0x3A, 0, 0, 0, // inc dword [rip+0x3a]
	0x48, 0x89, 0xF8, // mov rax, rdi
	0x48, 0x89, 0xF7, // mov rdi, rsi
	0xFF, 0xE0, // jmp rax
}

// threadNum has the type of omp_get_thread_num, and returns 0.
var threadNum = []byte{0x31, 0xC0, 0xC3} // xor eax, eax; ret

// setAlone makes alone the team until the test ends. The result is the memory where it counts.
func setAlone(t *testing.T) []byte {
	t.Helper()
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE|syscall.PROT_EXEC, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	copy(page, alone)
	copy(page[128:], threadNum)
	code := &arena{bytes: page}
	_, err = SetTeam(code.address(0), code.address(128))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := SetTeam(0, 0)
		require.NoError(t, err)
		require.NoError(t, syscall.Munmap(page))
	})
	return page[64:68]
}

// TestTeamHasTheSameBits calls every assembly kernel from C, and from Go on one thread.
func TestTeamHasTheSameBits(t *testing.T) {
	forEachElement(t, testTeamHasTheSameBits[float32], testTeamHasTheSameBits[float64])
}

func testTeamHasTheSameBits[T kernel.Float](t *testing.T) {
	setIdentity(t, codeOf[T]())
	count, called := setAlone(t), uint32(0)
	arenas := [2]*arena{newArena(t, 1<<24), newArena(t, 1<<24)}
	lengths := []int{1, 3*kernel.TileLen + 5, 16, 1 << 17, kernel.TileLen, 7}
	for _, b := range kernel.Available() {
		for i, v := range kernel.Variants() {
			if testing.Short() && i%7 != 0 || !kernel.Has[T](b, v.SquareRoot) {
				continue
			}
			id := fmt.Sprintf("%v/%v", b, v)
			flags := float64(v.Decay)
			if v.AMSGrad {
				flags += amsgradFlag
			}
			if v.Maximize {
				flags += maximizeFlag
			}
			var results [2][][]T
			for threads := 1; threads <= 2; threads++ {
				a := arenas[threads-1]
				a.used = 0
				rows := make([]row, len(lengths))
				for k, n := range lengths {
					rows[k] = newRow[T](a, n)
					if v.AMSGrad {
						rows[k].maxExpAvgSq = newRow[T](a, n).expAvgSq
					}
				}
				unserved, err := stepOne(a.rows(rows...), int64(len(rows)), a.groups(seventhStep(flags)), 1, codeOf[T](), int64(threads), int64(b), int64(v.Arithmetic), int64(v.SquareRoot))
				require.NoError(t, err, id)
				require.Zero(t, unserved, id)
				for _, r := range rows {
					for _, address := range []int64{r.param, r.grad, r.expAvg, r.expAvgSq, r.maxExpAvgSq} {
						if address != 0 {
							results[threads-1] = append(results[threads-1], elementsAt[T](a, address, int(r.numel)))
						}
					}
				}
			}
			if b != kernel.Generic {
				called++
			}
			require.Equal(t, called, binary.NativeEndian.Uint32(count), "%s: steps on the team", id)
			for k := range results[0] {
				sameValues(t, fmt.Sprintf("%s: tensor %d", id, k), results[1][k], results[0][k])
			}
		}
	}
	assert.NotZero(t, called)
}
