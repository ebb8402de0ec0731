/* tensortap.stats._kernel: statistics of arrays in memory, and comparisons of two.
 *
 * The Python side is stats/summarize.py and compare/elements.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernel.h"
#include "module.h"
#include "variants.h"

#define FIELDS 17      /* of a Summary */
#define MAX_TABLES 64  /* dtypes of 8 bits */

static double tables[MAX_TABLES][256];
static int n_tables;

/* Read a tuple of dimensions or strides and return its length; -1 on error. */
static int read_tuple(PyObject *tuple, ptrdiff_t *out)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_DIMS) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of at most %d integers", MAX_DIMS);
        return -1;
    }
    int n = (int)PyTuple_GET_SIZE(tuple);
    for (int i = 0; i < n; i++) {
        out[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return n;
}

/* The beginning of what the __array_struct__ of an array points to, as the array interface of NumPy
 * defines it */
typedef struct {
    int two, ndim;
    char kind;
    int itemsize, flags;
    Py_ssize_t *shape, *strides;
    void *data;
} ArrayStruct;

/* Return an address that was given as a number or as the __array_struct__ of an array. */
static void *read_address(PyObject *given)
{
    if (!PyCapsule_CheckExact(given))
        return PyLong_AsVoidPtr(given);
    const ArrayStruct *found = PyCapsule_GetPointer(given, NULL);
    return found != NULL ? found->data : NULL;
}

Py_ssize_t read_array(PyObject *address, PyObject *dtype, PyObject *shape, PyObject *strides,
                      Elements *out)
{
    Array *array = &out->array;
    array->data = read_address(address);
    long code = PyLong_AsLong(dtype);
    if (PyErr_Occurred())
        return -1;
    if (code < 0 || code >= BYTES + n_tables) {
        PyErr_Format(PyExc_ValueError, "no dtype has the code %ld", code);
        return -1;
    }
    out->kind = code < BYTES ? (Kind)code : BYTES;
    out->table = code < BYTES ? NULL : tables[code - BYTES];
    if (PyLong_Check(shape)) {
        array->ndim = 1;
        array->shape[0] = PyLong_AsSsize_t(shape);
    } else {
        array->ndim = read_tuple(shape, array->shape);
    }
    if (PyErr_Occurred())
        return -1;
    size_t itemsize = itemsize_of(out->kind), count = 1;
    const char *wrong = NULL;
    for (int i = array->ndim - 1; i >= 0 && wrong == NULL; i--) {
        array->strides[i] = (ptrdiff_t)(count * itemsize);
        if (array->shape[i] < 0)
            wrong = "a dimension is negative";
        else if (array->shape[i] > 0 && count > PTRDIFF_MAX / itemsize / (size_t)array->shape[i])
            wrong = "more elements than memory can hold";
        count *= (size_t)array->shape[i];
    }
    if (wrong == NULL && strides != Py_None && read_tuple(strides, array->strides) != array->ndim)
        wrong = "shape and strides differ in length";
    else if (wrong == NULL && count > 0 && array->data == NULL)
        wrong = "address 0 holds no elements";
    if (wrong != NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, wrong);
    return wrong == NULL ? (Py_ssize_t)count : -1;
}

/* add_table(256 float64 as bytes) -> code */
static PyObject *kernel_add_table(PyObject *module, PyObject *values)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int fits = view.len == sizeof *tables && n_tables < MAX_TABLES;
    if (fits)
        memcpy(tables[n_tables], view.buf, sizeof *tables);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "expected 256 float64, and at most %d tables", MAX_TABLES);
        return NULL;
    }
    return PyLong_FromLong(BYTES + n_tables++);
}

static PyObject *kernel_variants(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && variant(i) != NULL; i++) {
        PyObject *name = PyUnicode_FromString(variant(i));
        if (name == NULL || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *kernel_variant(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(used_variant());
}

static PyObject *kernel_use(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL)
        return NULL;
    if (!use_variant(text)) {
        PyErr_Format(PyExc_ValueError, "this processor cannot run the variant %s", text);
        return NULL;
    }
    Py_RETURN_NONE;
}

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
 * Returns None for values that only NumPy can summarize. */
static PyObject *kernel_summarize(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "address, code, shape, strides, threads");
        return NULL;
    }
    Elements elements;
    Statistics result;
    Outcome outcome;
    Py_ssize_t count = read_array(args[0], args[1], args[2], args[3], &elements);
    long threads = PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (count <= FEW) {
        outcome = summarize(&elements, 1, &result);
    } else {
        Py_BEGIN_ALLOW_THREADS
        outcome = summarize(&elements, (int)threads, &result);
        Py_END_ALLOW_THREADS
    }
    if (outcome == NO_MEMORY)
        return PyErr_NoMemory();
    if (outcome == BEYOND)
        Py_RETURN_NONE;
    return as_summary(&result);
}

/* compare(a, b, shape, atol, rtol, equal_nan, format, threads) -> tuple
 *
 * `a` and `b` are (address, code, strides), `format` is (digits, least exponent, largest number).
 * Returns the fields of Difference in their order. */
static PyObject *kernel_compare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *shape, *addresses[2], *codes[2], *strides[2];
    Rules rules;
    int threads;
    if (!PyArg_ParseTuple(args, "(OOO)(OOO)Oddp(iid)i", &addresses[0], &codes[0], &strides[0],
                          &addresses[1], &codes[1], &strides[1], &shape, &rules.atol, &rules.rtol,
                          &rules.equal_nan, &rules.digits, &rules.least_exponent, &rules.largest,
                          &threads))
        return NULL;
    if (rules.digits < 0 || rules.digits > 53) {
        PyErr_SetString(PyExc_ValueError, "a format has at most 53 digits");
        return NULL;
    }
    Elements sides[2];
    for (int i = 0; i < 2; i++) {
        if (read_array(addresses[i], codes[i], shape, strides[i], &sides[i]) < 0)
            return NULL;
        if (sides[i].kind == COMPLEX64 || sides[i].kind == COMPLEX128) {
            PyErr_SetString(PyExc_ValueError, "complex numbers cannot be compared here");
            return NULL;
        }
    }
    Difference f;
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = compare(&sides[0], &sides[1], &rules, threads, &f);
    Py_END_ALLOW_THREADS
    if (outcome != DONE)
        return PyErr_NoMemory();
    return Py_BuildValue("(LLLLLLddddddddKi)", (long long)f.count, (long long)f.finite,
                         (long long)f.mismatches, (long long)f.nonfinite,
                         (long long)f.first_nonfinite, (long long)f.worst, f.max_abs, f.mean_abs,
                         f.max_rel, f.mean_rel, f.excess, f.factor, f.cosine, f.rel_l2,
                         (unsigned long long)f.steps, f.identical);
}

/* digest(address, code, shape, strides, whole, offsets, seed) -> four sums */
static PyObject *kernel_digest(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *address, *code, *shape, *strides, *tuples[2];
    unsigned long long seed;
    ptrdiff_t places[2][MAX_DIMS];
    Elements elements;
    if (!PyArg_ParseTuple(args, "OOOOOOK", &address, &code, &shape, &strides, &tuples[0], &tuples[1],
                          &seed))
        return NULL;
    Py_ssize_t count = read_array(address, code, shape, strides, &elements);
    if (count < 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        int n = read_tuple(tuples[i], places[i]);
        if (n >= 0 && n != elements.array.ndim)
            PyErr_SetString(PyExc_ValueError, "shape, whole and offsets differ in length");
        if (PyErr_Occurred())
            return NULL;
    }
    uint32_t sums[4] = {0};
    if (count > 0) {
        Py_BEGIN_ALLOW_THREADS
        digest(&elements, places[0], places[1], seed, sums);
        Py_END_ALLOW_THREADS
    }
    return Py_BuildValue("(IIII)", sums[0], sums[1], sums[2], sums[3]);
}

/* digest_rows(address, code, shape, strides, whole, offsets, outer, seeds) -> sums of each form */
static PyObject *kernel_digest_rows(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *address, *code, *shape, *strides, *tuples[2], *given;
    int outer, forms;
    uint64_t seeds[FORMS];
    ptrdiff_t places[2][MAX_DIMS];
    Elements elements;
    if (!PyArg_ParseTuple(args, "OOOOOOiO!", &address, &code, &shape, &strides, &tuples[0],
                          &tuples[1], &outer, &PyTuple_Type, &given))
        return NULL;
    Py_ssize_t count = read_array(address, code, shape, strides, &elements);
    if (count < 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        int n = read_tuple(tuples[i], places[i]);
        if (n >= 0 && n != elements.array.ndim)
            PyErr_SetString(PyExc_ValueError, "shape, whole and offsets differ in length");
        if (PyErr_Occurred())
            return NULL;
    }
    forms = (int)PyTuple_GET_SIZE(given);
    if (outer < 0 || outer > elements.array.ndim || forms < 1 || forms > FORMS
        || (forms > 1 && itemsize_of(elements.kind) != 4)) {
        PyErr_SetString(PyExc_ValueError, "an array has no such rows or forms");
        return NULL;
    }
    for (int form = 0; form < forms; form++)
        seeds[form] = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(given, form));
    if (PyErr_Occurred())
        return NULL;
    uint32_t sums[FORMS][RING] = {{0}};
    if (count > 0) {
        Py_BEGIN_ALLOW_THREADS
        digest_rows(&elements, places[0], places[1], outer, forms, seeds, sums);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = PyTuple_New(forms);
    for (int form = 0; result != NULL && form < forms; form++) {
        uint32_t *of = sums[form];
        PyObject *each = Py_BuildValue("(IIIII)", of[0], of[1], of[2], of[3], of[4]);
        if (each == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, form, each);
    }
    return result;
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
    {"summarize_many", kernel_summarize_many, METH_VARARGS,
     "summarize_many(arrays, threads) -> columns | None"},
    {"sum_of_squares", kernel_sum_of_squares, METH_O, "sum_of_squares(tensors) -> float | None"},
    {"locate", (PyCFunction)(void (*)(void))kernel_locate, METH_FASTCALL,
     "locate(tensor, dtypes) -> (address, code, shape, strides) | None"},
    {"compare", kernel_compare, METH_VARARGS,
     "compare(a, b, shape, atol, rtol, equal_nan, format, threads) -> tuple"},
    {"digest", kernel_digest, METH_VARARGS,
     "digest(address, code, shape, strides, whole, offsets, seed) -> four sums"},
    {"digest_rows", kernel_digest_rows, METH_VARARGS,
     "digest_rows(address, code, shape, strides, whole, offsets, outer, seeds) -> sums of each form"},
    {"channels", kernel_channels, METH_VARARGS, "Add up the channels of a matrix: see stats/activations.py."},
    {"movements", kernel_movements, METH_VARARGS, "Sums over movements: see stats/norms.py."},
    {"set_summary", kernel_set_summary, METH_O, "Set the class of summaries."},
    {"add_table", kernel_add_table, METH_O, "Add the 256 values of an 8-bit dtype and return its code."},
    {"use_exchange", kernel_use_exchange, METH_VARARGS,
     "use_exchange(classes, capsule, has_overrides) -> bool: find tensors of these classes by DLPack"},
    {"use_team", kernel_use_team, METH_VARARGS, "Use the threads of an OpenMP runtime."},
    {"variants", kernel_variants, METH_NOARGS, "Return the variants that this processor can run, the best last."},
    {"variant", kernel_variant, METH_NOARGS, "Return the variant in use."},
    {"use", kernel_use, METH_O, "Use another variant."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.stats._kernel",
    .m_doc = "Statistics and comparisons of arrays in memory.", .m_size = -1, .m_methods = methods,
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
    if (made != NULL && (PyModule_AddType(made, &SummaryBatchType) < 0 || prepare_names() < 0 ||
                         add_hooks(made) < 0))
        Py_CLEAR(made);
    choose_variant();
    return made;
}
