/* What both kernels show to Python: tables of 8-bit dtypes, and which code runs.
 *
 * For module.c alone, after Python.h: everything here is static.
 */
#ifndef TENSORTAP_PYTHON_H
#define TENSORTAP_PYTHON_H

#include "summarize.h"
#include "variants.h"

#define TABLES 64 /* dtypes of 8 bits */

static double tables[TABLES][256];
static int n_tables;

/* A dimension or stride list; -1 on error. */
static int read_tuple(PyObject *tuple, ptrdiff_t *out)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_DIMS) {
        PyErr_Format(PyExc_TypeError, "a tuple of at most %d integers is wanted", MAX_DIMS);
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
    int fits = view.len == sizeof *tables && n_tables < TABLES;
    if (fits)
        memcpy(tables[n_tables], view.buf, sizeof *tables);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "a table is 256 float64, and there are at most %d", TABLES);
        return NULL;
    }
    return PyLong_FromLong(BYTES + n_tables++);
}

static PyObject *kernel_variants(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *found = PyList_New(0);
    for (int i = 0; found != NULL && variant(i) != NULL; i++) {
        PyObject *name = PyUnicode_FromString(variant(i));
        if (name == NULL || PyList_Append(found, name) < 0)
            Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
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
        PyErr_Format(PyExc_ValueError, "this processor has no %s", text);
        return NULL;
    }
    Py_RETURN_NONE;
}

#endif
