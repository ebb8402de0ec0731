/* The statistics of numbers in memory, in one pass.
 *
 * The elements are cut into tasks and these into chunks, always in the same places. A chunk fits
 * into the first-level cache, where the passes of kernel_passes.h go over it a few times: range,
 * exponents, sums, and deviations where the sums alone would not tell them. What the chunks of a
 * task come to is added up by Chan's formula, and so are the tasks, in their order: the figures
 * do not depend on how many threads there were.
 *
 * Of 8-bit elements, and of many 16-bit ones, the bit patterns are counted instead.
 *
 * Whatever can be told by bits is told by bits. For the rest the processor is set to treat
 * subnormal numbers as IEEE 754 says, and set back: training may run with them flushed to zero.
 */
#define _GNU_SOURCE /* sched_getaffinity */
#include "kernel_core.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

#define CHUNK 4096                /* elements: their float64 fit into the first-level cache */
#define TASK (16 * CHUNK)         /* what a thread takes at a time */
#define A_THREAD (8 * TASK)       /* elements that are worth a thread */
#define MOST_THREADS 8            /* by default: memory has no more to give */
#define LIMIT 64                  /* threads, whatever the caller says */
#define WORTH_A_TABLE (1 << 20)   /* 16-bit elements from which counting patterns is faster */
#define WORTH_A_SMALL (1 << 19)   /* bfloat16 uses few of them, which stay in the cache */
#define PATTERNS (1 << 16)
#define SECOND (PATTERNS + 1040)  /* where the second table begins: not 4096 bytes times anything */
#define FLUSH ((uint64_t)1 << 31) /* elements that a table of 32-bit counts can take */
#define WINDOW 16                 /* exponents that are counted by comparisons at a time */
#define MOST_WINDOWS 3            /* with more of them, increments in memory are faster */
#define SAFE 100                  /* within 2**±100, no eighth power leaves float64 */
#define NOTHING INT_MIN           /* the unit of moments that hold only zeros */
#define BIAS 127                  /* of the exponents that float32 has */
#define FIELD32_INF 0x7F800000u
#define FIELD64_INF 0x7FF0000000000000u

typedef struct {
    int32_t low, high; /* in the order of the values: see PASS(range32) */
    uint32_t small, large;
} Range32;

typedef struct {
    int64_t low, high;
    uint64_t small, large;
} Range64;

typedef struct {
    double sum, sizes, p2, p4, p8;
} Sums;

typedef struct {
    void (*halves)(const uint16_t *, size_t, float *);
    void (*range32)(const uint32_t *, size_t, Range32 *);
    void (*range64)(const uint64_t *, size_t, Range64 *);
    size_t (*zeros32)(const uint32_t *, size_t);
    size_t (*zeros64)(const uint64_t *, size_t);
    void (*exponents32)(const uint32_t *, size_t, uint8_t *);
    void (*exponents64)(const uint64_t *, size_t, uint8_t *);
    size_t (*window)(const uint8_t *, size_t, uint8_t, uint64_t *);
    size_t (*outside)(const uint8_t *, size_t, uint8_t, uint8_t, uint64_t *);
    void (*sums32)(const float *, size_t, Sums *);
    void (*sums64)(const double *, size_t, Sums *);
    void (*deviations32)(const float *, size_t, double, double *);
    void (*deviations64)(const double *, size_t, double, double *);
} Passes;

/* ---- the passes, for every kind of processor ---- */

#define PASS(name) name##_baseline
#define WIDTH 16
#define BYTES_WIDTH 16
#include "kernel_passes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#define BEGIN_AVX2                                                                                \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt\"))), apply_to = function)")
#define BEGIN_AVX512                                                                              \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\"))), apply_to = function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX2                                                                                \
    _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt\")")
#define BEGIN_AVX512                                                                              \
    _Pragma("GCC push_options")                                                                   \
    _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

BEGIN_AVX2
#define PASS(name) name##_avx2
#define WIDTH 32
#define BYTES_WIDTH 32
#include "kernel_passes.h"
END_TARGET

BEGIN_AVX512
#define PASS(name) name##_avx512
#define WIDTH 64
#define BYTES_WIDTH 32
#include "kernel_passes.h"
END_TARGET
#endif

static const struct {
    const char *name;
    const Passes *passes;
} variants[] = {
    {"baseline", &passes_baseline},
#if defined(__x86_64__)
    {"avx2", &passes_avx2},
    {"avx512", &passes_avx512},
#endif
};
#define VARIANTS ((int)(sizeof variants / sizeof *variants))

static int used; /* the index of the variant */

static int can_run(int index)
{
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (index == 1)
        return avx2;
    if (index == 2)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return index == 0;
}

const char *variant(int index)
{
    return index < VARIANTS && can_run(index) ? variants[index].name : NULL;
}

const char *used_variant(void)
{
    return variants[used].name;
}

int use_variant(const char *name)
{
    for (int i = 0; i < VARIANTS; i++) {
        if (strcmp(name, variants[i].name) == 0 && can_run(i)) {
            used = i;
            return 1;
        }
    }
    return 0;
}

void choose_variant(void)
{
    while (used + 1 < VARIANTS && can_run(used + 1))
        used++;
}

/* ---- the processor's treatment of numbers ---- */

#if defined(__x86_64__)
typedef unsigned int Environment;
static void enter(Environment *before)
{
    *before = _mm_getcsr();
    _mm_setcsr(0x1F80); /* all exceptions masked, to nearest, subnormals as they are */
}
static void leave(const Environment *before)
{
    _mm_setcsr(*before);
}
#else
typedef fenv_t Environment;
static void enter(Environment *before)
{
    fegetenv(before);
    fesetenv(FE_DFL_ENV);
}
static void leave(const Environment *before)
{
    fesetenv(before);
}
#endif

/* ---- moments: averages over n finite values, in units of 2**unit to the power concerned ---- */

typedef struct {
    int64_t n;
    int unit;
    double mean, m2, mean_abs, p2, p4, p8; /* m2: the sum of squared deviations from the mean */
    double low, high, min_abs;             /* these three in units of 1 */
} Moments;

static void to_unit(Moments *m, int unit)
{
    if (m->unit == unit)
        return;
    if (m->unit != NOTHING) {
        int k = m->unit - unit;
        m->mean = ldexp(m->mean, k);
        m->m2 = ldexp(m->m2, 2 * k);
        m->mean_abs = ldexp(m->mean_abs, k);
        m->p2 = ldexp(m->p2, 2 * k);
        m->p4 = ldexp(m->p4, 4 * k);
        m->p8 = ldexp(m->p8, 8 * k);
    }
    m->unit = unit;
}

/* Add b to a, by Chan's formula. */
static void add(Moments *a, Moments b)
{
    if (b.n == 0)
        return;
    if (a->n == 0) {
        *a = b;
        return;
    }
    /* the larger unit: what the smaller loses to underflow is far below what float64 can tell */
    int unit = a->unit > b.unit ? a->unit : b.unit;
    to_unit(a, unit);
    to_unit(&b, unit);
    double n = (double)(a->n + b.n);
    double rest = (double)a->n / n, part = (double)b.n / n, delta = b.mean - a->mean;
    a->m2 += b.m2 + delta * delta * part * (double)a->n;
    a->mean += delta * part;
    a->mean_abs = a->mean_abs * rest + b.mean_abs * part;
    a->p2 = a->p2 * rest + b.p2 * part;
    a->p4 = a->p4 * rest + b.p4 * part;
    a->p8 = a->p8 * rest + b.p8 * part;
    a->n += b.n;
    a->low = b.low < a->low ? b.low : a->low;
    a->high = b.high > a->high ? b.high : a->high;
    a->min_abs = b.min_abs < a->min_abs ? b.min_abs : a->min_abs;
}

/* The unit for values up to max_abs: 1 wherever that is safe. */
static int unit_for(double max_abs)
{
    int exponent;
    if (max_abs == 0.0)
        return NOTHING;
    frexp(max_abs, &exponent);
    return exponent >= -SAFE && exponent <= SAFE ? 0 : exponent;
}

static Moments of_constant(int64_t n, double value, int unit)
{
    double y = unit == NOTHING ? 0.0 : ldexp(value, -unit), y2 = y * y, y4 = y2 * y2;
    return (Moments){n, unit, y, 0.0, fabs(y), y2, y4, y4 * y4, value, value, fabs(value)};
}

static Moments of_sums(int64_t n, int unit, const Sums *s)
{
    double d = (double)n, mean = s->sum / d;
    double m2 = s->p2 - mean * mean * d;
    return (Moments){n, unit, mean, m2, s->sizes / d, s->p2 / d, s->p4 / d, s->p8 / d, 0, 0, 0};
}

/* Whether the mean is so small beside the deviations that the squares alone tell them. */
static int tells_deviations(const Moments *m)
{
    return m->m2 >= 0.25 * m->p2 * (double)m->n;
}

static void set_deviations(Moments *m, double rest, double squares)
{
    double d = (double)m->n;
    double m2 = squares - rest * rest / d;
    m->m2 = m2 > 0.0 ? m2 : 0.0;
    m->mean += rest / d;
}

/* ---- workers ---- */

typedef struct {
    /* counts that are only ever added to, so that who counted what does not matter */
    int64_t zeros, nans, posinfs, neginfs;
    uint64_t near[256];      /* by the exponents that normal numbers of float32 have, plus BIAS */
    uint64_t far[EXPONENTS]; /* by all others, from FIRST_EXPONENT */
    int any_far;             /* far is only used, and cleared, when there are some */
    /* how exponents are counted just now */
    int base, width;    /* of the windows */
    int scatter, pause; /* chunks for which they are not tried, and how many next time */
    uint32_t few[4][256]; /* patterns of 8 bits */
    uint32_t *many;       /* of 16 bits: two tables */
    uint64_t *patterns;   /* where they are added up from time to time */
    uint64_t seen;        /* since then */
    uint8_t exponents[CHUNK];
    float floats[CHUNK], finite32[CHUNK];
    double doubles[CHUNK], finite64[CHUNK], rulers[CHUNK], finite_rulers[CHUNK], scaled[CHUNK];
    double gathered[2 * CHUNK]; /* elements of up to 16 bytes */
} Worker;

typedef struct {
    Array array;
    Kind kind;
    size_t itemsize, count, tasks;
    int contiguous, by_patterns;
    const Passes *passes;
    const double *table;
    Moments *parts; /* of every task */
    size_t next;    /* the task that nobody has taken yet */
    int beyond;     /* a magnitude that no float64 holds */
} Job;

typedef struct {
    Job *job;
    Worker *worker;
    pthread_t thread;
} Hand;

static void start(Worker *w, const Job *job)
{
    w->zeros = w->nans = w->posinfs = w->neginfs = 0;
    memset(w->near, 0, sizeof w->near);
    w->any_far = 0;
    w->base = w->scatter = 0;
    w->width = WINDOW;
    w->pause = 1;
    w->seen = 0;
    if (job->by_patterns && job->kind == BYTES)
        memset(w->few, 0, sizeof w->few);
}

/* ---- exponents ---- */

static void count_exponent(Worker *w, int exponent, uint64_t times)
{
    if (exponent > -BIAS && exponent <= BIAS) {
        w->near[exponent + BIAS] += times;
        return;
    }
    if (!w->any_far) {
        memset(w->far, 0, sizeof w->far);
        w->any_far = 1;
    }
    w->far[exponent - FIRST_EXPONENT] += times;
}

static int highest_bit(uint64_t x)
{
    return 63 - __builtin_clzll(x);
}

static void count_far32(Worker *w, const uint32_t *bits, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t size = bits[i] & INT32_MAX;
        if (size != 0 && size < 0x00800000)
            count_exponent(w, highest_bit(size) - 149, 1);
    }
}

static void count_far64(Worker *w, const uint64_t *bits, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t size = bits[i] & INT64_MAX;
        int exponent = (int)(size >> 52) - 1023;
        if (size == 0 || (exponent > -BIAS && exponent <= BIAS))
            continue;
        count_exponent(w, exponent == -1023 ? highest_bit(size) - 1074 : exponent, 1);
    }
}

static size_t scatter_bytes(const uint8_t *bytes, size_t n, uint64_t *near)
{
    /* several tables: an increment waits for the one before at the same address */
    uint32_t tables[8][256];
    size_t counted = 0;
    memset(tables, 0, sizeof tables);
    for (size_t i = 0; i < n; i += 8)
        for (int k = 0; k < 8; k++)
            tables[k][bytes[i + k]]++;
    for (int e = 1; e < 256; e++) {
        uint32_t sum = 0;
        for (int k = 0; k < 8; k++)
            sum += tables[k][e];
        near[e] += sum;
        counted += sum;
    }
    return counted;
}

/* Put as few windows as will do where most exponents were so far; 0 if too many would be needed. */
static int place_windows(Worker *w)
{
    uint64_t total = 0;
    for (int e = 1; e < 255; e++)
        total += w->near[e];
    for (w->width = WINDOW; w->width <= MOST_WINDOWS * WINDOW; w->width += WINDOW) {
        uint64_t sum = 0, best = 0;
        for (int e = 1; e < 255; e++) {
            sum += w->near[e];
            if (e > w->width)
                sum -= w->near[e - w->width];
            if (e >= w->width && sum >= best) {
                best = sum;
                w->base = e - w->width + 1;
            }
        }
        if (best >= total - total / 32)
            return 1;
    }
    return 0;
}

/* Count the exponents that w->exponents holds, for a chunk with so many zeros and with `top` as
 * its largest; returns whether all of them were there. */
static int count_near(Worker *w, const Passes *p, size_t n, size_t zeros, int top)
{
    size_t padded = (n + 63) / 64 * 64, counted = zeros;
    memset(w->exponents + n, 0, padded - n);
    if (w->scatter > 0) {
        counted += scatter_bytes(w->exponents, padded, w->near);
        if (--w->scatter == 0 && !place_windows(w))
            w->scatter = w->pause = w->pause < 64 ? 2 * w->pause : 64;
        return counted == n;
    }
    if (w->base == 0) { /* the first chunk */
        top = top < WINDOW ? WINDOW : top > 254 ? 254 : top;
        w->base = top - WINDOW + 1;
    }
    for (int at = 0; at < w->width; at += WINDOW)
        counted += p->window(w->exponents, padded, (uint8_t)(w->base + at), w->near);
    if (counted < n) {
        size_t others = p->outside(w->exponents, padded, (uint8_t)w->base, (uint8_t)w->width,
                                   w->near);
        counted += others;
        w->scatter = others > n / 16;
    }
    return counted == n;
}

/* ---- a chunk of float32 ---- */

static double from_order32(int32_t order)
{
    int32_t bits = order ^ ((order >> 31) & INT32_MAX);
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Take NaN and Inf out, and count them. */
static size_t sift32(Worker *w, const uint32_t *bits, size_t n)
{
    size_t kept = 0, posinfs = 0, neginfs = 0;
    for (size_t i = 0; i < n; i++) {
        memcpy(&w->finite32[kept], &bits[i], sizeof bits[i]);
        kept += (bits[i] & INT32_MAX) < FIELD32_INF;
        posinfs += bits[i] == FIELD32_INF;
        neginfs += bits[i] == (FIELD32_INF | 0x80000000u);
    }
    w->posinfs += (int64_t)posinfs;
    w->neginfs += (int64_t)neginfs;
    w->nans += (int64_t)(n - kept - posinfs - neginfs);
    return kept;
}

static Moments moments64(Worker *w, const Passes *p, const double *x, size_t n, double low,
                         double high, double min_abs);

static Moments chunk32(Worker *w, const Passes *p, const float *x, size_t n)
{
    Range32 r;
    const uint32_t *bits = (const void *)x;
    p->range32(bits, n, &r);
    if (r.large >= FIELD32_INF) {
        n = sift32(w, bits, n);
        if (n == 0)
            return (Moments){0};
        x = w->finite32;
        bits = (const void *)x;
        p->range32(bits, n, &r);
    }
    size_t zeros = r.small == 0 ? p->zeros32(bits, n) : 0;
    w->zeros += (int64_t)zeros;
    p->exponents32(bits, n, w->exponents);
    if (!count_near(w, p, n, zeros, (int)(r.large >> 23)))
        count_far32(w, bits, n);

    double low = from_order32(r.low), high = from_order32(r.high);
    double min_abs = from_order32((int32_t)r.small);
    int unit = unit_for(from_order32((int32_t)r.large));
    if (low == high)
        return of_constant((int64_t)n, low, unit);
    if (unit != 0) {
        for (size_t i = 0; i < n; i++)
            w->doubles[i] = (double)x[i];
        return moments64(w, p, w->doubles, n, low, high, min_abs);
    }
    Sums s;
    p->sums32(x, n, &s);
    Moments m = of_sums((int64_t)n, 0, &s);
    if (!tells_deviations(&m)) {
        double found[2];
        p->deviations32(x, n, m.mean, found);
        set_deviations(&m, found[0], found[1]);
    }
    m.low = low;
    m.high = high;
    m.min_abs = min_abs;
    return m;
}

/* ---- a chunk of float64 ---- */

static double from_order64(int64_t order)
{
    int64_t bits = order ^ ((order >> 63) & INT64_MAX);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static Moments moments64(Worker *w, const Passes *p, const double *x, size_t n, double low,
                         double high, double min_abs)
{
    int unit = unit_for(-low > high ? -low : high);
    if (low == high)
        return of_constant((int64_t)n, low, unit);
    if (unit != 0) {
        /* in two steps: 2**-unit itself may be beyond float64 */
        double half = ldexp(1.0, -unit / 2), other = ldexp(1.0, -unit - -unit / 2);
        for (size_t i = 0; i < n; i++)
            w->scaled[i] = x[i] * half * other;
        x = w->scaled;
    }
    Sums s;
    p->sums64(x, n, &s);
    Moments m = of_sums((int64_t)n, unit, &s);
    if (!tells_deviations(&m)) {
        double found[2];
        p->deviations64(x, n, m.mean, found);
        set_deviations(&m, found[0], found[1]);
    }
    m.low = low;
    m.high = high;
    m.min_abs = min_abs;
    return m;
}

static size_t sift64(Worker *w, const double *x, const double *ruler, size_t n)
{
    size_t kept = 0, posinfs = 0, neginfs = 0;
    const uint64_t *bits = (const void *)x;
    for (size_t i = 0; i < n; i++) {
        w->finite64[kept] = x[i];
        w->finite_rulers[kept] = ruler[i];
        kept += (bits[i] & INT64_MAX) < FIELD64_INF;
        posinfs += bits[i] == FIELD64_INF;
        neginfs += bits[i] == (FIELD64_INF | (uint64_t)1 << 63);
    }
    w->posinfs += (int64_t)posinfs;
    w->neginfs += (int64_t)neginfs;
    w->nans += (int64_t)(n - kept - posinfs - neginfs);
    return kept;
}

/* `ruler` are the values, rounded towards zero: its exponents are the true ones. */
static Moments chunk64(Worker *w, const Passes *p, const double *x, const double *ruler, size_t n)
{
    Range64 r;
    p->range64((const void *)x, n, &r);
    if (r.large >= FIELD64_INF) {
        n = sift64(w, x, ruler, n);
        if (n == 0)
            return (Moments){0};
        x = w->finite64;
        ruler = w->finite_rulers;
        p->range64((const void *)x, n, &r);
    }
    const uint64_t *bits = (const void *)ruler;
    size_t zeros = r.small == 0 ? p->zeros64(bits, n) : 0;
    w->zeros += (int64_t)zeros;
    p->exponents64(bits, n, w->exponents);
    if (!count_near(w, p, n, zeros, (int)(r.large >> 52) - 1023 + BIAS))
        count_far64(w, bits, n);
    return moments64(w, p, x, n, from_order64(r.low), from_order64(r.high),
                     from_order64((int64_t)r.small));
}

/* ---- elements of every kind as float32 or float64 ---- */

#define EACH(type, body)                                                                          \
    do {                                                                                          \
        const type *in = (const void *)data;                                                      \
        for (size_t i = 0; i < n; i++)                                                            \
            body;                                                                                 \
    } while (0)

/* A whole number as float64, and the same without the bits that would round it up. */
static double ruler_of(uint64_t size)
{
    return (double)(size >> 53 ? size & ~(uint64_t)0x7FF : size);
}

static Moments take_chunk(Worker *w, Job *job, const char *data, size_t n)
{
    const Passes *p = job->passes;
    float *f = w->floats;
    double *d = w->doubles;
    uint32_t bits;
    switch (job->kind) {
    case FLOAT32:
        return chunk32(w, p, (const void *)data, n);
    case BFLOAT16:
        EACH(uint16_t, (bits = (uint32_t)in[i] << 16, memcpy(&f[i], &bits, sizeof bits)));
        return chunk32(w, p, f, n);
    case FLOAT16:
        p->halves((const void *)data, n, f);
        return chunk32(w, p, f, n);
    case INT16:
        EACH(int16_t, f[i] = (float)in[i]);
        return chunk32(w, p, f, n);
    case UINT16:
        EACH(uint16_t, f[i] = (float)in[i]);
        return chunk32(w, p, f, n);
    case FLOAT64:
        return chunk64(w, p, (const void *)data, (const void *)data, n);
    case INT32:
        EACH(int32_t, d[i] = (double)in[i]);
        return chunk64(w, p, d, d, n);
    case UINT32:
        EACH(uint32_t, d[i] = (double)in[i]);
        return chunk64(w, p, d, d, n);
    case INT64:
        EACH(int64_t, (d[i] = (double)in[i],
                       w->rulers[i] = ruler_of(in[i] < 0 ? -(uint64_t)in[i] : (uint64_t)in[i])));
        return chunk64(w, p, d, w->rulers, n);
    case UINT64:
        EACH(uint64_t, (d[i] = (double)in[i], w->rulers[i] = ruler_of(in[i])));
        return chunk64(w, p, d, w->rulers, n);
    case COMPLEX64: {
        /* float64 has room for the squares; NaN wins over Inf by itself */
        const float *part = (const void *)data;
        for (size_t i = 0; i < n; i++) {
            double x = (double)part[2 * i], y = (double)part[2 * i + 1];
            d[i] = sqrt(x * x + y * y);
        }
        return chunk64(w, p, d, d, n);
    }
    case COMPLEX128: {
        const double *part = (const void *)data;
        for (size_t i = 0; i < n; i++) {
            double x = part[2 * i], y = part[2 * i + 1];
            d[i] = isnan(x) || isnan(y) ? (double)NAN : hypot(x, y);
            if (isinf(d[i]) && !isinf(x) && !isinf(y))
                __atomic_store_n(&job->beyond, 1, __ATOMIC_RELAXED);
        }
        return chunk64(w, p, d, d, n);
    }
    default:
        return (Moments){0};
    }
}

/* ---- bit patterns ---- */

static void settle(Worker *w, Kind kind)
{
    if (kind == BYTES) {
        for (int i = 0; i < 256; i++)
            w->patterns[i] += (uint64_t)w->few[0][i] + w->few[1][i] + w->few[2][i] + w->few[3][i];
        memset(w->few, 0, sizeof w->few);
    } else {
        for (int i = 0; i < PATTERNS; i++)
            if (w->many[i] | w->many[SECOND + i]) /* a page that nothing was counted in stays unused */
                w->patterns[i] += (uint64_t)w->many[i] + w->many[SECOND + i];
        if (w->seen >= FLUSH)
            memset(w->many, 0, (SECOND + PATTERNS) * sizeof *w->many);
    }
    w->seen = 0;
}

static void count_patterns(Worker *w, Kind kind, const char *data, size_t n)
{
    size_t i = 0;
    if (kind == BYTES) {
        const uint8_t *in = (const void *)data;
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; k++)
                w->few[k][in[i + k]]++;
        for (; i < n; i++)
            w->few[0][in[i]]++;
    } else {
        const uint16_t *in = (const void *)data;
        /* two tables and two places: neighbours are alike, and an increment waits for the last */
        uint32_t *first = w->many, *second = w->many + SECOND;
        const uint16_t *other = in + n / 2;
        for (; i + 4 <= n / 2; i += 4)
            for (int k = 0; k < 4; k++) {
                first[in[i + k]]++;
                second[other[i + k]]++;
            }
        for (size_t k = i; k < n / 2; k++)
            first[in[k]]++;
        for (size_t k = n / 2 + i; k < n; k++)
            first[in[k]]++;
    }
    w->seen += n;
    if (w->seen >= FLUSH)
        settle(w, kind);
}

static double value_of(const Job *job, int pattern)
{
    uint16_t half = (uint16_t)pattern;
    uint32_t bits = (uint32_t)pattern << 16;
    float value;
    switch (job->kind) {
    case BYTES:
        return job->table[pattern];
    case INT16:
        return (double)(int16_t)pattern;
    case UINT16:
        return (double)pattern;
    case FLOAT16:
        job->passes->halves(&half, 1, &value);
        return (double)value;
    default:
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
}

/* The moments of values that occur `times` each; the fields and counts go to the worker. */
static Moments of_patterns(Worker *w, const Job *job, const uint64_t *times, double *values,
                           double *weights)
{
    int patterns = job->kind == BYTES ? 256 : PATTERNS;
    size_t kept = 0;
    int64_t n = 0;
    double low = INFINITY, high = -INFINITY, min_abs = INFINITY;
    for (int i = 0; i < patterns; i++) {
        if (times[i] == 0)
            continue;
        double x = value_of(job, i);
        if (!isfinite(x)) {
            *(isnan(x) ? &w->nans : x > 0 ? &w->posinfs : &w->neginfs) += (int64_t)times[i];
            continue;
        }
        if (x == 0.0) {
            w->zeros += (int64_t)times[i];
        } else {
            count_exponent(w, ilogb(x), times[i]);
        }
        n += (int64_t)times[i];
        low = x < low ? x : low;
        high = x > high ? x : high;
        min_abs = fabs(x) < min_abs ? fabs(x) : min_abs;
        values[kept] = x;
        weights[kept++] = (double)times[i];
    }
    if (n == 0)
        return (Moments){0};
    int unit = unit_for(-low > high ? -low : high);
    if (low == high)
        return of_constant(n, low, unit);
    double factor = ldexp(1.0, -unit); /* no such dtype reaches where this would overflow */
    Sums s = {0};
    for (size_t i = 0; i < kept; i++) {
        double y = values[i] *= factor, many = weights[i], y2 = y * y, y4 = y2 * y2;
        s.sum += y * many;
        s.sizes += fabs(y) * many;
        s.p2 += y2 * many;
        s.p4 += y4 * many;
        s.p8 += y4 * y4 * many;
    }
    Moments m = of_sums(n, unit, &s);
    double rest = 0.0, squares = 0.0;
    for (size_t i = 0; i < kept; i++) {
        double d = values[i] - m.mean;
        rest += d * weights[i];
        squares += d * d * weights[i];
    }
    set_deviations(&m, rest, squares);
    m.low = low;
    m.high = high;
    m.min_abs = min_abs;
    return m;
}

/* ---- strides ---- */

size_t itemsize_of(Kind kind)
{
    static const size_t sizes[KINDS] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8, 8, 16, 1};
    return sizes[kind];
}

/* The same elements, in an order that suits memory: from outer to inner with falling strides,
 * none negative, and what lies end to end as one dimension. */
static void normalize(Array *a, size_t itemsize)
{
    int kept = 0;
    for (int i = 0; i < a->ndim; i++) {
        ptrdiff_t size = a->shape[i], stride = a->strides[i];
        if (size == 1)
            continue;
        if (stride < 0) {
            a->data += stride * (size - 1);
            stride = -stride;
        }
        int at = kept++;
        for (; at > 0 && a->strides[at - 1] < stride; at--) {
            a->shape[at] = a->shape[at - 1];
            a->strides[at] = a->strides[at - 1];
        }
        a->shape[at] = size;
        a->strides[at] = stride;
    }
    int dims = 0;
    for (int i = 0; i < kept; i++) {
        if (dims > 0 && a->strides[dims - 1] == a->shape[i] * a->strides[i]) {
            a->shape[dims - 1] *= a->shape[i];
            a->strides[dims - 1] = a->strides[i];
        } else {
            a->shape[dims] = a->shape[i];
            a->strides[dims++] = a->strides[i];
        }
    }
    if (dims == 0) {
        a->shape[0] = 1;
        a->strides[0] = (ptrdiff_t)itemsize;
        dims = 1;
    }
    a->ndim = dims;
}

#define COPY_ROW(size)                                                                            \
    case size:                                                                                    \
        for (size_t j = 0; j < row; j++)                                                          \
            memcpy(out + j * (size), from + (ptrdiff_t)j * stride, size);                         \
        break

/* Copy elements `first` to `first + n` of a normalized array. */
static void gather(const Array *a, size_t itemsize, size_t first, size_t n, char *out)
{
    ptrdiff_t index[MAX_DIMS];
    int last = a->ndim - 1;
    const char *from = a->data;
    for (int i = last; i >= 0; i--) {
        index[i] = (ptrdiff_t)(first % (size_t)a->shape[i]);
        first /= (size_t)a->shape[i];
        from += index[i] * a->strides[i];
    }
    ptrdiff_t stride = a->strides[last];
    while (n > 0) {
        size_t row = (size_t)(a->shape[last] - index[last]);
        row = row < n ? row : n;
        if (stride == (ptrdiff_t)itemsize) {
            memcpy(out, from, row * itemsize);
        } else {
            switch (itemsize) {
                COPY_ROW(1);
                COPY_ROW(2);
                COPY_ROW(4);
                COPY_ROW(8);
                COPY_ROW(16);
            }
        }
        out += row * itemsize;
        n -= row;
        index[last] += (ptrdiff_t)row;
        from += (ptrdiff_t)row * stride;
        for (int i = last; i > 0 && index[i] == a->shape[i]; i--) {
            from += a->strides[i - 1] - index[i] * a->strides[i];
            index[i] = 0;
            index[i - 1]++;
        }
    }
}

/* ---- tasks and threads ---- */

static Moments do_task(Worker *w, Job *job, size_t task)
{
    Moments total = {0};
    size_t end = (task + 1) * TASK < job->count ? (task + 1) * TASK : job->count;
    for (size_t at = task * TASK; at < end; at += CHUNK) {
        size_t n = end - at < CHUNK ? end - at : CHUNK;
        const char *data = (const void *)w->gathered;
        if (job->contiguous)
            data = job->array.data + at * job->itemsize;
        else
            gather(&job->array, job->itemsize, at, n, (void *)w->gathered);
        if (job->by_patterns)
            count_patterns(w, job->kind, data, n);
        else
            add(&total, take_chunk(w, job, data, n));
    }
    return total;
}

static void *work(void *argument)
{
    Hand *hand = argument;
    Job *job = hand->job;
    Environment before;
    enter(&before);
    start(hand->worker, job);
    for (;;) {
        size_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks)
            break;
        job->parts[task] = do_task(hand->worker, job, task);
    }
    if (job->by_patterns)
        settle(hand->worker, job->kind);
    leave(&before);
    return NULL;
}

static int usable_processors(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

static int hands_for(size_t count, int threads)
{
    size_t worth = count / A_THREAD;
    if (worth <= 1)
        return 1;
    if (threads <= 0) {
        threads = usable_processors();
        threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    }
    threads = threads < LIMIT ? threads : LIMIT;
    return worth < (size_t)threads ? (int)worth : threads;
}

/* Run the job with as many hands as there are; the first is this thread itself. */
static void work_together(Hand *hands, int n)
{
    sigset_t all, before;
    int started = 1;
    /* signals are for the threads that know of them */
    sigfillset(&all);
    if (n > 1) {
        pthread_sigmask(SIG_BLOCK, &all, &before);
        while (started < n &&
               pthread_create(&hands[started].thread, NULL, work, &hands[started]) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    for (int i = started; i < n; i++)
        start(hands[i].worker, hands[i].job); /* no thread to be had: nothing counted */
    work(&hands[0]);
    for (int i = 1; i < started; i++)
        pthread_join(hands[i].thread, NULL);
}

/* ---- the result ---- */

static void put_counts(const Worker *w, const Job *job, Statistics *found)
{
    found->count = (int64_t)job->count;
    found->zeros = w->zeros;
    found->nans = w->nans;
    found->posinfs = w->posinfs;
    found->neginfs = w->neginfs;
    int first = w->any_far ? FIRST_EXPONENT : 1 - BIAS;
    int last = w->any_far ? FIRST_EXPONENT + EXPONENTS - 1 : BIAS;
#define COUNT(e)                                                                                  \
    ((e) > -BIAS && (e) <= BIAS ? w->near[(e) + BIAS] : w->far[(e) - FIRST_EXPONENT])
    while (first <= last && COUNT(first) == 0)
        first++;
    while (last >= first && COUNT(last) == 0)
        last--;
    found->bins = last - first + 1;
    found->first_bin = found->bins ? first : 0;
    for (int e = first; e <= last; e++)
        found->bin[e - first] = COUNT(e);
#undef COUNT
}

static void put_figures(const Moments *m, Statistics *found)
{
    if (m->n == 0) {
        found->min = found->max = found->mean = found->std = found->mean_abs = (double)NAN;
        found->max_abs = found->min_abs = found->rm2 = found->rm4 = found->rm8 = (double)NAN;
        return;
    }
    int unit = m->unit == NOTHING ? 0 : m->unit;
    double max_abs = -m->low > m->high ? -m->low : m->high;
    found->min = m->low + 0.0; /* 0.0 of -0.0 */
    found->max = m->high + 0.0;
    found->max_abs = max_abs + 0.0;
    found->min_abs = m->min_abs + 0.0;
    found->mean = ldexp(m->mean, unit);
    found->std = ldexp(m->n > 1 ? sqrt(m->m2 / (double)(m->n - 1)) : 0.0, unit);
    found->mean_abs = ldexp(m->mean_abs, unit);
    found->rm2 = ldexp(sqrt(m->p2), unit);
    found->rm4 = ldexp(sqrt(sqrt(m->p4)), unit);
    found->rm8 = ldexp(sqrt(sqrt(sqrt(m->p8))), unit);
}

static void add_counts(Worker *to, const Worker *from)
{
    to->zeros += from->zeros;
    to->nans += from->nans;
    to->posinfs += from->posinfs;
    to->neginfs += from->neginfs;
    for (int e = 1 - BIAS; e <= BIAS; e++)
        to->near[e + BIAS] += from->near[e + BIAS];
    for (int i = 0; from->any_far && i < EXPONENTS; i++)
        if (from->far[i] != 0)
            count_exponent(to, i + FIRST_EXPONENT, from->far[i]);
}

static void prepare(Job *job, const Array *array, Kind kind, const double *table)
{
    *job = (Job){.kind = kind, .itemsize = itemsize_of(kind), .count = 1, .table = table,
                 .passes = variants[used].passes};
    job->array.ndim = array->ndim;
    job->array.data = array->data;
    for (int i = 0; i < array->ndim; i++) {
        job->array.shape[i] = array->shape[i];
        job->array.strides[i] = array->strides[i];
        job->count *= (size_t)array->shape[i];
    }
    if (job->count > 0)
        normalize(&job->array, job->itemsize);
    /* what is not aligned is copied to where it is */
    size_t alignment = job->itemsize < 8 ? job->itemsize : 8;
    job->contiguous = job->array.ndim == 1 && (size_t)job->array.strides[0] == job->itemsize &&
                      (uintptr_t)job->array.data % alignment == 0;
    size_t many = kind == BFLOAT16 ? WORTH_A_SMALL : WORTH_A_TABLE;
    job->by_patterns = kind == BYTES || (job->itemsize == 2 && job->count >= many);
    job->tasks = (job->count + TASK - 1) / TASK;
}

Outcome summarize_few(const Array *array, Kind kind, const double *table, Statistics *found)
{
    static Worker worker;
    Job job;
    Moments total = {0};
    Environment before;
    prepare(&job, array, kind, table);
    if (job.tasks > 1)
        return summarize(array, kind, table, 1, found);
    enter(&before);
    start(&worker, &job);
    if (job.kind == BYTES) {
        uint64_t patterns[256] = {0};
        double values[256], weights[256];
        worker.patterns = patterns;
        if (job.tasks)
            do_task(&worker, &job, 0);
        settle(&worker, job.kind);
        total = of_patterns(&worker, &job, patterns, values, weights);
    } else if (job.tasks) {
        total = do_task(&worker, &job, 0);
    }
    put_counts(&worker, &job, found);
    put_figures(&total, found);
    leave(&before);
    return job.beyond ? BEYOND : DONE;
}

Outcome summarize(const Array *array, Kind kind, const double *table, int threads,
                  Statistics *found)
{
    Job job;
    Moments total = {0};
    Environment before;
    Outcome outcome = NO_MEMORY;
    prepare(&job, array, kind, table);
    int n = hands_for(job.count, threads);
    size_t patterns = job.by_patterns ? (kind == BYTES ? 256 : PATTERNS) : 0;
    double *values = NULL;
    Hand *hands = calloc((size_t)n, sizeof *hands);
    job.parts = calloc(job.tasks + 1, sizeof *job.parts);
    if (hands == NULL || job.parts == NULL)
        goto end;
    for (int i = 0; i < n; i++) {
        Worker *w = malloc(sizeof *w);
        if (w == NULL)
            goto end;
        hands[i].job = &job;
        hands[i].worker = w;
        w->patterns = patterns ? calloc(patterns, sizeof *w->patterns) : NULL;
        w->many = patterns > 256 ? calloc(SECOND + PATTERNS, sizeof *w->many) : NULL;
        if ((patterns && w->patterns == NULL) || (patterns > 256 && w->many == NULL))
            goto end;
    }
    values = patterns ? malloc(2 * patterns * sizeof *values) : NULL;
    if (patterns && values == NULL)
        goto end;
    work_together(hands, n);

    enter(&before);
    Worker *first = hands[0].worker;
    for (int i = 1; i < n; i++) {
        add_counts(first, hands[i].worker);
        for (size_t k = 0; k < patterns; k++)
            first->patterns[k] += hands[i].worker->patterns[k];
    }
    if (patterns)
        total = of_patterns(first, &job, first->patterns, values, values + patterns);
    else
        for (size_t i = 0; i < job.tasks; i++)
            add(&total, job.parts[i]);
    put_counts(first, &job, found);
    put_figures(&total, found);
    leave(&before);
    outcome = job.beyond ? BEYOND : DONE;
end:
    for (int i = 0; hands != NULL && i < n && hands[i].worker != NULL; i++) {
        free(hands[i].worker->patterns);
        free(hands[i].worker->many);
        free(hands[i].worker);
    }
    free(values);
    free(job.parts);
    free(hands);
    return outcome;
}
