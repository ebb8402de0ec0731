/* Statistics of many arrays, as columns. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"

enum { COUNTS = 5, FLOATS = 10 };

PyObject *as_columns(const Many *many)
{
    Py_ssize_t n = (Py_ssize_t)many->n, total = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        total += many->kept[i].figures.bins;
    const Py_ssize_t sizes[] = {COUNTS * n * 8, FLOATS * n * 8, n * 4, (n + 1) * 4, total * 8};
    PyObject *columns = PyTuple_New(5);
    void *memory[5];
    for (int k = 0; columns != NULL && k < 5; k++) {
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, sizes[k]);
        if (bytes == NULL) {
            Py_CLEAR(columns);
            break;
        }
        memory[k] = PyBytes_AS_STRING(bytes);
        PyTuple_SET_ITEM(columns, k, bytes);
    }
    if (columns == NULL)
        return NULL;
    int64_t *counts = memory[0];
    double *floats = memory[1];
    int32_t *first = memory[2], *ends = memory[3];
    uint64_t *bins = memory[4];
    ends[0] = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const Kept *kept = &many->kept[i];
        const int64_t *count = (const void *)&kept->figures; /* the fields follow each other */
        const double *figure = (const void *)(count + COUNTS);
        for (int k = 0; k < COUNTS; k++)
            counts[k * n + i] = count[k];
        for (int k = 0; k < FLOATS; k++)
            floats[k * n + i] = figure[k];
        first[i] = kept->figures.first_bin;
        memcpy(bins + ends[i], kept->bin, (size_t)kept->figures.bins * 8);
        ends[i + 1] = ends[i] + kept->figures.bins;
    }
    return columns;
}

/* Read an item of `summarize_many`; return 1, or 0 for a tensor that needs the general way, -1 on error. */
static int read_item(PyObject *item, Elements *out)
{
    if (is_exchanged(item))
        return view_elements(item, out);
    if (!PyTuple_Check(item))
        return 0;
    if (PyTuple_GET_SIZE(item) != 4) {
        PyErr_SetString(PyExc_TypeError, "an array is (address, code, shape, strides)");
        return -1;
    }
    PyObject *address = PyTuple_GET_ITEM(item, 0), *code = PyTuple_GET_ITEM(item, 1);
    return read_array(address, code, PyTuple_GET_ITEM(item, 2), PyTuple_GET_ITEM(item, 3), out) < 0 ? -1 : 1;
}

#define SQUARES(name, type)                                                                        \
    static double name(const char *data, size_t n)                                                 \
    {                                                                                              \
        const type *x = (const type *)data;                                                        \
        double lanes[8] = {0}, sum = 0;                                                            \
        size_t i = 0;                                                                              \
        for (; i + 8 <= n; i += 8)                                                                 \
            for (int k = 0; k < 8; k++)                                                            \
                lanes[k] += (double)x[i + k] * (double)x[i + k];                                   \
        for (; i < n; i++)                                                                         \
            sum += (double)x[i] * (double)x[i];                                                    \
        for (int k = 0; k < 8; k++)                                                                \
            sum += lanes[k];                                                                       \
        return sum;                                                                                \
    }
SQUARES(squares_of_floats, float)
SQUARES(squares_of_doubles, double)

/* Return the number of elements if they follow each other; -1 if they do not. */
static ptrdiff_t contiguous(const Elements *elements)
{
    const Array *array = &elements->array;
    ptrdiff_t count = 1, stride = (ptrdiff_t)itemsize_of(elements->kind);
    for (int i = array->ndim - 1; i >= 0; i--) {
        if (array->shape[i] != 1 && array->strides[i] != stride * count)
            return -1;
        count *= array->shape[i];
    }
    return count;
}

PyObject *kernel_sum_of_squares(PyObject *module, PyObject *tensors)
{
    (void)module;
    double sum = 0;
    Py_ssize_t n = PyList_Check(tensors) ? PyList_GET_SIZE(tensors) : -1;
    if (n > 0 && is_exchanged(PyList_GET_ITEM(tensors, 0))) {
        int known = is_overridden(PyList_GET_ITEM(tensors, 0));
        if (known != 0)
            return known < 0 ? NULL : Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        Elements elements;
        if (!is_exchanged(tensor) || !view_elements(tensor, &elements))
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        ptrdiff_t count = contiguous(&elements);
        if (count < 0 || (elements.kind != FLOAT32 && elements.kind != FLOAT64))
            Py_RETURN_NONE;
        sum += elements.kind == FLOAT32 ? squares_of_floats(elements.array.data, (size_t)count)
                                        : squares_of_doubles(elements.array.data, (size_t)count);
    }
    return n < 0 ? Py_NewRef(Py_None) : PyFloat_FromDouble(sum);
}

PyObject *kernel_summarize_many(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *arrays, *columns = NULL;
    int threads, known;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &arrays, &threads))
        return NULL;
    size_t n = (size_t)PyList_GET_SIZE(arrays);
    if (n > 0 && is_exchanged(PyList_GET_ITEM(arrays, 0))) {
        known = is_overridden(PyList_GET_ITEM(arrays, 0)); /* which is the same for all of them */
        if (known != 0)
            return known < 0 ? NULL : Py_NewRef(Py_None);
    }
    Elements *elements = malloc((n + 1) * sizeof *elements);
    Many many = {elements, malloc((n + 1) * sizeof *many.kept), 0, 0};
    Outcome outcome = elements != NULL && many.kept != NULL ? DONE : NO_MEMORY;
    known = 1;
    for (; outcome == DONE && many.n < n; many.n++) {
        known = read_item(PyList_GET_ITEM(arrays, many.n), &elements[many.n]);
        if (known <= 0)
            goto end;
        many.kept[many.n].bin = NULL;
    }
    if (outcome == DONE) {
        Py_BEGIN_ALLOW_THREADS
        outcome = summarize_many(&many, threads);
        Py_END_ALLOW_THREADS
    }
    if (outcome == NO_MEMORY)
        PyErr_NoMemory();
    else if (outcome == BEYOND)
        PyErr_SetString(PyExc_OverflowError, "float64 cannot hold a magnitude");
    else
        columns = as_columns(&many);
end:
    for (size_t i = 0; i < many.n; i++)
        if (many.kept[i].bin != many.kept[i].few)
            free(many.kept[i].bin);
    free(many.kept);
    free(elements);
    return known == 0 ? Py_NewRef(Py_None) : columns;
}
