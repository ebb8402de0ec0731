/* The elements of a tensor, through the DLPack exchange of its class.
 *
 * The few structs of DLPack that are read are declared here: its header would be a dependency of the
 * build. The table of functions is versioned, and the version is checked. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"

#define MAJOR 1       /* of the version of DLPack */
#define CPU 1         /* a type of device */
#define MAX_CLASSES 4

enum { SIGNED = 0, UNSIGNED = 1, FLOATING = 2, BRAIN = 4 }; /* codes of dtypes */

typedef struct {
    void *data;
    struct {
        int32_t type, index;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} View;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous, *allocate, *export, *import;
    int (*view)(void *tensor, View *view);
    void *stream;
} Exchange;

static const Exchange *exchange;
static PyObject *classes[MAX_CLASSES];
static PyObject *has_overrides;

/* use_exchange(classes, capsule, has_overrides) */
PyObject *kernel_use_exchange(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given, *capsule, *overrides;
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &given, &capsule, &overrides))
        return NULL;
    const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found == NULL)
        return NULL;
    if (found->version.major != MAJOR || found->view == NULL || PyTuple_GET_SIZE(given) > MAX_CLASSES)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++)
        Py_XSETREF(classes[i], Py_NewRef(PyTuple_GET_ITEM(given, i)));
    Py_XSETREF(has_overrides, Py_NewRef(overrides));
    exchange = found; /* it is static */
    Py_RETURN_TRUE;
}

/* Return the kind of elements; KINDS for those that need the general way. */
static Kind kind_of(const View *view)
{
    static const struct {
        uint8_t code, bits;
        Kind kind;
    } known[] = {{FLOATING, 32, FLOAT32}, {BRAIN, 16, BFLOAT16},    {FLOATING, 16, FLOAT16},
                 {FLOATING, 64, FLOAT64}, {SIGNED, 64, INT64},      {SIGNED, 32, INT32},
                 {SIGNED, 16, INT16},     {UNSIGNED, 64, UINT64},   {UNSIGNED, 32, UINT32},
                 {UNSIGNED, 16, UINT16}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (view->dtype.code == known[i].code && view->dtype.bits == known[i].bits)
            return known[i].kind;
    return KINDS;
}

int is_exchanged(PyObject *tensor)
{
    PyObject *cls = (PyObject *)Py_TYPE(tensor);
    for (int i = 0; exchange != NULL && i < MAX_CLASSES; i++)
        if (cls == classes[i])
            return 1;
    return 0;
}

int is_overridden(PyObject *tensor)
{
    PyObject *tensors = PyTuple_Pack(1, tensor);
    int found = tensors != NULL ? is_true(PyObject_CallOneArg(has_overrides, tensors)) : -1;
    Py_XDECREF(tensors);
    return found;
}

int view_elements(PyObject *tensor, Elements *out)
{
    View view;
    Array *array = &out->array;
    if (exchange->view(tensor, &view) != 0) {
        PyErr_Clear(); /* no memory of its own: the general way says so */
        return 0;
    }
    Py_ssize_t count = 1;
    out->kind = kind_of(&view);
    out->table = NULL;
    if (view.device.type != CPU || view.dtype.lanes != 1 || out->kind == KINDS || view.ndim > MAX_DIMS)
        return 0;
    size_t itemsize = itemsize_of(out->kind);
    array->ndim = view.ndim;
    array->data = (const char *)view.data + view.offset;
    for (int i = view.ndim - 1; i >= 0; i--) {
        array->shape[i] = (ptrdiff_t)view.shape[i];
        array->strides[i] = (ptrdiff_t)itemsize * (view.strides ? (ptrdiff_t)view.strides[i] : count);
        count *= array->shape[i];
    }
    int general = count > 0 ? is_freed(tensor, view.data, itemsize) : 0;
    if (general == 0 && is_float(out->kind))
        general = is_negated(tensor);
    PyErr_Clear();
    return general == 0;
}
