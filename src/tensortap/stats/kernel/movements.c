/* movements(): the sums of moves.c for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "module.h"

PyObject *kernel_movements(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given, *sums = NULL;
    int threads;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &given, &threads))
        return NULL;
    size_t n = (size_t)PyList_GET_SIZE(given);
    Movement *movements = calloc(n + 1, sizeof *movements);
    if (movements == NULL)
        return PyErr_NoMemory();
    for (size_t i = 0; i < n; i++) {
        int code;
        Py_ssize_t count, at[5];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(given, i), "innnnnn", &code, &count, &at[0], &at[1],
                              &at[2], &at[3], &at[4]))
            goto end;
        if (code < FLOAT32 || code > BFLOAT16 || count < 0 || (count > 0 && at[0] == 0)) {
            PyErr_SetString(PyExc_ValueError, "expected floats at an address");
            goto end;
        }
        movements[i] = (Movement){(Kind)code,          (size_t)count,       (const char *)at[0],
                                  (const char *)at[1], (const char *)at[2], (const char *)at[3],
                                  (char *)at[4],       {0, 0, 0, 0}};
    }
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = sum_movements(movements, n, threads);
    Py_END_ALLOW_THREADS
    sums = outcome == DONE ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * sizeof(MoveSums)))
                           : PyErr_NoMemory();
    for (size_t i = 0; sums != NULL && i < n; i++)
        memcpy(PyBytes_AS_STRING(sums) + i * sizeof(MoveSums), &movements[i].sums, sizeof(MoveSums));
end:
    free(movements);
    return sums;
}
