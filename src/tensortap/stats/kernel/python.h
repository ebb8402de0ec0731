/* Functions that both kernels offer to Python: tables of 8-bit dtypes, and the choice of variants.
 *
 * Only for module.c, after Python.h: everything here is static.
 */
#ifndef TENSORTAP_PYTHON_H
#define TENSORTAP_PYTHON_H

#include "summarize.h"
#include "variants.h"

#define MAX_TABLES 64 /* dtypes of 8 bits */

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

#endif
