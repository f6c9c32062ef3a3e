//go:build !purego

package kernel

import "github.com/klauspost/cpuid/v2"

// assemblyBackends lists the backends of which the CPU has every instruction and the operating system keeps every register. The
// generated files say what each function requires.
//
// The tests passed on AVX512 on a Sapphire Rapids server CPU and, short, on an emulated Skylake-X (scripts/avx512/run.sh).
func assemblyBackends() []Backend {
	var backends []Backend
	if cpuid.CPU.Supports(cpuid.AVX2, cpuid.FMA3) {
		backends = append(backends, AVX2)
		if cpuid.CPU.Supports(cpuid.AVX512F, cpuid.BMI2) {
			backends = append(backends, AVX512)
		}
	}
	return backends
}

// assemblyStages finds the kernel of a variant on a backend other than Generic.
func assemblyStages(b Backend, v Variant) stages {
	if b == AVX2 {
		return kernelsAVX2[v.index()]
	}
	return kernelsAVX512[v.index()]
}

// assemblySqrt finds a square root, other than Library, of a backend other than Generic that has it.
func assemblySqrt(b Backend, r SquareRoot) func(y, x []float32, mxcsr uint32) {
	switch {
	case b == AVX2 && r == IEEE:
		return sqrtAVX2_ieee
	case b == AVX2:
		return sqrtAVX2_goldschmidt
	case r == IEEE:
		return sqrtAVX512_ieee
	case r == Newton:
		return sqrtAVX512_newton
	default:
		return sqrtAVX512_goldschmidt
	}
}
