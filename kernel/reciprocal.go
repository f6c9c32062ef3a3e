package kernel

import "math"

// Invert looks for a way to divide by s.BiasCorrection2Sqrt without a division, and leaves it in s.Reciprocal and
// s.ReciprocalLow: two numbers h and l for which
//
//	fma(x, h, x*l) = x / c,   c = BiasCorrection2Sqrt
//
// to the last bit for every square root x of a float32, Inf and NaN included [Brisebarre]. Where there are none (for one c in
// thirteen), and for float64, both are zero and kernels divide. Rounding is to nearest in all this.
//
// h is 1/c rounded down and l what is missing, itself rounded: so l is positive and Inf stays Inf, -0 stays -0. c is in
// [2^-60, 1], as 1-beta2^step is. Then all numbers here are normal: x is at least 2^-75, h at least 1, and l at least h*2^-48,
// since a quotient of 24-bit numbers that is no such number itself is at least that far from each. For a power of two l would be
// zero; h*2^-40 takes its place, too small to change x*h, which is exact. As nothing underflows, c and x may be thought scaled to
// [1, 2): c = C*2^-23 and x = X*2^-23 with integers of 24 bits.
//
// The sum x*h + x*l differs from x/c before its last rounding, by less than x*(2^-49 + 2^-77), for the roundings of l, + 2^-48, for
// that of x*l. The two round apart only if a midpoint of two floats, M*2^-25 or (from 1 on) M*2^-24 with an odd M of 25 bits, is
// within that distance of x/c. Multiplied by c and by a power of two that reads, with an integer j that cannot be zero,
//
//	M*C = X*2^25 + j, |j| < 4   where x < c
//	M*C = X*2^24 + j, |j| < 2   where x >= c
//
// An odd M in its range is determined by j, for the odd part of C can be inverted modulo a power of two. So eight x at most are
// in doubt, and these are tried.
func (s *Scalars[T]) Invert() {
	s.Reciprocal, s.ReciprocalLow = 0, 0
	c, single := any(s.BiasCorrection2Sqrt).(float32)
	if !single || !(0x1p-60 <= c && c <= 1) {
		return
	}
	h, l := reciprocal(c)
	some, num := doubtful(uint64(math.Float32bits(c)&(1<<23-1) | 1<<23))
	for _, x := range some[:num] {
		if x := float32(x); fusedMultiplyAdd32(x, h, x*l) != x/c {
			return
		}
	}
	s.Reciprocal, s.ReciprocalLow = T(h), T(l)
}

// reciprocal is 1/c as the sum of a float32 that is not larger and a positive float32.
func reciprocal(c float32) (h, l float32) {
	h = 1 / c
	if float64(h)*float64(c) > 1 { // the product is exact
		h = math.Float32frombits(math.Float32bits(h) - 1)
	}
	missing := 1 - float64(h)*float64(c) // exact as well
	if missing == 0 {
		return h, h * 0x1p-40
	}
	return h, float32(missing / float64(c))
}

// doubtful has every X of 24 bits whose quotient by C is so near to a midpoint; others may be among them.
func doubtful(C uint64) (found [8]uint64, num int) {
	solve := func(C uint64, j int64, shift int) {
		if C%2 == 0 && j%2 == 0 {
			C, j, shift = C/2, j/2, shift-1
		}
		if C%2 == 0 || j%2 == 0 {
			return // M*C-j would be odd
		}
		M := uint64(j)*inverse(C)&(1<<shift-1) | 1<<24
		X := (M*C - uint64(j)) >> shift
		if X>>23 == 1 {
			found[num] = X
			num++
		}
	}
	for _, j := range [...]int64{-3, -2, -1, 1, 2, 3} {
		solve(C, j, 25)
	}
	solve(C, -1, 24)
	solve(C, 1, 24)
	return found, num
}

// inverse is the number whose product with an odd C is 1 modulo 2^64, by Newton's method: it has 3 bits at first, then twice as many.
func inverse(C uint64) uint64 {
	y := C
	for range 5 {
		y *= 2 - C*y
	}
	return y
}
