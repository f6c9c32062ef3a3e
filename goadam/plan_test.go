package goadam

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

// lineElements is how many elements a cache line has at most.
const lineElements = cacheLine / 4

// randomLengths mixes empty rows, rows around the piece length and rows of many pieces.
func randomLengths(rows int, length int) []int {
	r := newRand()
	lengths := make([]int, rows)
	for i := range lengths {
		switch r.IntN(6) {
		case 0:
		case 1:
			lengths[i] = 1 + r.IntN(40)
		case 2:
			lengths[i] = max(0, length+r.IntN(5)-2)
		case 3:
			lengths[i] = r.IntN(20 * length)
		default:
			lengths[i] = r.IntN(length + 1)
		}
	}
	return lengths
}

// rowsAt has only parameters, each of which starts anywhere in a cache line.
func rowsAt[T kernel.Float](lengths []int) []Param[T] {
	r := newRand()
	rows := make([]Param[T], len(lengths))
	for i, n := range lengths {
		offset := r.IntN(lineElements)
		rows[i].Param = make([]T, offset+n)[offset:]
	}
	return rows
}

func numelOf(spans []span) (numel int) {
	for _, s := range spans {
		numel += s.end - s.begin
	}
	return numel
}

func TestPlanCoversEveryElementOnceInOrder(t *testing.T) {
	forEachElement(t, testPlanCoversEveryElementOnceInOrder[float32], testPlanCoversEveryElementOnceInOrder[float64])
}

func testPlanCoversEveryElementOnceInOrder[T kernel.Float](t *testing.T) {
	for _, length := range []int{1, 16, 17, 100, minPiece, maxSpan} {
		for _, rows := range []int{0, 1, 2, 7, 100} {
			lengths := randomLengths(rows, length)
			params := rowsAt[T](lengths)
			p := newPlan(params, length)
			id := fmt.Sprintf("length=%d/rows=%d", length, rows)

			var all []span
			for i := range p.pieces() {
				require.NotEmpty(t, p.piece(i), "%s: piece %d", id, i)
				all = append(all, p.piece(i)...)
			}
			require.Equal(t, p.spans, all, "%s: the pieces are not the spans", id)
			next := 0
			for row, numel := range lengths {
				for begin := 0; begin < numel; next++ {
					require.Less(t, next, len(all), "%s: row %d ends at %d of %d", id, row, begin, numel)
					s := all[next]
					require.Equal(t, span{row, begin, s.end}, s, "%s: span %d", id, next)
					require.Greater(t, s.end, s.begin, "%s: span %d", id, next)
					begin = s.end
				}
			}
			require.Len(t, all, next, "%s: spans beyond the last row", id)
		}
	}
}

func TestPlanBoundsPieces(t *testing.T) {
	forEachElement(t, testPlanBoundsPieces[float32], testPlanBoundsPieces[float64])
}

func testPlanBoundsPieces[T kernel.Float](t *testing.T) {
	for _, length := range []int{16, 17, 100, minPiece, maxSpan} {
		params := rowsAt[T](randomLengths(300, length))
		p := newPlan(params, length)
		for i := range p.pieces() {
			id := fmt.Sprintf("length=%d/piece=%d", length, i)
			numel := numelOf(p.piece(i))
			assert.Less(t, numel, length+lineElements, "%s is too long", id)
			if i+1 < p.pieces() {
				if next := p.piece(i + 1)[0]; next.begin == 0 {
					assert.Greater(t, numel+len(params[next.row].Param), length, "%s had room for row %d", id, next.row)
				}
			}
		}
	}
}

func TestPlanCutsLongTensorsOnlyAndOnCacheLines(t *testing.T) {
	forEachElement(t, testPlanCutsLongTensorsOnlyAndOnCacheLines[float32], testPlanCutsLongTensorsOnlyAndOnCacheLines[float64])
}

func testPlanCutsLongTensorsOnlyAndOnCacheLines[T kernel.Float](t *testing.T) {
	cuts := 0
	for _, length := range []int{16, 17, 100, minPiece, maxSpan} {
		params := rowsAt[T](randomLengths(300, length))
		for i, s := range newPlan(params, length).spans {
			param := params[s.row].Param
			if s.begin == 0 && s.end == len(param) {
				continue
			}
			cuts++
			id := fmt.Sprintf("length=%d/span=%d", length, i)
			assert.Greater(t, len(param), length, "%s cuts a tensor that fits", id)
			address := reflect.ValueOf(param[s.begin:]).Pointer()
			assert.True(t, s.begin == 0 || address%cacheLine == 0, "%s begins at %#x", id, address)
		}
	}
	assert.Positive(t, cuts, "nothing was cut")
}

func TestPieceLen(t *testing.T) {
	for _, c := range []struct{ numel, threads, want int }{
		{serialBelow, 2, 8192}, {serialBelow, 8, minPiece}, {serialBelow, maxThreads, minPiece}, {1 << 30, 2, maxSpan}, {1 << 20, 2, maxSpan},
	} {
		assert.Equal(t, c.want, pieceLen(c.numel, c.threads), "pieceLen(%d, %d)", c.numel, c.threads)
	}
}
