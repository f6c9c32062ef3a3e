//go:build !purego

package kernel

func assemblyBackends() []Backend { return nil }

func assemblyStages(Backend, Variant) stages { return stages{} }

func assemblySqrt(Backend, SquareRoot) func(y, x []float32, mxcsr uint32) { return nil }
