/* What the files of the Python module share. */
#ifndef TENSORTAP_MODULE_H
#define TENSORTAP_MODULE_H

#include <Python.h>
#include <time.h>

#include "kernel.h"

#define FEW (1 << 14) /* elements: for these, releasing the interpreter lock does not pay */

/* Read the address of an array, its dtype, its shape (or the number of its elements), and its strides
 * (None for C order); return the number of elements, or -1 on error. */
Py_ssize_t read_array(PyObject *address, PyObject *dtype, PyObject *shape, PyObject *strides,
                      Elements *out);

/* columns.c */

/* Return the results as columns: (counts, figures, first bins, ends of bins, bins), as bytes. */
PyObject *as_columns(const Many *many);

/* summarize_many(arrays, threads) -> columns | None
 *
 * `arrays` is a list of tensors, or of (address, code, shape, strides) as for `summarize`. Returns None
 * if one of them is a tensor that needs the general way. */
PyObject *kernel_summarize_many(PyObject *module, PyObject *args);

/* sum_of_squares(tensors) -> float | None
 *
 * None if one of them needs the general way. In float64: it is finite if all elements of floats are. */
PyObject *kernel_sum_of_squares(PyObject *module, PyObject *tensors);

/* Read a clock, in nanoseconds. */
static inline long long now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (long long)t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* batch.c */

extern PyTypeObject SummaryBatchType;

/* Summarize an array and add it to a SummaryBatch; return its number, 0 on error. `start` is when the
 * caller began with this array, by CLOCK_MONOTONIC. */
long long add_elements(PyObject *batch, PyObject *key, long long start, const Elements *elements);

/* Add the last array again; return its number, 0 if the last one has another `number`, -1 on error. */
long long repeat_elements(PyObject *batch, PyObject *key, long long start, long long number);

long long step_of(PyObject *batch);
int is_due(PyObject *batch); /* whether to take it now */

/* exchange.c */

PyObject *kernel_use_exchange(PyObject *module, PyObject *args);

/* Return whether the class of a tensor exchanges its elements. */
int is_exchanged(PyObject *tensor);

/* Return whether a mode of the user sees each attribute of a tensor that is read; -1 on error. */
int is_overridden(PyObject *tensor);

/* Find the elements of a tensor of such a class; return 0 if it needs the general way. */
int view_elements(PyObject *tensor, Elements *out);

static inline int is_float(Kind kind)
{
    return kind == FLOAT32 || kind == FLOAT64 || kind == FLOAT16 || kind == BFLOAT16;
}

/* hooks.c */

int add_hooks(PyObject *module); /* -1 on error */

/* locate.c */

/* Return whether an object, of which the reference is taken, is true; -1 on error. */
int is_true(PyObject *found);
int is_negated(PyObject *tensor); /* a negative view; -1 on error */

/* Return whether the storage of a tensor has been freed, so that its address is nothing but its offset;
 * -1 on error. */
int is_freed(PyObject *tensor, const void *data, size_t itemsize);

/* locate(tensor, dtypes) -> (address, code, shape, strides) | None
 *
 * `dtypes` has for each dtype its code, its size, and whether tensors may be negative views (1), or
 * conjugate ones as well (2). `shape` is the number of elements if they are in C order. */
PyObject *kernel_locate(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
int prepare_names(void); /* before; -1 on error */

/* channels(address, code, shape, strides, shift, squares) -> four sums
 *
 * Of a matrix: the first four powers of the deviations from `shift`. The squares of each column are
 * added to the float64 at the address `squares`. */
PyObject *kernel_channels(PyObject *module, PyObject *args);

/* movements([(code, count, x, a, y, b, kept)], threads) -> 4 float64 for each, as bytes
 *
 * Arrays are addresses of contiguous floats of one dtype, or 0: see Movement. */
PyObject *kernel_movements(PyObject *module, PyObject *args);

#endif
