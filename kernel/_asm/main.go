// Command asm generates the assembly of package kernel: with -isa one instruction set's kernels, by the flags of avo; with -lookup
// the Go file that finds them. "go generate ./kernel" runs it.
package main

import (
	"flag"
	"log"

	. "github.com/mmcloughlin/avo/build"

	"roundpipe-go/kernel"
)

func main() {
	log.SetFlags(0)
	name := flag.String("isa", "", "instruction set: avx2 or avx512")
	lookup := flag.String("lookup", "", "`file` to write the tables of kernels to")
	Package("roundpipe-go/kernel") // before avo's flags make its output files, which are no Go until they are written
	flag.Parse()
	if *lookup != "" {
		if err := writeLookup(*lookup); err != nil {
			log.Fatal(err)
		}
		return
	}

	set := map[string]isa{"avx2": avx2{}, "avx512": avx512{}}[*name]
	if set == nil {
		log.Fatalf("asm: no instruction set %q", *name)
	}
	ConstraintExpr("!purego")
	defined := map[string]bool{}
	define := func(symbol string, kernel func(isa, kernel.Variant), v kernel.Variant) {
		if !defined[symbol] {
			defined[symbol] = true
			kernel(set, v)
		}
	}
	for _, v := range kernel.Variants() {
		switch {
		case v.SquareRoot == kernel.Library:
			define(momentsSymbol(set, v), momentsKernel, v)
			define(updateSymbol(set, v), updateKernel, v)
		case set.Backend().Has(v.SquareRoot):
			define(stepSymbol(set, v), stepKernel, v)
		}
	}
	for _, root := range []string{"ieee", "goldschmidt", "estimate"} {
		sqrtKernel(set, root)
	}
	if set.Backend().Has(kernel.Newton) {
		sqrtKernel(set, "newton")
		sqrtKernel(set, "estimate14")
	}
	Generate()
}
