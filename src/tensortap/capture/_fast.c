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

#include "_columns.h"
#include "_snapshot.h"

#define FIELDS 16 /* of a Record */

/* ---- FastCapture ---- */

static int capture_init(FastCapture *self, PyObject *args, PyObject *kwargs)
{
#define NAME(name) #name,
    static char *names[] = {REFERENCES(NAME) "budget", "small", "overhead", "columns",
                            NULL};
#define LOCAL(name) PyObject *name;
    REFERENCES(LOCAL)
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO!O!OOOOOOO!LLLp", names, &record,
                                     &tensor, &ticket, &kind, &PyDict_Type, &classes,
                                     &PyDict_Type, &dtypes, &ranks, &next, &append, &hurry,
                                     &wake, &sink, &QueueStateType, &state, &self->budget,
                                     &self->small, &self->overhead, &self->columns))
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

/* Return rank and world size as a tuple; NULL on error. */
static PyObject *rank_of(FastCapture *self)
{
    PyObject *rank = PyObject_CallNoArgs(self->ranks);
    if (rank != NULL && (!PyTuple_CheckExact(rank) || PyTuple_GET_SIZE(rank) != 2)) {
        PyErr_SetString(PyExc_TypeError, "ranks() must return a rank and a world size");
        Py_CLEAR(rank);
    }
    return rank;
}

static PyObject *make_record(FastCapture *self, PyObject *const *args, PyObject *info,
                             Snapshot *snapshot)
{
    PyObject *record = NULL, *name = args[1], *number = args[2], *step = args[3], *call = args[4];
    if (snapshot->value == NULL && copy_array(self, snapshot) < 0)
        return NULL;
    PyObject *rank = rank_of(self);
    if (rank == NULL)
        return NULL;
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

static PyObject *make_ticket(FastCapture *self)
{
    PyObject *fields[] = {self->one, self->hurry};
    return PyObject_Vectorcall(self->ticket, fields, 2, NULL);
}

/* Count a queued record and wake the thread of the queue if it sleeps; return -1 on error. */
static int count_queued(FastCapture *self, long long nbytes)
{
    QueueState *state = (QueueState *)self->state;
    state->put += nbytes + self->overhead;
    state->captured += 1;
    state->nbytes += nbytes;
    if (!state->asleep)
        return 0;
    state->asleep = 0;
    PyObject *woken = PyObject_CallNoArgs(self->wake);
    Py_XDECREF(woken);
    return woken != NULL ? 0 : -1;
}

/* Queue a record; return its ticket. */
static PyObject *enqueue(FastCapture *self, PyObject *record, long long nbytes)
{
    PyObject *ticket = make_ticket(self);
    PyObject *weight = PyLong_FromLongLong(nbytes + self->overhead);
    PyObject *entry = ticket && weight ? PyTuple_Pack(3, record, ticket, weight) : NULL;
    Py_CLEAR(((QueueState *)self->state)->block); /* later records come after this one */
    PyObject *appended = entry ? PyObject_CallOneArg(self->append, entry) : NULL;
    Py_XDECREF(weight); Py_XDECREF(entry);
    if (appended == NULL || count_queued(self, nbytes) < 0)
        Py_CLEAR(ticket);
    Py_XDECREF(appended);
    return ticket;
}

/* ---- columns ---- */

/* The bytes of a value, and what the records of its column have in common. */
typedef struct {
    const char *data;
    PyObject *owner, *framework; /* `owner` has the bytes */
    double real;
    int64_t whole;
} Payload;

/* Find the bytes of a value; return 0 if it cannot be in a column, -1 on error. */
static int payload_of(FastCapture *self, PyObject *info, const Snapshot *snapshot,
                      Payload *payload)
{
    PyObject *value = snapshot->value;
    int overflow = 0;
    if (snapshot->tensor != NULL) {
        payload->framework = Py_NewRef(PyTuple_GET_ITEM(info, 3));
    } else if (value == NULL) {
        payload->framework = Py_NewRef(str_numpy);
        payload->data = snapshot->view.buf;
    } else if (PyFloat_CheckExact(value)) {
        payload->framework = Py_NewRef(str_float);
        payload->real = PyFloat_AS_DOUBLE(value);
        payload->data = (char *)&payload->real;
    } else if (PyLong_CheckExact(value)) {
        payload->framework = Py_NewRef(str_int);
        payload->whole = PyLong_AsLongLongAndOverflow(value, &overflow);
        payload->data = (char *)&payload->whole;
    } else if ((PyObject *)Py_TYPE(value) == self->tensor) {
        payload->framework = PyObject_GetAttr(value, str_framework);
        payload->owner = PyObject_GetAttr(value, str_data);
        if (payload->framework == NULL || payload->owner == NULL)
            return -1;
        if (!PyBytes_CheckExact(payload->owner) ||
            PyBytes_GET_SIZE(payload->owner) != snapshot->nbytes)
            return 0;
        payload->data = PyBytes_AS_STRING(payload->owner);
    } else {
        return 0;
    }
    return !overflow && (snapshot->dtype != NULL || snapshot->nbytes == 8);
}

/* Return 1 if a number fits into 64 bits, else 0. */
static int whole(PyObject *number, int64_t *into)
{
    int overflow = 1;
    if (PyLong_CheckExact(number))
        *into = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* Return the block that takes records, which may be a new one; NULL on error. Borrowed. */
static ColumnWriter *open_block(FastCapture *self)
{
    QueueState *state = (QueueState *)self->state;
    ColumnWriter *fresh = NULL;
    for (;;) { /* another thread may open one while a new one is made */
        ColumnWriter *open = (ColumnWriter *)state->block;
        if (open != NULL && (PyObject *)open != Py_None && !writer_is_full(open)) {
            Py_XDECREF(fresh);
            return open;
        }
        if (fresh != NULL)
            break;
        fresh = writer_new(self->overhead);
        if (fresh == NULL)
            return NULL;
    }
    PyObject *appended = PyObject_CallOneArg(self->append, (PyObject *)fresh);
    if (appended == NULL) {
        Py_DECREF(fresh);
        return NULL;
    }
    Py_DECREF(appended);
    PyObject *before = state->block;
    state->block = (PyObject *)fresh;
    Py_XDECREF(before);
    return fresh;
}

/* Add a record to the open block; return 0 if it cannot be in a column, -1 on error. */
static int add_to_block(FastCapture *self, PyObject *const *args, const Snapshot *snapshot,
                        const Payload *payload, PyObject *key, PyObject *ticket)
{
    int64_t row[ROW];
    int counted = args[3] != Py_None; /* without a training step, calls count as steps */
    row[2] = 0;
    if (!whole(counted ? args[3] : args[2], &row[1]) || (counted && !whole(args[4], &row[2])))
        return 0;
    ColumnWriter *block = open_block(self);
    PyObject *seq = block != NULL ? PyObject_CallNoArgs(self->next) : NULL;
    if (seq == NULL)
        return -1;
    row[3] = PyLong_AsLongLong(seq);
    Py_DECREF(seq);
    row[4] = now_ns(CLOCK_REALTIME);
    /* only now: no other thread runs between here and the copy */
    const char *data = snapshot->tensor ? address_of(snapshot->tensor) : payload->data;
    if (data == NULL)
        return 0;
    return writer_add(block, key, ticket, row, data, snapshot->nbytes) < 0 ? -1 : 1;
}

/* Queue a value as part of a column; return its ticket, or NULL: then `*suited` is 0 if it needs a
 * record of its own, else there was an error. */
static PyObject *gather(FastCapture *self, PyObject *const *args, PyObject *info,
                        const Snapshot *snapshot, int *suited)
{
    Payload payload = {NULL};
    PyObject *ticket = NULL, *rank = NULL, *key = NULL;
    *suited = PyUnicode_CheckExact(args[1]) ? payload_of(self, info, snapshot, &payload) : 0;
    if (*suited > 0) {
        rank = rank_of(self);
        ticket = rank ? make_ticket(self) : NULL;
        key = ticket ? PyTuple_Pack(6, args[1], PyTuple_GET_ITEM(info, 1), payload.framework,
                                    snapshot->dtype ? snapshot->dtype : str_empty,
                                    snapshot->shape ? snapshot->shape : self->no_shape, rank)
                     : NULL;
        *suited = key ? add_to_block(self, args, snapshot, &payload, key, ticket) : -1;
        if (*suited > 0 && count_queued(self, snapshot->nbytes) < 0)
            *suited = -1;
    }
    Py_XDECREF(key); Py_XDECREF(rank);
    Py_XDECREF(payload.owner); Py_XDECREF(payload.framework);
    if (*suited <= 0)
        Py_CLEAR(ticket);
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
    Snapshot snapshot = {NULL};
    PyObject *ticket = NULL;
    int taken = take(self, info, args[0], &snapshot), suited = 0;
    if (taken > 0) {
        if (self->columns)
            ticket = gather(self, args, info, &snapshot, &suited);
        if (suited == 0 && snapshot.tensor != NULL) {
            Py_CLEAR(snapshot.dtype);
            Py_CLEAR(snapshot.shape);
            taken = take_other(self, PyTuple_GET_ITEM(info, 2), args[0], &snapshot);
        }
        PyObject *record =
            suited == 0 && taken > 0 ? make_record(self, args, info, &snapshot) : NULL;
        if (record != NULL) {
            ticket = enqueue(self, record, snapshot.nbytes);
            Py_DECREF(record);
        }
        ((QueueState *)self->state)->spent_ns += now_ns(CLOCK_MONOTONIC) - start;
    }
    if (snapshot.view.obj != NULL)
        PyBuffer_Release(&snapshot.view);
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
    .tp_name = "tensortap.capture._fast.FastCapture",
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
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.capture._fast",
    .m_doc = "The fast path for small values, in C.", .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    str_dtype = PyUnicode_InternFromString("dtype");
    str_shape = PyUnicode_InternFromString("shape");
    str_pending = PyUnicode_InternFromString("pending");
    str_numpy = PyUnicode_InternFromString("numpy");
    str_empty = PyUnicode_InternFromString("");
    str_data = PyUnicode_InternFromString("data");
    str_framework = PyUnicode_InternFromString("framework");
    str_float = PyUnicode_InternFromString("float");
    str_int = PyUnicode_InternFromString("int");
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_is_neg = PyUnicode_InternFromString("is_neg");
    str_is_conj = PyUnicode_InternFromString("is_conj");
    str_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    str_data_ptr = PyUnicode_InternFromString("data_ptr");
    str_storage_offset = PyUnicode_InternFromString("storage_offset");
    str_element_size = PyUnicode_InternFromString("element_size");
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddType(made, &QueueStateType) < 0 ||
        PyModule_AddType(made, &FastCaptureType) < 0 ||
        PyModule_AddType(made, &ColumnWriterType) < 0 ||
        PyModule_AddIntConstant(made, "FLOAT", FLOAT) < 0 ||
        PyModule_AddIntConstant(made, "ARRAY", ARRAY) < 0 ||
        PyModule_AddIntConstant(made, "TAKE", TAKE) < 0 ||
        PyModule_AddIntConstant(made, "READ", READ) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
