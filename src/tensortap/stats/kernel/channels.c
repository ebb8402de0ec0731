/* Sums over a matrix whose columns are the channels of a layer.
 *
 * Large matrices are divided by rows, always at the same places, so the result does not depend on the
 * number of threads.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "module.h"
#include "processor.h"
#include "worker.h"

#define PARTS 4                  /* of a large matrix */
#define A_PART (size_t)(1 << 16) /* elements that justify a part of their own */
#define ROWS 4                   /* that are added together, so that sums of channels stay in registers */

typedef struct {
    const Elements *elements;
    size_t first, last; /* rows */
    double shift, *squares, sums[4];
} RowPart;

typedef struct {
    RowPart *parts;
    int n, next; /* the next part to take */
} RowJob;

/* Add up to ROWS rows, from column `at` on. */
static void add_chunk(const RowPart *part, const char *from, size_t rows, size_t at, size_t count,
                      float *wide, double sums[4])
{
    const Passes *passes = used_passes();
    Kind kind = part->elements->kind;
    ptrdiff_t stride = part->elements->array.strides[0];
    double *squares = part->squares + at;
    if (kind == FLOAT64) {
        passes->channels64((const void *)from, stride, rows, count, part->shift, squares, sums);
        return;
    }
    if (kind != FLOAT32) {
        for (size_t row = 0; row < rows; row++, from += stride)
            (kind == FLOAT16 ? passes->halves : passes->upper_halves)((const void *)from, count,
                                                                      wide + row * CHUNK);
        from = (const char *)wide;
        stride = CHUNK * sizeof *wide;
    }
    passes->channels32((const void *)from, stride, rows, count, part->shift, squares, sums);
}

static void add_rows(RowPart *part)
{
    const Array *array = &part->elements->array;
    size_t n = (size_t)array->shape[1], itemsize = itemsize_of(part->elements->kind);
    float wide[ROWS * CHUNK];
    double rest[4] = {0}, sums[4];
    FloatMode before;
    use_ieee_mode(&before);
    for (size_t i = part->first; i < part->last; i += ROWS) {
        size_t rows = part->last - i < ROWS ? part->last - i : ROWS;
        const char *row = array->data + (ptrdiff_t)i * array->strides[0];
        for (size_t at = 0; at < n; at += CHUNK) {
            add_chunk(part, row + at * itemsize, rows, at, n - at < CHUNK ? n - at : CHUNK, wide, sums);
            for (int k = 0; k < 4; k++) { /* Kahan's sum: there may be many rows */
                double term = sums[k] - rest[k], total = part->sums[k] + term;
                rest[k] = (total - part->sums[k]) - term;
                part->sums[k] = total;
            }
        }
    }
    restore_mode(&before);
}

static void *take_rows(void *given)
{
    RowJob *job = given;
    for (int i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->n;)
        add_rows(&job->parts[i]);
    return NULL;
}

/* Return 0 if there is no memory, or if the elements are no floats. */
static int add_channels(const Elements *elements, double shift, double *squares, double sums[4])
{
    size_t rows = (size_t)elements->array.shape[0], n = (size_t)elements->array.shape[1];
    int parts = rows >= PARTS && rows * n >= PARTS * A_PART ? PARTS : 1;
    int threads = parts > 1 ? threads_for(rows * n, 0) : 1;
    RowPart all[PARTS];
    RowJob job = {all, parts, 0};
    void *arguments[MAX_THREADS];
    double *spare = calloc((size_t)(parts - 1) * n + 1, sizeof *spare);
    if (spare == NULL || elements->kind > BFLOAT16) {
        free(spare);
        return 0;
    }
    for (int i = 0; i < parts; i++)
        all[i] = (RowPart){elements, rows * (size_t)i / (size_t)parts,
                           rows * (size_t)(i + 1) / (size_t)parts, shift,
                           i ? spare + (size_t)(i - 1) * n : squares, {0}};
    for (int i = 0; i < threads; i++)
        arguments[i] = &job;
    work_together(take_rows, arguments, threads);
    for (int i = 0; i < parts; i++) {
        for (int k = 0; k < 4; k++)
            sums[k] += all[i].sums[k];
        for (size_t c = 0; i && c < n; c++)
            squares[c] += all[i].squares[c];
    }
    free(spare);
    return 1;
}

PyObject *kernel_channels(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *address, *code, *shape, *strides;
    Py_ssize_t squares;
    double shift, sums[4] = {0};
    Elements elements;
    int done;
    if (!PyArg_ParseTuple(args, "OOOOdn", &address, &code, &shape, &strides, &shift, &squares) ||
        read_array(address, code, shape, strides, &elements) < 0)
        return NULL;
    if (elements.array.ndim != 2) {
        PyErr_SetString(PyExc_ValueError, "expected a matrix");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = add_channels(&elements, shift, (double *)squares, sums);
    Py_END_ALLOW_THREADS
    if (!done)
        return PyErr_NoMemory();
    return Py_BuildValue("(dddd)", sums[0], sums[1], sums[2], sums[3]);
}
