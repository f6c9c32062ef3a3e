package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"

	"roundpipe-go/kernel"
)

// element is what differs between the types of elements: mostly the last letter of the instructions.
type element struct {
	name     string // in symbols, and in Go
	nbytes   int
	bits     func(x float64) uint64
	constant func(bits uint64) Constant // in memory
	has      func(kernel.Backend, kernel.SquareRoot) bool

	multiplies func(kernel.Backend, kernel.Variant) bool

	// z = x op y is op(y, x, z); multiplyAdd(y, x, z) is z += x*y.
	add, sub, mul, div, sqrt, max, multiplyAdd func(ops ...Op)
	move, broadcast, compare                   func(ops ...Op)

	// AVX2's: by a vector of ones and zeros.
	maskMove func(from, active, to Op)
	blend    func(chosen, yes, no, z Op)

	// AVX-512's: by a mask register.
	moveOrZero         func(from, active, to Op)
	blendMask, ternary func(ops ...Op)
}

var elements = []element{
	{
		name: "float32", nbytes: 4,
		bits:     func(x float64) uint64 { return uint64(math.Float32bits(float32(x))) },
		constant: func(bits uint64) Constant { return U32(uint32(bits)) },
		has:      kernel.Has[float32],

		multiplies: kernel.Multiplies[float32],

		add: VADDPS, sub: VSUBPS, mul: VMULPS, div: VDIVPS, sqrt: VSQRTPS, max: VMAXPS, multiplyAdd: VFMADD231PS,
		move: VMOVUPS, broadcast: VBROADCASTSS, compare: VCMPPS,
		maskMove: VMASKMOVPS, blend: VBLENDVPS,
		moveOrZero: VMOVUPS_Z, blendMask: VBLENDMPS, ternary: VPTERNLOGD,
	},
	{
		name: "float64", nbytes: 8,
		bits:     math.Float64bits,
		constant: func(bits uint64) Constant { return U64(bits) },
		has:      kernel.Has[float64],

		multiplies: kernel.Multiplies[float64],

		add: VADDPD, sub: VSUBPD, mul: VMULPD, div: VDIVPD, sqrt: VSQRTPD, max: VMAXPD, multiplyAdd: VFMADD231PD,
		move: VMOVUPD, broadcast: VBROADCASTSD, compare: VCMPPD,
		maskMove: VMASKMOVPD, blend: VBLENDVPD,
		moveOrZero: VMOVUPD_Z, blendMask: VBLENDMPD, ternary: VPTERNLOGQ,
	},
}

func (e element) Element() element { return e }

// signBit is the bit that is set in negative elements alone.
func (e element) signBit() uint64 { return 1 << (8*e.nbytes - 1) }
