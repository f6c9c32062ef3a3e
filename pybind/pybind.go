package pybind

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

// abi is the version of the tables and of the functions; _binding.py asks for the one it was written for.
const abi = 7

// ABI returns the version of the boundary that doc.go describes.
func ABI() (int64, error) { return abi, nil }

// The codes of the types of elements.
const (
	float32Code = iota
	float64Code
)

// Step runs the steps of the table at address calls, all or none: doc.go has the tables. Their tensors must not share memory.
//
// It returns 0 when all is updated, and k > 0 when row k-1 of a call is not one for the kernels and nothing was changed.
func Step(calls, numCalls int64) (unserved int64, err error) {
	defer recoverTo(&err)
	table, err := memory[call]("the call table", calls, numCalls)
	if err != nil {
		return 0, fmt.Errorf("pybind: %w", err)
	}
	return steps(table)
}

// call mirrors a call of doc.go, word for word.
type call struct {
	rows, numRows, groups, numGroups, dtype, threads, backend, arithmetic, squareRoot int64
}

func steps(calls []call) (unserved int64, err error) {
	if len(calls) == 0 {
		return 0, nil
	}
	others := func() (int64, error) { return steps(calls[1:]) }
	switch c := &calls[0]; c.dtype {
	case float32Code:
		return step[float32](c, &params32, others)
	case float64Code:
		return step[float64](c, &params64, others)
	default:
		return 0, unknownDtype(c.dtype)
	}
}

func unknownDtype(dtype int64) error {
	return fmt.Errorf("pybind: dtype is %d, want %d to %d", dtype, float32Code, float64Code)
}

// The params of calls that are over, for the next to write over: a step has thousands.
var params32, params64 sync.Pool

// step checks a call, then has the others checked and taken, then takes its own.
func step[T kernel.Float](c *call, pool *sync.Pool, others func() (int64, error)) (unserved int64, err error) {
	config, err := newConfig[T](c.threads, c.backend, c.arithmetic, c.squareRoot, library(c.dtype))
	if err != nil {
		return 0, err
	}
	groups, err := convert("group", c.groups, c.numGroups, nil, newGroup)
	if err != nil {
		return 0, err
	}
	params, _ := pool.Get().(*[]goadam.Param[T])
	if params == nil {
		params = new([]goadam.Param[T])
	}
	defer func() {
		clear(*params) // Go may come to own memory at these addresses, and its collector would take them for pointers
		pool.Put(params)
	}()
	*params, err = convert("row", c.rows, c.numRows, *params, newParam[T])
	if err != nil {
		return 0, err
	}
	run, err := goadam.Prepare(*params, groups, config)
	if u := (*goadam.UnservedError)(nil); errors.As(err, &u) {
		return int64(u.Param) + 1, nil
	}
	if err != nil {
		return 0, err
	}
	if unserved, err := others(); unserved != 0 || err != nil {
		return unserved, err
	}
	return 0, run()
}

// Sqrt writes the square roots of numel elements at address x to address y, the way a step with these settings takes them.
// Python compares them with torch.sqrt to find out which square root this torch computes.
func Sqrt(y, x, numel, dtype, backend, squareRoot int64) (count int64, err error) {
	defer recoverTo(&err)
	switch dtype {
	case float32Code:
		return sqrt[float32](y, x, numel, backend, squareRoot, library(dtype))
	case float64Code:
		return sqrt[float64](y, x, numel, backend, squareRoot, library(dtype))
	}
	return 0, unknownDtype(dtype)
}

func sqrt[T kernel.Float](y, x, numel, backend, squareRoot int64, library *librarySquareRoot) (count int64, err error) {
	ys, err := memory[T]("y", y, numel)
	if err != nil {
		return 0, fmt.Errorf("pybind: %w", err)
	}
	xs, err := memory[T]("x", x, numel)
	if err != nil {
		return 0, fmt.Errorf("pybind: %w", err)
	}
	config, err := newConfig[T](1, backend, 0, squareRoot, library)
	if err != nil {
		return 0, err
	}
	if config.SquareRoot != kernel.Library {
		return numel, kernel.Sqrt(config.Backend, config.SquareRoot, ys, xs)
	}
	if config.Library == nil {
		return 0, errors.New("pybind: no library square root is set")
	}
	for begin := 0; begin < len(xs); begin += kernel.TileLen {
		end := min(begin+kernel.TileLen, len(xs))
		config.Library(ys[begin:end], xs[begin:end])
	}
	return numel, nil
}

// Backends returns a bit mask of the backends this CPU can run: bit 0 generic, bit 1 avx2, bit 2 avx512.
func Backends() (int64, error) {
	mask := int64(0)
	for _, b := range kernel.Available() {
		mask |= 1 << b
	}
	return mask, nil
}

// BuildInfo returns goadam.Info as JSON.
func BuildInfo() (string, error) {
	text, err := json.Marshal(goadam.NewInfo())
	return string(text), err
}

func newConfig[T kernel.Float](threads, backend, arithmetic, squareRoot int64, library *librarySquareRoot) (goadam.Config[T], error) {
	for _, f := range []struct {
		name        string
		value, last int64
	}{
		{"backend", backend, int64(kernel.AVX512)}, {"arithmetic", arithmetic, int64(kernel.Plain)},
		{"square root", squareRoot, int64(kernel.Library)},
	} {
		if f.value < 0 || f.value > f.last {
			return goadam.Config[T]{}, fmt.Errorf("pybind: %s is %d, want 0 to %d", f.name, f.value, f.last)
		}
	}
	return goadam.Config[T]{
		Threads: int(threads), Backend: kernel.Backend(backend), Arithmetic: kernel.Arithmetic(arithmetic),
		SquareRoot: kernel.SquareRoot(squareRoot), Library: function[T](library), Team: newTeam[T](library),
	}, nil
}

// recoverTo turns a panic of the calling goroutine into an error: a panic that reaches C ends the process.
func recoverTo(err *error) {
	if reason := recover(); reason != nil {
		*err = fmt.Errorf("pybind: panic: %v", reason)
	}
}
