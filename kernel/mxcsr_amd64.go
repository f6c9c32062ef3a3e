//go:build !purego

package kernel

import "runtime"

// MXCSR reads the control word of the calling thread.
func MXCSR() uint32 { return loadMXCSR() }

// enterControl puts a control word in force for the portable code and returns the one before. The goroutine stays on its thread
// until leaveControl, for the control word belongs to the thread.
func enterControl(word uint32) (before uint32) {
	runtime.LockOSThread()
	before = loadMXCSR()
	storeMXCSR(word)
	return before
}

func leaveControl(before uint32) {
	storeMXCSR(before)
	runtime.UnlockOSThread()
}

// loadMXCSR reads the thread's control word.
//
//go:noescape
func loadMXCSR() uint32

// storeMXCSR sets the thread's control word.
//
//go:noescape
func storeMXCSR(word uint32)
