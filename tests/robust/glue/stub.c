// In the place of Go under pybind/step.c: reads the tables to their last byte, and answers what the test has asked for.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int64_t stub_answer;  // 0 done, k > 0 row k-1 is not served, -1 an error
int64_t stub_calls;
int64_t stub_with_gil; // whether the last call had it
uint64_t stub_sum; // of all words, so that they are read

typedef struct {
	int64_t rows, num_rows, groups, num_groups, dtype, threads, backend, arithmetic, square_root;
} call; // of pybind/doc.go

static void read_words(int64_t address, int64_t count) {
	for (int64_t i = 0; i < count; i++)
		stub_sum += ((const uint64_t *)(intptr_t)address)[i];
}

int64_t roundpipe_go_step(int64_t calls, int64_t num_calls, char *message, int64_t size) {
	stub_calls++;
	stub_with_gil = PyGILState_Check();
	read_words(calls, 9 * num_calls);
	for (int64_t i = 0; i < num_calls; i++) {
		const call *c = (const call *)(intptr_t)calls + i;
		read_words(c->rows, 8 * c->num_rows);
		read_words(c->groups, 9 * c->num_groups);
	}
	if (stub_answer < 0) {
		memset(message, 'x', (size_t)size);
		snprintf(message, (size_t)size, "stub: refused %lld calls", (long long)num_calls);
	}
	return stub_answer;
}
