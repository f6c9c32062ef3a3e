//go:build python

// Fills in the rows of a group straight from the tensor objects, at a tenth of what the same facts cost through Python's
// attributes. What is not plain (float32, contiguous, with its state, on the CPU) it leaves to _descriptors.py, which knows all
// cases and their reasons. Python reaches it by ctypes, since gopy's functions let the GIL go; the build tag keeps Python's
// headers out of the Go tests.
//
// torch's methods let the GIL go as well, and other threads may then change what is being read. So there are two passes: the
// first takes references and calls what must be called, the second reads shapes and addresses and calls nothing of the kind.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

typedef struct {
	uint32_t major, minor;
	void *previous;
	void *allocator, *managed_from_object, *managed_to_object;
	int (*tensor_from_object)(void *object, dl_tensor *out);
	void *current_work_stream;
} dl_exchange;

enum { DL_CPU = 1, DL_FLOAT = 2 };

// ---- what install was given

static int (*tensor_from_object)(void *, dl_tensor *);
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *is_neg, *is_inference; // unbound methods of Tensor, which let the GIL go
static PyObject *grad_name, *step_name, *exp_avg_name, *exp_avg_sq_name, *max_exp_avg_sq_name;

// A row of doc.go.
typedef struct {
	int64_t param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, numel, layout;
} row;

enum { MAX_COUNTS = 64 };

// The tensors of a row that change, in this order in the list of written tensors; the maximum only with amsgrad.
enum { PARAM, EXP_AVG, EXP_AVG_SQ, STEP, MAX_EXP_AVG_SQ };
#define STEP_FLOAT64 ((int64_t)1 << 32)

// Each of the following returns 1 for yes, 0 for no ("not plain": Python decides), -1 with an exception.

static int holds(PyObject *method, PyObject *tensor) {
	PyObject *result = PyObject_Vectorcall(method, &tensor, 1, NULL);
	if (result == NULL)
		return -1;
	int yes = result == Py_True;
	Py_DECREF(result);
	return yes;
}

// view_of fills view if object is a plain CPU tensor.
static int view_of(PyObject *object, dl_tensor *view) {
	if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type)
		return 0;
	if (tensor_from_object(object, view) != 0) {
		PyErr_Clear(); // sparse, or on a device without memory of its own
		return 0;
	}
	return view->device_type == DL_CPU && view->type_code == DL_FLOAT && view->type_lanes == 1 && view->byte_offset == 0;
}

// dense reports whether the elements fill one block of memory in C order. Other orders are Python's.
static int dense(const dl_tensor *t, int64_t *numel) {
	int64_t extent = 1;
	int yes = 1;
	for (int i = t->ndim - 1; i >= 0; i--) {
		if (t->shape[i] != 1 && t->strides != NULL && t->strides[i] != extent)
			yes = 0;
		extent *= t->shape[i];
	}
	*numel = extent;
	return yes || extent == 0;
}

// same_block reports whether object is a plain float32 tensor of param's shape, in C order, and where it is.
static int same_block(PyObject *object, const dl_tensor *param, int64_t *address) {
	dl_tensor t;
	int64_t numel;
	if (object == NULL)
		return 0;
	int plain = view_of(object, &t);
	if (plain <= 0)
		return plain;
	if (t.type_bits != 32 || t.ndim != param->ndim ||
	    memcmp(t.shape, param->shape, sizeof *t.shape * (size_t)t.ndim) != 0 || !dense(&t, &numel))
		return 0;
	*address = (int64_t)(intptr_t)t.data;
	return 1;
}

// next_count returns the counter's value after the increment, as torch rounds it.
static double next_count(const dl_tensor *step) {
	return step->type_bits == 32 ? (double)(*(const float *)step->data + 1.0f) : *(const double *)step->data + 1.0;
}

// vetted reports whether a tensor was looked at in the step before: lazily negated tensors and those of inference mode, which
// torch refuses to write, look like any other from here, and to ask costs as much as all the rest.
static int vetted(PyObject *tensor, PyObject *before, Py_ssize_t index) {
	if (index < PyList_GET_SIZE(before) && PyList_GET_ITEM(before, index) == tensor)
		return 1;
	if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type)
		return 0;
	int no = holds(is_neg, tensor);
	if (no == 0)
		no = holds(is_inference, tensor);
	return no < 0 ? -1 : !no;
}

// keep takes references to the tensors of one parameter and vets them: the first pass.
static int keep(PyObject *param, PyObject *grad, PyObject *entry, int amsgrad, PyObject *before, PyObject *written, PyObject *grads) {
	PyObject *names[] = {NULL, exp_avg_name, exp_avg_sq_name, step_name, max_exp_avg_sq_name};
	Py_ssize_t first = PyList_GET_SIZE(written);
	int num = amsgrad ? 5 : 4;
	if (!PyDict_CheckExact(entry))
		return 0;
	if (PyList_Append(grads, grad) != 0)
		return -1;
	for (int i = 0; i < num; i++) {
		PyObject *tensor = i == PARAM ? param : PyDict_GetItemWithError(entry, names[i]);
		if (tensor == NULL)
			return PyErr_Occurred() ? -1 : 0;
		if (PyList_Append(written, tensor) != 0)
			return -1;
	}
	for (int i = 0; i < num; i++) {
		int yes = vetted(PyList_GET_ITEM(written, first + i), before, first + i);
		if (yes <= 0)
			return yes;
	}
	if (Py_TYPE(grad) != tensor_type)
		return 0;
	int no = holds(is_neg, grad);
	return no < 0 ? -1 : !no;
}

// fill_in writes the row of one parameter: the second pass.
static int fill_in(PyObject *const *tensors, PyObject *grad, int amsgrad, int64_t first_group, double *counts, int *num_counts,
                   row *out) {
	dl_tensor p, step;
	int64_t one;
	int plain = view_of(tensors[PARAM], &p);
	if (plain <= 0)
		return plain;
	if (p.type_bits != 32 || !dense(&p, &out->numel))
		return 0;
	out->param = (int64_t)(intptr_t)p.data;
	out->max_exp_avg_sq = 0;
	if ((plain = same_block(grad, &p, &out->grad)) <= 0 || (plain = same_block(tensors[EXP_AVG], &p, &out->exp_avg)) <= 0 ||
	    (plain = same_block(tensors[EXP_AVG_SQ], &p, &out->exp_avg_sq)) <= 0 ||
	    (amsgrad && (plain = same_block(tensors[MAX_EXP_AVG_SQ], &p, &out->max_exp_avg_sq)) <= 0) ||
	    (plain = view_of(tensors[STEP], &step)) <= 0)
		return plain;
	if (!dense(&step, &one) || one != 1 || (step.type_bits != 32 && step.type_bits != 64))
		return 0;
	out->step = (int64_t)(intptr_t)step.data;

	double count = next_count(&step);
	int k = *num_counts - 1;
	while (k >= 0 && counts[k] != count)
		k--;
	if (k < 0) {
		if (*num_counts == MAX_COUNTS || count != count)
			return 0;
		k = (*num_counts)++;
		counts[k] = count;
	}
	out->layout = (first_group + k) | (step.type_bits == 64 ? STEP_FLOAT64 : 0);
	return 1;
}

// state_of finds a parameter's entry in the optimizer's state. The state's order is mostly that of the parameters: then the
// entry is the next one, which saves the call of Tensor.__hash__, a Python function. A new reference; NULL if there is none.
static PyObject *state_of(PyObject *state, PyObject *param, Py_ssize_t *cursor) {
	PyObject *key, *entry;
	Py_ssize_t next = *cursor;
	if (PyDict_Next(state, &next, &key, &entry) && key == param)
		*cursor = next;
	else
		entry = PyDict_GetItemWithError(state, param);
	return Py_XNewRef(entry);
}

// pass_over moves the cursor past a parameter that has no gradient now, but had one.
static void pass_over(PyObject *state, PyObject *param, Py_ssize_t *cursor) {
	PyObject *key;
	Py_ssize_t next = *cursor;
	if (PyDict_Next(state, &next, &key, NULL) && key == param)
		*cursor = next;
}

// pack(params, state, amsgrad, first_group, cursor, before) -> (rows, counts, written, grads, cursor), or None if a parameter
// with a gradient is not plain or has no state yet. rows is bytes in the layout of doc.go, whose groups count from first_group
// on; counts has a value after the increment for each of them; written and grads are the tensors that the rows point into.
// cursor is where in the state the next group is expected, 0 for the first; before is what was written in the step before.
static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
	(void)module;
	if (nargs != 6 || !PyList_CheckExact(args[0]) || !PyDict_Check(args[1]) || !PyList_CheckExact(args[5]))
		Py_RETURN_NONE;
	PyObject *params = args[0], *state = args[1], *before = args[5];
	int amsgrad = PyObject_IsTrue(args[2]);
	Py_ssize_t first_group = PyLong_AsSsize_t(args[3]), cursor = PyLong_AsSsize_t(args[4]);
	if (PyErr_Occurred())
		return NULL;
	double counts[MAX_COUNTS];
	int num_counts = 0, plain = 1, width = amsgrad ? 5 : 4;
	row *rows = NULL;
	PyObject *written = PyList_New(0), *grads = PyList_New(0), *values = NULL, *result = NULL;
	if (written == NULL || grads == NULL)
		goto done;
	for (Py_ssize_t i = 0; plain > 0 && i < PyList_GET_SIZE(params); i++) {
		PyObject *param = Py_NewRef(PyList_GET_ITEM(params, i));
		PyObject *grad = PyObject_GetAttr(param, grad_name), *entry = NULL;
		if (grad == NULL)
			plain = -1;
		else if (grad == Py_None)
			pass_over(state, param, &cursor);
		else if ((entry = state_of(state, param, &cursor)) != NULL)
			plain = keep(param, grad, entry, amsgrad, before, written, grads);
		else
			plain = PyErr_Occurred() ? -1 : 0;
		Py_XDECREF(entry);
		Py_XDECREF(grad);
		Py_DECREF(param);
	}
	Py_ssize_t num_rows = PyList_GET_SIZE(grads);
	if (plain > 0 && (rows = PyMem_Malloc(sizeof *rows * (size_t)(num_rows + 1))) == NULL) {
		PyErr_NoMemory();
		plain = -1;
	}
	for (Py_ssize_t i = 0; plain > 0 && i < num_rows; i++) {
		PyObject *tensors[5] = {NULL};
		for (int k = 0; k < width; k++)
			tensors[k] = PyList_GET_ITEM(written, i * width + k);
		plain = fill_in(tensors, PyList_GET_ITEM(grads, i), amsgrad, first_group, counts, &num_counts, &rows[i]);
	}
	if (plain == 0)
		result = Py_NewRef(Py_None);
	if (plain <= 0 || (values = PyTuple_New(num_counts)) == NULL)
		goto done;
	for (int k = 0; k < num_counts; k++) {
		PyObject *value = PyFloat_FromDouble(counts[k]);
		if (value == NULL)
			goto done;
		PyTuple_SET_ITEM(values, k, value);
	}
	result = Py_BuildValue("(y#OOOn)", (const char *)rows, num_rows * (Py_ssize_t)sizeof *rows, values, written, grads, cursor);
done:
	Py_XDECREF(values);
	Py_XDECREF(grads);
	Py_XDECREF(written);
	PyMem_Free(rows);
	return result;
}

static PyMethodDef pack_method = {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, "Rows of plain parameters, or None."};

// roundpipe_go_pack returns the function pack for tensors of the given types, whose exchange API is in the capsule, or NULL with
// an exception. Call it with the GIL held.
PyObject *roundpipe_go_pack(PyObject *capsule, PyObject *tensor, PyObject *parameter) {
	dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
	if (api == NULL)
		return NULL;
	if (api->major != 1 || api->tensor_from_object == NULL)
		return PyErr_Format(PyExc_ImportError, "roundpipe_go: torch speaks version %u of DLPack's exchange API, want 1", api->major);
	tensor_from_object = api->tensor_from_object;
	tensor_type = (PyTypeObject *)Py_NewRef(tensor);
	parameter_type = (PyTypeObject *)Py_NewRef(parameter);
	is_neg = PyObject_GetAttrString(tensor, "is_neg");
	is_inference = PyObject_GetAttrString(tensor, "is_inference");
	grad_name = PyUnicode_InternFromString("grad");
	step_name = PyUnicode_InternFromString("step");
	exp_avg_name = PyUnicode_InternFromString("exp_avg");
	exp_avg_sq_name = PyUnicode_InternFromString("exp_avg_sq");
	max_exp_avg_sq_name = PyUnicode_InternFromString("max_exp_avg_sq");
	if (PyErr_Occurred())
		return NULL;
	return PyCFunction_New(&pack_method, NULL);
}
