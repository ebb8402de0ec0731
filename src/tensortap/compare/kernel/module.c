/* tensortap.compare._kernel: the Python interface of compare.c. `compare/elements.py` calls it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../stats/kernel/python.h"
#include "compare.h"

/* Parse (address, code, strides) and the shape; return -1 on error. */
static int read_side(PyObject *given, PyObject *shape, Side *side)
{
    PyObject *address, *strides;
    int code;
    if (!PyArg_ParseTuple(given, "OiO", &address, &code, &strides))
        return -1;
    side->array.data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return -1;
    int table = code - BYTES;
    if (code < 0 || table >= n_tables || code == COMPLEX64 || code == COMPLEX128) {
        PyErr_Format(PyExc_ValueError, "no dtype has the code %d", code);
        return -1;
    }
    side->kind = table < 0 ? (Kind)code : BYTES;
    side->table = table < 0 ? NULL : tables[table];
    side->array.ndim = read_tuple(shape, side->array.shape);
    if (side->array.ndim < 0 || read_tuple(strides, side->array.strides) < 0)
        return -1;
    if (PyTuple_GET_SIZE(shape) != PyTuple_GET_SIZE(strides)) {
        PyErr_SetString(PyExc_ValueError, "shape and strides differ in length");
        return -1;
    }
    size_t count = 1;
    for (int i = 0; i < side->array.ndim; i++) {
        if (side->array.shape[i] < 0) {
            PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return -1;
        }
        count *= (size_t)side->array.shape[i];
    }
    if (count > 0 && side->array.data == NULL) {
        PyErr_SetString(PyExc_ValueError, "address 0 holds no elements");
        return -1;
    }
    return 0;
}

/* compare(a, b, shape, atol, rtol, equal_nan, format, threads) -> tuple
 *
 * `a` and `b` are (address, code, strides in bytes), `format` is (digits, least exponent, largest
 * number). Returns the fields of Difference in their order. */
static PyObject *kernel_compare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *a, *b, *shape;
    Rules rules;
    int threads;
    if (!PyArg_ParseTuple(args, "OOOddp(iid)i", &a, &b, &shape, &rules.atol, &rules.rtol,
                          &rules.equal_nan, &rules.digits, &rules.least_exponent, &rules.largest,
                          &threads))
        return NULL;
    if (rules.digits < 0 || rules.digits > 53) {
        PyErr_SetString(PyExc_ValueError, "a format has at most 53 digits");
        return NULL;
    }
    Side sides[2];
    if (read_side(a, shape, &sides[0]) < 0 || read_side(b, shape, &sides[1]) < 0)
        return NULL;
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

static PyMethodDef methods[] = {
    {"compare", kernel_compare, METH_VARARGS,
     "compare(a, b, shape, atol, rtol, equal_nan, format, threads) -> tuple"},
    {"add_table", kernel_add_table, METH_O, "The code of an 8-bit dtype with these values."},
    {"variants", kernel_variants, METH_NOARGS, "The code that this processor can run, best last."},
    {"variant", kernel_variant, METH_NOARGS, "The code that it does run."},
    {"use", kernel_use, METH_O, "Run other code than the best."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "tensortap.compare._kernel",
    .m_doc = "Two arrays, element by element, in C.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    static const char *names[] = {"FLOAT32", "FLOAT64", "FLOAT16", "BFLOAT16", "INT16",
                                  "UINT16",  "INT32",   "UINT32",  "INT64",    "UINT64"};
    PyObject *made = PyModule_Create(&module);
    for (int i = 0; made != NULL && i < (int)(sizeof names / sizeof *names); i++)
        if (PyModule_AddIntConstant(made, names[i], i) < 0)
            Py_CLEAR(made);
    choose_variant();
    return made;
}
