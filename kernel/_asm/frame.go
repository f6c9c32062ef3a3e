package main

import (
	"strings"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// place is the vector of elements that the code being written works on.
type place struct {
	name   string       // "body" or "tail"
	index  reg.Register // of the first element
	active lanes        // of the tail; nil in the body, where all are
}

// forEachVector writes the loop over whole vectors, then the same code once more for what is left, with the other lanes masked
// off in memory. In registers those lanes are zero, and what they compute is dropped.
func forEachVector(m isa, n reg.Register, code func(at place)) {
	index, last := GP64(), GP64()
	XORQ(index, index)
	LEAQ(Mem{Base: n, Disp: -m.Lanes()}, last)

	Label("body")
	CMPQ(index, last)
	JGT(LabelRef("tail"))
	code(place{name: "body", index: index})
	ADDQ(U8(m.Lanes()), index)
	JMP(LabelRef("body"))

	Label("tail")
	SUBQ(index, n)
	JEQ(LabelRef("done"))
	code(place{name: "tail", index: index, active: m.Active(n)})
	Label("done")
}

// underControl writes the code between a change of the control word and its return to what it was, then leaves the function.
func underControl(word Mem, code func()) {
	Pragma("noescape")
	Comment("Round as the caller says.")
	before := AllocLocal(8)
	VSTMXCSR(before)
	VLDMXCSR(word)
	code()
	VLDMXCSR(before)
	VZEROUPPER()
	RET()
}

// signature puts the element type in the place of T.
func signature(m isa, function string) string {
	return strings.NewReplacer("[T]", "["+m.Element().name+"]", "[]T", "[]"+m.Element().name).Replace(function)
}

func address(c gotypes.Component) Mem {
	b, err := c.Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

func broadcast(m isa, scalar gotypes.Component) reg.VecVirtual {
	return result(m, func(z Op) { m.Element().broadcast(address(scalar), z) })
}

func load(m isa, array reg.Register, at place) reg.VecVirtual {
	return result(m, func(z Op) { m.Move(Mem{Base: array, Index: at.index, Scale: uint8(m.Element().nbytes)}, z, at.active) })
}

// prefetchDistance, in bytes, is how far ahead of the body memory is asked for: the CPU itself stops where a page of 4 KiB ends.
const prefetchDistance = 2048

// prefetch asks for what the body will load. It may lie beyond the arrays, where asking does nothing.
func prefetch(m isa, s span, at place) {
	if at.active != nil {
		return
	}
	Comment("Ask for memory ahead.")
	for _, array := range []reg.Register{s.grad, s.expAvg, s.expAvgSq, s.maxExpAvgSq, s.param} {
		if array != nil {
			PREFETCHT0(Mem{Base: array, Index: at.index, Scale: uint8(m.Element().nbytes), Disp: prefetchDistance})
		}
	}
}

func store(m isa, x reg.VecVirtual, array reg.Register, at place) {
	m.Move(x, Mem{Base: array, Index: at.index, Scale: uint8(m.Element().nbytes)}, at.active)
}
