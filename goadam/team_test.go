package goadam

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// TestTeamGetsEveryElementOnce looks at what a team is given, element by element, in place of making the calls: that takes C, and is
// tested in package pybind.
func TestTeamGetsEveryElementOnce(t *testing.T) {
	forEachElement(t, testTeamGetsEveryElementOnce[float32], testTeamGetsEveryElementOnce[float64])
}

func testTeamGetsEveryElementOnce[T kernel.Float](t *testing.T) {
	forEachKernel[T](t, 3, func(t *testing.T, id string, v kernel.Variant, config Config[T]) {
		rows, groups, asked := newRows[T](v.AMSGrad, motley...), newGroups(t, v), 0
		config.Threads = 4
		library := config.squareRoot(kernel.NearestNoFlush) == kernel.Library
		owners := map[*T]int{} // of each parameter's first element: its row
		for i, row := range rows {
			if len(row.Param) > 0 {
				owners[&row.Param[0]] = i
			}
		}
		config.Team = func(threads int, calls []kernel.Call[T], starts []int) {
			asked++
			assert.Equal(t, config.Threads, threads, id)
			require.Zero(t, starts[0])
			require.Equal(t, len(calls), starts[len(starts)-1], id)
			for i := range len(starts) - 1 {
				require.Less(t, starts[i], starts[i+1], id)
			}
			row, done := -1, 0
			for _, c := range calls {
				if next, begins := owners[&c.Span.Param[0]]; begins {
					row, done = next, 0
				}
				r, n := &rows[row], len(c.Span.Param)
				require.LessOrEqual(t, n, maxSpan, id)
				for _, pair := range [][2][]T{{c.Span.Param, r.Param}, {c.Span.Grad, r.Grad}, {c.Span.ExpAvg, r.ExpAvg}, {c.Span.ExpAvgSq, r.ExpAvgSq}, {c.Span.MaxExpAvgSq, r.MaxExpAvgSq}} {
					if len(pair[1]) == 0 {
						require.Empty(t, pair[0], id)
						continue
					}
					require.Len(t, pair[0], n, id)
					require.Same(t, unsafe.SliceData(pair[1][done:]), unsafe.SliceData(pair[0]), id)
				}
				require.NotZero(t, c.Step, id)
				require.Equal(t, library, c.Update != 0, id)
				done += n
				if done == len(r.Param) {
					delete(owners, &r.Param[0])
				}
			}
		}
		require.NoError(t, Step(rows, groups, config))
		if config.Backend == kernel.Generic {
			assert.Zero(t, asked, id)
			return
		}
		assert.Equal(t, 1, asked, id)
		assert.Empty(t, owners, fmt.Sprintf("%s: rows that were not computed to their end", id))
	})
}

func TestPanicInATeamIsAnError(t *testing.T) {
	if kernel.Best() == kernel.Generic {
		t.Skip("a team works for assembly kernels only")
	}
	config := Config[float32]{Threads: 2, Backend: kernel.Best(), Team: func(int, []kernel.Call[float32], []int) { panic("four") }}
	err := Step(newRows[float32](false, serialBelowTeam), newGroups(t, kernel.Variant{}), config)
	assert.EqualError(t, err, "goadam: panic in the update: four")
}
