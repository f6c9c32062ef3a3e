package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"roundpipe-go/kernel"
)

// lanes is a set of lanes: a vector of all-ones and zeros on AVX2, a mask register on AVX-512.
type lanes reg.Register

// isa is what differs between the instruction sets. Each is one for vectors of one element.
type isa interface {
	Name() string                // in symbols
	Backend() kernel.Backend     // of the same name
	Element() element            // in every lane
	Lanes() int                  // elements in a vector
	Vector() reg.VecVirtual      // a new vector register
	Active(n reg.Register) lanes // the first n lanes, 0 < n < Lanes; it uses n up

	// Move copies a vector between memory and a register, only the active lanes unless active is nil. Lanes that are not active
	// are left alone in memory, where they may lie outside mapped pages, and become zero in a register.
	Move(from, to Op, active lanes)

	// Constant has the same bits in every lane. It is not to be made in a loop.
	Constant(name string, bits uint64) Op

	// Negate flips the sign of x.
	Negate(x reg.VecVirtual, signBit Op)

	// Far has the lanes where |x| is not below 0.5, NaN included.
	Far(x reg.VecVirtual) lanes

	// Select is yes in the chosen lanes and no in the others.
	Select(chosen lanes, yes, no reg.VecVirtual) reg.VecVirtual

	// Maximum is the larger of x and y, or a NaN where either is one. The instruction alone would return y there.
	Maximum(x, y reg.VecVirtual) reg.VecVirtual

	// The rest is for float32 alone.

	// ReciprocalRootEstimate is RSQRTPS, the CPU's own approximation of 1/sqrt(x).
	ReciprocalRootEstimate(x reg.VecVirtual) reg.VecVirtual

	// Ordinary has the bounds of [0x00800000, 0x7f7ff800), the bits of the positive float32 that are neither denormal nor among
	// the largest. It is not to be called in a loop.
	Ordinary() bounds

	// SqrtUnless replaces root by sqrt(x) in every lane where x is not ordinary. As such lanes are rare and the instruction is
	// slow, it is jumped over when there are none.
	SqrtUnless(ordinary bounds, x, root reg.VecVirtual, label string)
}

// bounds are two constants that a comparison of integers takes.
type bounds [2]Op

// Predicates of VCMPPS, VCMPPD and VPCMPUD.
const (
	unordered        = U8(0x03) // either is NaN
	notBelow         = U8(0x15) // not less, or NaN
	unsignedNotBelow = U8(5)
)

type avx2 struct{ element }

func (avx2) Name() string            { return "AVX2" }
func (avx2) Backend() kernel.Backend { return kernel.AVX2 }
func (m avx2) Lanes() int            { return 32 / m.nbytes }
func (avx2) Vector() reg.VecVirtual  { return YMM() }

func (m avx2) Active(n reg.Register) lanes {
	Comment("The first n lanes: a vector that ends n lanes after the first half of the table.")
	table, active := GP64(), m.Vector()
	LEAQ(activeTable(m), table)
	NEGQ(n)
	VMOVUPS(Mem{Base: table, Disp: 32, Index: n, Scale: uint8(m.nbytes)}, active)
	return active
}

func (m avx2) Move(from, to Op, active lanes) {
	if active == nil {
		m.move(from, to)
	} else {
		m.maskMove(from, active, to)
	}
}

// Constant is a vector in memory: with 16 registers none is to spare.
func (m avx2) Constant(name string, bits uint64) Op {
	return constantTable(m.element, name, bits, m.Lanes())
}

func (avx2) Negate(x reg.VecVirtual, signBit Op) { VXORPS(signBit, x, x) }

func (m avx2) Far(x reg.VecVirtual) lanes {
	far := m.Vector()
	VANDPS(m.Constant("absolute", m.signBit()-1), x, far)
	m.compare(notBelow, m.Constant("half", m.bits(0.5)), far, far)
	return far
}

func (m avx2) Select(chosen lanes, yes, no reg.VecVirtual) reg.VecVirtual {
	return result(m, func(z Op) { m.blend(chosen, yes, no, z) })
}

func (m avx2) Maximum(x, y reg.VecVirtual) reg.VecVirtual {
	nan, larger := m.Vector(), m.Vector()
	m.compare(unordered, y, x, nan)
	m.max(y, x, larger)
	VORPS(nan, larger, larger)
	return larger
}

func (m avx2) ReciprocalRootEstimate(x reg.VecVirtual) reg.VecVirtual {
	return result(m, func(z Op) { VRSQRTPS(x, z) })
}

// Ordinary: the comparison is of signed integers, for which negative floats are small.
func (m avx2) Ordinary() bounds {
	return bounds{m.Constant("largestDenormal", 0x00800000-1), m.Constant("largestOrdinary", 0x7f7ff800-1)}
}

func (m avx2) SqrtUnless(ordinary bounds, x, root reg.VecVirtual, label string) {
	normal, large, all := m.Vector(), m.Vector(), GP32()
	VPCMPGTD(ordinary[0], x, normal)
	VPCMPGTD(ordinary[1], x, large)
	VPANDN(normal, large, normal)
	VMOVMSKPS(normal, all)
	CMPL(all, U32(0xff))
	JEQ(LabelRef(label))
	VSQRTPS(x, large)
	VBLENDVPS(normal, root, large, root)
	Label(label)
}

type avx512 struct{ element }

func (avx512) Name() string            { return "AVX512" }
func (avx512) Backend() kernel.Backend { return kernel.AVX512 }
func (m avx512) Lanes() int            { return 64 / m.nbytes }
func (avx512) Vector() reg.VecVirtual  { return ZMM() }

func (m avx512) Active(n reg.Register) lanes {
	Comment("The first n lanes: ones below bit n.")
	bits, active := GP32(), K()
	MOVL(U32(1<<m.Lanes()-1), bits)
	BZHIL(n.(reg.GPVirtual).As32(), bits, bits)
	KMOVW(bits, active)
	return active
}

func (m avx512) Move(from, to Op, active lanes) {
	switch {
	case active == nil:
		m.move(from, to)
	case IsMem(to):
		m.move(from, active, to)
	default:
		m.moveOrZero(from, active, to)
	}
}

func (m avx512) Constant(name string, bits uint64) Op {
	return result(m, func(z Op) { m.broadcast(constantTable(m.element, name, bits, 1), z) })
}

func (avx512) Negate(x reg.VecVirtual, signBit Op) { VPXORD(signBit, x, x) }

func (m avx512) Far(x reg.VecVirtual) lanes {
	absolute, far := m.Vector(), K()
	VPANDD(m.Constant("absolute", m.signBit()-1), x, absolute)
	m.compare(notBelow, m.Constant("half", m.bits(0.5)), absolute, far)
	return far
}

func (m avx512) Select(chosen lanes, yes, no reg.VecVirtual) reg.VecVirtual {
	return result(m, func(z Op) { m.blendMask(yes, no, chosen, z) })
}

func (m avx512) Maximum(x, y reg.VecVirtual) reg.VecVirtual {
	nan, larger := K(), m.Vector()
	m.compare(unordered, y, x, nan)
	m.max(y, x, larger)
	m.ternary(U8(0xff), larger, larger, nan, larger) // all bits, whatever they were
	return larger
}

// ReciprocalRootEstimate works on halves: AVX-512's own VRSQRT14PS is another approximation, with other bits.
func (m avx512) ReciprocalRootEstimate(x reg.VecVirtual) reg.VecVirtual {
	low, high, whole := YMM(), YMM(), m.Vector()
	VEXTRACTF64X4(U8(1), x, high)
	VRSQRTPS(x.AsY(), low)
	VRSQRTPS(high, high)
	VINSERTF64X4(U8(1), high, low.AsZ(), whole)
	return whole
}

// Ordinary: the comparison is of unsigned distances from the first bound.
func (m avx512) Ordinary() bounds {
	return bounds{m.Constant("smallestNormal", 0x00800000), m.Constant("ordinaryCount", 0x7f7ff800-0x00800000)}
}

func (m avx512) SqrtUnless(ordinary bounds, x, root reg.VecVirtual, label string) {
	distance, other := m.Vector(), K()
	VPSUBD(ordinary[0], x, distance)
	VPCMPUD(unsignedNotBelow, ordinary[1], distance, other)
	KORTESTW(other, other)
	JEQ(LabelRef(label))
	VSQRTPS(x, other, root)
	Label(label)
}

// newtonBounds are those of [2^-102, Inf), where Newton's formula holds as it is.
func (m avx512) newtonBounds() bounds {
	return bounds{m.Constant("smallestNewton", 0x0c800000), m.Constant("newtonCount", 0x7f800000-0x0c800000)}
}

// newtonUnless replaces root in every lane where x is not within the bounds: by newton(x*2^64)*2^-32 where x is positive and
// finite, else by sqrt(x).
func (m avx512) newtonUnless(ordinary bounds, x, root reg.VecVirtual, newton func(reg.VecVirtual) reg.VecVirtual, label string) {
	distance, other, special := m.Vector(), K(), K()
	VPSUBD(ordinary[0], x, distance)
	VPCMPUD(unsignedNotBelow, ordinary[1], distance, other)
	KORTESTW(other, other)
	JEQ(LabelRef(label))
	Comment("small lanes: root = newton(x*2^64)*2^-32")
	VMULPS(m.Constant("scaleDown", 0x2f800000), newton(mul(m, x, m.Constant("scaleUp", 0x5f800000))), other, root)
	Comment("lanes of zero, negatives, Inf and NaN: root = sqrt(x)")
	VPSUBD(m.Constant("smallest", 1), x, distance)
	VPCMPUD(unsignedNotBelow, m.Constant("positiveFinite", 0x7f800000-1), distance, special)
	VSQRTPS(x, special, root)
	Label(label)
}

// tables are the constants in memory of the file being written, by name.
var tables = map[string]Mem{}

// constantTable is n elements with the same bits.
func constantTable(e element, name string, bits uint64, n int) Mem {
	return table(e, name, n, func(int) uint64 { return bits })
}

// activeTable is a vector of ones, then one of zeros.
func activeTable(m avx2) Mem {
	return table(m.element, "active", 2*m.Lanes(), func(i int) uint64 {
		if i < m.Lanes() {
			return 1<<64 - 1
		}
		return 0
	})
}

func table(e element, name string, n int, bits func(i int) uint64) Mem {
	t, ok := tables[name]
	if !ok {
		t = GLOBL(name, RODATA|NOPTR)
		for i := range n {
			DATA(e.nbytes*i, e.constant(bits(i)))
		}
		tables[name] = t
	}
	return t
}
