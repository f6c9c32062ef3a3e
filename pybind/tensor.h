// What step.c reads of torch's tensors, without calling torch.

#ifndef ROUNDPIPE_GO_TENSOR_H
#define ROUNDPIPE_GO_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// ---- DLPack, as far as it is needed; https://dmlc.github.io/dlpack, version 1

typedef struct {
	void *data;
	int32_t device_type, device_id;
	int32_t ndim;
	uint8_t type_code, type_bits;
	uint16_t type_lanes;
	int64_t *shape, *strides;
	uint64_t byte_offset;
} dl_tensor;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_COMPLEX = 5 };

// tensor_install takes torch's exchange API, its two types of tensors, and the places that _places.py has learned, in its order.
// Returns 0, or -1 with an exception.
int tensor_install(PyObject *capsule, PyObject *tensor, PyObject *parameter, PyObject *places);

// tensor_is_plain reports whether the object is a dense CPU tensor of one of the two types, and nothing more: no lazy negation or
// conjugation, not of inference mode, no wrapper of a transform.
int tensor_is_plain(PyObject *object);

// tensor_view says where a plain tensor's elements are. Returns 1, or 0 if torch does not say it.
int tensor_view(PyObject *object, dl_tensor *view);

// tensor_bump adds to the version of a plain tensor, by which autograd sees that it was written.
void tensor_bump(PyObject *object, uint32_t times);

// tensor_prefetch asks for the memory that the others will read; it never faults.
void tensor_prefetch(PyObject *object);

#endif
