package pybind

import (
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The two sides of the boundary are written in two languages; these tests read both.

func source(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

func python(t *testing.T, file string) string {
	t.Helper()
	return source(t, "../python/roundpipe_go/"+file)
}

// find is the first group of a pattern that must be there.
func find(t *testing.T, text, pattern string) string {
	t.Helper()
	match := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.NotNil(t, match, "nothing matches %s", pattern)
	return match[1]
}

// documented lists the words of a table in doc.go, in order: "param", "grad", ...
func documented(t *testing.T, intro string) (names []string) {
	t.Helper()
	_, text, found := strings.Cut(source(t, "doc.go"), intro+":\n//\n")
	require.True(t, found, "doc.go has no %q", intro)
	for i, line := range strings.Split(text, "\n") {
		match := regexp.MustCompile(`^//\t(\d+) (1 - \w+|\w+)`).FindStringSubmatch(line)
		if match == nil {
			break
		}
		require.Equal(t, strconv.Itoa(i), match[1], "words of doc.go are out of order: %s", line)
		names = append(names, match[2])
	}
	return names
}

// fields lists the fields of a table's struct under the names that doc.go has: exp_avg for expAvg, 1 - beta1 for oneMinusBeta1.
func fields(of any) (names []string) {
	for _, field := range reflect.VisibleFields(reflect.TypeOf(of)) {
		name := strings.ToLower(regexp.MustCompile(`([A-Z])`).ReplaceAllString(field.Name, "_$1"))
		names = append(names, strings.ReplaceAll(name, "one_minus_", "1 - "))
	}
	return names
}

// packed lists the expressions that _descriptors.py adds to a table, in order.
func packed(t *testing.T, table string) (expressions []string) {
	t.Helper()
	tuple := find(t, python(t, "_descriptors.py"), `(?s)self\.`+table+`\.extend\(\s*\(\n(.*?)\n\s*\)\s*\)`)
	for line := range strings.Lines(tuple) {
		expressions = append(expressions, strings.Trim(line, " ,\n"))
	}
	return expressions
}

// samePlaces checks that every expression is about the documented word, whatever conversions are around it. Python has other
// names for the words in aliases.
func samePlaces(t *testing.T, words, expressions []string, aliases map[string]string) {
	t.Helper()
	require.Len(t, expressions, len(words))
	for i, word := range words {
		name := word
		if alias, found := aliases[word]; found {
			name = alias
		}
		assert.Regexp(t, `\b`+name+`\b`, expressions[i], "word %d, %s", i, word)
		assert.Equal(t, strings.Contains(word, "1 - "), strings.Contains(expressions[i], "1 - "), "word %d, %s: %s", i, word, expressions[i])
	}
}

func TestRowsAreWhatDocSays(t *testing.T) {
	words := documented(t, "A row is eight int64")
	assert.Equal(t, words, fields(row{}))
	samePlaces(t, words, packed(t, "rows"), map[string]string{"layout": "group"})
	assert.Equal(t, strconv.Itoa(len(words)), find(t, python(t, "_descriptors.py"), `\n_ROW_WORDS = (\d+)\n`))
}

func TestGroupsAreWhatDocSays(t *testing.T) {
	words := documented(t, "A group is nine float64")
	assert.Equal(t, words, fields(group{}))
	samePlaces(t, words, packed(t, "groups"), map[string]string{"weight_decay": "decay"})
	assert.Equal(t, strconv.Itoa(len(words)), find(t, python(t, "_descriptors.py"), `\n_GROUP_WORDS = (\d+)\n`))
}

func TestPythonHasOurConstants(t *testing.T) {
	version, err := ABI()
	require.NoError(t, err)
	assert.Equal(t, strconv.FormatInt(version, 10), find(t, python(t, "_binding.py"), `\n_ABI = (\d+)\n`))

	assert.Contains(t, python(t, "_binding.py"), "\nDTYPES = (torch.float32, torch.float64)\n")
	assert.Equal(t, []int{0, 1}, []int{float32Code, float64Code})

	descriptors := python(t, "_descriptors.py")
	assert.Contains(t, descriptors, "\n_STEP_FLOAT64 = 1 << 32\n")
	assert.EqualValues(t, 1<<32, stepFloat64)
	assert.Contains(t, descriptors, "\n_NO_DECAY, _L2_DECAY, _DECOUPLED_DECAY = range(3)\n")
	assert.Contains(t, descriptors, "\n_AMSGRAD, _MAXIMIZE = 1 << 2, 1 << 3\n")
	assert.Equal(t, []int{1 << 2, 1 << 3}, []int{amsgradFlag, maximizeFlag})
}
