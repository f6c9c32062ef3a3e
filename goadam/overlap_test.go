package goadam

import (
	"cmp"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// rowsOverlapSlowly compares every tensor of every row with every tensor of every other row.
func rowsOverlapSlowly[T kernel.Float](params []Param[T]) bool {
	for i := range params {
		for j := range params[:i] {
			for _, a := range params[i].tensors() {
				for _, b := range params[j].tensors() {
					if a.begin != a.end && b.begin != b.end && a.overlaps(b) && (a.written || b.written) {
						return true
					}
				}
			}
		}
	}
	return false
}

func TestRowsOverlapIsWhatComparingAllGives(t *testing.T) {
	forEachElement(t, testRowsOverlapIsWhatComparingAllGives[float32], testRowsOverlapIsWhatComparingAllGives[float64])
}

func testRowsOverlapIsWhatComparingAllGives[T kernel.Float](t *testing.T) {
	r := newRand()
	buffer, found := make([]T, 4000), map[bool]int{}
	for call := range 5000 {
		cursor := 0
		take := func(n int) []T {
			if r.IntN(30) == 0 { // anywhere, mostly over something
				begin := r.IntN(len(buffer) - n)
				return buffer[begin : begin+n]
			}
			cursor += n
			return buffer[cursor-n : cursor] // next to the one before
		}
		rows := make([]Param[T], 1+r.IntN(12))
		shared := take(20)
		for i := range rows {
			n := r.IntN(20)
			rows[i] = Param[T]{Param: take(n), Grad: shared[:n], ExpAvg: take(n), ExpAvgSq: take(n), MaxExpAvgSq: take(n), Step: Counter{Float32: new(float32)}}
			if r.IntN(3) > 0 {
				rows[i].Grad = take(n)
			}
		}
		for i := range rows {
			if rows[i].unservedMemory() != "" {
				rows[i] = Param[T]{Step: Counter{Float32: new(float32)}} // such a row never gets so far
			}
		}
		r.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		want := rowsOverlapSlowly(rows)
		require.Equal(t, want, rowsOverlap(rows), "call %d", call)
		found[want]++
	}
	assert.Greater(t, found[true], 300)
	assert.Greater(t, found[false], 300)
}

// TestRowsOverlapSeesEveryChange has rows that were apart in the call before, and then moves one tensor onto another.
func TestRowsOverlapSeesEveryChange(t *testing.T) {
	rows := newRows[float32](true, 40, 40, 40)
	require.False(t, rowsOverlap(rows))
	require.True(t, sameAsLast(rows))
	target := rows[0].ExpAvg
	for i, tensor := range []*[]float32{&rows[2].Param, &rows[2].Grad, &rows[2].ExpAvg, &rows[2].ExpAvgSq, &rows[2].MaxExpAvgSq} {
		kept := *tensor
		*tensor = target
		assert.True(t, rowsOverlap(rows), "tensor %d", i)
		*tensor = kept
		assert.False(t, rowsOverlap(rows), "tensor %d", i)
	}
	half := rows[2].part(0, 20)
	shorter := []Param[float32]{rows[0], rows[1], {Param: half.Param, Grad: half.Grad, ExpAvg: half.ExpAvg, ExpAvgSq: half.ExpAvgSq, MaxExpAvgSq: half.MaxExpAvgSq}}
	assert.False(t, rowsOverlap(shorter))
	assert.False(t, sameAsLast(rows), "a row has grown since")
	assert.False(t, sameAsLast(rows[:2]), "a row is missing")
}

func TestSortByBegin(t *testing.T) {
	r := newRand()
	for call := range 2000 {
		list := make([]extent, r.IntN(60))
		for i := range list { // runs of about 1, 3, 9 or 27
			list[i].begin = uintptr(r.IntN(100))
			if i > 0 && r.IntN([]int{1, 3, 9, 27}[call%4]) > 0 {
				list[i].begin = list[i-1].begin + uintptr(r.IntN(3))
			}
			list[i].end = uintptr(i) // tells them apart
		}
		want := slices.Clone(list)
		slices.SortStableFunc(want, func(a, b extent) int { return cmp.Compare(a.begin, b.begin) })
		require.Equal(t, want, sortByBegin(list), "call %d", call)
	}
}

// overlappingRow has rows over one buffer that share memory in some way, n elements each.
type overlappingRow[T kernel.Float] struct {
	desc string
	rows func(b func(begin, end float64) []T) []Param[T]
}

func overlappingRows[T kernel.Float]() []overlappingRow[T] {
	return []overlappingRow[T]{
		{"same parameter twice", func(b func(begin, end float64) []T) []Param[T] {
			row := Param[T]{Param: b(0, 1), Grad: b(1, 2), ExpAvg: b(2, 3), ExpAvgSq: b(3, 4)}
			return []Param[T]{row, row}
		}},
		{"same parameter, own states", func(b func(begin, end float64) []T) []Param[T] {
			return []Param[T]{
				{Param: b(0, 1), Grad: b(1, 2), ExpAvg: b(2, 3), ExpAvgSq: b(3, 4)},
				{Param: b(0, 1), Grad: b(4, 5), ExpAvg: b(5, 6), ExpAvgSq: b(6, 7)},
			}
		}},
		{"parameters that overlap in part", func(b func(begin, end float64) []T) []Param[T] {
			return []Param[T]{
				{Param: b(0, 1), Grad: b(2, 3), ExpAvg: b(3, 4), ExpAvgSq: b(4, 5)},
				{Param: b(0.5, 1.5), Grad: b(5, 6), ExpAvg: b(6, 7), ExpAvgSq: b(7, 8)},
			}
		}},
		{"gradient is another row's parameter", func(b func(begin, end float64) []T) []Param[T] {
			return []Param[T]{
				{Param: b(0, 1), Grad: b(1, 2), ExpAvg: b(2, 3), ExpAvgSq: b(3, 4)},
				{Param: b(4, 5), Grad: b(0, 1), ExpAvg: b(5, 6), ExpAvgSq: b(6, 7)},
			}
		}},
		{"gradient is a later row's moment", func(b func(begin, end float64) []T) []Param[T] {
			return []Param[T]{
				{Param: b(0, 1), Grad: b(5, 6), ExpAvg: b(1, 2), ExpAvgSq: b(2, 3)},
				{Param: b(3, 4), Grad: b(4, 5), ExpAvg: b(5, 6), ExpAvgSq: b(6, 7)},
			}
		}},
	}
}

func TestOverlappingRowsRunInOrder(t *testing.T) {
	forEachElement(t, testOverlappingRowsRunInOrder[float32], testOverlappingRowsRunInOrder[float64])
}

func testOverlappingRowsRunInOrder[T kernel.Float](t *testing.T) {
	groups := newGroups(t, kernel.Variant{})
	for _, c := range overlappingRows[T]() {
		for _, n := range []int{16, serialBelow / 2} {
			config := Config[T]{Threads: 4, Backend: kernel.Best()}
			values := make([]T, 8*n)
			for i := range values {
				values[i] = T(i%1013) * 0x1p-10
			}
			build := func() (buffer []T, rows []Param[T]) {
				buffer = slices.Clone(values)
				rows = c.rows(func(begin, end float64) []T { return buffer[int(begin*float64(n)):int(end*float64(n))] })
				for i := range rows {
					rows[i].Step.Float32, rows[i].Group = new(float32), i%2
				}
				return buffer, rows
			}
			got, rows := build()
			want, wanted := build()
			require.True(t, rowsOverlap(rows), c.desc)
			require.NoError(t, Step(rows, groups, config))
			reference(t, wanted, groups, config, kernel.NearestNoFlush)
			sameValues(t, c.desc, got, want)
		}
	}
}

func TestSharedGradientsRunInParallel(t *testing.T) {
	forEachElement(t, testSharedGradientsRunInParallel[float32], testSharedGradientsRunInParallel[float64])
}

func testSharedGradientsRunInParallel[T kernel.Float](t *testing.T) {
	groups := newGroups(t, kernel.Variant{})
	config := Config[T]{Threads: 4, Backend: kernel.Best()}
	rows := newRows[T](false, serialBelow/2, serialBelow/2, serialBelow/2)
	rows[1].Grad, rows[2].Grad = rows[0].Grad, rows[0].Grad
	require.False(t, rowsOverlap(rows))
	want := clone(rows)
	require.NoError(t, Step(rows, groups, config))
	reference(t, want, groups, config, kernel.NearestNoFlush)
	sameRows(t, "shared gradient", rows, want)
}
