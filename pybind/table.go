package pybind

import (
	"fmt"
	"math"
	"slices"
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

// lowestAddress is the end of the page at 0: no system maps it, and Go's runtime aborts when it meets a pointer into it.
const lowestAddress = 4096

// memory turns an address into a slice of numel elements.
func memory[T any](name string, address, numel int64) ([]T, error) {
	if numel == 0 {
		return nil, nil
	}
	nbytes := int64(unsafe.Sizeof(*new(T)))
	if numel < 0 || numel > math.MaxInt64/nbytes || address < lowestAddress || address > math.MaxInt64-numel*nbytes {
		return nil, noMemory(name, address, numel, nbytes)
	}
	// The detour tells vet that the integer came from C and is no Go pointer in disguise.
	return unsafe.Slice(*(**T)(unsafe.Pointer(&address)), numel), nil
}

func noMemory(name string, address, numel, nbytes int64) error {
	if numel < 0 || numel > math.MaxInt64/nbytes {
		return fmt.Errorf("%s has %d elements, want 0 to what fits an address", name, numel)
	}
	return fmt.Errorf("%s is at %#x with %d elements, want an address that holds them", name, address, numel)
}

func newParam[T kernel.Float](r *row, p *goadam.Param[T]) error {
	if r.layout&^(groupMask|stepFloat64) != 0 {
		return fmt.Errorf("unknown bits in layout %#x", r.layout)
	}
	p.Group = int(r.layout & groupMask)
	var errs [5]error
	p.Param, errs[0] = memory[T]("param", r.param, r.numel)
	p.Grad, errs[1] = memory[T]("grad", r.grad, r.numel)
	p.ExpAvg, errs[2] = memory[T]("exp_avg", r.expAvg, r.numel)
	p.ExpAvgSq, errs[3] = memory[T]("exp_avg_sq", r.expAvgSq, r.numel)
	if r.maxExpAvgSq != 0 { // goadam knows whether the group needs one
		p.MaxExpAvgSq, errs[4] = memory[T]("max_exp_avg_sq", r.maxExpAvgSq, r.numel)
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if r.layout&stepFloat64 != 0 {
		return newStep(r.step, &p.Step.Float64)
	}
	return newStep(r.step, &p.Step.Float32)
}

func newStep[T any](address int64, step **T) error {
	data, err := memory[T]("step", address, 1)
	if err == nil {
		*step = &data[0]
	}
	return err
}

func newGroup(g *group, out *goadam.Group) error {
	flags := int64(g.flags)
	if float64(flags) != g.flags || flags&^knownFlags != 0 || flags&decayMask > int64(kernel.DecoupledDecay) {
		return fmt.Errorf("unknown flags %v", g.flags)
	}
	*out = goadam.Group{
		Decay:    kernel.Decay(flags & decayMask),
		AMSGrad:  flags&amsgradFlag != 0,
		Maximize: flags&maximizeFlag != 0,
		Scalars: goadam.Scalars{
			WeightDecay: g.weightDecay, OneMinusBeta1: g.oneMinusBeta1, Beta2: g.beta2, OneMinusBeta2: g.oneMinusBeta2,
			BiasCorrection2Sqrt: g.biasCorrection2Sqrt, StepSize: g.stepSize, Eps: g.eps, Step: g.step,
		},
	}
	return nil
}

// convert maps the table of count entries at an address, entry by entry, to a slice that reuses out's memory.
func convert[T, U any](entry string, address, count int64, out []U, one func(*T, *U) error) ([]U, error) {
	table, err := memory[T]("table", address, count)
	if err != nil {
		return out[:0], fmt.Errorf("pybind: the %s %w", entry, err)
	}
	out = slices.Grow(out[:0], len(table))[:len(table)]
	for i := range table {
		if err := one(&table[i], &out[i]); err != nil {
			return out, fmt.Errorf("pybind: %s %d: %w", entry, i, err)
		}
	}
	return out, nil
}
