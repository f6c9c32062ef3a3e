//go:build !amd64 || purego

package kernel

func assemblyBackends() []Backend { return nil }

func assemblyStages(Backend, Variant) stages { return stages{} }

func assemblySqrt(Backend, SquareRoot) func(y, x []float32, mxcsr uint32) { return nil }

// MXCSR is NearestNoFlush: this build has no way to the control word.
func MXCSR() uint32 { return NearestNoFlush }

// enterControl does nothing: the portable code rounds as the calling thread does.
func enterControl(uint32) uint32 { return NearestNoFlush }

func leaveControl(uint32) {}
