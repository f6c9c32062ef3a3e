package pybind

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"roundpipe-go/kernel"
)

// fuzzBytes is the memory that fuzzed rows point into; fuzzNumel float64 from any address there stay inside the arena.
const (
	fuzzBytes = 1024
	fuzzNumel = 40
)

// program reads a fuzzer's bytes as rows and groups that are right, wrong and at the edges, but never outside the arena.
type program struct {
	data  []byte
	arena *arena
}

func (p *program) next() byte {
	if len(p.data) == 0 {
		return 0
	}
	b := p.data[0]
	p.data = p.data[1:]
	return b
}

func (p *program) address() int64 {
	switch b := p.next(); b {
	case 255:
		return 0
	case 254:
		return -1
	case 253:
		return math.MaxInt64
	case 252:
		return math.MinInt64
	case 251:
		return p.arena.address(int(p.next())) // mostly not aligned
	default:
		return p.arena.address(int(b) * 4)
	}
}

func (p *program) numel() int64 {
	switch b := p.next(); b {
	case 255:
		return -1
	case 254:
		return math.MaxInt64
	case 253:
		return math.MinInt64
	case 252:
		return math.MaxInt64/4 + 1
	default:
		return int64(b % fuzzNumel)
	}
}

func (p *program) row() row {
	r := row{param: p.address(), grad: p.address(), expAvg: p.address(), expAvgSq: p.address(), step: p.address(), numel: p.numel()}
	layout := p.next()
	r.layout = int64(layout&3) | int64(layout>>2&7)<<32
	if layout>>5&1 != 0 {
		r.maxExpAvgSq = p.address()
	}
	return r
}

func (p *program) group() group {
	g := seventhStep(float64(p.next()%20) - 2)
	switch p.next() {
	case 1:
		g.flags = math.NaN()
	case 2:
		g.flags += 0.5
	case 3:
		g.stepSize, g.eps = math.NaN(), math.Inf(1)
	case 4:
		g.step = -math.MaxFloat64
	}
	return g
}

// FuzzStep: no table makes a step panic, and a refused one changes nothing.
func FuzzStep(f *testing.F) {
	f.Add([]byte{})
	good := []byte{0, 40, 80, 120, 160, 30, 0} // one row of 30 elements, tensors apart
	f.Add(append([]byte{1, 1, 1, 1, 1, 1, 2, 0}, good...))
	f.Add([]byte{1, 1, 1, 1, 1, 2, 2, 0, 0, 40, 80, 120, 160, 20, 0})                                            // float64, which fill the gaps
	f.Add(append([]byte{2, 2, 2, 2, 1, 1, 2, 0, 6, 3}, append(good, 0, 40, 80, 120, 160, 30, 4|1|1<<5, 200)...)) // the next has amsgrad
	f.Add(append([]byte{1, 1, 1, 1, 1, 1, 2, 0}, 0, 0, 80, 120, 160, 30, 0))                                     // grad is param
	f.Add(append([]byte{1, 1, 1, 1, 1, 1, 2, 0}, 251, 3, 40, 80, 120, 160, 30, 0))                               // not aligned
	f.Add(append([]byte{1, 1, 1, 1, 1, 1, 2, 0}, 255, 254, 253, 252, 160, 254, 0xFF))                            // nothing is right
	memory, tables := newArena(f, fuzzBytes+8*fuzzNumel), newArena(f, 1<<16)
	f.Fuzz(func(t *testing.T, data []byte) {
		for i := range len(memory.bytes) / 4 {
			memory.setFloat32(memory.address(0), i, float32(i%7)*0.25)
		}
		before := string(memory.bytes)
		p := &program{data: data, arena: memory}
		rows, groups := make([]row, p.next()%8), make([]group, p.next()%4)
		backend, arithmetic, squareRoot := int64(p.next()%4)-1, int64(p.next()%4)-1, int64(p.next()%5)-1
		dtype := int64(p.next()%4) - 1
		for i := range groups {
			groups[i] = p.group()
		}
		for i := range rows {
			rows[i] = p.row()
		}
		tables.used = 0
		rowTable, groupTable := tables.rows(rows...), tables.groups(groups...)

		unserved, err := stepOne(rowTable, int64(len(rows)), groupTable, int64(len(groups)), dtype, 2, backend, arithmetic, squareRoot)
		switch {
		case err != nil:
			assert.NotContains(t, err.Error(), "panic")
			assert.Zero(t, unserved, "%v", err)
			assert.Equal(t, before, string(memory.bytes), "%v, but something was written", err)
		case unserved != 0:
			assert.True(t, 0 < unserved && unserved <= int64(len(rows)), "row %d of %d", unserved, len(rows))
			assert.Equal(t, before, string(memory.bytes), "row %d is not served, but something was written", unserved)
		case len(rows) > 0:
			last := rows[len(rows)-1] // its counter is written after everything else
			want := groups[last.layout&groupMask].step
			if last.layout&stepFloat64 != 0 {
				assert.Equal(t, want, memory.float64(last.step))
			} else {
				assert.Equal(t, float32(want), memory.float32(last.step, 0))
			}
			assert.Contains(t, kernel.Available(), kernel.Backend(backend))
		}
	})
}
