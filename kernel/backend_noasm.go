//go:build !amd64 || purego

package kernel

import "unsafe"

func assemblyBackends() []Backend { return nil }

func assemblyStages[T Float](Backend, Variant) (stages[T], *codes) { return stages[T]{}, nil }

func assemblySqrt[T Float](Backend, SquareRoot) sqrtFunc[T] { return nil }

// MXCSR is NearestNoFlush: this build has no way to the control word.
func MXCSR() uint32 { return NearestNoFlush }

// enterControl does nothing: the portable code rounds as the calling thread does.
func enterControl(uint32) uint32 { return NearestNoFlush }

func leaveControl(uint32) {}

func prefetchLines(unsafe.Pointer, int) {}
