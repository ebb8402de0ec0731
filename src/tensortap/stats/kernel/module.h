/* What the files of the Python module share. */
#ifndef TENSORTAP_MODULE_H
#define TENSORTAP_MODULE_H

#include <Python.h>

#include "kernel.h"

#define FEW (1 << 14) /* elements: for these, releasing the interpreter lock does not pay */

/* Read the address of an array, its dtype, its shape (or the number of its elements), and its strides
 * (None for C order); return the number of elements, or -1 on error. */
Py_ssize_t read_array(PyObject *address, PyObject *dtype, PyObject *shape, PyObject *strides,
                      Elements *out);

/* Return the results as columns: (counts, figures, first bins, ends of bins, bins), as bytes. */
PyObject *as_columns(const Many *many);

extern PyTypeObject SummaryBatchType;

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
