//go:build python

// A whole step of plain parameters in one call: float32, float64 or complex, dense, on the CPU, with their state, all of one
// precision, under options that are plain numbers. It takes a tenth of the time of the same facts through Python's attributes.
// What is not plain it leaves to _step.py, which knows all cases and their reasons, and then has changed nothing.
//
// Python calls it by ctypes, since gopy's functions let the GIL go; the build tag keeps Python's headers out of the Go tests.
//
// Calls into Python may let the GIL go, and other threads may then change what is being read. So tensors are first found and
// referenced; then, without another such call, their addresses are read and the step is entered.

#include "tensor.h"

#include <float.h>
#include <math.h>
#include <string.h>

// The tables of doc.go.
typedef struct {
	int64_t param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, numel, layout;
} row;

typedef struct {
	double weight_decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, step_size, eps, step, flags;
} group;

#define STEP_FLOAT64 ((int64_t)1 << 32)
enum { NO_DECAY, L2_DECAY, DECOUPLED_DECAY, AMSGRAD = 1 << 2, MAXIMIZE = 1 << 3 };
enum { FLOAT32, FLOAT64 };
enum { GENERIC }; // of the backends

typedef struct {
	int64_t rows, num_rows, groups, num_groups, dtype, threads, backend, arithmetic, square_root;
} call;

// roundpipe_go_step is pybind.Step. It returns -1 with the error's text in message.
extern int64_t roundpipe_go_step(int64_t calls, int64_t num_calls, char *message, int64_t size);

// What Python's group of parameters says.
typedef struct {
	double lr, beta1, beta2, eps, weight_decay;
	int amsgrad, maximize, decoupled;
} options;

enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, STEP, MAX_EXP_AVG_SQ, NUM_TENSORS };

// A parameter that has a gradient. All are references.
typedef struct {
	PyObject *tensors[NUM_TENSORS];  // the maximum is NULL without amsgrad
	PyObject *storages[NUM_TENSORS]; // NULL where they need not be held
	PyObject *entry;                 // of the optimizer's state
	Py_ssize_t options;
} item;

typedef struct {
	PyObject *key; // of the optimizer in owners
	options *options;
	item *items;
	row *rows;
	group *groups;
	Py_ssize_t num_options, num_items, room_items, num_groups, room_groups;
	int64_t numel;
	int dtype; // -1 before the first tensor
} step;

// How far ahead memory is asked for, in parameters.
enum { AHEAD = 4 };

// More distinct step counts than that in a group are for Python.
enum { MAX_COUNTS = 64 };

static PyObject *grad_name, *params_name, *lr_name, *betas_name, *eps_name, *weight_decay_name, *amsgrad_name,
    *maximize_name, *decoupled_name, *foreach_name, *fused_name, *capturable_name, *differentiable_name;
static PyObject *state_names[NUM_TENSORS];
static PyObject *untyped_storage; // the unbound method of Tensor
static PyObject *condition_wait;  // the code of threading.Condition.wait
static PyObject *owners;          // _alone.owners: who is in a step of an optimizer, by the optimizer's id

// Each of the following returns 1 for yes, 0 for no ("not plain": Python decides), -1 with an exception.

static int number(PyObject *object, double *value) {
	if (object == NULL)
		return 0;
	if (PyFloat_CheckExact(object)) {
		*value = PyFloat_AS_DOUBLE(object);
		return 1;
	}
	if (!PyLong_CheckExact(object))
		return 0;
	*value = PyLong_AsDouble(object);
	if (*value == -1 && PyErr_Occurred()) {
		PyErr_Clear();
		return 0;
	}
	return fabs(*value) < 0x1p26; // Python computes exactly with integers, and with larger ones their product shows it
}

static int flag(PyObject *object, int *value) {
	*value = object == Py_True;
	return object == Py_True || object == Py_False;
}

static int off(PyObject *object) { return object == Py_None || object == Py_False; }

// read_options takes only what the kernels serve; _step.unserved_options has the reasons.
static int read_options(PyObject *from, options *o) {
	PyObject *betas = PyDict_GetItem(from, betas_name);
	if (betas == NULL || !(PyTuple_CheckExact(betas) || PyList_CheckExact(betas)) || PySequence_Fast_GET_SIZE(betas) != 2)
		return 0;
	return number(PySequence_Fast_GET_ITEM(betas, 0), &o->beta1) && number(PySequence_Fast_GET_ITEM(betas, 1), &o->beta2) &&
	       number(PyDict_GetItem(from, lr_name), &o->lr) && number(PyDict_GetItem(from, eps_name), &o->eps) &&
	       number(PyDict_GetItem(from, weight_decay_name), &o->weight_decay) &&
	       flag(PyDict_GetItem(from, amsgrad_name), &o->amsgrad) && flag(PyDict_GetItem(from, maximize_name), &o->maximize) &&
	       flag(PyDict_GetItem(from, decoupled_name), &o->decoupled) && off(PyDict_GetItem(from, foreach_name)) &&
	       off(PyDict_GetItem(from, fused_name)) && off(PyDict_GetItem(from, capturable_name)) &&
	       off(PyDict_GetItem(from, differentiable_name)) && isfinite(o->beta1) && isfinite(o->beta2) && o->beta1 > 0x1p-25 &&
	       o->beta2 >= 0;
}

// add_item takes over the references.
static int add_item(step *s, PyObject *param, PyObject *grad, PyObject *entry) {
	if (s->num_items == s->room_items) {
		Py_ssize_t room = 2 * s->room_items + 16;
		item *items = PyMem_Realloc(s->items, sizeof *items * (size_t)room);
		if (items == NULL) {
			PyErr_NoMemory();
			return -1;
		}
		s->items = items;
		s->room_items = room;
	}
	s->items[s->num_items++] = (item){.tensors = {[PARAM] = Py_NewRef(param), [GRAD] = Py_NewRef(grad)},
	                                  .entry = Py_NewRef(entry), .options = s->num_options - 1};
	return 1;
}

// next_is reports whether a parameter's entry is the next one of the optimizer's state, whose order is mostly that of the parameters,
// and then moves the cursor past it. That saves the call of Tensor.__hash__, a Python function. The entry is a borrowed reference.
static int next_is(PyObject *state, PyObject *param, Py_ssize_t *cursor, PyObject **entry) {
	PyObject *key;
	Py_ssize_t next = *cursor;
	if (!PyDict_Next(state, &next, &key, entry) || key != param)
		return 0;
	*cursor = next;
	return 1;
}

// add_params finds the parameters of a group that have a gradient, and their state.
static int add_params(step *s, PyObject *params, PyObject *state, Py_ssize_t *cursor) {
	int plain = 1;
	for (Py_ssize_t i = 0; plain > 0 && i < PyList_GET_SIZE(params); i++) {
		PyObject *param = Py_NewRef(PyList_GET_ITEM(params, i));
		PyObject *grad = NULL, *entry;
		if (i + AHEAD < PyList_GET_SIZE(params))
			__builtin_prefetch(PyList_GET_ITEM(params, i + AHEAD));
		if (!tensor_is_plain(param))
			plain = 0;
		else if ((grad = PyObject_GetAttr(param, grad_name)) == NULL)
			plain = -1;
		else if (next_is(state, param, cursor, &entry) || grad == Py_None ||
		         (entry = PyDict_GetItemWithError(state, param)) != NULL) {
			if (grad != Py_None && (plain = PyDict_CheckExact(entry))) {
				plain = add_item(s, param, grad, entry);
				__builtin_prefetch(((PyDictObject *)entry)->ma_keys);
			}
		} else
			plain = PyErr_Occurred() ? -1 : 0;
		Py_XDECREF(grad);
		Py_DECREF(param);
	}
	return plain;
}

static int add_groups(step *s, PyObject *param_groups, PyObject *state) {
	Py_ssize_t cursor = 0, num = PyList_GET_SIZE(param_groups);
	s->options = PyMem_Calloc((size_t)num + 1, sizeof *s->options);
	if (s->options == NULL) {
		PyErr_NoMemory();
		return -1;
	}
	int plain = 1;
	for (Py_ssize_t i = 0; plain > 0 && i < num && i < PyList_GET_SIZE(param_groups); i++) {
		PyObject *from = Py_NewRef(PyList_GET_ITEM(param_groups, i));
		PyObject *params = PyDict_CheckExact(from) ? Py_XNewRef(PyDict_GetItem(from, params_name)) : NULL;
		plain = params != NULL && PyList_CheckExact(params) && read_options(from, &s->options[s->num_options++]);
		if (plain)
			plain = add_params(s, params, state, &cursor);
		Py_XDECREF(params);
		Py_DECREF(from);
	}
	return plain;
}

// find_state takes references to the tensors of the state.
static int find_state(step *s) {
	for (Py_ssize_t i = 0; i < s->num_items; i++) {
		item *it = &s->items[i];
		int last = s->options[it->options].amsgrad ? MAX_EXP_AVG_SQ : STEP;
		for (int k = EXP_AVG; k <= last; k++) {
			PyObject *tensor = PyDict_GetItem(it->entry, state_names[k]);
			if (tensor == NULL)
				return 0;
			it->tensors[k] = Py_NewRef(tensor);
		}
	}
	return 1;
}

// dense reports whether the elements fill one block of memory, in any order of the dimensions, and how many they are.
static int dense(const dl_tensor *t, int64_t *numel) {
	int64_t extent = 1;
	int in_order = t->strides == NULL;
	*numel = 1;
	for (int i = 0; i < t->ndim; i++)
		*numel *= t->shape[i];
	if (in_order || *numel == 0)
		return 1;
	for (int i = t->ndim - 1; i >= 0; i--) { // C order, the usual one
		if (t->shape[i] != 1 && t->strides[i] != extent)
			break;
		extent *= t->shape[i];
	}
	if (extent == *numel)
		return 1;
	for (extent = 1; extent < *numel;) { // some other order: from the nearest dimension outwards
		int i = 0;
		while (i < t->ndim && (t->shape[i] == 1 || t->strides[i] != extent))
			i++;
		if (i == t->ndim)
			return 0;
		extent *= t->shape[i];
	}
	return 1;
}

// like reports whether a tensor has param's type, shape and order of elements, and where it is.
static int like(PyObject *object, const dl_tensor *param, int64_t *address) {
	dl_tensor t;
	if (!tensor_is_plain(object) || !tensor_view(object, &t) || t.type_code != param->type_code || t.type_bits != param->type_bits ||
	    t.ndim != param->ndim)
		return 0;
	for (int i = 0; i < t.ndim; i++) {
		if (t.shape[i] != param->shape[i])
			return 0;
		if (t.strides == NULL || param->strides == NULL || (t.shape[i] != 1 && t.strides[i] != param->strides[i]))
			return 0;
	}
	*address = (int64_t)(intptr_t)t.data;
	return 1;
}

// constants fills in a group's constants at a count, by the expressions of _descriptors.Table.add_group, which has torch's. pow
// is what Python calls for **.
static int constants(const options *o, double count, int dtype, group *g) {
	const double largest = dtype == FLOAT32 ? FLT_MAX : DBL_MAX;
	double power1 = pow(o->beta1, count), power2 = pow(o->beta2, count);
	double bias_correction1 = 1 - power1, bias_correction2 = 1 - power2;
	if (!isfinite(power1) || !isfinite(power2) || bias_correction1 == 0 || bias_correction2 < 0)
		return 0;
	int decays = o->weight_decay != 0;
	*g = (group){
	    .weight_decay = !decays ? 0 : o->decoupled ? 1 - o->lr * o->weight_decay : o->weight_decay,
	    .one_minus_beta1 = 1 - o->beta1,
	    .beta2 = o->beta2,
	    .one_minus_beta2 = 1 - o->beta2,
	    .bias_correction2_sqrt = pow(bias_correction2, 0.5),
	    .step_size = o->lr / bias_correction1,
	    .eps = o->eps,
	    .step = count,
	    .flags = (!decays ? NO_DECAY : o->decoupled ? DECOUPLED_DECAY : L2_DECAY) | (o->amsgrad ? AMSGRAD : 0) |
	             (o->maximize ? MAXIMIZE : 0),
	};
	double checked[] = {g->one_minus_beta1, g->one_minus_beta2, g->step_size, o->decoupled ? 0 : g->weight_decay};
	for (size_t i = 0; i < sizeof checked / sizeof *checked; i++)
		if (isfinite(checked[i]) && fabs(checked[i]) > largest)
			return 0;
	return 1;
}

// group_at finds or makes the group of some options at a count. first is the first group of these options.
static int group_at(step *s, const options *o, double count, Py_ssize_t first, int64_t *index) {
	for (Py_ssize_t i = s->num_groups - 1; i >= first; i--)
		if (s->groups[i].step == count) {
			*index = i;
			return 1;
		}
	if (s->num_groups - first == MAX_COUNTS || count != count)
		return 0;
	if (s->num_groups == s->room_groups) {
		Py_ssize_t room = 2 * s->room_groups + 4;
		group *groups = PyMem_Realloc(s->groups, sizeof *groups * (size_t)room);
		if (groups == NULL) {
			PyErr_NoMemory();
			return -1;
		}
		s->groups = groups;
		s->room_groups = room;
	}
	*index = s->num_groups;
	return constants(o, count, s->dtype, &s->groups[s->num_groups++]);
}

// add_row reads where a parameter and its tensors are.
static int add_row(step *s, const item *it, Py_ssize_t first, row *out) {
	const options *o = &s->options[it->options];
	dl_tensor p, t;
	int64_t one, index = 0;
	*out = (row){0};
	if (!tensor_is_plain(it->tensors[PARAM]) || !tensor_view(it->tensors[PARAM], &p) || !dense(&p, &out->numel))
		return 0;
	int complex = p.type_code == DL_COMPLEX, bits = complex ? p.type_bits / 2 : p.type_bits;
	if ((p.type_code != DL_FLOAT && !complex) || (complex && o->weight_decay != 0) || (bits != 32 && bits != 64))
		return 0;
	int dtype = bits == 32 ? FLOAT32 : FLOAT64;
	if (s->dtype >= 0 && dtype != s->dtype)
		return 0;
	s->dtype = dtype;
	out->numel *= 1 + complex;
	out->param = (int64_t)(intptr_t)p.data;
	if (!like(it->tensors[GRAD], &p, &out->grad) || !like(it->tensors[EXP_AVG], &p, &out->exp_avg) ||
	    !like(it->tensors[EXP_AVG_SQ], &p, &out->exp_avg_sq) ||
	    (it->tensors[MAX_EXP_AVG_SQ] != NULL && !like(it->tensors[MAX_EXP_AVG_SQ], &p, &out->max_exp_avg_sq)))
		return 0;
	if (!tensor_is_plain(it->tensors[STEP]) || !tensor_view(it->tensors[STEP], &t) || t.type_code != DL_FLOAT ||
	    (t.type_bits != 32 && t.type_bits != 64) || !dense(&t, &one) || one != 1)
		return 0;
	out->step = (int64_t)(intptr_t)t.data;
	s->numel += out->numel;
	double count = t.type_bits == 32 ? (double)(*(const float *)t.data + 1.0f) : *(const double *)t.data + 1.0;
	int found = group_at(s, o, count, first, &index);
	out->layout = index | (t.type_bits == 64 ? STEP_FLOAT64 : 0);
	return found;
}

static int add_rows(step *s) {
	Py_ssize_t first = 0;
	s->numel = s->num_groups = 0;
	if (s->rows == NULL && (s->rows = PyMem_Malloc(sizeof *s->rows * ((size_t)s->num_items + 1))) == NULL) {
		PyErr_NoMemory();
		return -1;
	}
	for (Py_ssize_t i = 0; i < s->num_items; i++) {
		const item *it = &s->items[i];
		if (i + AHEAD < s->num_items)
			for (int k = 0; k < NUM_TENSORS; k++)
				if (it[AHEAD].tensors[k] != NULL)
					tensor_prefetch(it[AHEAD].tensors[k]);
		if (i > 0 && it->options != it[-1].options)
			first = s->num_groups;
		int plain = add_row(s, it, first, &s->rows[i]);
		if (plain <= 0)
			return plain;
	}
	return 1;
}

// waits reports whether a thread is in threading.Condition.wait, as those of progress bars, loggers and queues mostly are: what it
// calls there are locks.
static int waits(PyThreadState *thread) {
	PyFrameObject *frame = PyThreadState_GetFrame(thread);
	if (frame == NULL)
		return 0;
	PyCodeObject *code = PyFrame_GetCode(frame);
	int yes = (PyObject *)code == condition_wait;
	Py_DECREF(code);
	Py_DECREF(frame);
	return yes;
}

// others_run reports whether other threads may be in one of torch's methods, which let the GIL go.
static int others_run(void) {
	PyThreadState *self = PyThreadState_Get(), *t = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
	int collects = PyGC_Disable(); // a finalizer could let the GIL go, and a thread of the list end
	while (t != NULL && (t == self || waits(t)))
		t = PyThreadState_Next(t);
	if (collects)
		PyGC_Enable();
	return t != NULL;
}

// hold_storages takes references to the memory itself. Those to tensors are not enough where another thread gives a tensor other
// memory meanwhile, as param.data = other does.
static int hold_storages(step *s) {
	for (Py_ssize_t i = 0; i < s->num_items; i++)
		for (int k = 0; k < NUM_TENSORS; k++) {
			PyObject *tensor = s->items[i].tensors[k];
			if (tensor != NULL && (s->items[i].storages[k] = PyObject_CallOneArg(untyped_storage, tensor)) == NULL)
				return -1;
		}
	return 1;
}

static int compare(const void *a, const void *b) {
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return (x > y) - (x < y);
}

// counters_differ reports whether no two rows have the same counter, which torch would increase twice.
static int counters_differ(const step *s) {
	Py_ssize_t i = 1;
	while (i < s->num_items && s->rows[i - 1].step < s->rows[i].step)
		i++;
	if (i >= s->num_items)
		return 1; // an allocator mostly goes upwards
	int64_t *sorted = PyMem_Malloc(sizeof *sorted * (size_t)s->num_items);
	if (sorted == NULL) {
		PyErr_NoMemory();
		return -1;
	}
	for (i = 0; i < s->num_items; i++)
		sorted[i] = s->rows[i].step;
	qsort(sorted, (size_t)s->num_items, sizeof *sorted, compare);
	int differ = 1;
	for (i = 1; i < s->num_items; i++)
		differ &= sorted[i - 1] != sorted[i];
	PyMem_Free(sorted);
	return differ;
}

// bump makes the versions what torch's operations would have made them: it writes exp_avg_sq twice, and a decoupled decay is a
// write of its own.
static void bump(const step *s) {
	for (Py_ssize_t i = 0; i < s->num_items; i++) {
		const item *it = &s->items[i];
		const options *o = &s->options[it->options];
		tensor_bump(it->tensors[PARAM], 1 + (o->decoupled && o->weight_decay != 0));
		tensor_bump(it->tensors[EXP_AVG], 1);
		tensor_bump(it->tensors[EXP_AVG_SQ], 2);
		tensor_bump(it->tensors[STEP], 1);
		if (it->tensors[MAX_EXP_AVG_SQ] != NULL)
			tensor_bump(it->tensors[MAX_EXP_AVG_SQ], 1);
	}
}

// is_long reports whether a step may take longer than some 5 ms, Python's switch interval. A shorter one keeps the GIL: to get it back
// from a thread that computes in Python may take as long, and nobody waits for it longer than for such a thread. An element takes a
// thread up to 1.5 ns; of float64 four times that, and without vectors sixty times. Nor does a step let the GIL go for less time than
// it has taken with it to read the tensors, some 2 µs each parameter, if that is less than some 10 ms.
static int is_long(const step *s, int64_t threads, int64_t backend) {
	int64_t work = s->numel * (backend == GENERIC ? 64 : s->dtype == FLOAT64 ? 4 : 1) / (threads > 1 ? 2 : 1);
	return work > (int64_t)1 << 21 && (work > (int64_t)s->num_items << 11 || work > (int64_t)1 << 23);
}

// compute enters Go. A long step lets the GIL go meanwhile, and is in owners then, for which it must be the only one.
static int compute(const step *s, const call *c, char *message, int64_t size, int64_t *unserved) {
	if (!is_long(s, c->threads, c->backend)) {
		int taken = PyDict_GET_SIZE(owners) > 0 ? PyDict_Contains(owners, s->key) : 0;
		if (taken != 0)
			return taken < 0 ? -1 : 0;
		*unserved = roundpipe_go_step((intptr_t)c, 1, message, size);
		return 1;
	}
	PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
	PyObject *owner = thread != NULL ? PyDict_SetDefault(owners, s->key, thread) : NULL;
	if (owner == thread && owner != NULL) {
		PyThreadState *released = PyEval_SaveThread();
		*unserved = roundpipe_go_step((intptr_t)c, 1, message, size);
		PyEval_RestoreThread(released);
		if (PyDict_GetItem(owners, s->key) == thread && PyDict_DelItem(owners, s->key) != 0)
			PyErr_Clear();
	}
	int mine = owner == thread;
	Py_XDECREF(thread);
	return owner == NULL ? -1 : mine;
}

// run takes the step. settings is the tuple (arithmetic, square root) of the dtype, or None: no kernel then has torch's bits, or
// Python has not found out yet. A step of an optimizer that is in a step already is for _alone.py.
static int run(step *s, PyObject *settings, long threads, long backend) {
	char message[512] = "";
	long arithmetic, square_root;
	int64_t unserved;
	if (settings == Py_None)
		return 0;
	if (!PyArg_ParseTuple(settings, "ll", &arithmetic, &square_root))
		return -1;
	call c = {(intptr_t)s->rows, s->num_items, (intptr_t)s->groups, s->num_groups, s->dtype, threads, backend, arithmetic, square_root};
	int alone = compute(s, &c, message, sizeof message, &unserved);
	if (alone <= 0)
		return alone;
	if (unserved > 0)
		return 0;
	bump(s); // also after an error: elements may have been written
	if (unserved == 0)
		return 1;
	PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
	if (text != NULL)
		PyErr_SetObject(PyExc_RuntimeError, text);
	Py_XDECREF(text);
	return -1;
}

static void clear(step *s) {
	for (Py_ssize_t i = 0; i < s->num_items; i++) {
		for (int k = 0; k < NUM_TENSORS; k++) {
			Py_XDECREF(s->items[i].tensors[k]);
			Py_XDECREF(s->items[i].storages[k]);
		}
		Py_DECREF(s->items[i].entry);
	}
	PyMem_Free(s->options);
	PyMem_Free(s->items);
	PyMem_Free(s->rows);
	PyMem_Free(s->groups);
}

// step(key, param_groups, state, settings, threads, backend) -> bool: whether the step was taken; if not, nothing was changed.
// key is the optimizer's in owners. settings has, for float32 and for float64, a tuple of the codes of arithmetic and square root, or None.
static PyObject *step_plain(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
	(void)module;
	if (nargs != 6 || !PyLong_CheckExact(args[0]) || !PyList_CheckExact(args[3]) || PyList_GET_SIZE(args[3]) != 2)
		return PyErr_Format(PyExc_TypeError, "roundpipe_go: step takes key, param_groups, state, settings, threads and backend");
	long threads = PyLong_AsLong(args[4]), backend = PyLong_AsLong(args[5]);
	if (PyErr_Occurred())
		return NULL;
	if (!PyList_CheckExact(args[1]) || !PyDict_Check(args[2]))
		Py_RETURN_FALSE;
	step s = {.key = args[0], .dtype = -1};
	int plain = add_groups(&s, args[1], args[2]);
	if (plain > 0)
		plain = find_state(&s);
	int hold = plain > 0 && others_run();
	if (hold)
		plain = hold_storages(&s);
	if (plain > 0)
		plain = add_rows(&s);
	if (plain > 0 && !hold && is_long(&s, threads, backend)) {
		plain = hold_storages(&s);
		if (plain > 0)
			plain = add_rows(&s); // again: the call may have let a new thread run
	}
	if (plain > 0)
		plain = counters_differ(&s);
	if (plain > 0 && s.num_items > 0)
		plain = run(&s, PyList_GET_ITEM(args[3], s.dtype), threads, backend);
	clear(&s);
	return plain < 0 ? NULL : PyBool_FromLong(plain);
}

static PyMethodDef method = {"step", (PyCFunction)(void (*)(void))step_plain, METH_FASTCALL, "Takes a plain step."};

// roundpipe_go_plain_step returns the function step; the arguments are owners and those of tensor_install. Call it with the GIL held.
PyObject *roundpipe_go_plain_step(PyObject *owned, PyObject *capsule, PyObject *tensor, PyObject *parameter, PyObject *places) {
	struct {
		PyObject **name;
		const char *text;
	} names[] = {
	    {&grad_name, "grad"}, {&params_name, "params"}, {&lr_name, "lr"}, {&betas_name, "betas"}, {&eps_name, "eps"},
	    {&weight_decay_name, "weight_decay"}, {&amsgrad_name, "amsgrad"}, {&maximize_name, "maximize"},
	    {&decoupled_name, "decoupled_weight_decay"}, {&foreach_name, "foreach"}, {&fused_name, "fused"},
	    {&capturable_name, "capturable"}, {&differentiable_name, "differentiable"}, {&state_names[EXP_AVG], "exp_avg"},
	    {&state_names[EXP_AVG_SQ], "exp_avg_sq"}, {&state_names[STEP], "step"}, {&state_names[MAX_EXP_AVG_SQ], "max_exp_avg_sq"},
	};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
			return NULL;
	if ((untyped_storage = PyObject_GetAttrString(tensor, "untyped_storage")) == NULL)
		return NULL;
	PyObject *threading = PyImport_ImportModule("threading");
	PyObject *condition = threading != NULL ? PyObject_GetAttrString(threading, "Condition") : NULL;
	PyObject *wait = condition != NULL ? PyObject_GetAttrString(condition, "wait") : NULL;
	condition_wait = wait != NULL ? PyObject_GetAttrString(wait, "__code__") : NULL;
	Py_XDECREF(wait);
	Py_XDECREF(condition);
	Py_XDECREF(threading);
	if (condition_wait == NULL)
		return NULL;
	if (!PyDict_CheckExact(owned))
		return PyErr_Format(PyExc_TypeError, "roundpipe_go: owners is no dict");
	owners = Py_NewRef(owned);
	if (tensor_install(capsule, tensor, parameter, places) != 0)
		return NULL;
	return PyCFunction_New(&method, NULL);
}
