/* Chunks of any kind of element, converted to float32 or float64 for the passes. */
#include "worker.h"

#include <math.h>
#include <string.h>

#define MAX_WINDOWS 3 /* with more, increments in memory are faster */

/* ---- exponents ---- */

void count_exponent(Worker *w, int exponent, uint64_t times)
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
    /* several tables, because an increment waits for the previous one at the same address */
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

/* Place as few windows as possible over the exponents so far; return 0 if too many are needed. */
static int place_windows(Worker *w)
{
    uint64_t total = 0;
    for (int e = 1; e < 255; e++)
        total += w->near[e];
    for (w->width = WINDOW; w->width <= MAX_WINDOWS * WINDOW; w->width += WINDOW) {
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

/* Count the exponents in w->exponents, of a chunk with this many zeros and the largest exponent
 * `top`. Return whether they account for all elements. */
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
        size_t outside = p->outside(w->exponents, padded, (uint8_t)w->base, (uint8_t)w->width,
                                    w->near);
        counted += outside;
        w->scatter = outside > n / 16;
    }
    return counted == n;
}

/* ---- a chunk of float32 ---- */

/* Turn the bits of a float into an integer in the order of the floats, or back. */
static int32_t order32(int32_t bits)
{
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static double from_order32(int32_t order)
{
    int32_t bits = order32(order);
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Count NaN and Inf, and copy the finite values to w->finite32. */
static size_t sift32(Worker *w, const uint32_t *bits, size_t n)
{
    size_t kept = 0, posinfs = 0, neginfs = 0;
    for (size_t i = 0; i < n; i++) {
        memcpy(&w->finite32[kept], &bits[i], sizeof bits[i]);
        kept += (bits[i] & INT32_MAX) < INF32;
        posinfs += bits[i] == INF32;
        neginfs += bits[i] == (INF32 | 0x80000000u);
    }
    w->posinfs += (int64_t)posinfs;
    w->neginfs += (int64_t)neginfs;
    w->nans += (int64_t)(n - kept - posinfs - neginfs);
    return kept;
}

static Moments moments64(Worker *w, const Passes *p, const double *x, size_t n, double low,
                         double high, double min_abs);

/* `r` is the range of the values. */
static Moments chunk32(Worker *w, const Passes *p, const float *x, size_t n, Range32 r)
{
    const uint32_t *bits = (const void *)x;
    if (r.large >= INF32) {
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
    p->sums32(x, n, w->next, w->job->itemsize, &s);
    Moments m = of_sums((int64_t)n, 0, &s);
    if (!deviations_are_accurate(&m)) {
        double sums[2];
        p->deviations32(x, n, m.mean, sums);
        set_deviations(&m, sums[0], sums[1]);
    }
    m.low = low;
    m.high = high;
    m.min_abs = min_abs;
    return m;
}

static Moments whole_chunk32(Worker *w, const Passes *p, const float *x, size_t n)
{
    Range32 r;
    p->range32((const void *)x, n, &r);
    return chunk32(w, p, x, n, r);
}

/* Take a chunk of 16-bit floats, which `widen` converts: it is faster to find their range before. */
static Moments chunk16(Worker *w, const Passes *p, const uint16_t *x, size_t n,
                       void (*widen)(const uint16_t *, size_t, float *))
{
    Range16 r;
    int32_t bits[4];
    float *values = w->floats;
    p->range16(x, n, &r);
    uint16_t ends[4] = {(uint16_t)(r.low ^ ((r.low >> 15) & INT16_MAX)),
                        (uint16_t)(r.high ^ ((r.high >> 15) & INT16_MAX)), r.small, r.large};
    widen(ends, 4, values);
    memcpy(bits, values, sizeof bits);
    widen(x, n, values);
    return chunk32(w, p, values, n, (Range32){order32(bits[0]), order32(bits[1]),
                                              (uint32_t)bits[2], (uint32_t)bits[3]});
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
        /* in two steps, because float64 may not hold 2**-unit */
        double half = ldexp(1.0, -unit / 2), other = ldexp(1.0, -unit - -unit / 2);
        for (size_t i = 0; i < n; i++)
            w->scaled[i] = x[i] * half * other;
        x = w->scaled;
    }
    Sums s;
    p->sums64(x, n, w->next, w->job->itemsize, &s);
    Moments m = of_sums((int64_t)n, unit, &s);
    if (!deviations_are_accurate(&m)) {
        double sums[2];
        p->deviations64(x, n, m.mean, sums);
        set_deviations(&m, sums[0], sums[1]);
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
        kept += (bits[i] & INT64_MAX) < INF64;
        posinfs += bits[i] == INF64;
        neginfs += bits[i] == (INF64 | (uint64_t)1 << 63);
    }
    w->posinfs += (int64_t)posinfs;
    w->neginfs += (int64_t)neginfs;
    w->nans += (int64_t)(n - kept - posinfs - neginfs);
    return kept;
}

/* `ruler` has the values rounded towards zero, which keeps the exact exponents. */
static Moments chunk64(Worker *w, const Passes *p, const double *x, const double *ruler, size_t n)
{
    Range64 r;
    p->range64((const void *)x, n, &r);
    if (r.large >= INF64) {
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

/* ---- conversion of elements ---- */

/* Convert an integer to float64 without the bits that would round it up. */
static double ruler_of(uint64_t size)
{
    return (double)(size >> 53 ? size & ~(uint64_t)0x7FF : size);
}

Moments take_chunk(Worker *w, const char *data, size_t n)
{
    Job *job = w->job;
    const Passes *p = job->passes;
    float *f = w->floats;
    double *d = w->doubles;
    w->next = data + n * job->itemsize;
    switch (job->kind) {
    case FLOAT32:
        return whole_chunk32(w, p, (const void *)data, n);
    case BFLOAT16:
        return chunk16(w, p, (const void *)data, n, p->upper_halves);
    case FLOAT16:
        return chunk16(w, p, (const void *)data, n, p->halves);
    case INT16:
        EACH(int16_t, f[i] = (float)in[i]);
        return whole_chunk32(w, p, f, n);
    case UINT16:
        EACH(uint16_t, f[i] = (float)in[i]);
        return whole_chunk32(w, p, f, n);
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
        /* float64 holds the squares; NaN takes precedence over Inf */
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
