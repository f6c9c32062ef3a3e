//go:build python

// The one function that holds the GIL: it fills in the rows of a group straight from the tensor objects, at a tenth of what the
// same facts cost through Python's attributes. What is not plain (float32, contiguous, with its state, on the CPU) it leaves to
// _descriptors.py, which knows all cases and their reasons. Python reaches it by ctypes, since gopy's functions let the GIL go;
// the build tag keeps Python's headers out of the Go tests.

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
static PyObject *is_neg, *is_inference; // unbound methods of Tensor
static PyObject *grad_name, *step_name, *exp_avg_name, *exp_avg_sq_name, *max_exp_avg_sq_name;

// A row of doc.go.
typedef struct {
	int64_t param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, numel, layout;
} row;

enum { MAX_COUNTS = 64 };
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

// count returns the counter's value after the increment, as torch rounds it.
static double next_count(const dl_tensor *step) {
	return step->type_bits == 32 ? (double)(*(const float *)step->data + 1.0f) : *(const double *)step->data + 1.0;
}

// pack_one fills in the row of one parameter. Its tensors go to the lists, so that they live until the call is over.
static int pack_one(PyObject *param, PyObject *grad, PyObject *entry, int amsgrad, int64_t first_group, double *counts,
                    int *num_counts, row *out, PyObject *written, PyObject *grads) {
	dl_tensor p, step;
	if (!PyDict_CheckExact(entry))
		return 0;
	PyObject *exp_avg = PyDict_GetItemWithError(entry, exp_avg_name);
	PyObject *exp_avg_sq = PyDict_GetItemWithError(entry, exp_avg_sq_name);
	PyObject *max_exp_avg_sq = amsgrad ? PyDict_GetItemWithError(entry, max_exp_avg_sq_name) : NULL;
	PyObject *counter = PyDict_GetItemWithError(entry, step_name);
	if (PyErr_Occurred())
		return -1;
	if (counter == NULL)
		return 0;

	int plain = view_of(param, &p);
	if (plain <= 0)
		return plain;
	if (p.type_bits != 32 || !dense(&p, &out->numel))
		return 0;
	out->param = (int64_t)(intptr_t)p.data;
	if ((plain = same_block(grad, &p, &out->grad)) <= 0 || (plain = same_block(exp_avg, &p, &out->exp_avg)) <= 0 ||
	    (plain = same_block(exp_avg_sq, &p, &out->exp_avg_sq)) <= 0)
		return plain;
	out->max_exp_avg_sq = 0;
	if (amsgrad && (plain = same_block(max_exp_avg_sq, &p, &out->max_exp_avg_sq)) <= 0)
		return plain;
	if ((plain = view_of(counter, &step)) <= 0)
		return plain;
	int64_t one;
	if (!dense(&step, &one) || one != 1 || (step.type_bits != 32 && step.type_bits != 64))
		return 0;
	out->step = (int64_t)(intptr_t)step.data;

	// A lazily negated tensor looks like any other from here, and so does one of inference mode, which torch refuses to write.
	PyObject *blocks[] = {grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq};
	int num_blocks = amsgrad ? 5 : 4, no = 0;
	for (int i = 0; i < num_blocks && no == 0; i++)
		no = holds(is_neg, blocks[i]);
	if (no == 0)
		no = holds(is_inference, param);
	if (no == 0)
		no = holds(is_inference, exp_avg); // made with the rest of the state
	if (no != 0)
		return no < 0 ? -1 : 0;

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

	for (int i = 1; i < num_blocks; i++)
		if (PyList_Append(written, blocks[i]) != 0)
			return -1;
	return PyList_Append(written, counter) == 0 && PyList_Append(grads, grad) == 0 ? 1 : -1;
}

// state_of finds a parameter's entry in the optimizer's state. The state's order is mostly that of the parameters: then the
// entry is the next one, which saves the call of Tensor.__hash__, a Python function. Borrowed; NULL if there is none.
static PyObject *state_of(PyObject *state, PyObject *param, Py_ssize_t *cursor) {
	PyObject *key, *entry;
	Py_ssize_t next = *cursor;
	if (PyDict_Next(state, &next, &key, &entry) && key == param) {
		*cursor = next;
		return entry;
	}
	return PyDict_GetItemWithError(state, param);
}

// pack(params, state, amsgrad, first_group, cursor) -> (rows, counts, written, grads, cursor), or None if a parameter with a
// gradient is not plain or has no state yet. rows is bytes in the layout of doc.go, whose groups count from first_group on;
// counts has a value after the increment for each of them; written and grads are the tensors that the rows point into. cursor
// is where in the state the next group is expected, 0 for the first.
static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
	(void)module;
	if (nargs != 5 || !PyList_CheckExact(args[0]) || !PyDict_Check(args[1]))
		return PyErr_Format(PyExc_TypeError, "pack takes a list of parameters, the state, amsgrad, the first group and a cursor");
	PyObject *params = args[0], *state = args[1];
	int amsgrad = PyObject_IsTrue(args[2]);
	Py_ssize_t first_group = PyLong_AsSsize_t(args[3]), cursor = PyLong_AsSsize_t(args[4]);
	if (PyErr_Occurred())
		return NULL;
	double counts[MAX_COUNTS];
	int num_counts = 0, plain = 1;
	Py_ssize_t num_rows = 0, num_params = PyList_GET_SIZE(params);
	row *rows = PyMem_Malloc(sizeof *rows * (size_t)(num_params + 1));
	PyObject *written = PyList_New(0), *grads = PyList_New(0), *values = NULL, *result = NULL;
	if (rows == NULL || written == NULL || grads == NULL)
		goto done;
	for (Py_ssize_t i = 0; plain > 0 && i < num_params && i < PyList_GET_SIZE(params); i++) {
		PyObject *param = Py_NewRef(PyList_GET_ITEM(params, i));
		PyObject *grad = PyObject_GetAttr(param, grad_name);
		if (grad == NULL) {
			plain = -1;
		} else if (grad != Py_None) {
			PyObject *entry = state_of(state, param, &cursor);
			if (entry != NULL)
				plain = pack_one(param, grad, entry, amsgrad, first_group, counts, &num_counts, &rows[num_rows++], written, grads);
			else
				plain = PyErr_Occurred() ? -1 : 0;
		}
		Py_XDECREF(grad);
		Py_DECREF(param);
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
