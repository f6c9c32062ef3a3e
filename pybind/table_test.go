package pybind

import (
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/goadam"
	"roundpipe-go/kernel"
)

func TestMemoryRefusesWhatNoAddressHolds(t *testing.T) {
	const far = math.MaxInt64
	for _, c := range []struct {
		address, numel int64
		want           string // "" if it is memory
	}{
		{0, 0, ""}, {-5, 0, ""}, {far, 0, ""}, // nothing is anywhere
		{4096, 1, ""}, {far - 8, 2, ""}, {far - 4, 1, ""}, // the last byte that an int64 reaches
		{0, 1, "x is at 0x0 with 1 elements, want an address that holds them"},
		{4095, 1, "x is at 0xfff with 1 elements, want an address that holds them"},
		{-64, 1, "x is at -0x40 with 1 elements, want an address that holds them"},
		{math.MinInt64, 1, "x is at -0x8000000000000000 with 1 elements, want an address that holds them"},
		{far - 3, 1, "x is at 0x7ffffffffffffffc with 1 elements, want an address that holds them"},
		{far, 1, "x is at 0x7fffffffffffffff with 1 elements, want an address that holds them"},
		{4096, -1, "x has -1 elements, want 0 to what fits an address"},
		{4096, math.MinInt64, "x has -9223372036854775808 elements, want 0 to what fits an address"},
		{4096, far/4 + 1, "x has 2305843009213693952 elements, want 0 to what fits an address"},
		{4096, far / 4, "x is at 0x1000 with 2305843009213693951 elements, want an address that holds them"},
	} {
		data, err := memory[float32]("x", c.address, c.numel)
		if c.want != "" {
			assert.EqualError(t, err, c.want)
			continue
		}
		assert.NoError(t, err, "address=%#x/numel=%d", c.address, c.numel)
		assert.Len(t, data, int(c.numel), "address=%#x/numel=%d", c.address, c.numel)
	}
}

func stepFloat32(a *arena, rows []row, groups []group) (int64, error) {
	return stepOne(a.rows(rows...), int64(len(rows)), a.groups(groups...), int64(len(groups)), float32Code, 1, 0, 0, 0)
}

// TestStepReadsTheTables compares a step through the tables with one through goadam, for every word of them.
func TestStepReadsTheTables(t *testing.T) {
	forEachElement(t, testStepReadsTheTables[float32], testStepReadsTheTables[float64])
}

func testStepReadsTheTables[T kernel.Float](t *testing.T) {
	flags := []float64{0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}
	a := newArena(t, 1<<20)
	var rows []row
	var groups []group
	var params []goadam.Param[T]
	var goGroups []goadam.Group
	for i, f := range flags {
		g := seventhStep(f)
		g.stepSize *= float64(i + 1)
		groups = append(groups, g)
		goGroups = append(goGroups, goadam.Group{
			Decay: kernel.Decay(int(f) % 4), AMSGrad: int(f)&4 != 0, Maximize: int(f)&8 != 0,
			Scalars: goadam.Scalars{
				WeightDecay: g.weightDecay, OneMinusBeta1: g.oneMinusBeta1, Beta2: g.beta2, OneMinusBeta2: g.oneMinusBeta2,
				BiasCorrection2Sqrt: g.biasCorrection2Sqrt, StepSize: g.stepSize, Eps: g.eps, Step: g.step,
			},
		})

		r := newRow[T](a, i*5)
		r.layout = int64(i)
		p := goadam.Param[T]{Group: i, Param: slices.Clone(elementsAt[T](a, r.param, i*5)), Grad: slices.Clone(elementsAt[T](a, r.grad, i*5)), ExpAvg: slices.Clone(elementsAt[T](a, r.expAvg, i*5)), ExpAvgSq: slices.Clone(elementsAt[T](a, r.expAvgSq, i*5))}
		if int(f)&4 != 0 {
			r.maxExpAvgSq = a.take(8 * i * 5)
			p.MaxExpAvgSq = slices.Clone(elementsAt[T](a, r.maxExpAvgSq, i*5))
		}
		if i%2 == 1 {
			r.step, r.layout = a.words(math.Float64bits(6)), r.layout|stepFloat64
			p.Step.Float64 = new(float64)
		} else {
			p.Step.Float32 = new(float32)
		}
		rows, params = append(rows, r), append(params, p)
	}

	unserved, err := stepOne(a.rows(rows...), int64(len(rows)), a.groups(groups...), int64(len(groups)), codeOf[T](), 1, 0, 0, 0)
	require.NoError(t, err)
	require.Zero(t, unserved)
	require.NoError(t, goadam.Step(params, goGroups, goadam.Config[T]{}))
	for i, r := range rows {
		p := &params[i]
		for _, c := range []struct {
			name    string
			address int64
			want    []T
		}{{"param", r.param, p.Param}, {"grad", r.grad, p.Grad}, {"exp_avg", r.expAvg, p.ExpAvg}, {"exp_avg_sq", r.expAvgSq, p.ExpAvgSq}, {"max_exp_avg_sq", r.maxExpAvgSq, p.MaxExpAvgSq}} {
			if len(c.want) > 0 {
				sameValues(t, fmt.Sprintf("flags=%v: %s", flags[i], c.name), elementsAt[T](a, c.address, len(c.want)), c.want)
			}
		}
		if i%2 == 1 {
			assert.Equal(t, 7.0, a.float64(r.step), "flags=%v", flags[i])
		} else {
			assert.Equal(t, float32(7), a.float32(r.step, 0), "flags=%v", flags[i])
		}
	}
}

func TestRefusedTablesChangeNothing(t *testing.T) {
	for _, c := range []struct {
		spoil func(rows []row, groups []group)
		want  string
	}{
		{func(rows []row, _ []group) { rows[1].param = 0 }, "pybind: row 1: param is at 0x0 with 20 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].grad = -4 }, "pybind: row 1: grad is at -0x4 with 20 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].expAvg = 0 }, "pybind: row 1: exp_avg is at 0x0 with 20 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].expAvgSq = 0 }, "pybind: row 1: exp_avg_sq is at 0x0 with 20 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].maxExpAvgSq = -4 }, "pybind: row 1: max_exp_avg_sq is at -0x4 with 20 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].step = 0 }, "pybind: row 1: step is at 0x0 with 1 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].step, rows[1].layout = math.MaxInt64-7, stepFloat64 }, "pybind: row 1: step is at 0x7ffffffffffffff8 with 1 elements, want an address that holds them"},
		{func(rows []row, _ []group) { rows[1].numel = -1 }, "pybind: row 1: param has -1 elements, want 0 to what fits an address"},
		{func(rows []row, _ []group) { rows[1].layout = 1 << 33 }, "pybind: row 1: unknown bits in layout 0x200000000"},
		{func(rows []row, _ []group) { rows[1].layout = -1 }, "pybind: row 1: unknown bits in layout -0x1"},
		{func(rows []row, _ []group) { rows[1].layout = 2 }, "goadam: param 1: group is 2, want 0 to 1"},
		{func(rows []row, _ []group) { rows[1].layout = math.MaxUint32 }, "goadam: param 1: group is 4294967295, want 0 to 1"},
		{func(rows []row, _ []group) { rows[1].layout = 1 }, "goadam: param 1: max_exp_avg_sq has 0 elements, want 20"},
		{func(rows []row, _ []group) { rows[1].maxExpAvgSq = rows[0].expAvg }, "goadam: param 1: max_exp_avg_sq has 20 elements, want 0"},
		{func(_ []row, groups []group) { groups[1].flags = 3 }, "pybind: group 1: unknown flags 3"},
		{func(_ []row, groups []group) { groups[1].flags = 16 }, "pybind: group 1: unknown flags 16"},
		{func(_ []row, groups []group) { groups[1].flags = -1 }, "pybind: group 1: unknown flags -1"},
		{func(_ []row, groups []group) { groups[1].flags = 0.5 }, "pybind: group 1: unknown flags 0.5"},
		{func(_ []row, groups []group) { groups[1].flags = math.NaN() }, "pybind: group 1: unknown flags NaN"},
		{func(_ []row, groups []group) { groups[1].flags = math.Inf(1) }, "pybind: group 1: unknown flags +Inf"},
		{func(_ []row, groups []group) { groups[1].flags = 0x1p63 }, "pybind: group 1: unknown flags 9.223372036854776e+18"},
	} {
		a := newArena(t, 1<<16)
		rows, groups := []row{a.newRow(20), a.newRow(20)}, []group{seventhStep(0), seventhStep(4)}
		before, used := string(a.bytes), a.used
		c.spoil(rows, groups)
		unserved, err := stepFloat32(a, rows, groups)
		assert.EqualError(t, err, c.want)
		assert.Zero(t, unserved, c.want)
		assert.Equal(t, before[:used], string(a.bytes[:used]), "%s: something was written", c.want)
	}
}

// TestStepTakesAllCallsOrNone has float32 rows in one call and float64 rows in another, of which the last may be spoilt.
func TestStepTakesAllCallsOrNone(t *testing.T) {
	for _, c := range []struct {
		desc     string
		spoil    func(last *row)
		unserved int64
		err      string
	}{
		{"both", func(*row) {}, 0, ""},
		{"a row for torch", func(last *row) { last.grad = last.param }, 2, ""},
		{"a wrong row", func(last *row) { last.layout = 1 }, 0, "goadam: param 1: group is 1, want 0 to 0"},
	} {
		for swapped := range 2 {
			a := newArena(t, 1<<16)
			singles, doubles := []row{a.newRow(20), a.newRow(20)}, []row{newRow[float64](a, 20), newRow[float64](a, 20)}
			before, used := string(a.bytes), a.used
			c.spoil(&doubles[1])
			groups := a.groups(seventhStep(0))
			calls := []call{{a.rows(singles...), 2, groups, 1, float32Code, 1, 0, 0, 0}, {a.rows(doubles...), 2, groups, 1, float64Code, 1, 0, 0, 0}}
			if swapped == 1 {
				calls[0], calls[1] = calls[1], calls[0]
			}
			unserved, err := Step(tableOf(calls...), 2)
			assert.Equal(t, c.unserved, unserved, c.desc)
			if c.err != "" {
				assert.EqualError(t, err, c.err)
			} else {
				assert.NoError(t, err, c.desc)
			}
			if c.unserved == 0 && c.err == "" {
				assert.Equal(t, []float32{7, 7}, []float32{a.float32(singles[0].step, 0), a.float32(doubles[1].step, 0)}, c.desc)
			} else {
				assert.Equal(t, before[:used], string(a.bytes[:used]), "%s, swapped=%d: something was written", c.desc, swapped)
			}
		}
	}
	_, err := Step(0, 1)
	assert.EqualError(t, err, "pybind: the call table is at 0x0 with 1 elements, want an address that holds them")
}

func TestUnservedRowIsNamed(t *testing.T) {
	for _, c := range []struct {
		desc  string
		spoil func(r *row)
	}{
		{"param not aligned", func(r *row) { r.param++ }},
		{"grad not aligned", func(r *row) { r.grad += 2 }},
		{"step not aligned", func(r *row) { r.step += 3 }},
		{"grad is param", func(r *row) { r.grad = r.param }},
		{"step in exp_avg", func(r *row) { r.step = r.expAvg + 76 }},
		{"moments overlap by one", func(r *row) { r.expAvgSq = r.expAvg + 76 }},
	} {
		for bad := range 3 {
			a := newArena(t, 1<<16)
			rows := []row{a.newRow(20), a.newRow(20), a.newRow(20)}
			a.take(64) // room for the tensor that is moved
			before, used := string(a.bytes), a.used
			c.spoil(&rows[bad])
			unserved, err := stepFloat32(a, rows, []group{seventhStep(0)})
			assert.NoError(t, err, "%s in row %d", c.desc, bad)
			assert.EqualValues(t, bad+1, unserved, "%s in row %d", c.desc, bad)
			assert.Equal(t, before[:used], string(a.bytes[:used]), "%s in row %d: something was written", c.desc, bad)
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for _, c := range []struct {
		backend, arithmetic, squareRoot int64
		want                            string
	}{
		{-1, 0, 0, "pybind: backend is -1, want 0 to 2"}, {3, 0, 0, "pybind: backend is 3, want 0 to 2"},
		{256, 0, 0, "pybind: backend is 256, want 0 to 2"}, // 0 in eight bits
		{0, 2, 0, "pybind: arithmetic is 2, want 0 to 1"}, {0, -1, 0, "pybind: arithmetic is -1, want 0 to 1"},
		{0, 0, 4, "pybind: square root is 4, want 0 to 3"}, {0, 0, math.MinInt64, "pybind: square root is -9223372036854775808, want 0 to 3"},
		{0, 0, int64(kernel.Library), "goadam: group 0: kernel: square root library needs a function"},
	} {
		a := newArena(t, 1<<12)
		_, err := stepOne(0, 0, a.groups(seventhStep(0)), 1, float32Code, 1, c.backend, c.arithmetic, c.squareRoot)
		assert.EqualError(t, err, c.want)
	}
}

func TestDtypeIsChecked(t *testing.T) {
	a := newArena(t, 1<<12)
	for _, dtype := range []int64{-1, 2, 256, math.MaxInt64} {
		want := fmt.Sprintf("pybind: dtype is %d, want 0 to 1", dtype)
		_, err := stepOne(0, 0, a.groups(seventhStep(0)), 1, dtype, 1, 0, 0, 0)
		assert.EqualError(t, err, want)
		_, err = Sqrt(0, 0, 0, dtype, 0, 0)
		assert.EqualError(t, err, want)
		_, err = SetLibrarySquareRoot(dtype, 0, 0)
		assert.EqualError(t, err, want)
	}
}

func TestFloat64NeedsItsAlignment(t *testing.T) {
	a := newArena(t, 1<<12)
	r := newRow[float64](a, 20)
	r.grad += 4
	unserved, err := stepOne(a.rows(r), 1, a.groups(seventhStep(0)), 1, float64Code, 1, 0, 0, 0)
	assert.NoError(t, err)
	assert.EqualValues(t, 1, unserved)
}

func TestTablesAreChecked(t *testing.T) {
	for _, c := range []struct {
		rows, numRows, groups, numGroups int64
		want                             string
	}{
		{0, 1, 0, 0, "pybind: the row table is at 0x0 with 1 elements, want an address that holds them"},
		{4096, -1, 0, 0, "pybind: the row table has -1 elements, want 0 to what fits an address"},
		{4096, math.MaxInt64 / 64, 0, 0, "pybind: the row table is at 0x1000 with 144115188075855871 elements, want an address that holds them"},
		{0, 0, -8, 1, "pybind: the group table is at -0x8 with 1 elements, want an address that holds them"},
		{0, 0, 4096, math.MaxInt64, "pybind: the group table has 9223372036854775807 elements, want 0 to what fits an address"},
	} {
		_, err := stepOne(c.rows, c.numRows, c.groups, c.numGroups, float32Code, 1, 0, 0, 0)
		assert.EqualError(t, err, c.want)
	}
	unserved, err := stepOne(0, 0, 0, 0, float32Code, 1, 0, 0, 0)
	assert.NoError(t, err, "no rows")
	assert.Zero(t, unserved)
}

// TestPanicsBecomeErrors puts tables and tensors where any access faults: a panic in this package and one in goadam's update.
func TestPanicsBecomeErrors(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	page, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Munmap(page)) }()
	closed := (&arena{bytes: page}).address(0)
	const fault = "runtime error: invalid memory address or nil pointer dereference"

	_, err = stepOne(closed, 1, 0, 0, float32Code, 1, 0, 0, 0)
	assert.EqualError(t, err, "pybind: panic: "+fault)
	_, err = stepOne(0, 0, closed, 1, float32Code, 1, 0, 0, 0)
	assert.EqualError(t, err, "pybind: panic: "+fault)
	_, err = Sqrt(closed, closed+2048, 4, float32Code, 0, 0)
	assert.EqualError(t, err, "pybind: panic: "+fault)

	for _, backend := range kernel.Available() {
		a := newArena(t, 1<<16)
		r, good := a.newRow(4), a.newRow(4)
		r.param = closed
		_, err = stepOne(a.rows(r), 1, a.groups(seventhStep(0)), 1, float32Code, 1, int64(backend), 0, 0)
		assert.EqualError(t, err, "goadam: panic in the update: "+fault, "%v", backend)
		assert.Equal(t, float32(6), a.float32(r.step, 0), "%v: the counter advanced", backend)
		_, err = stepOne(a.rows(good), 1, a.groups(seventhStep(0)), 1, float32Code, 1, int64(backend), 0, 0)
		assert.NoError(t, err, "%v: the call after the panic", backend)
		assert.Equal(t, float32(7), a.float32(good.step, 0), "%v: the call after the panic", backend)
	}
}
