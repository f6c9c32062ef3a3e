// Threads of OpenMP make the calls of kernels from here, without entering Go: that takes a thread some 40 µs, in which it computes
// 50,000 elements.

#include "team.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
	span span;
	const void *one, *two;
} arguments;

// call_kernel calls a function of Go's assembly, of which kernel.Call says what it needs and keeps: it finds its arguments above the
// return address, and the registers that C wants kept are kept here.
#ifdef __x86_64__
void roundpipe_go_call_kernel(uintptr_t function, const arguments *a);
__asm__(".text\n"
        ".hidden roundpipe_go_call_kernel\n"
        ".globl roundpipe_go_call_kernel\n"
        ".type roundpipe_go_call_kernel, @function\n"
        "roundpipe_go_call_kernel:\n"
        ".cfi_startproc\n"
        "	pushq %rbp\n"
        ".cfi_def_cfa_offset 16\n"
        ".cfi_offset %rbp, -16\n"
        "	movq %rsp, %rbp\n"
        ".cfi_def_cfa_register %rbp\n"
        "	pushq %rbx\n"
        "	pushq %r12\n"
        "	pushq %r13\n"
        "	pushq %r14\n"
        "	pushq %r15\n"
        ".cfi_offset %rbx, -24\n"
        ".cfi_offset %r12, -32\n"
        ".cfi_offset %r13, -40\n"
        ".cfi_offset %r14, -48\n"
        ".cfi_offset %r15, -56\n"
        "	subq $136, %rsp\n" // sizeof(arguments)
        "	movq %rdi, %rax\n"
        "	movq %rsp, %rdi\n"
        "	movl $17, %ecx\n"
        "	rep movsq\n"
        "	call *%rax\n"
        "	leaq -40(%rbp), %rsp\n"
        "	popq %r15\n"
        "	popq %r14\n"
        "	popq %r13\n"
        "	popq %r12\n"
        "	popq %rbx\n"
        "	popq %rbp\n"
        ".cfi_def_cfa %rsp, 8\n"
        "	ret\n"
        ".cfi_endproc\n"
        ".size roundpipe_go_call_kernel, . - roundpipe_go_call_kernel\n");
_Static_assert(sizeof(arguments) == 136 && sizeof(kernel_call) == 144, "as the assembly above and kernel.Call have it");
static void call_kernel(uintptr_t function, const arguments *a) { roundpipe_go_call_kernel(function, a); }
#else
static void call_kernel(uintptr_t function, const arguments *a) { (void)function, (void)a; } // there is no assembly to call
#endif

// VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE: how ATen calls it.
static const int64_t mode = 0x2 | 0x140000 | 0x100;

void library_sqrt(void *sqrt, void *set_threads, int64_t nbytes, int n, const void *x, void *y) {
	// oneMKL would cut a call over threads of OpenMP, from 128 elements on by some of its code paths: that takes longer than the
	// square roots, and these threads are not ours to start. 0 is what a thread has that has not set anything.
	int (*set)(int) = (int (*)(int))set_threads;
	int before = set != NULL ? set(1) : 0;
	if (nbytes == sizeof(float))
		((void (*)(int, const float *, float *, int64_t))sqrt)(n, x, y, mode);
	else
		((void (*)(int, const double *, double *, int64_t))sqrt)(n, x, y, mode);
	if (set != NULL)
		set(before);
}

// make_call is kernel.Kernel.Step.
static void make_call(const work *w, const kernel_call *c) {
	if (c->update == 0) {
		call_kernel(c->step, &(arguments){c->span, c->scalars, NULL});
		return;
	}
	_Alignas(64) char tile[TILE_LEN * sizeof(double)];
	for (int64_t begin = 0, numel = c->span.slices[PARAM].len; begin < numel; begin += TILE_LEN) {
		int64_t n = numel - begin < TILE_LEN ? numel - begin : TILE_LEN;
		span part = {0};
		for (int i = 0; i < NUM_SLICES; i++)
			if (c->span.slices[i].len > 0)
				part.slices[i] = (slice){c->span.slices[i].data + begin * w->nbytes, n, n};
		int amsgrad = part.slices[MAX_EXP_AVG_SQ].len > 0;
		call_kernel(c->step, &(arguments){part, c->scalars, NULL});
		library_sqrt(w->sqrt, w->set_threads, w->nbytes, (int)n, part.slices[amsgrad ? MAX_EXP_AVG_SQ : EXP_AVG_SQ].data, tile);
		call_kernel(c->update, &(arguments){part, tile, c->scalars});
	}
}

// prefetch is kernel.Prefetch: it asks for the beginning of what comes next.
static void prefetch(const work *w, const kernel_call *c) {
	int64_t most = c->span.slices[PARAM].len * w->nbytes;
	for (int i = 0; i < NUM_SLICES; i++)
		for (int64_t at = 0; at < most && at < 16 * 64 && c->span.slices[i].len > 0; at += 64)
			__builtin_prefetch(c->span.slices[i].data + at);
}

// A run of pieces that one thread begins with.
typedef struct {
	_Alignas(64) _Atomic int64_t next; // on a cache line of its own
	int64_t end;
} share;

typedef struct {
	const work *work;
	int (*thread_num)(void);
	share *shares;
	int num_shares;
} job;

// one_thread does the pieces of its own share, then what others have left of theirs. A thread has the same share in step after step,
// as in torch's operations, so that its caches have it.
static void one_thread(void *data) {
	const job *j = data;
	const work *w = j->work;
	const kernel_call *calls = (const kernel_call *)w->calls;
	const int64_t *starts = (const int64_t *)w->starts;
	int first = j->thread_num();
	if (first >= j->num_shares)
		return;
	for (int k = 0; k < j->num_shares; k++) {
		share *s = &j->shares[(first + k) % j->num_shares];
		for (int64_t piece; (piece = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->end;)
			for (int64_t i = starts[piece], end = starts[piece + 1]; i < end; i++) {
				if (i + 1 < end)
					prefetch(w, &calls[i + 1]);
				make_call(w, &calls[i]);
			}
	}
}

void run_work(const work *w, const openmp *o, unsigned threads) {
	share one, *shares = aligned_alloc(_Alignof(share), threads * sizeof *shares); // not on the stack: a thread may be lent little
	job j = {w, (int (*)(void))o->thread_num, shares, (int)threads};
	if (shares == NULL) {
		j.shares = &one;
		j.num_shares = 1;
	}
	for (int64_t k = 0; k < j.num_shares; k++)
		j.shares[k] = (share){w->pieces * k / j.num_shares, w->pieces * (k + 1) / j.num_shares};
	// All threads that torch's operations have, even if some find nothing to do: OpenMP ends those that a smaller team leaves out, and
	// torch's next operation would start them anew.
	unsigned all = (unsigned)((int (*)(void))o->max_threads)();
	((void (*)(void (*)(void *), void *, unsigned, unsigned))o->parallel)(one_thread, &j, all > threads ? all : threads, 0);
	free(shares);
}
