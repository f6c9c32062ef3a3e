//go:build python

// torch has no public C interface without its C++ headers but DLPack, which tells neither lazy negation nor inference mode, and
// none to bump a version; asking through Python costs more than a small update. What DLPack lacks is read from the tensor's
// memory, at places that _places.py has found by comparing samples with what Python says of them.

#include "tensor.h"

typedef struct {
	uint32_t major, minor;
	void *previous;
	void *allocator, *managed_from_object, *managed_to_object;
	int (*tensor_from_object)(void *object, dl_tensor *out);
	void *current_work_stream;
} dl_exchange;

static int (*tensor_from_object)(void *, dl_tensor *);
static PyTypeObject *tensor_type, *parameter_type;

// Offsets in bytes: of the tensor's implementation in the Python object; in there, of the keys and of the version counter; in
// there, of the version.
static Py_ssize_t implementation_place, keys_place, counter_place, version_place;
static unsigned long long plain_keys;

int tensor_install(PyObject *capsule, PyObject *tensor, PyObject *parameter, PyObject *places) {
	dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
	if (api == NULL)
		return -1;
	if (api->major != 1 || api->tensor_from_object == NULL) {
		PyErr_Format(PyExc_ImportError, "roundpipe_go: torch speaks version %u of DLPack's exchange API, want 1", api->major);
		return -1;
	}
	if (!PyArg_ParseTuple(places, "nnnnK", &implementation_place, &keys_place, &counter_place, &version_place, &plain_keys))
		return -1;
	tensor_from_object = api->tensor_from_object;
	tensor_type = (PyTypeObject *)Py_NewRef(tensor);
	parameter_type = (PyTypeObject *)Py_NewRef(parameter);
	return 0;
}

static const char *implementation(PyObject *object) { return *(const char **)((char *)object + implementation_place); }

int tensor_is_plain(PyObject *object) {
	if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type)
		return 0;
	return *(const uint64_t *)(implementation(object) + keys_place) == plain_keys;
}

int tensor_view(PyObject *object, dl_tensor *view) {
	if (tensor_from_object(object, view) != 0) {
		PyErr_Clear();
		return 0;
	}
	return view->device_type == DL_CPU && view->type_lanes == 1 && view->byte_offset == 0;
}

void tensor_bump(PyObject *object, uint32_t times) {
	if (!tensor_is_plain(object))
		return; // another thread has made it something else meanwhile
	char *counter = *(char **)(implementation(object) + counter_place);
	__atomic_fetch_add((uint32_t *)(counter + version_place), times, __ATOMIC_RELAXED);
}

void tensor_prefetch(PyObject *object) {
	const char *memory = implementation(object);
	__builtin_prefetch(memory);
	__builtin_prefetch(memory + 64);
	__builtin_prefetch(memory + 128);
}
