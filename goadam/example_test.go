package goadam_test

import (
	"fmt"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

// One step over two parameters of one group, from the first step's zero moments.
func ExampleStep() {
	options := goadam.Options{LR: 0.5, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8}
	group, err := options.Group(1)
	if err != nil {
		panic(err)
	}
	weight := goadam.Param[float32]{
		Param: []float32{1, 2, 3}, Grad: []float32{0.25, -4, 1e-3},
		ExpAvg: make([]float32, 3), ExpAvgSq: make([]float32, 3), Step: goadam.Counter{Float32: new(float32)},
	}
	bias := goadam.Param[float32]{
		Param: []float32{0}, Grad: []float32{7},
		ExpAvg: make([]float32, 1), ExpAvgSq: make([]float32, 1), Step: goadam.Counter{Float32: new(float32)},
	}

	config := goadam.Config[float32]{Threads: 2, Backend: kernel.Best()}
	if err := goadam.Step([]goadam.Param[float32]{weight, bias}, []goadam.Group{group}, config); err != nil {
		panic(err)
	}
	fmt.Printf("%.4f %.4f step %v\n", weight.Param, bias.Param, *weight.Step.Float32)
	// Output: [0.5000 2.5000 2.5000] [-0.5000] step 1
}
