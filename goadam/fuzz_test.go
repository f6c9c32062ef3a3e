package goadam

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// lengthsOf reads row lengths: two bytes each, of which the high one counts in units that reach all the sizes where cuts change.
func lengthsOf(data []byte, unit int) []int {
	lengths := make([]int, 0, len(data)/2)
	for i := 0; i+1 < len(data) && len(lengths) < 200; i += 2 {
		lengths = append(lengths, int(data[i])*unit+int(data[i+1]))
	}
	return lengths
}

// FuzzPlan: whatever the lengths, the plan has every element once, in order, and no piece that is empty or too long.
func FuzzPlan(f *testing.F) {
	f.Add(uint16(100), uint8(0), []byte{0, 0, 0, 1, 1, 0, 7, 3})
	f.Add(uint16(minPiece), uint8(3), []byte{0, 255, 200, 17, 0, 0, 31, 1, 32, 0})
	f.Add(uint16(1), uint8(15), []byte{0, 5, 0, 0, 0, 2})
	f.Add(uint16(maxSpan), uint8(1), []byte{255, 255, 0, 0, 128, 0, 0, 1})
	memory := make([]float32, 256*256+256+lineElements)
	f.Fuzz(func(t *testing.T, length uint16, offset uint8, data []byte) {
		lengths := lengthsOf(data, 256)
		rows := make([]Param[float32], len(lengths))
		for i, n := range lengths {
			begin := (int(offset) + i) % lineElements
			rows[i].Param = memory[begin : begin+n]
		}
		limit := max(1, int(length))
		p := newPlan(rows, limit)
		row, at := 0, 0
		for piece := range p.pieces() {
			spans := p.piece(piece)
			if len(spans) == 0 || numelOf(spans) >= limit+lineElements {
				t.Fatalf("piece %d of %d has the spans %v", piece, p.pieces(), spans)
			}
			for _, s := range spans {
				for row < len(lengths) && at == lengths[row] {
					row, at = row+1, 0
				}
				if s.row != row || s.begin != at || s.end <= at || s.end > lengths[row] {
					t.Fatalf("piece %d has %v, want one from %d of row %d on", piece, s, at, row)
				}
				at = s.end
			}
		}
		for row < len(lengths) && at == lengths[row] {
			row, at = row+1, 0
		}
		require.Equal(t, len(lengths), row, "the plan ends in row %d at %d", row, at)
	})
}

// FuzzStep lays rows anywhere in one buffer, overlaps and all: a refusal leaves it as it was, and what is done has the bits of
// one row after the other.
func FuzzStep(f *testing.F) {
	f.Add(uint8(0), uint8(1), []byte{0, 0, 20, 40, 60, 80, 100, 16, 0})
	f.Add(uint8(9), uint8(4), []byte{1, 0, 40, 80, 120, 160, 200, 37, 0, 210, 30, 70, 110, 150, 201, 8, 1})
	f.Add(uint8(21), uint8(2), []byte{0, 0, 0, 40, 80, 120, 160, 30, 0})
	f.Add(uint8(5), uint8(3), []byte{0, 0, 40, 80, 120, 160, 100, 30, 2})
	const elements = 320
	f.Fuzz(func(t *testing.T, variant, threads uint8, data []byte) {
		v := kernel.Variants()[int(variant)%len(kernel.Variants())]
		backends := kernel.Available()
		config := Config[float32]{Threads: int(threads % 5), Backend: backends[int(threads)%len(backends)], Arithmetic: v.Arithmetic,
			SquareRoot: v.SquareRoot, Library: skewedSqrt[float32]}
		groups := newGroups(t, v)
		lay := func(memory []float32) (rows []Param[float32]) {
			at := func(b byte, n int) []float32 { return memory[min(int(b), elements-n):][:n:n] }
			for d := data; len(d) >= 9 && len(rows) < 12; d = d[9:] {
				n := int(d[7] % 40)
				p := Param[float32]{Param: at(d[1], n), Grad: at(d[2], n), ExpAvg: at(d[3], n), ExpAvgSq: at(d[4], n), Group: int(d[0]%4) - 1}
				if d[8]&1 != 0 || v.AMSGrad {
					p.MaxExpAvgSq = at(d[5], n)
				}
				p.Step.Float32 = &memory[int(d[6])+elements-256]
				if d[8]&2 != 0 {
					p.Grad = p.Grad[:n/2]
				}
				rows = append(rows, p)
			}
			return rows
		}
		memory := make([]float32, elements)
		for i := range memory {
			memory[i] = float32(i%7) * 0.25
		}
		got, want := slices.Clone(memory), slices.Clone(memory)
		rows := lay(got)
		err := Step(rows, groups, config)
		if err != nil {
			var unserved *UnservedError
			if errors.As(err, &unserved) {
				assert.Less(t, unserved.Param, len(rows))
			}
			assert.NotContains(t, err.Error(), "panic")
			sameValues(t, "refused: "+err.Error(), got, want)
			return
		}
		// Counters are written last, so they go last here too.
		again := lay(want)
		for i := range again {
			counter := again[i].Step
			again[i].Step.Float32 = new(float32)
			reference(t, again[i:i+1], groups, config, kernel.NearestNoFlush)
			again[i].Step = counter
		}
		for i := range again {
			again[i].Step.set(7)
		}
		sameValues(t, "memory", got, want)
	})
}
