// Command asm generates the assembly of package kernel: with -isa and -element one instruction set's kernels for one type of
// elements, by the flags of avo; with -lookup the tables that find them. "go generate ./kernel" runs it.
package main

import (
	"flag"
	"log"

	. "github.com/mmcloughlin/avo/build"

	"roundpipe-go/kernel"
)

func main() {
	log.SetFlags(0)
	isaName := flag.String("isa", "", "instruction set: avx2 or avx512")
	elementName := flag.String("element", "", "type of the elements: float32 or float64")
	lookup := flag.String("lookup", "", "`file`, without .go and .s, to write the tables of kernels to")
	Package("roundpipe-go/kernel") // before avo's flags make its output files, which are no Go until they are written
	flag.Parse()
	if *lookup != "" {
		if err := writeLookup(*lookup); err != nil {
			log.Fatal(err)
		}
		return
	}
	for _, m := range isas() {
		if m.Backend().String() == *isaName && m.Element().name == *elementName {
			writeKernels(m)
			return
		}
	}
	log.Fatalf("asm: no instruction set %q for elements %q", *isaName, *elementName)
}

// isas lists what there is a file of kernels for.
func isas() (all []isa) {
	for _, e := range elements {
		all = append(all, avx2{e}, avx512{e})
	}
	return all
}

func writeKernels(m isa) {
	ConstraintExpr("!purego")
	defined := map[string]bool{}
	define := func(symbol string, kernel func(isa, kernel.Variant), v kernel.Variant) {
		if !defined[symbol] {
			defined[symbol] = true
			kernel(m, v)
		}
	}
	has := func(root kernel.SquareRoot) bool { return m.Element().has(m.Backend(), root) }
	for _, v := range kernel.Variants() {
		switch {
		case v.SquareRoot == kernel.Library:
			define(momentsSymbol(m, v), momentsKernel, v)
			define(updateSymbol(m, v), updateKernel, v)
		case has(v.SquareRoot):
			define(stepSymbol(m, v), stepKernel, v)
			if m.Element().multiplies(m.Backend(), v) {
				define(reciprocalSymbol(m, v), reciprocalKernel, v)
			}
		}
	}
	sqrtKernel(m, "ieee")
	if has(kernel.Goldschmidt) {
		sqrtKernel(m, "goldschmidt")
		sqrtKernel(m, "estimate")
	}
	if has(kernel.Newton) {
		sqrtKernel(m, "newton")
		sqrtKernel(m, "estimate14")
	}
	Generate()
}
