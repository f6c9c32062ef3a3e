package pybind

import (
	"encoding/json"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"roundpipe-go/kernel"
)

func TestBackendsIsAMaskOfTheAvailable(t *testing.T) {
	mask, err := Backends()
	require.NoError(t, err)
	want := int64(0)
	for _, b := range kernel.Available() {
		want |= map[kernel.Backend]int64{kernel.Generic: 1, kernel.AVX2: 2, kernel.AVX512: 4}[b]
	}
	assert.Equal(t, want, mask)
	assert.Equal(t, int64(1), mask&1, "generic is always there")
}

func TestBuildInfoIsJSON(t *testing.T) {
	text, err := BuildInfo()
	require.NoError(t, err)
	var info map[string]any
	require.NoError(t, json.Unmarshal([]byte(text), &info))
	assert.Equal(t, runtime.Version(), info["go_version"])
	assert.Contains(t, info["backends"], "generic")
	assert.EqualValues(t, runtime.NumCPU(), info["num_cpu"])
	assert.EqualValues(t, runtime.GOMAXPROCS(0), info["gomaxprocs"])
}
