package kernel

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// requireEnv names the backends, comma-separated, without which a run of the tests proves too little.
const requireEnv = "ROUNDPIPE_GO_REQUIRE_BACKENDS"

// ran has the backends that some test used.
var ran = map[Backend]bool{}

// TestMain says which backends the tests ran on, and fails if a required one is not among them: a green run must not mean that
// there was nothing to run.
func TestMain(m *testing.M) {
	code := m.Run()
	var names, missing []string
	for _, b := range []Backend{Generic, AVX2, AVX512} {
		if ran[b] {
			names = append(names, b.String())
		}
	}
	for _, name := range required() {
		if !slices.Contains(names, name) {
			missing = append(missing, name)
		}
	}
	fmt.Println("kernel: tests ran on", strings.Join(names, ", "))
	if len(missing) > 0 {
		fmt.Printf("kernel: FAIL: %s requires %s\n", requireEnv, strings.Join(missing, ", "))
		code = 1
	}
	os.Exit(code)
}

func required() []string {
	return strings.FieldsFunc(os.Getenv(requireEnv), func(r rune) bool { return r == ',' || r == ' ' })
}

// backends lists the backends to test and remembers that they were.
func backends() []Backend {
	for _, b := range Available() {
		ran[b] = true
	}
	return Available()
}

// variants lists the variants that a backend has of an element.
func variants[T Float](b Backend) []Variant {
	return slices.DeleteFunc(Variants(), func(v Variant) bool { return !Has[T](b, v.SquareRoot) })
}

func TestRequiredBackendsAreAvailable(t *testing.T) {
	for _, name := range required() {
		b, ok := ParseBackend(name)
		assert.True(t, ok, "%s names no backend: %q", requireEnv, name)
		assert.Contains(t, Available(), b, "%s requires %s", requireEnv, name)
	}
}

func TestBackendsAreOrdered(t *testing.T) {
	available := Available()
	assert.Equal(t, Generic, available[0])
	assert.True(t, slices.IsSorted(available))
	assert.Equal(t, available[len(available)-1], Best())
	for _, b := range available {
		parsed, ok := ParseBackend(b.String())
		assert.True(t, ok)
		assert.Equal(t, b, parsed)
	}
	_, ok := ParseBackend("sse2")
	assert.False(t, ok)
}

func TestVariantsAreIndexedAndNamedOnce(t *testing.T) {
	names := map[string]bool{}
	for i, v := range Variants() {
		assert.Equal(t, i, v.index(), v)
		names[v.String()] = true
	}
	assert.Len(t, names, numVariants)
	assert.Contains(t, names, "l2_amsgrad_maximize/plain/goldschmidt")
}

func TestLookupRefuses(t *testing.T) {
	forEachElement(t, testLookupRefuses[float32], testLookupRefuses[float64])
	_, err := Lookup[float32](Generic, Variant{SquareRoot: Goldschmidt}, nil)
	assert.EqualError(t, err, "kernel: backend generic has no square root goldschmidt of float32")
	for _, b := range backends() {
		if b != AVX512 {
			_, err := Lookup[float32](b, Variant{SquareRoot: Newton}, nil)
			assert.ErrorContains(t, err, "has no square root newton of float32", b)
		}
		for _, r := range []SquareRoot{Goldschmidt, Newton} {
			_, err = Lookup[float64](b, Variant{SquareRoot: r}, nil)
			assert.EqualError(t, err, fmt.Sprintf("kernel: backend %v has no square root %v of float64", b, r))
			assert.EqualError(t, Sqrt[float64](b, r, nil, nil), fmt.Sprintf("kernel: backend %v has no square root %v of float64", b, r))
		}
	}
}

func testLookupRefuses[T Float](t *testing.T) {
	_, err := Lookup[T](Generic, Variant{SquareRoot: Library}, nil)
	assert.ErrorContains(t, err, "square root library needs a function")
	assert.ErrorContains(t, Sqrt[T](Generic, Library, nil, nil), "no square root library")
	for _, b := range []Backend{AVX2, AVX512} {
		if !slices.Contains(Available(), b) {
			_, err = Lookup[T](b, Variant{}, nil)
			assert.ErrorContains(t, err, "not available")
			assert.ErrorContains(t, Sqrt[T](b, IEEE, nil, nil), "not available")
		}
	}
}
