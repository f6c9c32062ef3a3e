package pybind

import (
	"encoding/binary"
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/goadam"
)

// FuzzTables reads tables of any words at all: what comes out is either an error or exactly what the words say. Nothing is
// followed, so addresses may be anything.
func FuzzTables(f *testing.F) {
	words := func(values ...int64) (data []byte) {
		for _, v := range values {
			data = binary.NativeEndian.AppendUint64(data, uint64(v))
		}
		return data
	}
	f.Add(words(4096, 8192, 12288, 16384, 0, 20480, 100, 0))
	f.Add(words(4096, 8192, 12288, 16384, 20480, 24576, 100, 1<<32|3))
	f.Add(words(math.MaxInt64-399, 8192, 12288, 16384, 0, math.MaxInt64-3, 100, 1<<33))
	f.Add(words(4096, 8192, 12288, 16384, 0, 20480, math.MaxInt64/4, 0))
	f.Add(words(4096, 8192, 12288, 16384, 0, 20480, math.MinInt64, -1))
	f.Add(words(0, 0, 0, 0, 0, 4096, 0, math.MaxUint32))
	f.Add(words(0, 0, 0, 0, 0, 0, 0, 0, 0x4028000000000000)) // flags of 12
	f.Add(words(0, 0, 0, 0, 0, 0, 0, 0, 0x4030000000000000)) // of 16, which nothing means
	memory := newArena(f, 1<<16)
	f.Fuzz(func(t *testing.T, data []byte) {
		data = data[:min(len(data), len(memory.bytes))]
		copy(memory.bytes, data)
		const rowBytes, groupBytes = 8 * 8, 9 * 8
		table := memory.address(0)

		rows := elementsAt[row](memory, table, len(data)/rowBytes)
		params, err := convert("row", table, int64(len(rows)), nil, newParam[float32])
		decoded(t, err)
		doubles, err64 := convert("row", table, int64(len(rows)), nil, newParam[float64])
		decoded(t, err64)
		if err64 == nil {
			assert.NoError(t, err, "rows that hold float64 hold float32")
			assert.Len(t, doubles, len(rows))
		}
		for i := range params {
			if err == nil {
				sameAsWords(t, &rows[i], &params[i])
			}
		}

		groups := elementsAt[group](memory, table, len(data)/groupBytes)
		converted, err := convert("group", table, int64(len(groups)), nil, newGroup)
		decoded(t, err)
		for i, g := range converted {
			if err == nil {
				flags := int64(groups[i].flags)
				assert.Zero(t, flags&^knownFlags, "group %d", i)
				assert.EqualValues(t, flags&decayMask, g.Decay, "group %d", i)
				assert.Equal(t, flags&amsgradFlag != 0, g.AMSGrad, "group %d", i)
				assert.Equal(t, flags&maximizeFlag != 0, g.Maximize, "group %d", i)
				assert.Equal(t, math.Float64bits(groups[i].step), math.Float64bits(g.Scalars.Step), "group %d", i)
			}
		}
	})
}

// addressOf is where a slice begins, as a table holds it.
func addressOf[T any](data []T) int64 { return int64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))) }

// decoded checks that a refusal is in words.
func decoded(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		require.True(t, strings.HasPrefix(err.Error(), "pybind: "), "%v", err)
		require.NotContains(t, err.Error(), "panic")
	}
}

// sameAsWords checks every slice of a row against its words: address, length, and that its end is an address too.
func sameAsWords(t *testing.T, r *row, p *goadam.Param[float32]) {
	t.Helper()
	for _, c := range []struct {
		name    string
		address int64
		data    []float32
	}{{"param", r.param, p.Param}, {"grad", r.grad, p.Grad}, {"exp_avg", r.expAvg, p.ExpAvg}, {"exp_avg_sq", r.expAvgSq, p.ExpAvgSq}, {"max_exp_avg_sq", r.maxExpAvgSq, p.MaxExpAvgSq}} {
		if c.name == "max_exp_avg_sq" && c.address == 0 {
			require.Empty(t, c.data)
			continue
		}
		require.EqualValues(t, r.numel, len(c.data), c.name)
		if len(c.data) > 0 {
			require.Equal(t, c.address, addressOf(c.data), c.name)
			require.GreaterOrEqual(t, c.address, int64(lowestAddress), c.name)
			require.Greater(t, c.address+4*r.numel, c.address, "%s: its end wraps", c.name)
		}
	}
	require.EqualValues(t, r.layout&groupMask, p.Group)
	require.Equal(t, r.layout&stepFloat64 != 0, p.Step.Float64 != nil)
	require.Equal(t, r.layout&stepFloat64 == 0, p.Step.Float32 != nil)
}
