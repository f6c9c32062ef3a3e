package pybind

import (
	"fmt"
	"math"
	"unsafe"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

// row and group mirror the tables of doc.go, word for word.
type row struct {
	param, grad, expAvg, expAvgSq, maxExpAvgSq, step, numel, layout int64
}

type group struct {
	weightDecay, oneMinusBeta1, beta2, oneMinusBeta2, biasCorrection2Sqrt, stepSize, eps, step, flags float64
}

const (
	groupMask   = 1<<32 - 1
	stepFloat64 = 1 << 32

	decayMask    = 3
	amsgradFlag  = 1 << 2
	maximizeFlag = 1 << 3
	knownFlags   = decayMask | amsgradFlag | maximizeFlag
)

// memory turns an address into a slice of numel elements.
func memory[T any](name string, address, numel int64) ([]T, error) {
	if numel == 0 {
		return nil, nil
	}
	if numel < 0 || numel > math.MaxInt64/int64(unsafe.Sizeof(*new(T))) {
		return nil, fmt.Errorf("pybind: %s has %d elements, want 0 to what fits an address", name, numel)
	}
	if address <= 0 || address > math.MaxInt64-numel*int64(unsafe.Sizeof(*new(T))) {
		return nil, fmt.Errorf("pybind: %s is at %#x with %d elements, want an address that holds them", name, address, numel)
	}
	// The detour tells vet that the integer came from C and is no Go pointer in disguise.
	return unsafe.Slice(*(**T)(unsafe.Pointer(&address)), numel), nil
}

func newParam(index int, r *row) (goadam.Param, error) {
	p := goadam.Param{Group: int(r.layout & groupMask)}
	if r.layout&^(groupMask|stepFloat64) != 0 {
		return p, fmt.Errorf("pybind: row %d: unknown bits in layout %#x", index, r.layout)
	}
	for _, f := range []struct {
		name    string
		address int64
		data    *[]float32
	}{
		{"param", r.param, &p.Param}, {"grad", r.grad, &p.Grad}, {"exp_avg", r.expAvg, &p.ExpAvg},
		{"exp_avg_sq", r.expAvgSq, &p.ExpAvgSq},
	} {
		var err error
		if *f.data, err = memory[float32](f.name, f.address, r.numel); err != nil {
			return p, fmt.Errorf("row %d: %w", index, err)
		}
	}
	var err error
	if r.maxExpAvgSq != 0 {
		if p.MaxExpAvgSq, err = memory[float32]("max_exp_avg_sq", r.maxExpAvgSq, r.numel); err != nil {
			return p, fmt.Errorf("row %d: %w", index, err)
		}
	}
	if r.layout&stepFloat64 != 0 {
		var step []float64
		if step, err = memory[float64]("step", r.step, 1); err == nil {
			p.Step.Float64 = &step[0]
		}
	} else {
		var step []float32
		if step, err = memory[float32]("step", r.step, 1); err == nil {
			p.Step.Float32 = &step[0]
		}
	}
	if err != nil {
		return p, fmt.Errorf("row %d: %w", index, err)
	}
	return p, nil
}

func newGroup(index int, g *group) (goadam.Group, error) {
	flags := int64(g.flags)
	if float64(flags) != g.flags || flags&^knownFlags != 0 || flags&decayMask > int64(kernel.DecoupledDecay) {
		return goadam.Group{}, fmt.Errorf("pybind: group %d: unknown flags %v", index, g.flags)
	}
	return goadam.Group{
		Decay:    kernel.Decay(flags & decayMask),
		AMSGrad:  flags&amsgradFlag != 0,
		Maximize: flags&maximizeFlag != 0,
		Scalars: goadam.Scalars{
			WeightDecay: g.weightDecay, OneMinusBeta1: g.oneMinusBeta1, Beta2: g.beta2, OneMinusBeta2: g.oneMinusBeta2,
			BiasCorrection2Sqrt: g.biasCorrection2Sqrt, StepSize: g.stepSize, Eps: g.eps, Step: g.step,
		},
	}, nil
}

// convert maps a table to a slice by one function per entry.
func convert[T, U any](table []T, one func(int, *T) (U, error)) ([]U, error) {
	out := make([]U, len(table))
	for i := range table {
		var err error
		if out[i], err = one(i, &table[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}
