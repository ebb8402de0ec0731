/* Looking at small values, and copying them, for the fast path: see `_fast.c`. */
static PyObject *str_dtype, *str_shape, *str_pending, *str_numpy, *str_empty, *str_data;
static PyObject *str_framework, *str_float, *str_int;
static PyObject *str_is_cpu, *str_is_neg, *str_is_conj, *str_is_contiguous, *str_data_ptr;
static PyObject *str_storage_offset, *str_element_size;

static long long now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (long long)t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- QueueState: numbers that the training thread and the thread of a queue share ---- */

typedef struct {
    PyObject_HEAD
    long long put, got, captured, nbytes, spent_ns;
    char asleep;
    PyObject *block; /* the ColumnWriter that takes records; None or NULL if there is none */
} QueueState;

static void state_dealloc(QueueState *self)
{
    Py_XDECREF(self->block);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef state_members[] = {
    {"put", T_LONGLONG, offsetof(QueueState, put), 0, "bytes that ever entered the queue"},
    {"got", T_LONGLONG, offsetof(QueueState, got), 0, "bytes that ever left it"},
    {"captured", T_LONGLONG, offsetof(QueueState, captured), 0, "values that took the fast path"},
    {"nbytes", T_LONGLONG, offsetof(QueueState, nbytes), 0, "their bytes"},
    {"spent_ns", T_LONGLONG, offsetof(QueueState, spent_ns), 0, "the time they took"},
    {"asleep", T_BOOL, offsetof(QueueState, asleep), 0, "whether the thread waits to be woken"},
    {"block", T_OBJECT, offsetof(QueueState, block), 0, "the block that takes small records"},
    {NULL},
};

static PyTypeObject QueueStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.capture._fast.QueueState",
    .tp_doc = "Numbers that the training thread and the thread of a queue share.",
    .tp_basicsize = sizeof(QueueState),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)state_dealloc,
    .tp_members = state_members,
};

/* ---- FastCapture ---- */

/* record, tensor, ticket: the classes; kind: Kind.VALUE; classes: class -> (how, its name,
 * take_small); dtypes: NumPy dtype -> name; ranks: () -> (rank, world size); next: () -> seq;
 * append: of the queue's deque; hurry: for the ticket; wake: wakes the queue's thread */
#define REFERENCES(DO) \
    DO(record) DO(tensor) DO(ticket) DO(kind) DO(classes) DO(dtypes) DO(ranks) DO(next) \
    DO(append) DO(hurry) DO(wake) DO(sink) DO(state)

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
#define DECLARE(name) PyObject *name;
    REFERENCES(DECLARE)
    PyObject *one, *zero, *no_shape;
    long long budget, small, overhead;
    int columns; /* whether the sink takes blocks of records */
} FastCapture;

enum { FLOAT = 0, ARRAY = 1, TAKE = 2, READ = 3 };

/* A value as a record holds it; `dtype` and `shape` are NULL unless it is a tensor. The value of
 * a small array, or of a tensor that can be read in place, is only made for a record: columns copy
 * the bytes in `view` or of `tensor` (borrowed). */
typedef struct {
    PyObject *value, *dtype, *shape, *tensor;
    long long nbytes;
    Py_buffer view;
} Snapshot;

/* Return whether `nbytes` more keep the queue within its budget; -1 on error. */
static int fits(FastCapture *self, long long nbytes)
{
    QueueState *state = (QueueState *)self->state;
    long long queued = state->put - state->got;
    if (queued == 0)
        return 1;
    PyObject *pending = PyObject_GetAttr(self->sink, str_pending);
    if (pending == NULL)
        return -1;
    long long unsettled = PyLong_AsLongLong(pending);
    Py_DECREF(pending);
    if (unsettled == -1 && PyErr_Occurred())
        return -1;
    return queued + unsettled + nbytes + self->overhead <= self->budget;
}

/* Look at a small NumPy array; return 1 if done, 0 to leave it to Python, -1 on error. */
static int take_array(FastCapture *self, PyObject *array, Snapshot *snapshot)
{
    PyObject *descr = PyObject_GetAttr(array, str_dtype);
    if (descr == NULL)
        return -1;
    PyObject *dtype = PyDict_GetItemWithError(self->dtypes, descr); /* borrowed */
    Py_DECREF(descr);
    if (dtype == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (PyObject_GetBuffer(array, &snapshot->view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* strided, or a dtype without the buffer protocol */
        return 0;
    }
    snapshot->dtype = Py_NewRef(dtype);
    snapshot->nbytes = snapshot->view.len;
    int fit = snapshot->nbytes <= self->small ? fits(self, snapshot->nbytes) : 0;
    if (fit <= 0)
        return fit;
    snapshot->shape = PyObject_GetAttr(array, str_shape);
    return snapshot->shape != NULL ? 1 : -1;
}

/* Make the value of an array, for a record; return -1 on error. */
static int copy_array(FastCapture *self, Snapshot *snapshot)
{
    PyObject *data = PyBytes_FromStringAndSize(snapshot->view.buf, snapshot->view.len);
    if (data == NULL)
        return -1;
    PyObject *fields[] = {str_numpy, snapshot->dtype, snapshot->shape, data};
    snapshot->value = PyObject_Vectorcall(self->tensor, fields, 4, NULL);
    Py_DECREF(data);
    return snapshot->value != NULL ? 0 : -1;
}

/* Copy a small value with `take_small` of its adapter; the result is as of `take_array`. */
static int take_other(FastCapture *self, PyObject *take_small, PyObject *value, Snapshot *snapshot)
{
    PyObject *taken = PyObject_CallOneArg(take_small, value);
    if (taken == NULL)
        return -1;
    if (!PyTuple_CheckExact(taken) || PyTuple_GET_SIZE(taken) != 2) {
        Py_DECREF(taken); /* None: not small */
        return 0;
    }
    snapshot->nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(taken, 1));
    int fit = snapshot->nbytes == -1 && PyErr_Occurred() ? -1 : fits(self, snapshot->nbytes);
    if (fit > 0)
        snapshot->value = Py_NewRef(PyTuple_GET_ITEM(taken, 0));
    Py_DECREF(taken);
    if (fit > 0 && (PyObject *)Py_TYPE(snapshot->value) == self->tensor) {
        snapshot->dtype = PyObject_GetAttr(snapshot->value, str_dtype);
        snapshot->shape = snapshot->dtype ? PyObject_GetAttr(snapshot->value, str_shape) : NULL;
        if (snapshot->shape == NULL)
            return -1;
    }
    return fit;
}

/* Return the integer that a method gives; 0 if it gives none, and no error is set. */
static uintptr_t number_of(PyObject *tensor, PyObject *method)
{
    PyObject *number = PyObject_CallMethodNoArgs(tensor, method);
    void *found = number != NULL ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    PyErr_Clear();
    return (uintptr_t)found;
}

/* Return the address of a tensor's bytes; NULL if it has none, or its storage has been freed: then the
 * address of a view is its offset. */
static const char *address_of(PyObject *tensor)
{
    uintptr_t address = number_of(tensor, str_data_ptr);
    uintptr_t offset = number_of(tensor, str_storage_offset);
    if (offset != 0 && address == offset * number_of(tensor, str_element_size))
        return NULL;
    return (const char *)address;
}

/* Return whether a result is true, and release it; -1 if it is an error. */
static int is_true(PyObject *result)
{
    int truth = result != NULL ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}

/* Return whether reading an attribute of a tensor would run Python code; -1 on error. */
static int is_overridden(PyObject *tensor, PyObject *overridden)
{
    PyObject *tensors = PyTuple_Pack(1, tensor);
    int special = tensors ? is_true(PyObject_CallOneArg(overridden, tensors)) : -1;
    Py_XDECREF(tensors);
    return special;
}

/* Return whether a tensor's bytes in memory are its values, in C order; -1 on error. */
static int is_plain(PyObject *tensor, long lazy)
{
    if (is_true(PyObject_GetAttr(tensor, str_is_cpu)) != 1 ||
        (lazy >= 1 && is_true(PyObject_CallMethodNoArgs(tensor, str_is_neg)) != 0) ||
        (lazy >= 2 && is_true(PyObject_CallMethodNoArgs(tensor, str_is_conj)) != 0))
        return 0;
    return is_true(PyObject_CallMethodNoArgs(tensor, str_is_contiguous));
}

/* Look at a small tensor; return 1 if it can be read in place, else 0, and no error is set. */
static int read_tensor(FastCapture *self, PyObject *info, PyObject *tensor, Snapshot *snapshot)
{
    int plain = 0;
    PyObject *size = NULL, *dtype = is_overridden(tensor, PyTuple_GET_ITEM(info, 5)) == 0
                                        ? PyObject_GetAttr(tensor, str_dtype) : NULL;
    PyObject *known = dtype ? PyDict_GetItemWithError(PyTuple_GET_ITEM(info, 4), dtype) : NULL;
    Py_XDECREF(dtype);
    if (known != NULL) { /* borrowed, from a dict that does not change */
        long lazy = PyLong_AsLong(PyTuple_GET_ITEM(known, 2));
        plain = is_plain(tensor, lazy);
        size = plain == 1 ? PyObject_GetAttr(tensor, str_shape) : NULL;
    }
    PyObject *shape = size != NULL ? PySequence_Tuple(size) : NULL; /* not torch's subclass */
    Py_XDECREF(size);
    if (shape != NULL) {
        long long nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 1));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape) && nbytes <= self->small; i++)
            nbytes *= PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (0 < nbytes && nbytes <= self->small && address_of(tensor) != NULL) {
            snapshot->dtype = Py_NewRef(PyTuple_GET_ITEM(known, 0));
            snapshot->shape = shape;
            snapshot->nbytes = nbytes;
            snapshot->tensor = tensor;
            return 1;
        }
        Py_DECREF(shape);
    }
    PyErr_Clear(); /* its adapter knows what to do */
    return 0;
}

static int take(FastCapture *self, PyObject *info, PyObject *value, Snapshot *snapshot)
{
    switch (PyLong_AsLong(PyTuple_GET_ITEM(info, 0))) {
    case FLOAT: {
        int fit = fits(self, snapshot->nbytes = 8);
        if (fit > 0)
            snapshot->value = Py_NewRef(value);
        return fit;
    }
    case ARRAY:
        return take_array(self, value, snapshot);
    case READ:
        if (self->columns && read_tensor(self, info, value, snapshot))
            return fits(self, snapshot->nbytes);
        /* fall through */
    default:
        return take_other(self, PyTuple_GET_ITEM(info, 2), value, snapshot);
    }
}
