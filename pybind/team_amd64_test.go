package pybind

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

// Where the machine code of lend leaves words.
const (
	opened  = 1024 + 4*iota // how often the team was opened
	lost                    // bits of registers that a call should have kept, and has not
	called                  // how often clobber was called
	threads                 // how many threads there were to be
)

// increment adds one to the word at an offset of the page, in code that is at offset at.
func increment(at, word int) []byte {
	return append([]byte{0xFF, 0x05}, binary.LittleEndian.AppendUint32(nil, uint32(word-at-6))...) // inc dword [rip+...]
}

// alone has the type of GOMP_parallel and calls the function once, on the calling thread, with numbers in all registers that C wants
// kept. It is written in machine code because a test file cannot hold C.
func alone() []byte {
	code := []byte{0x53, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57} // push rbx, r12, r13, r14, r15
	code = append(code, increment(len(code), opened)...)
	code = append(code, 0x89, 0x15) // mov [rip+...], edx
	code = binary.LittleEndian.AppendUint32(code, uint32(threads-len(code)-4))
	code = append(code, 0xBB, 1, 1, 1, 1)       // mov ebx, 0x01010101
	code = append(code, 0x41, 0xBC, 2, 2, 2, 2) // mov r12d, 0x02020202
	code = append(code, 0x41, 0xBD, 3, 3, 3, 3)
	code = append(code, 0x41, 0xBE, 4, 4, 4, 4)
	code = append(code, 0x41, 0xBF, 5, 5, 5, 5)
	code = append(code, 0x48, 0x89, 0xF8, 0x48, 0x89, 0xF7, 0xFF, 0xD0) // mov rax, rdi; mov rdi, rsi; call rax
	code = append(code, 0x81, 0xF3, 1, 1, 1, 1)                         // xor ebx, 0x01010101
	code = append(code, 0x41, 0x81, 0xF4, 2, 2, 2, 2)                   // xor r12d, 0x02020202
	code = append(code, 0x41, 0x81, 0xF5, 3, 3, 3, 3)
	code = append(code, 0x41, 0x81, 0xF6, 4, 4, 4, 4)
	code = append(code, 0x41, 0x81, 0xF7, 5, 5, 5, 5)
	code = append(code, 0x44, 0x09, 0xE3, 0x44, 0x09, 0xEB, 0x44, 0x09, 0xF3, 0x44, 0x09, 0xFB) // or ebx, r12d and so on
	code = append(code, 0x09, 0x1D)                                                             // or [rip+...], ebx
	code = binary.LittleEndian.AppendUint32(code, uint32(lost-len(code)-4))
	return append(code, 0x41, 0x5F, 0x41, 0x5E, 0x41, 0x5D, 0x41, 0x5C, 0x5B, 0xC3) // pop all; ret
}

// lent is a page with the machine code of a team.
type lent struct {
	*arena
}

func (l lent) word(offset int) uint32 { return binary.NativeEndian.Uint32(l.bytes[offset:]) }

// lend makes alone the team until the test ends: one thread, of most.
func lend(t *testing.T, most byte) lent {
	t.Helper()
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE|syscall.PROT_EXEC, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	copy(page, alone())
	copy(page[256:], []byte{0x31, 0xC0, 0xC3})          // omp_get_thread_num: xor eax, eax; ret
	copy(page[320:], []byte{0xB8, most, 0, 0, 0, 0xC3}) // omp_get_max_threads: mov eax, most; ret
	copy(page[384:], append(increment(384, called), clobber...))
	l := lent{&arena{bytes: page}}
	_, err = SetTeam(l.address(0), l.address(256), l.address(320))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := SetTeam(0, 0, 0)
		require.NoError(t, err)
		require.NoError(t, syscall.Munmap(page))
	})
	return l
}

// clobber changes every register that Go's assembly may change and C wants kept: xor ebx, ebx; the same with r12d to r15d; ret.
var clobber = []byte{0x31, 0xDB, 0x45, 0x31, 0xE4, 0x45, 0x31, 0xED, 0x45, 0x31, 0xF6, 0x45, 0x31, 0xFF, 0xC3}

// TestCallsKeepRegisters with kernels that keep none, whole and in two parts.
func TestCallsKeepRegisters(t *testing.T) {
	setIdentity(t, float32Code)
	l := lend(t, 2)
	a := newArena(t, 1<<16)
	calls := make([]kernel.Call[float32], 5)
	for i := range calls {
		calls[i].Step = uintptr(l.address(384))
	}
	var params []goadam.Param[float32]
	params, err := convert("row", a.rows(a.newRow(2*kernel.TileLen+1)), 1, params, newParam[float32])
	require.NoError(t, err)
	p := params[0]
	calls[1].Span = kernel.Span[float32]{Param: p.Param, Grad: p.Grad, ExpAvg: p.ExpAvg, ExpAvgSq: p.ExpAvgSq}
	calls[1].Update = calls[1].Step
	newTeam[float32](library(float32Code))(2, calls, []int{0, 2, 2, 5})
	assert.EqualValues(t, 1, l.word(opened))
	assert.EqualValues(t, 4+2*3, l.word(called), "once each, and twice for each of three tiles")
	assert.Zero(t, l.word(lost))
}

// TestTeamIsTorchs or larger: of a smaller one OpenMP would end the threads that are left over.
func TestTeamIsTorchs(t *testing.T) {
	l := lend(t, 6)
	for _, c := range []struct{ threads, want int }{{2, 6}, {6, 6}, {7, 7}} {
		newTeam[float32](nil)(c.threads, make([]kernel.Call[float32], 1), []int{0, 0})
		assert.EqualValues(t, c.want, l.word(threads), "%d asked for", c.threads)
	}
}

func TestHalfATeamIsRefused(t *testing.T) {
	for _, c := range [][3]int64{{1, 1, 0}, {1, 0, 1}, {0, 1, 1}} {
		_, err := SetTeam(c[0], c[1], c[2])
		assert.EqualError(t, err, "pybind: a team needs all its functions")
	}
	assert.Nil(t, newTeam[float32](nil))
}

// TestTeamHasTheSameBits calls every assembly kernel from C, and from Go on one thread.
func TestTeamHasTheSameBits(t *testing.T) {
	forEachElement(t, testTeamHasTheSameBits[float32], testTeamHasTheSameBits[float64])
}

func testTeamHasTheSameBits[T kernel.Float](t *testing.T) {
	setIdentity(t, codeOf[T]())
	l, steps := lend(t, 2), uint32(0)
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
						for i, most := range elementsAt[T](a, rows[k].maxExpAvgSq, n) {
							elementsAt[T](a, rows[k].maxExpAvgSq, n)[i] = most * T(1+i%2*99) // the old maximum stays, or does not
						}
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
				steps++
			}
			require.Equal(t, steps, l.word(opened), "%s: steps on the team", id)
			require.Zero(t, l.word(lost), id)
			for k := range results[0] {
				sameValues(t, fmt.Sprintf("%s: tensor %d", id, k), results[1][k], results[0][k])
			}
		}
	}
	assert.Equal(t, len(kernel.Available()) > 1, steps > 0)
}
