package kernel

import (
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

// TestCallIsWhatStepDoes by the names of the functions at its addresses: the tables are generated, but their order is Variants'.
func TestCallIsWhatStepDoes(t *testing.T) {
	forEachElement(t, testCallIsWhatStepDoes[float32], testCallIsWhatStepDoes[float64])
}

func testCallIsWhatStepDoes[T Float](t *testing.T) {
	span := ordinarySpan[T](33)
	forEachKernel[T](t, func(t *testing.T, id string, b Backend, v Variant) {
		k := lookup[T](t, b, v)
		if b == Generic {
			assert.False(t, k.IsAssembly(), id)
			return
		}
		element := map[uintptr]string{4: "float32", 8: "float64"}[unsafe.Sizeof(*new(T))]
		prefix := "adam" + map[Backend]string{AVX2: "AVX2", AVX512: "AVX512"}[b] + "_" + element + "_"
		variant := prefix + strings.ReplaceAll(v.String(), "/", "_")
		multiplying, dividing := ordinaryScalars[T](), ordinaryScalars[T]()
		multiplying.Reciprocal, dividing.Reciprocal = 2, 0
		for _, s := range []*Scalars[T]{&multiplying, &dividing} {
			c := k.Call(span, s)
			assert.Equal(t, span, c.Span, id)
			assert.Same(t, s, c.Scalars, id)
			switch {
			case v.SquareRoot == Library:
				decay, moments := v.Decay, v
				if decay == L2Decay {
					decay = NoDecay
				} else if decay == DecoupledDecay {
					moments.Decay = NoDecay
				}
				want := prefix + strings.ReplaceAll(strings.TrimSuffix(moments.String(), "library"), "/", "_") + "moments"
				assert.Equal(t, want, nameAt(t, c.Step), id)
				assert.Equal(t, prefix+decay.String()+"_update", nameAt(t, c.Update), id)
			case s == &multiplying && Multiplies[T](b, v):
				assert.Equal(t, variant+"_reciprocal", nameAt(t, c.Step), id)
				assert.Zero(t, c.Update, id)
			default:
				assert.Equal(t, variant, nameAt(t, c.Step), id)
				assert.Zero(t, c.Update, id)
			}
		}
	})
}

// nameAt is the name, without the package, of the function that begins at an address.
func nameAt(t *testing.T, address uintptr) string {
	t.Helper()
	f := runtime.FuncForPC(address)
	if !assert.NotNil(t, f, "no function at %#x", address) {
		return ""
	}
	assert.Equal(t, address, f.Entry(), "in the middle of %s", f.Name())
	return f.Name()[strings.LastIndex(f.Name(), ".")+1:]
}
