/* The statistics of a tensor for XLA on a CPU: an operation inside the compiled function.
 *
 * XLA calls `pack` with a buffer of float32, bfloat16 or float16, and a buffer of words to fill
 * in as `tensortap.rooms.track.packed` lays them out. JAX need not be there to build this: the few
 * structs of XLA's foreign function interface that are read are declared here.
 * The statistics themselves are those of stats/kernel.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../../stats/kernel/kernel.h"
#include "../../../stats/kernel/variants.h"

/* ---- what XLA hands over ---- */

typedef struct Extension {
    size_t size;
    int type; /* 1: it asks for the handler's metadata */
    struct Extension *next;
} Extension;

typedef struct {
    size_t size;
    Extension *extensions;
    int major, minor;
} Version;

typedef struct {
    size_t size;
    Version version;
    uint32_t traits;
} Metadata;

typedef struct {
    Extension base;
    Metadata *metadata;
} AskMetadata;

typedef struct {
    size_t size;
    Extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} Buffer;

typedef struct {
    size_t size;
    Extension *extensions;
    int64_t count;
    int *types;
    void **items;
} Buffers;

typedef struct {
    size_t size;
    Extension *extensions;
    const void *api;
    void *context;
    int stage;
    Buffers arguments, results;
} Frame;

/* the structs are the same in all of these versions: 0.OLDEST to 0.NEWEST */
enum { OLDEST = 1, NEWEST = 3 };
enum { XLA_FLOAT16 = 10, XLA_FLOAT32 = 11, XLA_BFLOAT16 = 16, EXECUTE = 3 };

/* ---- the vector ---- */

#define HEAD 24
#define WIDE 2 /* figures are float64 */

static void put_figure(uint32_t *words, double x)
{
    memcpy(words, &x, sizeof x);
}

/* As `tensortap.rooms.track.packed` wants it: averages in a unit in which the largest is below one. */
static void put_figures(uint32_t *w, const Statistics *s)
{
    double n = (double)(s->count - s->nans - s->posinfs - s->neginfs);
    int unit = 0;
    if (n < 1)
        return;
    frexp(s->max_abs, &unit);
    w[1] = (uint32_t)unit;
    put_figure(w + 6, s->min);
    put_figure(w + 8, s->max);
    put_figure(w + 10, s->min_abs);
    double std = ldexp(s->std, -unit), rm2 = ldexp(s->rm2, -unit), rm4 = ldexp(s->rm4, -unit);
    double rm8 = ldexp(s->rm8, -unit), square = rm4 * rm4, eighth = rm8 * rm8;
    put_figure(w + 12, ldexp(s->mean, -unit));
    put_figure(w + 14, std * std * (n - 1) / n);
    put_figure(w + 16, ldexp(s->mean_abs, -unit));
    put_figure(w + 18, rm2 * rm2);
    put_figure(w + 20, square * square);
    eighth *= eighth;
    put_figure(w + 22, eighth * eighth);
}

static int pack_into(const Buffer *in, const Buffer *out)
{
    Elements elements = {.array = {.data = in->data, .ndim = 1}};
    Array *array = &elements.array;
    Kind kind = in->dtype == XLA_FLOAT32 ? FLOAT32 : in->dtype == XLA_BFLOAT16 ? BFLOAT16 : FLOAT16;
    int first = kind == FLOAT32 ? -149 : kind == BFLOAT16 ? -133 : -24;
    int bins = kind == FLOAT32 ? 277 : kind == BFLOAT16 ? 261 : 40;
    if (out->rank != 1 || out->dims[0] != HEAD + bins)
        return -1;
    elements.kind = kind;
    array->shape[0] = 1;
    for (int64_t i = 0; i < in->rank; i++)
        array->shape[0] *= (ptrdiff_t)in->dims[i];
    array->strides[0] = kind == FLOAT32 ? 4 : 2;
    Statistics found;
    uint32_t *w = out->data;
    memset(w, 0, sizeof *w * (size_t)(HEAD + bins));
    /* one thread: XLA has its own */
    if (summarize(&elements, 1, &found) != DONE)
        return -1;
    w[0] = WIDE;
    w[2] = (uint32_t)found.zeros, w[3] = (uint32_t)found.nans;
    w[4] = (uint32_t)found.posinfs, w[5] = (uint32_t)found.neginfs;
    put_figures(w, &found);
    for (int i = 0; i < found.bins; i++)
        w[HEAD + found.first_bin + i - first] = (uint32_t)found.bin[i];
    return 0;
}

/* ---- the handler ---- */

static int minor = OLDEST; /* the version of the interface that is spoken: 0.minor */

static void *pack(Frame *frame)
{
    for (Extension *e = frame->extensions; e; e = e->next)
        if (e->type == 1) {
            Metadata *metadata = ((AskMetadata *)e)->metadata;
            metadata->version.major = 0;
            metadata->version.minor = minor;
            metadata->traits = 0;
            return NULL;
        }
    if (frame->stage == EXECUTE && frame->arguments.size == sizeof(Buffers) &&
        frame->arguments.count == 1 && frame->results.count == 1) {
        const Buffer *in = frame->arguments.items[0], *out = frame->results.items[0];
        if (in->dtype == XLA_FLOAT32 || in->dtype == XLA_BFLOAT16 || in->dtype == XLA_FLOAT16)
            pack_into(in, out);
    }
    return NULL;
}

static PyObject *speak(PyObject *self, PyObject *version)
{
    long wanted = PyLong_AsLong(version);
    if (wanted == -1 && PyErr_Occurred())
        return NULL;
    minor = (int)wanted;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"speak", speak, METH_O, "Register as code for this version of the interface."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tensortap.values.jax._xla", "Statistics for XLA on a CPU.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__xla(void)
{
    choose_variant();
    PyObject *m = PyModule_Create(&module);
    if (m == NULL)
        return NULL;
    PyObject *capsule = PyCapsule_New((void *)pack, "xla._CUSTOM_CALL_TARGET", NULL);
    if (capsule == NULL || PyModule_AddObject(m, "pack", capsule) < 0) {
        Py_XDECREF(capsule);
        Py_DECREF(m);
        return NULL;
    }
    PyModule_AddIntConstant(m, "OLDEST", OLDEST);
    PyModule_AddIntConstant(m, "NEWEST", NEWEST);
    return m;
}
