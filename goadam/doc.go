// Package goadam plans and runs one Adam step over many tensors: it checks every row, cuts the work into spans of bounded
// size and lets the caller and its workers compute them with the kernels of package kernel.
//
// A call either refuses its input before the first write or updates everything:
//
//	err := goadam.Step(params, groups, goadam.Config[float32]{Threads: 2, Backend: kernel.Best()})
//
// The package keeps nothing between calls. Memory belongs to the caller, who holds it until Step returns. Results do not
// depend on the number of threads, on where spans are cut, or on alignment.
//
// References: [Adam] Kingma and Ba, arXiv 1412.6980; [AMSGrad] Reddi, Kale and Kumar, ICLR 2018; [AdamW] Loshchilov and
// Hutter, arXiv 1711.05101.
package goadam
