package goadam

import (
	"runtime"

	"roundpipe-go/kernel"
)

// Info is what a bug report needs to know about the Go side.
type Info struct {
	GoVersion string   `json:"go_version"`
	Backends  []string `json:"backends"`
	// NumCPU is what the affinity mask allowed when the library was loaded; GOMAXPROCS how many threads run Go code at once.
	NumCPU     int `json:"num_cpu"`
	GOMAXPROCS int `json:"gomaxprocs"`
}

// NewInfo reads the facts of the running process.
func NewInfo() Info {
	info := Info{GoVersion: runtime.Version(), NumCPU: runtime.NumCPU(), GOMAXPROCS: runtime.GOMAXPROCS(0)}
	for _, b := range kernel.Available() {
		info.Backends = append(info.Backends, b.String())
	}
	return info
}
