/* The capture of a small value, in C: what `Session.capture` does in the common case.
 *
 * A catch of a number or a small tensor is mostly the cost of making a few Python objects. Here
 * they are made without a single Python frame. Whatever is not common (a condition, several
 * sinks, a queue over its budget, a value that is large or of another class) is left to Python:
 * `FastCapture.__call__` then returns None and has changed nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

#define FIELDS 16 /* of a Record */

static PyObject *str_dtype, *str_shape, *str_pending;

static long long now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (long long)t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- QueueState: the numbers that the training thread and the background thread share ---- */

typedef struct {
    PyObject_HEAD
    long long put;      /* bytes that ever went into the queue */
    long long got;      /* bytes that ever left it */
    long long captured; /* small values, and the rest of their bill */
    long long nbytes;
    long long spent_ns;
    char asleep;        /* the background thread waits for the bell */
} QueueState;

static PyMemberDef state_members[] = {
    {"put", T_LONGLONG, offsetof(QueueState, put), 0, "bytes that ever went into the queue"},
    {"got", T_LONGLONG, offsetof(QueueState, got), 0, "bytes that ever left it"},
    {"captured", T_LONGLONG, offsetof(QueueState, captured), 0, "small values that were captured"},
    {"nbytes", T_LONGLONG, offsetof(QueueState, nbytes), 0, "their bytes"},
    {"spent_ns", T_LONGLONG, offsetof(QueueState, spent_ns), 0, "the time they took"},
    {"asleep", T_BOOL, offsetof(QueueState, asleep), 0, "whether the bell has to be rung"},
    {NULL},
};

static PyTypeObject QueueStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.pipeline._fast.QueueState",
    .tp_doc = "The numbers that the training thread and the background thread share.",
    .tp_basicsize = sizeof(QueueState),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_members = state_members,
};

/* ---- FastCapture ---- */

typedef struct {
    PyObject_HEAD
    PyObject *record;    /* the class */
    PyObject *tensor;    /* the class TensorData */
    PyObject *ticket;    /* the class */
    PyObject *kind;      /* Kind.VALUE */
    PyObject *classes;   /* class -> (how, name of the class, take_small) */
    PyObject *dtypes;    /* NumPy dtype -> name */
    PyObject *ranks;     /* () -> (rank, world size) */
    PyObject *next;      /* () -> the next number in the order of capture */
    PyObject *append;    /* of the queue */
    PyObject *hurry;
    PyObject *wake;
    PyObject *sink;
    QueueState *state;
    PyObject *numpy;     /* "numpy" */
    PyObject *one, *zero, *empty, *nothing;
    long long budget, small, overhead;
} FastCapture;

enum { FLOAT = 0, ARRAY = 1, TAKE = 2 };

static int capture_init(FastCapture *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"record", "tensor", "ticket", "kind", "classes", "dtypes", "ranks",
                            "next", "append", "hurry", "wake", "sink", "state",
                            "budget", "small", "overhead", NULL};
    PyObject *record, *tensor, *ticket, *kind, *classes, *dtypes, *ranks, *next, *append, *hurry,
        *wake, *sink;
    QueueState *state;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO!O!OOOOOOO!LLL", names, &record,
                                     &tensor, &ticket, &kind, &PyDict_Type, &classes,
                                     &PyDict_Type, &dtypes, &ranks, &next, &append, &hurry,
                                     &wake, &sink, &QueueStateType, &state, &self->budget,
                                     &self->small, &self->overhead))
        return -1;
#define KEEP(field) Py_XSETREF(self->field, (void *)Py_NewRef((PyObject *)field))
    KEEP(record); KEEP(tensor); KEEP(ticket); KEEP(kind); KEEP(classes); KEEP(dtypes);
    KEEP(ranks); KEEP(next); KEEP(append); KEEP(hurry); KEEP(wake); KEEP(sink);
    KEEP(state);
#undef KEEP
    Py_XSETREF(self->numpy, PyUnicode_InternFromString("numpy"));
    Py_XSETREF(self->one, PyLong_FromLong(1));
    Py_XSETREF(self->zero, PyLong_FromLong(0));
    Py_XSETREF(self->empty, PyUnicode_InternFromString(""));
    Py_XSETREF(self->nothing, PyTuple_New(0));
    return self->nothing == NULL ? -1 : 0;
}

static int capture_traverse(FastCapture *self, visitproc visit, void *arg)
{
    Py_VISIT(self->record); Py_VISIT(self->tensor); Py_VISIT(self->ticket);
    Py_VISIT(self->kind); Py_VISIT(self->classes); Py_VISIT(self->dtypes);
    Py_VISIT(self->ranks); Py_VISIT(self->next); Py_VISIT(self->append);
    Py_VISIT(self->hurry); Py_VISIT(self->wake); Py_VISIT(self->sink);
    Py_VISIT(self->nothing);
    return 0;
}

static int capture_clear(FastCapture *self)
{
    Py_CLEAR(self->record); Py_CLEAR(self->tensor); Py_CLEAR(self->ticket);
    Py_CLEAR(self->kind); Py_CLEAR(self->classes); Py_CLEAR(self->dtypes);
    Py_CLEAR(self->ranks); Py_CLEAR(self->next); Py_CLEAR(self->append);
    Py_CLEAR(self->hurry); Py_CLEAR(self->wake); Py_CLEAR(self->sink);
    Py_CLEAR(self->nothing); Py_CLEAR(self->state);
    Py_CLEAR(self->numpy); Py_CLEAR(self->one); Py_CLEAR(self->zero); Py_CLEAR(self->empty);
    return 0;
}

static void capture_dealloc(FastCapture *self)
{
    PyObject_GC_UnTrack(self);
    capture_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Whether `nbytes` more keep the queue within its budget; -1 on error. */
static int fits(FastCapture *self, long long nbytes)
{
    long long queued = self->state->put - self->state->got;
    if (queued == 0)
        return 1;
    PyObject *pending = PyObject_GetAttr(self->sink, str_pending);
    if (pending == NULL)
        return -1;
    long long under_way = PyLong_AsLongLong(pending);
    Py_DECREF(pending);
    if (under_way == -1 && PyErr_Occurred())
        return -1;
    return queued + under_way + nbytes + self->overhead <= self->budget;
}

/* A small NumPy array as TensorData; 1 done, 0 not common, -1 error. */
static int take_array(FastCapture *self, PyObject *value, PyObject **snapshot, PyObject **dtype,
                      PyObject **shape, long long *nbytes)
{
    PyObject *descr = PyObject_GetAttr(value, str_dtype);
    if (descr == NULL)
        return -1;
    PyObject *name = PyDict_GetItemWithError(self->dtypes, descr); /* borrowed */
    Py_DECREF(descr);
    if (name == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_buffer view;
    if (PyObject_GetBuffer(value, &view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* strided, or a dtype that the buffer protocol has not */
        return 0;
    }
    Py_INCREF(name);
    *nbytes = view.len;
    int fit = view.len <= self->small ? fits(self, view.len) : 0;
    PyObject *data = fit > 0 ? PyBytes_FromStringAndSize(view.buf, view.len) : NULL;
    PyBuffer_Release(&view);
    if (data == NULL) {
        Py_DECREF(name);
        return fit <= 0 ? fit : -1;
    }
    *shape = PyObject_GetAttr(value, str_shape);
    if (*shape == NULL) {
        Py_DECREF(data);
        Py_DECREF(name);
        return -1;
    }
    PyObject *parts[] = {self->numpy, name, *shape, data};
    *snapshot = PyObject_Vectorcall(self->tensor, parts, 4, NULL);
    Py_DECREF(data);
    if (*snapshot == NULL) {
        Py_CLEAR(*shape);
        Py_DECREF(name);
        return -1;
    }
    *dtype = name;
    return 1;
}

/* A small value of another class through its adapter; 1 done, 0 not common, -1 error. */
static int take_other(FastCapture *self, PyObject *take, PyObject *value, PyObject **snapshot,
                      PyObject **dtype, PyObject **shape, long long *nbytes)
{
    PyObject *taken = PyObject_CallOneArg(take, value);
    if (taken == NULL)
        return -1;
    if (!PyTuple_CheckExact(taken) || PyTuple_GET_SIZE(taken) != 2) {
        Py_DECREF(taken); /* None: it is not small */
        return 0;
    }
    *nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(taken, 1));
    int fit = *nbytes == -1 && PyErr_Occurred() ? -1 : fits(self, *nbytes);
    if (fit <= 0) {
        Py_DECREF(taken);
        return fit;
    }
    *snapshot = Py_NewRef(PyTuple_GET_ITEM(taken, 0));
    Py_DECREF(taken);
    if ((PyObject *)Py_TYPE(*snapshot) == self->tensor) {
        *dtype = PyObject_GetAttr(*snapshot, str_dtype);
        *shape = *dtype ? PyObject_GetAttr(*snapshot, str_shape) : NULL;
        if (*shape == NULL) {
            Py_CLEAR(*dtype);
            Py_CLEAR(*snapshot);
            return -1;
        }
    }
    return 1;
}

/* hot(value, name, number, step, call) -> Ticket, or None when it is not the common case */
static PyObject *capture_call(FastCapture *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) != 5 || kwnames != NULL || self->nothing == NULL) {
        PyErr_SetString(PyExc_TypeError, "value, name, number, step, call");
        return NULL;
    }
    long long start = now_ns(CLOCK_MONOTONIC);
    PyObject *value = args[0], *name = args[1], *number = args[2], *step = args[3];
    PyObject *info = PyDict_GetItemWithError(self->classes, (PyObject *)Py_TYPE(value));
    if (info == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(info); /* another thread may learn the class anew while Python code runs below */
    PyObject *snapshot = NULL, *dtype = NULL, *shape = NULL;
    long long nbytes = 8;
    int done;
    switch (PyLong_AsLong(PyTuple_GET_ITEM(info, 0))) {
    case FLOAT:
        done = fits(self, nbytes);
        snapshot = done > 0 ? Py_NewRef(value) : NULL;
        break;
    case ARRAY:
        done = take_array(self, value, &snapshot, &dtype, &shape, &nbytes);
        break;
    default:
        done = take_other(self, PyTuple_GET_ITEM(info, 2), value, &snapshot, &dtype, &shape,
                          &nbytes);
    }
    if (done <= 0) {
        Py_DECREF(info);
        if (done < 0)
            return NULL;
        Py_RETURN_NONE;
    }

    PyObject *ticket = NULL, *record = NULL, *entry = NULL, *rank = NULL, *sequence = NULL,
             *moment = NULL, *tags = NULL, *weight = NULL, *done_append = NULL;
    rank = PyObject_CallNoArgs(self->ranks);
    if (rank != NULL && (!PyTuple_Check(rank) || PyTuple_GET_SIZE(rank) != 2))
        PyErr_SetString(PyExc_TypeError, "a rank and a world size are wanted");
    if (PyErr_Occurred())
        goto end;
    sequence = PyObject_CallNoArgs(self->next);
    moment = PyLong_FromLongLong(now_ns(CLOCK_REALTIME));
    tags = PyDict_New();
    if (sequence == NULL || moment == NULL || tags == NULL)
        goto end;
    PyObject *fields[FIELDS] = {
        name, self->kind, step == Py_None ? number : step, step == Py_None ? self->zero : args[4],
        sequence, PyTuple_GET_ITEM(rank, 0), PyTuple_GET_ITEM(rank, 1), moment,
        PyTuple_GET_ITEM(info, 1), dtype ? dtype : self->empty, shape ? shape : self->nothing,
        Py_None, Py_None, snapshot, Py_None, tags,
    };
    record = PyObject_Vectorcall(self->record, fields, FIELDS, NULL);
    PyObject *for_ticket[] = {self->one, self->hurry};
    ticket = PyObject_Vectorcall(self->ticket, for_ticket, 2, NULL);
    weight = PyLong_FromLongLong(nbytes + self->overhead);
    if (record == NULL || ticket == NULL || weight == NULL) {
        Py_CLEAR(ticket);
        goto end;
    }
    entry = PyTuple_Pack(3, record, ticket, weight);
    done_append = entry ? PyObject_CallOneArg(self->append, entry) : NULL;
    if (done_append == NULL) {
        Py_CLEAR(ticket);
        goto end;
    }
    QueueState *state = self->state;
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
    state->spent_ns += now_ns(CLOCK_MONOTONIC) - start;
end:
    Py_XDECREF(done_append); Py_XDECREF(entry); Py_XDECREF(weight); Py_XDECREF(record);
    Py_XDECREF(tags); Py_XDECREF(moment); Py_XDECREF(sequence); Py_XDECREF(rank);
    Py_XDECREF(shape); Py_XDECREF(dtype); Py_XDECREF(snapshot); Py_DECREF(info);
    return ticket;
}

typedef struct {
    FastCapture hot;
    vectorcallfunc call;
} CallableFastCapture;

static PyObject *capture_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *self = PyType_GenericNew(type, args, kwargs);
    if (self != NULL)
        ((CallableFastCapture *)self)->call = (vectorcallfunc)capture_call;
    return self;
}

static PyTypeObject FastCaptureType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.pipeline._fast.FastCapture",
    .tp_doc = "The capture of a small value: hot(value, name, number, step, call) -> Ticket | None",
    .tp_basicsize = sizeof(CallableFastCapture),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(CallableFastCapture, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = capture_new,
    .tp_init = (initproc)capture_init,
    .tp_dealloc = (destructor)capture_dealloc,
    .tp_traverse = (traverseproc)capture_traverse,
    .tp_clear = (inquiry)capture_clear,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.pipeline._fast",
    .m_doc = "The capture of a small value, in C.", .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    str_dtype = PyUnicode_InternFromString("dtype");
    str_shape = PyUnicode_InternFromString("shape");
    str_pending = PyUnicode_InternFromString("pending");
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
