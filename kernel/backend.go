package kernel

import "slices"

// Backend is one implementation of the kernels.
type Backend uint8

// The backends, each faster than the one before it.
const (
	Generic Backend = iota // portable Go, the reference
	AVX2                   // assembly, 32-byte vectors
	AVX512                 // assembly, 64-byte vectors
)

func (b Backend) String() string { return [...]string{"generic", "avx2", "avx512"}[b] }

// ParseBackend is the inverse of String.
func ParseBackend(name string) (Backend, bool) {
	for _, b := range []Backend{Generic, AVX2, AVX512} {
		if b.String() == name {
			return b, true
		}
	}
	return Generic, false
}

// Available lists the backends that this build has and this CPU and operating system can run, Generic first.
func Available() []Backend { return slices.Clone(available) }

// Best is the last of Available.
func Best() Backend { return available[len(available)-1] }

// available is detected once: what a CPU can do does not change while a process runs.
var available = append([]Backend{Generic}, assemblyBackends()...)
