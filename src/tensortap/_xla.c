/* The statistics of a tensor for XLA on a CPU: an operation inside the compiled function.
 *
 * XLA calls `pack` with a buffer of float32, bfloat16 or float16, and a buffer of words to fill
 * in as `tensortap.stats.packed` lays them out. JAX need not be there to build this: the few
 * structs of XLA's foreign function interface that are read are declared here.
 *
 * Blocks that fit into the first cache are reduced one after the other and put together in
 * float64 by Chan's formula. Nothing trusts the processor with subnormal numbers, as XLA makes
 * it flush them: blocks that hold some, or NaN or Inf, go element by element, by their bits.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

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
enum { FLOAT16 = 10, FLOAT32 = 11, BFLOAT16 = 16, EXECUTE = 3 };

/* ---- statistics ---- */

#define BLOCK 2048
#define LANES 16
#define INFINITY_BITS 0x7f800000u
#define SIGN 0x80000000u
#define HEAD 24
#define SMALLEST -149

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTEST __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define FASTEST
#endif

typedef struct {
    uint64_t zeros, nans, posinfs, neginfs, n;
    int32_t low, high; /* keys: in the order of the numbers */
    uint32_t min_abs;
    int unit;
    double mean, m2, mean_abs, p2, p4, p8; /* in the unit */
    uint64_t fields[4][256];
    uint64_t subnormals[23];
} Tally;

typedef struct {
    int32_t low, high;
    uint32_t min_abs, max_abs, zeros;
} Extremes;

static inline int32_t key_of(uint32_t u)
{
    return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) >> 1));
}

static inline int place_of(uint32_t a) /* the exponent, above that of the smallest subnormal */
{
    return a >> 23 ? (int)(a >> 23) + 22 : 31 - __builtin_clz(a);
}

FASTEST static void extremes_of(const uint32_t *restrict u, int n, Extremes *restrict e)
{
    int32_t low = INT32_MAX, high = INT32_MIN;
    uint32_t min_abs = UINT32_MAX, max_abs = 0, zeros = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = u[i] & ~SIGN;
        int32_t key = (int32_t)(u[i] ^ ((uint32_t)((int32_t)u[i] >> 31) >> 1));
        low = key < low ? key : low;
        high = key > high ? key : high;
        min_abs = a < min_abs ? a : min_abs;
        max_abs = a > max_abs ? a : max_abs;
        zeros += a == 0;
    }
    *e = (Extremes){low, high, min_abs, max_abs, zeros};
}

/* sixteen at once, whatever the processor makes of it */
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));

static inline double total(Floats lanes)
{
    double sum = 0;
    for (int j = 0; j < LANES; j++)
        sum += lanes[j];
    return sum;
}

/* Sums over a block of normal numbers and zeros, in units of 2**unit: n is a multiple of LANES. */
FASTEST static void sums_of(const uint32_t *restrict u, int n, float first, float second,
                            double *restrict out)
{
    Floats s1 = {0}, sa = {0}, p2 = {0}, p4 = {0}, p8 = {0};
    for (int i = 0; i < n; i += LANES) {
        /* two factors: one alone may leave the range */
        Floats x = *(const Floats *)(u + i) * first * second;
        Floats q = x * x, r = q * q;
        s1 += x;
        sa += (Floats)((Words)x & ~SIGN);
        p2 += q;
        p4 += r;
        p8 += r * r;
    }
    out[0] = total(s1), out[1] = total(sa);
    out[2] = total(p2), out[3] = total(p4), out[4] = total(p8);
}

FASTEST static void deviations_of(const uint32_t *restrict u, int n, float first, float second,
                                  float mean, double *restrict out)
{
    Floats d1 = {0}, d2 = {0};
    for (int i = 0; i < n; i += LANES) {
        Floats x = *(const Floats *)(u + i) * first * second - mean;
        d1 += x;
        d2 += x * x;
    }
    out[0] = total(d1), out[1] = total(d2);
}

/* Chan's formula; both in the larger of their units. */
static void put_together(Tally *t, uint64_t n, int unit, double mean, double m2, double mean_abs,
                         double p2, double p4, double p8)
{
    if (!n)
        return;
    int k = t->n && t->unit > unit ? t->unit : unit;
    int a = t->unit - k, b = unit - k;
    if (!t->n)
        a = 0;
    if (a) {
        t->mean = ldexp(t->mean, a), t->m2 = ldexp(t->m2, 2 * a);
        t->mean_abs = ldexp(t->mean_abs, a), t->p2 = ldexp(t->p2, 2 * a);
        t->p4 = ldexp(t->p4, 4 * a), t->p8 = ldexp(t->p8, 8 * a);
    }
    if (b) {
        mean = ldexp(mean, b), m2 = ldexp(m2, 2 * b), mean_abs = ldexp(mean_abs, b);
        p2 = ldexp(p2, 2 * b), p4 = ldexp(p4, 4 * b), p8 = ldexp(p8, 8 * b);
    }
    double all = (double)(t->n + n), part = (double)n / all, delta = mean - t->mean;
    t->m2 += m2 + delta * delta * part * (double)t->n;
    t->mean += delta * part;
    t->mean_abs += (mean_abs - t->mean_abs) * part;
    t->p2 += (p2 - t->p2) * part;
    t->p4 += (p4 - t->p4) * part;
    t->p8 += (p8 - t->p8) * part;
    t->unit = k;
    t->n += n;
}

static void widen(Tally *t, int32_t low, int32_t high, uint32_t min_abs)
{
    t->low = low < t->low ? low : t->low;
    t->high = high > t->high ? high : t->high;
    t->min_abs = min_abs < t->min_abs ? min_abs : t->min_abs;
}

/* A block with NaN, Inf or subnormal numbers: by the bits. */
static void add_slowly(Tally *t, const uint32_t *u, int n)
{
    uint64_t finite = 0;
    uint32_t max_abs = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = u[i] & ~SIGN;
        if (a >= INFINITY_BITS) {
            if (a > INFINITY_BITS)
                t->nans++;
            else if (u[i] & SIGN)
                t->neginfs++;
            else
                t->posinfs++;
            continue;
        }
        finite++;
        max_abs = a > max_abs ? a : max_abs;
        widen(t, key_of(u[i]), key_of(u[i]), a);
        if (!a)
            t->zeros++;
        else if (a >> 23)
            t->fields[0][a >> 23]++;
        else
            t->subnormals[place_of(a)]++;
    }
    if (!finite)
        return;
    int unit = max_abs ? place_of(max_abs) + SMALLEST + 1 : SMALLEST;
    double s1 = 0, sa = 0, p2 = 0, p4 = 0, p8 = 0, d1 = 0, d2 = 0, mean = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < n; i++) {
            uint32_t a = u[i] & ~SIGN;
            if (a >= INFINITY_BITS)
                continue;
            int field = (int)(a >> 23);
            uint32_t whole = (a & 0x7fffffu) | (field ? 1u << 23 : 0);
            double x = ldexp((double)whole, (field ? field : 1) - 150 - unit);
            double y = u[i] & SIGN ? -x : x;
            if (pass) {
                d1 += y - mean;
                d2 += (y - mean) * (y - mean);
            } else {
                double q = x * x, r = q * q;
                s1 += y, sa += x, p2 += q, p4 += r, p8 += r * r;
            }
        }
        if (!pass)
            mean = s1 / (double)finite;
    }
    double f = (double)finite;
    put_together(t, finite, unit, mean + d1 / f, d2 - d1 * d1 / f, sa / f, p2 / f, p4 / f, p8 / f);
}

static void add_block(Tally *t, const uint32_t *u, int n)
{
    Extremes e;
    int rest = n % LANES;
    if (rest) {
        n -= rest;
        add_slowly(t, u + n, rest);
        if (!n)
            return;
    }
    extremes_of(u, n, &e);
    if (e.max_abs >= INFINITY_BITS || (e.max_abs && e.max_abs < 1u << 23)) {
        add_slowly(t, u, n);
        return;
    }
    uint32_t before = 0;
    for (int j = 0; j < 4; j++)
        before += (uint32_t)t->fields[j][0];
    for (int i = 0; i < n; i += 4)
        for (int j = 0; j < 4; j++)
            t->fields[j][u[i + j] >> 23 & 255]++;
    uint32_t after = 0;
    for (int j = 0; j < 4; j++)
        after += (uint32_t)t->fields[j][0];
    if (after - before != e.zeros) { /* subnormals: take it back, and go by the bits */
        for (int i = 0; i < n; i += 4)
            for (int j = 0; j < 4; j++)
                t->fields[j][u[i + j] >> 23 & 255]--;
        add_slowly(t, u, n);
        return;
    }
    t->zeros += e.zeros;
    widen(t, e.low, e.high, e.min_abs);
    if (!e.max_abs) {
        put_together(t, (uint64_t)n, SMALLEST, 0, 0, 0, 0, 0, 0);
        return;
    }
    int unit = (int)(e.max_abs >> 23) - 126, half = -unit / 2;
    float first = ldexpf(1, half), second = ldexpf(1, -unit - half);
    double s[5], d[2], f = n;
    sums_of(u, n, first, second, s);
    float mean = (float)(s[0] / f);
    deviations_of(u, n, first, second, mean, d);
    double m2 = d[1] - d[0] * d[0] / f;
    put_together(t, (uint64_t)n, unit, mean + d[0] / f, m2 > 0 ? m2 : 0, s[1] / f, s[2] / f,
                 s[3] / f, s[4] / f);
}

FASTEST static void from_bfloat16(const uint16_t *restrict h, uint32_t *restrict u, int n)
{
    for (int i = 0; i < n; i++)
        u[i] = (uint32_t)h[i] << 16;
}

FASTEST static void from_float16(const uint16_t *restrict h, uint32_t *restrict u, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t sign = (uint32_t)(h[i] & 0x8000) << 16, a = h[i] & 0x7fff, field = a >> 10;
        float low = (float)(int)a * 0x1p-24f; /* subnormal there, normal here */
        uint32_t bits;
        memcpy(&bits, &low, 4);
        uint32_t normal = (a << 13) + (field == 31 ? 224u << 23 : 112u << 23);
        u[i] = sign | (field ? normal : bits);
    }
}

static void put_figure(uint32_t *words, double x)
{
    float high = (float)x, low = (float)(x - high);
    memcpy(words, &high, 4);
    memcpy(words + 1, &low, 4);
}

static int pack_into(const Buffer *in, const Buffer *out)
{
    int64_t n = 1;
    for (int64_t i = 0; i < in->rank; i++)
        n *= in->dims[i];
    int first = in->dtype == FLOAT32 ? -149 : in->dtype == BFLOAT16 ? -133 : -24;
    int bins = in->dtype == FLOAT32 ? 277 : in->dtype == BFLOAT16 ? 261 : 40;
    if (out->rank != 1 || out->dims[0] != HEAD + bins)
        return -1;
    Tally t;
    memset(&t, 0, sizeof t);
    t.low = INT32_MAX, t.high = INT32_MIN, t.min_abs = UINT32_MAX;
    uint32_t block[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int size = n - at < BLOCK ? (int)(n - at) : BLOCK;
        const uint32_t *u = block;
        if (in->dtype == FLOAT32)
            u = (const uint32_t *)in->data + at;
        else if (in->dtype == BFLOAT16)
            from_bfloat16((const uint16_t *)in->data + at, block, size);
        else
            from_float16((const uint16_t *)in->data + at, block, size);
        add_block(&t, u, size);
    }
    uint32_t *w = out->data;
    memset(w, 0, sizeof *w * (size_t)(HEAD + bins));
    w[0] = 1;
    w[1] = (uint32_t)t.unit;
    w[2] = (uint32_t)t.zeros, w[3] = (uint32_t)t.nans;
    w[4] = (uint32_t)t.posinfs, w[5] = (uint32_t)t.neginfs;
    if (t.n) {
        w[6] = (uint32_t)t.low ^ ((uint32_t)(t.low >> 31) >> 1);
        w[8] = (uint32_t)t.high ^ ((uint32_t)(t.high >> 31) >> 1);
        w[10] = t.min_abs;
        put_figure(w + 12, t.mean);
        put_figure(w + 14, t.m2 / (double)t.n);
        put_figure(w + 16, t.mean_abs);
        put_figure(w + 18, t.p2);
        put_figure(w + 20, t.p4);
        put_figure(w + 22, t.p8);
    }
    for (int field = 1; field < 255; field++) {
        uint64_t seen = 0;
        for (int j = 0; j < 4; j++)
            seen += t.fields[j][field];
        if (seen)
            w[HEAD + field + 22 + SMALLEST - first] = (uint32_t)seen;
    }
    for (int place = 0; place < 23; place++)
        if (t.subnormals[place])
            w[HEAD + place + SMALLEST - first] = (uint32_t)t.subnormals[place];
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
        if (in->dtype == FLOAT32 || in->dtype == BFLOAT16 || in->dtype == FLOAT16)
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
    PyModuleDef_HEAD_INIT, "tensortap._xla", "Statistics for XLA on a CPU.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__xla(void)
{
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
