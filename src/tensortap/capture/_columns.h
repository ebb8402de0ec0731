/* ColumnWriter: small records gathered as columns, see `tensortap.core.columns`.
 *
 * The training thread adds records until the thread of the queue takes the block. No call in
 * `writer_add` runs Python code, so that other threads and signal handlers see whole records.
 */
#include <stdint.h>

enum { ROW = 5, MOST_RECORDS = 1024, MOST_COLUMNS = 64 };
#define MOST_PAYLOAD (512 << 10) /* bytes; one more record may exceed it */

/* Large buffers are recycled: the first write to fresh memory costs more than the copy. */
enum { LARGE = 64 << 10, WHOLE = MOST_PAYLOAD + (64 << 10), MOST_FREE = 8 };
static char *free_buffers[MOST_FREE];
static int free_count;

/* The payloads of the records that have everything else in common. */
typedef struct {
    char *data;
    size_t used, capacity, size;
} Column;

typedef struct {
    PyObject_HEAD
    PyObject *tickets; /* list */
    PyObject *columns; /* dict: what the records of a column have in common -> its number */
    long long weight, overhead;
    Py_ssize_t count;
    int moved; /* the payloads are elsewhere */
    size_t payload;
    int64_t (*rows)[ROW]; /* column, step, call, seq, time */
    Column column[MOST_COLUMNS];
} ColumnWriter;

/* Return memory for at least `size` bytes, at most WHOLE, and how many it has; NULL if none is left. */
static char *buffer_new(size_t size, size_t *capacity)
{
    *capacity = size > LARGE ? WHOLE : size;
    if (size > LARGE && free_count > 0)
        return free_buffers[--free_count];
    return malloc(*capacity);
}

static void buffer_free(char *data, size_t capacity)
{
    if (data != NULL && capacity == WHOLE && free_count < MOST_FREE)
        free_buffers[free_count++] = data;
    else
        free(data);
}

static void writer_release(ColumnWriter *self)
{
    for (int i = 0; i < MOST_COLUMNS && self->column[i].data != NULL; i++) {
        buffer_free(self->column[i].data, self->column[i].capacity);
        self->column[i].data = NULL;
    }
}

static void writer_dealloc(ColumnWriter *self)
{
    writer_release(self);
    Py_XDECREF(self->tickets);
    Py_XDECREF(self->columns);
    free(self->rows);
    PyObject_Free(self);
}

static PyObject *writer_entries(ColumnWriter *self, PyObject *Py_UNUSED(none))
{
    PyObject *entries = PyList_New(self->count);
    for (Py_ssize_t i = 0; entries != NULL && i < self->count; i++) {
        long long weight = (long long)self->column[self->rows[i][0]].size + self->overhead;
        PyObject *entry = Py_BuildValue("OOL", Py_None, PyList_GET_ITEM(self->tickets, i), weight);
        if (entry == NULL)
            Py_CLEAR(entries);
        else
            PyList_SET_ITEM(entries, i, entry);
    }
    return entries;
}

/* Copy rows and payloads; a move works without the interpreter lock and releases the memory. */
static PyObject *writer_to(ColumnWriter *self, PyObject *target, int move)
{
    Py_buffer view;
    if (PyObject_GetBuffer(target, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    size_t rows = self->count * sizeof *self->rows;
    if ((size_t)view.len != rows + self->payload || self->moved) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "move once, to a target of `nbytes` bytes");
        return NULL;
    }
    self->moved = move;
    PyThreadState *state = move ? PyEval_SaveThread() : NULL;
    char *to = view.buf;
    memcpy(to, self->rows, rows);
    to += rows;
    for (int i = 0; i < MOST_COLUMNS && self->column[i].data != NULL; i++) {
        memcpy(to, self->column[i].data, self->column[i].used);
        to += self->column[i].used;
    }
    if (move)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&view);
    if (move)
        writer_release(self);
    Py_RETURN_NONE;
}

static PyObject *writer_copy(ColumnWriter *self, PyObject *target)
{
    return writer_to(self, target, 0);
}

static PyObject *writer_move(ColumnWriter *self, PyObject *target)
{
    return writer_to(self, target, 1);
}

static PyObject *writer_nbytes(ColumnWriter *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->count * sizeof *self->rows + self->payload);
}

static PyObject *writer_columns(ColumnWriter *self, void *Py_UNUSED(closure))
{
    return PyDict_Keys(self->columns);
}

static Py_ssize_t writer_length(ColumnWriter *self)
{
    return self->count;
}

static PyMethodDef writer_methods[] = {
    {"entries", (PyCFunction)writer_entries, METH_NOARGS, "Return (None, ticket, weight) of each"},
    {"copy", (PyCFunction)writer_copy, METH_O, "Copy rows and payloads to a buffer of `nbytes`"},
    {"move", (PyCFunction)writer_move, METH_O, "Move rows and payloads to a buffer of `nbytes`"},
    {NULL},
};

static PyGetSetDef writer_properties[] = {
    {"nbytes", (getter)writer_nbytes, NULL, "bytes of rows and payloads", NULL},
    {"columns", (getter)writer_columns, NULL, "what the records of each column share", NULL},
    {NULL},
};

static PyMemberDef writer_members[] = {
    {"tickets", T_OBJECT, offsetof(ColumnWriter, tickets), READONLY, "of the records, in order"},
    {"weight", T_LONGLONG, offsetof(ColumnWriter, weight), READONLY, "of all records, in bytes"},
    {NULL},
};

static PySequenceMethods writer_sequence = {.sq_length = (lenfunc)writer_length};

static PyTypeObject ColumnWriterType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.capture._fast.ColumnWriter",
    .tp_doc = "Small records, gathered as columns.",
    .tp_basicsize = sizeof(ColumnWriter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)writer_dealloc,
    .tp_methods = writer_methods,
    .tp_getset = writer_properties,
    .tp_members = writer_members,
    .tp_as_sequence = &writer_sequence,
};

static ColumnWriter *writer_new(long long overhead)
{
    ColumnWriter *self = PyObject_New(ColumnWriter, &ColumnWriterType);
    if (self == NULL)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->overhead = overhead;
    self->rows = malloc(MOST_RECORDS * sizeof *self->rows);
    self->tickets = PyList_New(0);
    self->columns = PyDict_New();
    if (self->rows == NULL || self->tickets == NULL || self->columns == NULL) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        Py_CLEAR(self);
    }
    return self;
}

static int writer_is_full(const ColumnWriter *self)
{
    return self->moved || self->count >= MOST_RECORDS || self->payload >= MOST_PAYLOAD ||
           PyDict_GET_SIZE(self->columns) >= MOST_COLUMNS;
}

/* Return the number of a column, which may be new; -1 on error. `key` has only exact classes of
 * Python in it, so that comparing it runs no Python code. */
static Py_ssize_t writer_column(ColumnWriter *self, PyObject *key, size_t size)
{
    PyObject *number = PyDict_GetItemWithError(self->columns, key); /* borrowed */
    if (number != NULL || PyErr_Occurred())
        return number != NULL ? PyLong_AsSsize_t(number) : -1;
    Py_ssize_t next = PyDict_GET_SIZE(self->columns);
    Column *column = &self->column[next];
    buffer_free(column->data, column->capacity); /* left from an error below */
    column->used = 0;
    column->size = size;
    column->data = buffer_new(4 * size + 64, &column->capacity);
    number = column->data != NULL ? PyLong_FromSsize_t(next) : PyErr_NoMemory();
    int failed = number == NULL || PyDict_SetItem(self->columns, key, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : next;
}

/* Add a record; return -1 on error, and then nothing was added. */
static int writer_add(ColumnWriter *self, PyObject *key, PyObject *ticket, const int64_t row[ROW],
                      const char *data, size_t size)
{
    Py_ssize_t number = writer_column(self, key, size);
    if (number < 0)
        return -1;
    Column *column = &self->column[number];
    if (column->used + size > column->capacity) {
        size_t capacity;
        char *more = buffer_new(4 * column->capacity, &capacity);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, column->data, column->used);
        buffer_free(column->data, column->capacity);
        column->data = more;
        column->capacity = capacity;
    }
    if (PyList_Append(self->tickets, ticket) < 0)
        return -1;
    memcpy(column->data + column->used, data, size);
    column->used += size;
    memcpy(self->rows[self->count], row, sizeof *self->rows);
    self->rows[self->count][0] = number;
    self->count += 1;
    self->payload += size;
    self->weight += (long long)size + self->overhead;
    return 0;
}
