/* The C fast path of `Pipeline.capture`, for small values.
 *
 * Capturing a number or a small tensor mostly costs the creation of a few Python objects. Here
 * they are created without a Python frame. Everything else (a condition, several queues, a full
 * queue, a large value or one of another class) is left to Python: `FastCapture` then returns
 * None and has changed nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

#define FIELDS 16 /* of a Record */

static PyObject *str_dtype, *str_shape, *str_pending, *str_numpy, *str_empty;

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
} QueueState;

static PyMemberDef state_members[] = {
    {"put", T_LONGLONG, offsetof(QueueState, put), 0, "bytes that ever entered the queue"},
    {"got", T_LONGLONG, offsetof(QueueState, got), 0, "bytes that ever left it"},
    {"captured", T_LONGLONG, offsetof(QueueState, captured), 0, "values that took the fast path"},
    {"nbytes", T_LONGLONG, offsetof(QueueState, nbytes), 0, "their bytes"},
    {"spent_ns", T_LONGLONG, offsetof(QueueState, spent_ns), 0, "the time they took"},
    {"asleep", T_BOOL, offsetof(QueueState, asleep), 0, "whether the thread waits to be woken"},
    {NULL},
};

static PyTypeObject QueueStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.pipeline._fast.QueueState",
    .tp_doc = "Numbers that the training thread and the thread of a queue share.",
    .tp_basicsize = sizeof(QueueState),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
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
} FastCapture;

enum { FLOAT = 0, ARRAY = 1, TAKE = 2 };

/* A value as a record holds it; `dtype` and `shape` are NULL unless it is a tensor. */
typedef struct {
    PyObject *value, *dtype, *shape;
    long long nbytes;
} Snapshot;

static int capture_init(FastCapture *self, PyObject *args, PyObject *kwargs)
{
#define NAME(name) #name,
    static char *names[] = {REFERENCES(NAME) "budget", "small", "overhead", NULL};
#define LOCAL(name) PyObject *name;
    REFERENCES(LOCAL)
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO!O!OOOOOOO!LLL", names, &record,
                                     &tensor, &ticket, &kind, &PyDict_Type, &classes,
                                     &PyDict_Type, &dtypes, &ranks, &next, &append, &hurry,
                                     &wake, &sink, &QueueStateType, &state, &self->budget,
                                     &self->small, &self->overhead))
        return -1;
#define KEEP(name) Py_XSETREF(self->name, Py_NewRef(name));
    REFERENCES(KEEP)
    Py_XSETREF(self->one, PyLong_FromLong(1));
    Py_XSETREF(self->zero, PyLong_FromLong(0));
    Py_XSETREF(self->no_shape, PyTuple_New(0));
    return self->no_shape == NULL ? -1 : 0;
}

static int capture_traverse(FastCapture *self, visitproc visit, void *arg)
{
#define VISIT(name) Py_VISIT(self->name);
    REFERENCES(VISIT)
    return 0;
}

static int capture_clear(FastCapture *self)
{
#define CLEAR(name) Py_CLEAR(self->name);
    REFERENCES(CLEAR)
    CLEAR(one) CLEAR(zero) CLEAR(no_shape)
    return 0;
}

static void capture_dealloc(FastCapture *self)
{
    PyObject_GC_UnTrack(self);
    capture_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

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

/* Copy a small NumPy array; return 1 if done, 0 to leave it to Python, -1 on error. */
static int take_array(FastCapture *self, PyObject *array, Snapshot *snapshot)
{
    PyObject *descr = PyObject_GetAttr(array, str_dtype);
    if (descr == NULL)
        return -1;
    PyObject *dtype = PyDict_GetItemWithError(self->dtypes, descr); /* borrowed */
    Py_DECREF(descr);
    if (dtype == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* strided, or a dtype without the buffer protocol */
        return 0;
    }
    snapshot->dtype = Py_NewRef(dtype);
    snapshot->nbytes = view.len;
    int fit = view.len <= self->small ? fits(self, view.len) : 0;
    PyObject *data = fit > 0 ? PyBytes_FromStringAndSize(view.buf, view.len) : NULL;
    PyBuffer_Release(&view);
    if (data == NULL)
        return fit <= 0 ? fit : -1;
    snapshot->shape = PyObject_GetAttr(array, str_shape);
    if (snapshot->shape != NULL) {
        PyObject *fields[] = {str_numpy, dtype, snapshot->shape, data};
        snapshot->value = PyObject_Vectorcall(self->tensor, fields, 4, NULL);
    }
    Py_DECREF(data);
    return snapshot->value != NULL ? 1 : -1;
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
    default:
        return take_other(self, PyTuple_GET_ITEM(info, 2), value, snapshot);
    }
}

static PyObject *make_record(FastCapture *self, PyObject *const *args, PyObject *info,
                             const Snapshot *snapshot)
{
    PyObject *record = NULL, *name = args[1], *number = args[2], *step = args[3], *call = args[4];
    PyObject *rank = PyObject_CallNoArgs(self->ranks);
    if (rank == NULL)
        return NULL;
    if (!PyTuple_Check(rank) || PyTuple_GET_SIZE(rank) != 2) {
        PyErr_SetString(PyExc_TypeError, "ranks() must return a rank and a world size");
        Py_DECREF(rank);
        return NULL;
    }
    PyObject *seq = PyObject_CallNoArgs(self->next);
    PyObject *time = PyLong_FromLongLong(now_ns(CLOCK_REALTIME));
    PyObject *tags = PyDict_New();
    if (seq != NULL && time != NULL && tags != NULL) {
        PyObject *fields[FIELDS] = {
            name, self->kind, step == Py_None ? number : step,
            step == Py_None ? self->zero : call, seq, PyTuple_GET_ITEM(rank, 0),
            PyTuple_GET_ITEM(rank, 1), time, PyTuple_GET_ITEM(info, 1),
            snapshot->dtype ? snapshot->dtype : str_empty,
            snapshot->shape ? snapshot->shape : self->no_shape,
            Py_None, Py_None, snapshot->value, Py_None, tags,
        };
        record = PyObject_Vectorcall(self->record, fields, FIELDS, NULL);
    }
    Py_XDECREF(tags); Py_XDECREF(time); Py_XDECREF(seq); Py_DECREF(rank);
    return record;
}

/* Queue a record; return its ticket. */
static PyObject *enqueue(FastCapture *self, PyObject *record, long long nbytes)
{
    QueueState *state = (QueueState *)self->state;
    PyObject *ticket_fields[] = {self->one, self->hurry};
    PyObject *ticket = PyObject_Vectorcall(self->ticket, ticket_fields, 2, NULL);
    PyObject *weight = PyLong_FromLongLong(nbytes + self->overhead);
    PyObject *entry = ticket && weight ? PyTuple_Pack(3, record, ticket, weight) : NULL;
    PyObject *appended = entry ? PyObject_CallOneArg(self->append, entry) : NULL;
    Py_XDECREF(weight); Py_XDECREF(entry);
    if (appended == NULL) {
        Py_XDECREF(ticket);
        return NULL;
    }
    Py_DECREF(appended);
    state->put += nbytes + self->overhead;
    state->captured += 1;
    state->nbytes += nbytes;
    if (state->asleep) {
        state->asleep = 0;
        PyObject *woken = PyObject_CallNoArgs(self->wake);
        if (woken == NULL)
            Py_CLEAR(ticket);
        Py_XDECREF(woken);
    }
    return ticket;
}

/* (value, name, number, step, call) -> Ticket, or None if Python has to capture the value */
static PyObject *capture_call(FastCapture *self, PyObject *const *args, size_t nargsf,
                              PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) != 5 || kwnames != NULL || self->no_shape == NULL) {
        PyErr_SetString(PyExc_TypeError, "expected value, name, number, step, call");
        return NULL;
    }
    long long start = now_ns(CLOCK_MONOTONIC);
    PyObject *info = PyDict_GetItemWithError(self->classes, (PyObject *)Py_TYPE(args[0]));
    if (info == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(info); /* another thread may replace it while Python code runs below */
    Snapshot snapshot = {NULL, NULL, NULL, 0};
    PyObject *ticket = NULL;
    int taken = take(self, info, args[0], &snapshot);
    if (taken > 0) {
        PyObject *record = make_record(self, args, info, &snapshot);
        if (record != NULL) {
            ticket = enqueue(self, record, snapshot.nbytes);
            Py_DECREF(record);
        }
        ((QueueState *)self->state)->spent_ns += now_ns(CLOCK_MONOTONIC) - start;
    }
    Py_XDECREF(snapshot.value); Py_XDECREF(snapshot.dtype); Py_XDECREF(snapshot.shape);
    Py_DECREF(info);
    return taken == 0 ? Py_NewRef(Py_None) : ticket;
}

static PyObject *capture_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *self = PyType_GenericNew(type, args, kwargs);
    if (self != NULL)
        ((FastCapture *)self)->call = (vectorcallfunc)capture_call;
    return self;
}

static PyTypeObject FastCaptureType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.pipeline._fast.FastCapture",
    .tp_doc = "Captures small values: (value, name, number, step, call) -> Ticket | None",
    .tp_basicsize = sizeof(FastCapture),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(FastCapture, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = capture_new,
    .tp_init = (initproc)capture_init,
    .tp_dealloc = (destructor)capture_dealloc,
    .tp_traverse = (traverseproc)capture_traverse,
    .tp_clear = (inquiry)capture_clear,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.pipeline._fast",
    .m_doc = "The fast path for small values, in C.", .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    str_dtype = PyUnicode_InternFromString("dtype");
    str_shape = PyUnicode_InternFromString("shape");
    str_pending = PyUnicode_InternFromString("pending");
    str_numpy = PyUnicode_InternFromString("numpy");
    str_empty = PyUnicode_InternFromString("");
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddType(made, &QueueStateType) < 0 ||
        PyModule_AddType(made, &FastCaptureType) < 0 ||
        PyModule_AddIntConstant(made, "FLOAT", FLOAT) < 0 ||
        PyModule_AddIntConstant(made, "ARRAY", ARRAY) < 0 ||
        PyModule_AddIntConstant(made, "TAKE", TAKE) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
