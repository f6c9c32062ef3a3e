package pybind

// #include <stdint.h>
import "C"

import "unsafe"

// roundpipe_go_step is Step for step.c. An error is -1, and its text is in message, of size bytes.
//
//export roundpipe_go_step
func roundpipe_go_step(calls, numCalls C.int64_t, message *C.char, size C.int64_t) C.int64_t {
	unserved, err := Step(int64(calls), int64(numCalls))
	if err != nil {
		text := unsafe.Slice((*byte)(unsafe.Pointer(message)), int(size))
		text[copy(text[:len(text)-1], err.Error())] = 0
		return -1
	}
	return C.int64_t(unserved)
}
