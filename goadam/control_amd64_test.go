//go:build !purego

package goadam

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	_ "unsafe" // for go:linkname

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// storeMXCSR sets the calling thread's control word. Package kernel keeps it to itself: only a test plays a caller from C.
//
//go:linkname storeMXCSR roundpipe-go/kernel.storeMXCSR
func storeMXCSR(word uint32)

// under calls a function on a thread whose control word is the given one, and returns the one it leaves.
func under(word uint32, call func()) (after uint32) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer storeMXCSR(kernel.MXCSR())
	storeMXCSR(word)
	call()
	return kernel.MXCSR()
}

// TestStepFollowsTheCallersControlWord: workers run on threads of Go's, which know nothing of torch.set_flush_denormal.
func TestStepFollowsTheCallersControlWord(t *testing.T) {
	forEachElement(t, testStepFollowsTheCallersControlWord[float32], testStepFollowsTheCallersControlWord[float64])
}

func testStepFollowsTheCallersControlWord[T kernel.Float](t *testing.T) {
	rows, smallestNormal := newRows[T](false, 3, serialBelow, 17), T(0x1p-126)
	if _, double := any(smallestNormal).(float64); double {
		smallestNormal = T(math.Ldexp(1, -1022))
	}
	for i := range rows {
		for j := range rows[i].Param { // moments that become denormal in this step
			rows[i].Grad[j] *= smallestNormal / 16
			rows[i].ExpAvg[j] *= smallestNormal * 4
			rows[i].ExpAvgSq[j] *= smallestNormal * 2
		}
	}
	groups := newGroups(t, kernel.Variant{})
	for _, b := range kernel.Available() {
		for _, root := range []kernel.SquareRoot{kernel.IEEE, kernel.Goldschmidt, kernel.Library} {
			kept := clone(rows)
			reference(t, kept, groups, Config[T]{Backend: b, SquareRoot: root, Library: skewedSqrt[T]}, kernel.NearestNoFlush)
			for _, word := range []uint32{kernel.NearestNoFlush | kernel.FlushMask, 0x3F80, 0x5F80 | 0x8000} {
				want := clone(rows)
				under(word, func() { // scalars are narrowed under it too
					reference(t, want, groups, Config[T]{Backend: b, SquareRoot: root, Library: skewedSqrt[T]}, word)
				})
				for _, threads := range []int{1, 4} {
					id := fmt.Sprintf("%v/%v/mxcsr=%04x/threads=%d", b, root, word, threads)
					config := Config[T]{Threads: threads, Backend: b, SquareRoot: root, Library: skewedSqrt[T]}
					got := clone(rows)
					var err error
					after := under(word, func() { err = Step(got, groups, config) })
					require.NoError(t, err, id)
					assert.Equal(t, word, after&^0x3F, "%s: got control word %04x", id, after) // the low bits are sticky flags
					sameRows(t, id, got, want)
					assert.NotEqual(t, kept[1].ExpAvgSq[:99], got[1].ExpAvgSq[:99], "%s: the control word changes nothing", id)
				}
			}
		}
	}
	assert.EqualValues(t, kernel.NearestNoFlush, kernel.MXCSR()&^0x3F, "the control word leaked: %04x", kernel.MXCSR())
}
