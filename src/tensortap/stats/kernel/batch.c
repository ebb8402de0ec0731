/* SummaryBatch: statistics of arrays that come one after the other, given back as columns. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdlib.h>

#include "module.h"

#define OLD 250000000 /* nanoseconds: readers of a run should not wait for longer */
#define FULL 4096     /* results that are taken together */

typedef struct {
    PyObject *key;  /* of the caller */
    long long time; /* when the array was seen, in nanoseconds since 1970 */
    long long spent; /* nanoseconds of the training thread */
} Seen;

typedef struct {
    PyObject_HEAD
    size_t n, room;
    Seen *seen;
    Kept *kept;
    long long number; /* of the last result, counted from 1 and never reset */
    long long step;   /* of the caller */
    long long kernel; /* nanoseconds in the kernel, never reset */
    char due;         /* whether the batch should be taken now */
} SummaryBatch;

/* Make room for one more; return 0 if there is no memory. */
static int provide_room(SummaryBatch *self)
{
    if (self->n < self->room)
        return 1;
    size_t room = self->room ? 2 * self->room : 64;
    Seen *seen = realloc(self->seen, room * sizeof *seen);
    if (seen == NULL)
        return 0;
    self->seen = seen;
    Kept *kept = realloc(self->kept, room * sizeof *kept);
    if (kept == NULL)
        return 0;
    self->kept = kept;
    self->room = room;
    for (size_t i = 0; i < self->n; i++)
        if (kept[i].figures.bins <= FEW_BINS)
            kept[i].bin = kept[i].few; /* which has moved */
    return 1;
}

/* Note what the last result belongs to; return its number. */
static long long note(SummaryBatch *self, PyObject *key, long long start)
{
    Seen *seen = &self->seen[self->n++];
    *seen = (Seen){Py_NewRef(key), now_ns(CLOCK_REALTIME), 0};
    self->due = self->n >= FULL || seen->time - self->seen[0].time > OLD;
    seen->spent = now_ns(CLOCK_MONOTONIC) - start;
    return ++self->number;
}

long long add_elements(PyObject *batch, PyObject *key, long long start, const Elements *elements)
{
    SummaryBatch *self = (SummaryBatch *)batch;
    Statistics result;
    Outcome outcome;
    size_t count = 1;
    for (int i = 0; i < elements->array.ndim; i++)
        count *= (size_t)elements->array.shape[i];
    long long begun = now_ns(CLOCK_MONOTONIC);
    if (count <= FEW) {
        outcome = summarize(elements, 1, &result);
    } else {
        Py_BEGIN_ALLOW_THREADS
        outcome = summarize(elements, 0, &result);
        Py_END_ALLOW_THREADS
    }
    /* other threads have run until here, but none does from here on */
    self->kernel += now_ns(CLOCK_MONOTONIC) - begun;
    if (outcome == BEYOND) {
        PyErr_SetString(PyExc_OverflowError, "float64 cannot hold a magnitude");
        return 0;
    }
    if (outcome != DONE || !provide_room(self) || !keep_result(&self->kept[self->n], &result)) {
        PyErr_NoMemory();
        return 0;
    }
    return note(self, key, start);
}

long long repeat_elements(PyObject *batch, PyObject *key, long long start, long long number)
{
    SummaryBatch *self = (SummaryBatch *)batch;
    if (self->n == 0 || self->number != number || self->kept[self->n - 1].figures.bins > FEW_BINS)
        return 0;
    if (!provide_room(self)) {
        PyErr_NoMemory();
        return -1;
    }
    Kept *kept = &self->kept[self->n];
    *kept = kept[-1];
    kept->bin = kept->few;
    return note(self, key, start);
}

long long step_of(PyObject *batch)
{
    return ((SummaryBatch *)batch)->step;
}

int is_due(PyObject *batch)
{
    return ((SummaryBatch *)batch)->due;
}

/* add(key, start, address, code, shape, strides)
 *
 * `start` is when the caller began with this array, by time.perf_counter_ns(). */
static PyObject *batch_add(SummaryBatch *self, PyObject *const *args, Py_ssize_t nargs)
{
    Elements elements;
    if (nargs != 6) {
        PyErr_SetString(PyExc_TypeError, "key, start, address, code, shape, strides");
        return NULL;
    }
    long long start = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || read_array(args[2], args[3], args[4], args[5], &elements) < 0)
        return NULL;
    if (!add_elements((PyObject *)self, args[0], start, &elements))
        return NULL;
    Py_RETURN_NONE;
}

static void clear(SummaryBatch *self)
{
    size_t n = self->n;
    self->n = 0; /* before anything that could call this again */
    self->due = 0;
    for (size_t i = 0; i < n; i++)
        if (self->kept[i].bin != self->kept[i].few)
            free(self->kept[i].bin);
    for (size_t i = 0; i < n; i++)
        Py_DECREF(self->seen[i].key);
}

/* take() -> (keys, times, spent, columns): give everything back and begin anew; `spent` has the
 * nanoseconds that each array took */
static PyObject *batch_take(SummaryBatch *self, PyObject *unused)
{
    (void)unused;
    Py_ssize_t n = (Py_ssize_t)self->n;
    Many many = {NULL, self->kept, self->n, 0};
    PyObject *keys = PyList_New(n), *times = PyList_New(n), *spent = PyList_New(n);
    PyObject *columns = as_columns(&many);
    if (keys == NULL || times == NULL || spent == NULL || columns == NULL)
        goto error;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *time = PyLong_FromLongLong(self->seen[i].time);
        PyObject *cost = PyLong_FromLongLong(self->seen[i].spent);
        if (time == NULL || cost == NULL) {
            Py_XDECREF(time);
            Py_XDECREF(cost);
            goto error;
        }
        PyList_SET_ITEM(times, i, time);
        PyList_SET_ITEM(spent, i, cost);
        PyList_SET_ITEM(keys, i, Py_NewRef(self->seen[i].key));
    }
    PyObject *taken = Py_BuildValue("(NNNN)", keys, times, spent, columns);
    if (taken != NULL)
        clear(self);
    return taken;
error:
    Py_XDECREF(keys);
    Py_XDECREF(times);
    Py_XDECREF(spent);
    Py_XDECREF(columns);
    return NULL;
}

static Py_ssize_t batch_length(SummaryBatch *self)
{
    return (Py_ssize_t)self->n;
}

static void batch_dealloc(SummaryBatch *self)
{
    clear(self);
    free(self->seen);
    free(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))batch_add, METH_FASTCALL,
     "add(key, start, address, code, shape, strides)"},
    {"take", (PyCFunction)batch_take, METH_NOARGS, "take() -> (keys, times, spent, columns)"},
    {NULL},
};

static PyMemberDef members[] = {
    {"due", T_BOOL, offsetof(SummaryBatch, due), READONLY, "whether to take the batch now"},
    {"step", T_LONGLONG, offsetof(SummaryBatch, step), 0, "the step of the arrays"},
    {"kernel_ns", T_LONGLONG, offsetof(SummaryBatch, kernel), READONLY, "time in the kernel"},
    {NULL},
};

static PySequenceMethods as_sequence = {.sq_length = (lenfunc)batch_length};

PyTypeObject SummaryBatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.stats._kernel.SummaryBatch",
    .tp_doc = "Statistics of arrays that come one after the other, given back as columns.",
    .tp_basicsize = sizeof(SummaryBatch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)batch_dealloc,
    .tp_methods = methods,
    .tp_members = members,
    .tp_as_sequence = &as_sequence,
};
