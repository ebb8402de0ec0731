/* tensortap.stats._kernel: from an address to a finished Summary.
 *
 * The Python side is stats/summarize.py, the computation is in summarize.c.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "summarize.h"
#include "python.h"

#define FEW (1 << 14) /* elements: for these, releasing the interpreter lock does not pay */
#define FIELDS 17     /* of a Summary */

static PyObject *summary; /* the class */

static PyObject *bins_of(const Statistics *s)
{
    PyObject *bins = PyTuple_New(s->bins);
    for (int i = 0; bins != NULL && i < s->bins; i++) {
        PyObject *n = PyLong_FromUnsignedLongLong(s->bin[i]);
        if (n == NULL)
            Py_CLEAR(bins);
        else
            PyTuple_SET_ITEM(bins, i, n);
    }
    return bins;
}

static PyObject *as_summary(const Statistics *s)
{
    if (summary == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "call set_summary first");
        return NULL;
    }
    const int64_t counts[] = {s->count, s->zeros, s->nans, s->posinfs, s->neginfs};
    const double figures[] = {s->min,     s->max,     s->mean, s->std, s->mean_abs,
                              s->max_abs, s->min_abs, s->rm2,  s->rm4, s->rm8};
    PyObject *fields[FIELDS], *made = NULL;
    int n = 0, complete = 1;
    for (int i = 0; i < 5; i++)
        fields[n++] = PyLong_FromLongLong(counts[i]);
    for (int i = 0; i < 10; i++)
        fields[n++] = PyFloat_FromDouble(figures[i]);
    fields[n++] = PyLong_FromLong(s->first_bin);
    fields[n++] = bins_of(s);
    for (int i = 0; i < n; i++)
        complete &= fields[i] != NULL;
    if (complete)
        made = PyObject_Vectorcall(summary, fields, FIELDS, NULL);
    for (int i = 0; i < n; i++)
        Py_XDECREF(fields[i]);
    return made;
}

/* summarize(address, code, shape, strides, threads) -> Summary | None
 *
 * `shape` may be the number of contiguous elements; `strides` are in bytes, or None for C order.
 * Returns None for values that only NumPy can summarize. */
static PyObject *kernel_summarize(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "address, code, shape, strides, threads");
        return NULL;
    }
    Array array;
    array.data = PyLong_AsVoidPtr(args[0]);
    long code = PyLong_AsLong(args[1]), threads = PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (code < 0 || code >= BYTES + n_tables) {
        PyErr_Format(PyExc_ValueError, "no dtype has the code %ld", code);
        return NULL;
    }
    Kind kind = code < BYTES ? (Kind)code : BYTES;
    const double *table = kind == BYTES ? tables[code - BYTES] : NULL;
    if (PyLong_Check(args[2])) {
        array.ndim = 1;
        array.shape[0] = PyLong_AsSsize_t(args[2]);
    } else {
        array.ndim = read_tuple(args[2], array.shape);
    }
    if (PyErr_Occurred())
        return NULL;
    size_t itemsize = itemsize_of(kind), count = 1;
    for (int i = array.ndim - 1; i >= 0; i--) {
        if (array.shape[i] < 0) {
            PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return NULL;
        }
        array.strides[i] = (ptrdiff_t)(count * itemsize);
        if (array.shape[i] > 0 && count > PTRDIFF_MAX / itemsize / (size_t)array.shape[i]) {
            PyErr_SetString(PyExc_ValueError, "more elements than memory can hold");
            return NULL;
        }
        count *= (size_t)array.shape[i];
    }
    if (args[3] != Py_None && read_tuple(args[3], array.strides) != array.ndim) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "shape and strides differ in length");
        return NULL;
    }
    if (count > 0 && array.data == NULL) {
        PyErr_SetString(PyExc_ValueError, "address 0 holds no elements");
        return NULL;
    }

    Statistics result;
    Outcome outcome;
    if (count <= FEW) {
        outcome = summarize_few(&array, kind, table, &result);
    } else {
        Py_BEGIN_ALLOW_THREADS
        outcome = summarize(&array, kind, table, (int)threads, &result);
        Py_END_ALLOW_THREADS
    }
    if (outcome == NO_MEMORY)
        return PyErr_NoMemory();
    if (outcome == BEYOND)
        Py_RETURN_NONE;
    return as_summary(&result);
}

static PyObject *kernel_set_summary(PyObject *module, PyObject *cls)
{
    (void)module;
    Py_XSETREF(summary, Py_NewRef(cls));
    Py_RETURN_NONE;
}

/* use_team(GOMP_parallel, omp_get_thread_num, omp_get_max_threads), as addresses */
static PyObject *kernel_use_team(PyObject *module, PyObject *args)
{
    (void)module;
    Py_ssize_t run, number, size;
    if (!PyArg_ParseTuple(args, "nnn", &run, &number, &size))
        return NULL;
    Team team = {(void (*)(void (*)(void *), void *, unsigned, unsigned))run,
                 (int (*)(void))number, (int (*)(void))size};
    use_team(team);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"summarize", (PyCFunction)(void (*)(void))kernel_summarize, METH_FASTCALL,
     "summarize(address, code, shape, strides, threads) -> Summary | None"},
    {"set_summary", kernel_set_summary, METH_O, "Set the class of summaries."},
    {"add_table", kernel_add_table, METH_O, "Add the 256 values of an 8-bit dtype and return its code."},
    {"use_team", kernel_use_team, METH_VARARGS, "Use the threads of an OpenMP runtime."},
    {"variants", kernel_variants, METH_NOARGS, "Return the variants that this processor can run, the best last."},
    {"variant", kernel_variant, METH_NOARGS, "Return the variant in use."},
    {"use", kernel_use, METH_O, "Use another variant."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.stats._kernel",
    .m_doc = "Statistics of arrays in memory.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    static const char *names[BYTES] = {"FLOAT32", "FLOAT64", "FLOAT16", "BFLOAT16",
                                       "INT16",   "UINT16",  "INT32",   "UINT32",
                                       "INT64",   "UINT64",  "COMPLEX64", "COMPLEX128"};
    PyObject *made = PyModule_Create(&module);
    for (int i = 0; made != NULL && i < BYTES; i++)
        if (PyModule_AddIntConstant(made, names[i], i) < 0)
            Py_CLEAR(made);
    choose_variant();
    return made;
}
