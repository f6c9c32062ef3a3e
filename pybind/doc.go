// Package pybind is the boundary between Python and Go: the few functions that gopy wraps as roundpipe_go._native, and the
// only place where an address becomes memory. It converts and holds no policy. Beside them step.c, which Python calls with the GIL
// held, takes a whole plain step, and team.go borrows the threads of torch's OpenMP.
//
// Every function takes int64 and returns (T, error): gopy narrows unsigned and float32 arguments in silence, takes anything
// for a bool, leaks 32 bytes for a result that is an error alone, and adds a detached-goroutine switch to functions without
// a result. It releases the GIL for the whole of every call. An error becomes RuntimeError.
//
// # The tables
//
// Step reads tables of native-endian 64-bit words, packed by python/roundpipe_go/_descriptors.py and by step.c. A call is nine int64:
//
//	0 rows             address of its rows
//	1 numRows
//	2 groups           address of its groups
//	3 numGroups
//	4 dtype            of the elements: 0 float32, 1 float64; a step with both is two calls
//	5 threads
//	6 backend          kernel.Backend
//	7 arithmetic       kernel.Arithmetic
//	8 squareRoot       kernel.SquareRoot
//
// A row is eight int64:
//
//	0 param            address of elements
//	1 grad             "
//	2 exp_avg          "
//	3 exp_avg_sq       "
//	4 max_exp_avg_sq   ", 0 unless the group has amsgrad
//	5 step             address of one float32 or float64
//	6 numel            elements of each tensor (twice that of a complex one)
//	7 layout           bits 0-31 index of the group, bit 32 set if step is float64
//
// A group is nine float64:
//
//	0 weight_decay     under l2; 1 - lr*weight_decay under decoupled decay
//	1 1 - beta1
//	2 beta2
//	3 1 - beta2
//	4 bias_correction2_sqrt
//	5 step_size
//	6 eps
//	7 step             count after the increment
//	8 flags            bits 0-1 decay (0 none, 1 l2, 2 decoupled), bit 2 amsgrad, bit 3 maximize
//
// Python keeps every tensor alive until the call returns. ABI counts the changes of this page and of the functions of step.c.
package pybind
