package goadam

import "roundpipe-go/kernel"

const (
	// maxSpan bounds a span, in elements: assembly cannot be preempted, and 32 Ki elements take 10 to 40 µs, of float64 some 200.
	maxSpan = 1 << 15

	// minPiece, in elements, is the least work worth claiming on its own: about 1 µs.
	minPiece = 1 << 11

	// piecesPerThread leaves enough pieces that a thread which starts late, or is slower, does not hold up the rest.
	piecesPerThread = 16
)

// span is [begin, end) of one tensor.
type span struct{ row, begin, end int }

// plan cuts the rows of a call into pieces, each a run of spans that one thread computes in order.
type plan struct {
	spans  []span
	starts []int // piece i is spans[starts[i]:starts[i+1]]
}

func (p *plan) pieces() int        { return len(p.starts) - 1 }
func (p *plan) piece(i int) []span { return p.spans[p.starts[i]:p.starts[i+1]] }
func (p *plan) close()             { p.starts = append(p.starts, len(p.spans)) }
func (p *plan) isOpen() bool       { return p.starts[len(p.starts)-1] < len(p.spans) }
func pieceLen(numel, threads int) int {
	return min(max(numel/(threads*piecesPerThread), minPiece), maxSpan)
}

// newPlan packs tensors into pieces of about pieceLen elements over one flat list. A tensor shorter than a piece is never
// cut; a longer one is cut where a cache line of the parameter begins, so that two threads do not write to the same line.
func newPlan[T kernel.Float](params []Param[T], length int) *plan {
	p := new(plan)
	fill(p, params, length)
	return p
}

// fill makes p the plan of params, in the memory that it has.
func fill[T kernel.Float](p *plan, params []Param[T], length int) {
	p.spans, p.starts = p.spans[:0], append(p.starts[:0], 0)
	room := length
	for row := range params {
		numel := len(params[row].Param)
		if numel > room && p.isOpen() {
			p.close()
			room = length
		}
		begin := 0
		for numel-begin > room {
			end := begin + room
			end += params[row].elementsToLine(end)
			if end >= numel {
				break
			}
			p.spans = append(p.spans, span{row, begin, end})
			p.close()
			begin, room = end, length
		}
		if begin < numel {
			p.spans = append(p.spans, span{row, begin, numel})
			room -= numel - begin
		}
	}
	if p.isOpen() {
		p.close()
	}
}
