//go:build race

package goadam

import (
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

const wrongPlanEnv = "GOADAM_TEST_WRONG_PLAN"

// TestRaceDetectorSeesAWrongPlan runs this test once more in a process of its own, where two pieces at the same time share
// two elements that only the kernel touches. If that went unnoticed, a green run under the race detector would prove nothing.
func TestRaceDetectorSeesAWrongPlan(t *testing.T) {
	if os.Getenv(wrongPlanEnv) != "" {
		runWrongPlan(t)
		return
	}
	self := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	self.Env = append(os.Environ(), wrongPlanEnv+"=1")
	output, err := self.CombinedOutput()
	assert.Error(t, err, "the wrong plan passed")
	assert.Contains(t, string(output), "WARNING: DATA RACE")
}

func runWrongPlan(t *testing.T) {
	rows, groups := newRows[float32](false, 64), newGroups(t, kernel.Variant{})
	steppers, err := newSteppers(groups, Config[float32]{Backend: kernel.Best()}, kernel.NearestNoFlush)
	require.NoError(t, err)
	spans := []span{{0, 0, 33}, {0, 31, 64}}
	var together sync.WaitGroup
	together.Add(len(spans))
	require.NoError(t, runPieces(len(spans), len(spans), func(piece int) {
		together.Done()
		together.Wait()
		steppers[0].step(rows[0].part(spans[piece].begin, spans[piece].end), nil)
	}))
}
