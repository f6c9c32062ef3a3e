package kernel

import "math"

// fusedMultiplyAdd is x*y + z with one rounding, as the hardware's FMA.
func fusedMultiplyAdd[T Float](x, y, z T) T {
	if _, double := any(x).(float64); double {
		return T(math.FMA(float64(x), float64(y), float64(z))) // the instruction itself, wherever a backend could be compared
	}
	return T(fusedMultiplyAdd32(float32(x), float32(y), float32(z)))
}

// fusedMultiplyAdd32 is x*y + z with one rounding to float32, in the rounding direction in force.
//
// A float64 holds the product of two float32 exactly: 24+24 bits of significand are at most 53, and its exponents suffice. The sum
// with z is not exact, and narrowing it would round twice. So the sum is rounded to odd: an inexact sum becomes whichever of its
// two float64 neighbours has the odd significand. That number lies strictly on the same side as the exact sum of every float32
// and of every midpoint between two, because their float64 significands are even (53 bits are at least 24+2); narrowing it
// therefore rounds as narrowing the exact sum would, in any direction, into the denormals, and to the same underflow.
//
// The sign of the sum's error comes from [Fast2Sum]: with the larger operand first, sum-large is exact in every rounding
// direction, and what remains, rounded once, is zero or has a sign exactly as the error does. Nothing here underflows or
// overflows in float64: a product of float32 numbers is 0 or between 2^-298 and 2^256. With Inf or NaN the error is NaN and the
// sum is kept.
func fusedMultiplyAdd32(x, y, z float32) float32 {
	large, small := float64(x)*float64(y), float64(z)
	sum := large + small
	if math.Abs(large) < math.Abs(small) {
		large, small = small, large
	}
	rest := small - (sum - large)
	bits := math.Float64bits(sum)
	if bits&1 == 0 && (rest > 0 || rest < 0) {
		if (rest > 0) == (sum > 0) {
			bits++
		} else {
			bits--
		}
	}
	return float32(math.Float64frombits(bits))
}
