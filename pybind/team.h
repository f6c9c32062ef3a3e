// The threads that a step runs on where torch lends its own.

#ifndef ROUNDPIPE_GO_TEAM_H
#define ROUNDPIPE_GO_TEAM_H

#include <stdint.h>

typedef struct {
	char *data;
	int64_t len, cap;
} slice;

// Param, Grad, ExpAvg, ExpAvgSq and MaxExpAvgSq, the last of them empty without amsgrad.
enum { PARAM, EXP_AVG_SQ = 3, MAX_EXP_AVG_SQ, NUM_SLICES };

typedef struct {
	slice slices[NUM_SLICES];
} span;

// kernel.Call
typedef struct {
	span span;
	const void *scalars;
	uintptr_t step, update;
} kernel_call;

enum { TILE_LEN = 1024 }; // kernel.TileLen

// A step's work: calls[starts[i]] to calls[starts[i + 1] - 1] are one piece. The calls are of elements of nbytes bytes, and take a
// square root of sqrt where they have an update.
typedef struct {
	uintptr_t calls, starts; // addresses of kernel_call and of int64_t
	int64_t pieces, nbytes;
	void *sqrt, *set_threads; // the arguments of library_sqrt
} work;

// Functions of an OpenMP: GOMP_parallel, omp_get_thread_num, omp_get_max_threads.
typedef struct {
	void *parallel, *thread_num, *max_threads;
} openmp;

// run_work has the pieces done by up to threads threads, at least one, and returns when all are.
void run_work(const work *w, const openmp *o, unsigned threads);

// library_sqrt sets y[i] to the square root of x[i], of elements of nbytes bytes, by a function like oneMKL's vmsSqrt or vmdSqrt.
// set_threads is oneMKL's MKL_Set_Num_Threads_Local, or NULL.
void library_sqrt(void *sqrt, void *set_threads, int64_t nbytes, int n, const void *x, void *y);

#endif
