package goadam

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// TestStepHasTheSameBitsForAnyThreads takes every seventh variant: the rows are large, and the next test has them all.
func TestStepHasTheSameBitsForAnyThreads(t *testing.T) {
	forEachElement(t, testStepHasTheSameBitsForAnyThreads[float32], testStepHasTheSameBitsForAnyThreads[float64])
}

func testStepHasTheSameBitsForAnyThreads[T kernel.Float](t *testing.T) {
	rows := map[bool][]Param[T]{false: newRows[T](false, motley...), true: newRows[T](true, motley...)}
	calls := 0
	forEachKernel[T](t, 7, func(t *testing.T, id string, v kernel.Variant, config Config[T]) {
		calls++
		groups, got, want := newGroups(t, v), clone(rows[v.AMSGrad]), clone(rows[v.AMSGrad])
		config.Threads = calls%8 + 1
		require.NoError(t, Step(got, groups, config))
		reference(t, want, groups, config, kernel.NearestNoFlush)
		sameRows(t, fmt.Sprintf("%s/threads=%d", id, config.Threads), got, want)
	})
}

// TestUpdateParallelOverShortPieces has a hundred times the cuts of an ordinary call.
func TestUpdateParallelOverShortPieces(t *testing.T) {
	forEachElement(t, testUpdateParallelOverShortPieces[float32], testUpdateParallelOverShortPieces[float64])
}

func testUpdateParallelOverShortPieces[T kernel.Float](t *testing.T) {
	lengths := []int{0, 1, 31, 64, 65, 900, 7, 0, 2100, 3}
	rows := map[bool][]Param[T]{false: newRows[T](false, lengths...), true: newRows[T](true, lengths...)}
	forEachKernel[T](t, 1, func(t *testing.T, id string, v kernel.Variant, config Config[T]) {
		groups, want := newGroups(t, v), clone(rows[v.AMSGrad])
		reference(t, want, groups, config, kernel.NearestNoFlush)
		steppers, err := newSteppers(groups, config, kernel.NearestNoFlush)
		require.NoError(t, err)
		for threads := 1; threads <= 8; threads++ {
			got := clone(rows[v.AMSGrad])
			require.NoError(t, updateParallel(got, steppers, 16+threads, threads))
			for i := range got {
				got[i].Step.set(7)
			}
			sameRows(t, fmt.Sprintf("%s/threads=%d", id, threads), got, want)
		}
	})
}

func TestRefusedStepChangesNothing(t *testing.T) {
	forEachElement(t, testRefusedStepChangesNothing[float32], testRefusedStepChangesNothing[float64])
}

func testRefusedStepChangesNothing[T kernel.Float](t *testing.T) {
	cases := []struct {
		desc     string
		amsgrad  bool
		spoil    func(rows []Param[T], groups []Group, config *Config[T])
		want     string
		unserved bool
	}{
		{"short grad", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].Grad = rows[2].Grad[1:] },
			"goadam: param 2: grad has 299 elements, want 300", false},
		{"short exp_avg", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].ExpAvg = nil },
			"goadam: param 2: exp_avg has 0 elements, want 300", false},
		{"long exp_avg_sq", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[1].ExpAvgSq = make([]T, 18) },
			"goadam: param 1: exp_avg_sq has 18 elements, want 17", false},
		{"short max_exp_avg_sq", true, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].MaxExpAvgSq = rows[2].MaxExpAvgSq[5:] },
			"goadam: param 2: max_exp_avg_sq has 295 elements, want 300", false},
		{"no max_exp_avg_sq", true, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[1].MaxExpAvgSq = nil },
			"goadam: param 1: max_exp_avg_sq has 0 elements, want 17", false},
		{"max_exp_avg_sq without amsgrad", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[1].MaxExpAvgSq = make([]T, 17) },
			"goadam: param 1: max_exp_avg_sq has 17 elements, want 0", false},
		{"group too high", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].Group = 2 },
			"goadam: param 2: group is 2, want 0 to 1", false},
		{"group negative", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[0].Group = -1 },
			"goadam: param 0: group is -1, want 0 to 1", false},
		{"no counter", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].Step = Counter{} },
			"goadam: param 2: step must be a float32 or a float64, and not both", false},
		{"two counters", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].Step.Float64 = new(float64) },
			"goadam: param 2: step must be a float32 or a float64, and not both", false},
		{"grad is param", false, func(rows []Param[T], _ []Group, _ *Config[T]) { rows[2].Grad = rows[2].Param },
			"goadam: param 2: tensors of one parameter share memory", true},
		{"moments overlap by one", false, func(rows []Param[T], _ []Group, _ *Config[T]) {
			both := make([]T, 33)
			rows[1].ExpAvg, rows[1].ExpAvgSq = both[:17], both[16:]
		}, "goadam: param 1: tensors of one parameter share memory", true},
		{"counter in a tensor", false, func(rows []Param[T], _ []Group, _ *Config[T]) {
			rows[2].Step.Float32 = (*float32)(unsafe.Pointer(&rows[2].Grad[299]))
		},
			"goadam: param 2: tensors of one parameter share memory", true},
		{"unknown decay", false, func(_ []Param[T], groups []Group, _ *Config[T]) { groups[1].Decay = 3 },
			"goadam: group 1: unknown decay 3", false},
		{"unknown arithmetic", false, func(_ []Param[T], _ []Group, config *Config[T]) { config.Arithmetic = 2 },
			"goadam: unknown arithmetic 2 or square root 0", false},
		{"unknown square root", false, func(_ []Param[T], _ []Group, config *Config[T]) { config.SquareRoot = kernel.Library + 1 },
			"goadam: unknown arithmetic 0 or square root 4", false},
		{"no library", false, func(_ []Param[T], _ []Group, config *Config[T]) { config.SquareRoot = kernel.Library },
			"goadam: group 0: kernel: square root library needs a function", false},
	}
	for _, c := range cases {
		rows, groups := newRows[T](c.amsgrad, 0, 17, 300), newGroups(t, kernel.Variant{AMSGrad: c.amsgrad})
		config := Config[T]{}
		c.spoil(rows, groups, &config)
		before := clone(rows)
		err := Step(rows, groups, config)
		require.EqualError(t, err, c.want, c.desc)
		var unserved *UnservedError
		assert.Equal(t, c.unserved, errors.As(err, &unserved), c.desc)
		sameRows(t, c.desc, rows, before)
	}
}

func TestUnavailableBackendIsRefused(t *testing.T) {
	forEachElement(t, testUnavailableBackendIsRefused[float32], testUnavailableBackendIsRefused[float64])
}

func testUnavailableBackendIsRefused[T kernel.Float](t *testing.T) {
	for _, b := range []kernel.Backend{kernel.AVX2, kernel.AVX512, 7} {
		if slices.Contains(kernel.Available(), b) {
			continue
		}
		rows := newRows[T](false, 5)
		before := clone(rows)
		assert.ErrorContains(t, Step(rows, newGroups(t, kernel.Variant{}), Config[T]{Backend: b}), "is not available here")
		sameRows(t, fmt.Sprintf("backend=%d", b), rows, before)
	}
}

func TestEmptyStepsAreFine(t *testing.T) {
	forEachElement(t, testEmptyStepsAreFine[float32], testEmptyStepsAreFine[float64])
}

func testEmptyStepsAreFine[T kernel.Float](t *testing.T) {
	assert.NoError(t, Step[T](nil, nil, Config[T]{}))
	assert.NoError(t, Step[T](nil, newGroups(t, kernel.Variant{}), Config[T]{Threads: 4}))
	rows := newRows[T](true, 0, 0)
	assert.NoError(t, Step(rows, newGroups(t, kernel.Variant{AMSGrad: true}), Config[T]{Threads: 4}))
	assert.EqualValues(t, 7, *rows[0].Step.Float32, "an empty parameter counts its steps too")
	assert.EqualValues(t, 7, *rows[1].Step.Float64, "an empty parameter counts its steps too")
}

// TestEmptyMaximumIsNone: a maximum without elements is as good as nil for a group without AMSGrad.
func TestEmptyMaximumIsNone(t *testing.T) {
	forEachElement(t, testEmptyMaximumIsNone[float32], testEmptyMaximumIsNone[float64])
}

func testEmptyMaximumIsNone[T kernel.Float](t *testing.T) {
	rows := newRows[T](false, 17)
	want, groups := clone(rows), newGroups(t, kernel.Variant{})
	rows[0].MaxExpAvgSq = []T{}
	require.NoError(t, Step(rows, groups, Config[T]{}))
	reference(t, want, groups, Config[T]{}, kernel.NearestNoFlush)
	sameRows(t, "empty maximum", rows, want)
}

func TestCountersTakeTheGroupsStep(t *testing.T) {
	forEachElement(t, testCountersTakeTheGroupsStep[float32], testCountersTakeTheGroupsStep[float64])
}

func testCountersTakeTheGroupsStep[T kernel.Float](t *testing.T) {
	for _, c := range []struct{ step, float32 float64 }{{1, 1}, {1.5, 1.5}, {1 << 24, 1 << 24}, {1<<24 + 1, 1 << 24}, {1<<24 + 2, 1<<24 + 2}} {
		rows, groups := newRows[T](false, 3, 3), newGroups(t, kernel.Variant{})
		groups[0].Scalars.Step, groups[1].Scalars.Step = c.step, c.step
		require.NoError(t, Step(rows, groups, Config[T]{}))
		assert.Equal(t, float32(c.float32), *rows[0].Step.Float32, "step %v as float32", c.step)
		assert.Equal(t, c.step, *rows[1].Step.Float64, "step %v as float64", c.step)
	}
}

func TestEstimateGivesWayToTheLibrary(t *testing.T) {
	const flush = kernel.NearestNoFlush | kernel.FlushMask
	for _, c := range []struct {
		backend    kernel.Backend
		mxcsr      uint32
		squareRoot kernel.SquareRoot
		want       kernel.SquareRoot
	}{
		{kernel.AVX2, kernel.NearestNoFlush, kernel.Goldschmidt, kernel.Goldschmidt},
		{kernel.AVX512, kernel.NearestNoFlush, kernel.Goldschmidt, kernel.Goldschmidt},
		{kernel.Generic, kernel.NearestNoFlush, kernel.Goldschmidt, kernel.Library},
		{kernel.AVX2, flush, kernel.Goldschmidt, kernel.Library},
		{kernel.AVX2, 0x3F80, kernel.Goldschmidt, kernel.Library}, // rounding down
		{kernel.AVX512, kernel.NearestNoFlush, kernel.Newton, kernel.Newton},
		{kernel.AVX512, flush, kernel.Newton, kernel.Library},
		{kernel.AVX2, kernel.NearestNoFlush, kernel.Newton, kernel.Library},
		{kernel.AVX2, flush, kernel.IEEE, kernel.IEEE},
		{kernel.Generic, kernel.NearestNoFlush, kernel.IEEE, kernel.IEEE},
	} {
		id := fmt.Sprintf("%v/%v/mxcsr=%04x", c.backend, c.squareRoot, c.mxcsr)
		config := Config[float32]{Backend: c.backend, SquareRoot: c.squareRoot}
		assert.Equal(t, c.want, config.squareRoot(c.mxcsr), id)
		if c.squareRoot.Estimated() { // from float32
			c.want = kernel.Library
		}
		double := Config[float64]{Backend: c.backend, SquareRoot: c.squareRoot}
		assert.Equal(t, c.want, double.squareRoot(c.mxcsr), id)
	}
}

// TestSmallRowsAreStepped has as many elements as a parallel call, in rows on both sides of where one pays.
func TestSmallRowsAreStepped(t *testing.T) {
	forEachElement(t, testSmallRowsAreStepped[float32], testSmallRowsAreStepped[float64])
}

func testSmallRowsAreStepped[T kernel.Float](t *testing.T) {
	groups, config := newGroups(t, kernel.Variant{}), Config[T]{Threads: 4, Backend: kernel.Best()}
	for _, numel := range []int{rowElements / 2, rowElements, rowElements + 1} {
		rows := newRows[T](false, slices.Repeat([]int{numel}, 2*serialBelow/rowElements)...)
		want := clone(rows)
		reference(t, want, groups, config, kernel.NearestNoFlush)
		require.NoError(t, Step(rows, groups, config))
		sameRows(t, fmt.Sprintf("numel=%d", numel), rows, want)
	}
}

func TestStepAllocatesNoMoreForMoreRows(t *testing.T) {
	forEachElement(t, testStepAllocatesNoMoreForMoreRows[float32], testStepAllocatesNoMoreForMoreRows[float64])
}

func testStepAllocatesNoMoreForMoreRows[T kernel.Float](t *testing.T) {
	groups := newGroups(t, kernel.Variant{})
	allocations := func(rows []Param[T]) float64 {
		return testing.AllocsPerRun(20, func() { require.NoError(t, Step(rows, groups, Config[T]{Backend: kernel.Best()})) })
	}
	few, many := newRows[T](false, 8, 8), newRows[T](false, slices.Repeat([]int{8}, 2000)...)
	assert.InDelta(t, allocations(few), allocations(many), 1) // a collection may empty the pool of tiles in between
}

func TestNonFiniteScalarsReachTheKernel(t *testing.T) {
	forEachElement(t, testNonFiniteScalarsReachTheKernel[float32], testNonFiniteScalarsReachTheKernel[float64])
}

func testNonFiniteScalarsReachTheKernel[T kernel.Float](t *testing.T) {
	rows, groups := newRows[T](false, 9), newGroups(t, kernel.Variant{})
	groups[0].Scalars.StepSize = math.Inf(1)
	want := clone(rows)
	reference(t, want, groups, Config[T]{}, kernel.NearestNoFlush)
	require.NoError(t, Step(rows, groups, Config[T]{}))
	sameRows(t, "step_size=inf", rows, want)
	assert.True(t, math.IsInf(float64(rows[0].Param[0]), 0), "got %x", rows[0].Param[0])
}
