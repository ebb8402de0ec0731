/* locate(tensor, dtypes): where the elements of a tensor are, asked through its Python methods. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"

enum { DTYPE, IS_CPU, IS_NESTED, IS_NEG, IS_CONJ, NUMEL, DATA_PTR, IS_CONTIGUOUS, STRIDE, SHAPE,
       STORAGE_OFFSET, NAMES };
static PyObject *names[NAMES];

int prepare_names(void)
{
    static const char *const texts[NAMES] = {"dtype", "is_cpu", "is_nested", "is_neg", "is_conj",
                                             "numel", "data_ptr", "is_contiguous", "stride", "shape",
                                             "storage_offset"};
    for (int i = 0; i < NAMES; i++)
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return -1;
    return 0;
}

int is_true(PyObject *found)
{
    if (found == NULL)
        return -1;
    int answer = PyObject_IsTrue(found);
    Py_DECREF(found);
    return answer;
}

int is_negated(PyObject *tensor)
{
    return is_true(PyObject_CallMethodNoArgs(tensor, names[IS_NEG]));
}

int is_freed(PyObject *tensor, const void *data, size_t itemsize)
{
    PyObject *found = PyObject_CallMethodNoArgs(tensor, names[STORAGE_OFFSET]);
    Py_ssize_t offset = found != NULL ? PyLong_AsSsize_t(found) : -1;
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : (uintptr_t)data == (uintptr_t)offset * itemsize;
}

/* Return the strides in bytes. */
static PyObject *strides_of(PyObject *tensor, Py_ssize_t itemsize)
{
    PyObject *counted = PyObject_CallMethodNoArgs(tensor, names[STRIDE]);
    if (counted == NULL)
        return NULL;
    Py_ssize_t n = PyTuple_Check(counted) ? PyTuple_GET_SIZE(counted) : 0;
    PyObject *strides = PyTuple_New(n);
    for (Py_ssize_t i = 0; strides != NULL && i < n; i++) {
        Py_ssize_t stride = PyLong_AsSsize_t(PyTuple_GET_ITEM(counted, i));
        PyObject *size = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(itemsize * stride);
        if (size == NULL)
            Py_CLEAR(strides);
        else
            PyTuple_SET_ITEM(strides, i, size);
    }
    Py_DECREF(counted);
    return strides;
}

/* Return whether the bytes in memory are the values: not those of a device, of a nested tensor
 * (which looks dense otherwise), or of a negative or conjugate view. -1 on error. */
static int is_plain(PyObject *tensor, long lazy)
{
    int found = is_true(PyObject_GetAttr(tensor, names[IS_CPU]));
    if (found <= 0)
        return found;
    found = is_true(PyObject_GetAttr(tensor, names[IS_NESTED]));
    if (found == 0 && lazy > 0)
        found = is_negated(tensor);
    if (found == 0 && lazy > 1)
        found = is_true(PyObject_CallMethodNoArgs(tensor, names[IS_CONJ]));
    return found < 0 ? -1 : !found;
}

/* Return (address, code, shape, strides); NULL without an error for tensors without memory. */
static PyObject *memory_of(PyObject *tensor, PyObject *code, Py_ssize_t itemsize)
{
    PyObject *shape = PyObject_CallMethodNoArgs(tensor, names[NUMEL]), *strides = NULL;
    PyObject *address = shape ? PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]) : NULL;
    PyObject *memory = NULL;
    if (address == NULL)
        goto end;
    int some = PyObject_IsTrue(shape);
    if (some < 0 || (some && is_freed(tensor, PyLong_AsVoidPtr(address), (size_t)itemsize) != 0))
        goto end;
    int contiguous = is_true(PyObject_CallMethodNoArgs(tensor, names[IS_CONTIGUOUS]));
    if (contiguous < 0)
        goto end;
    if (contiguous) {
        strides = Py_NewRef(Py_None);
    } else {
        Py_SETREF(shape, PyObject_GetAttr(tensor, names[SHAPE]));
        strides = shape != NULL ? strides_of(tensor, itemsize) : NULL;
    }
    if (strides != NULL)
        memory = PyTuple_Pack(4, address, code, shape, strides);
end:
    Py_XDECREF(shape);
    Py_XDECREF(address);
    Py_XDECREF(strides);
    return memory;
}

PyObject *kernel_locate(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 2 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "tensor, dtypes");
        return NULL;
    }
    PyObject *memory = NULL, *dtype = PyObject_GetAttr(args[0], names[DTYPE]);
    PyObject *known = dtype != NULL ? PyDict_GetItemWithError(args[1], dtype) : NULL; /* borrowed */
    if (known != NULL && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 3) {
        Py_ssize_t itemsize = PyLong_AsSsize_t(PyTuple_GET_ITEM(known, 1));
        long lazy = PyLong_AsLong(PyTuple_GET_ITEM(known, 2));
        if (!PyErr_Occurred() && is_plain(args[0], lazy) == 1)
            memory = memory_of(args[0], PyTuple_GET_ITEM(known, 0), itemsize);
    }
    Py_XDECREF(dtype);
    if (memory != NULL)
        return memory;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError))
        return NULL;
    PyErr_Clear(); /* no storage: the general way says so */
    Py_RETURN_NONE;
}
