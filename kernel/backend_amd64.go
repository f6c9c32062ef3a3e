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
func assemblyStages[T Float](b Backend, v Variant) (stages[T], *codes) {
	type table = *[numVariants]stages[T]
	i := v.index()
	_, double := any(*new(T)).(float64)
	switch {
	case b == AVX2 && double:
		return any(&kernelsAVX2_float64).(table)[i], &codesAVX2_float64[i]
	case b == AVX2:
		return any(&kernelsAVX2_float32).(table)[i], &codesAVX2_float32[i]
	case double:
		return any(&kernelsAVX512_float64).(table)[i], &codesAVX512_float64[i]
	default:
		return any(&kernelsAVX512_float32).(table)[i], &codesAVX512_float32[i]
	}
}

// assemblySqrt finds a square root, other than Library, of a backend other than Generic that has it.
func assemblySqrt[T Float](b Backend, r SquareRoot) sqrtFunc[T] {
	switch {
	case b == AVX2 && r == IEEE:
		return either[func(y, x []T, mxcsr uint32)](sqrtAVX2_float32_ieee, sqrtAVX2_float64_ieee)
	case r == IEEE:
		return either[func(y, x []T, mxcsr uint32)](sqrtAVX512_float32_ieee, sqrtAVX512_float64_ieee)
	}
	only := sqrtAVX512_float32_goldschmidt
	switch {
	case b == AVX2:
		only = sqrtAVX2_float32_goldschmidt
	case r == Newton:
		only = sqrtAVX512_float32_newton
	}
	return any(only).(func(y, x []T, mxcsr uint32))
}

// either is the one of two values that has the type R: the one for the caller's elements.
func either[R any](ofFloat32, ofFloat64 any) R {
	if r, ok := ofFloat32.(R); ok {
		return r
	}
	return ofFloat64.(R)
}
