/* Statistics from the number of occurrences of each bit pattern, for 8-bit elements and for many
 * 16-bit ones. */
#include "worker.h"

#include <math.h>
#include <string.h>

#define FLUSH ((uint64_t)1 << 31) /* elements until the 32-bit counts must be added up */

void flush_patterns(Worker *w, Kind kind)
{
    if (kind == BYTES) {
        for (int i = 0; i < 256; i++)
            w->patterns[i] += (uint64_t)w->few[0][i] + w->few[1][i] + w->few[2][i] + w->few[3][i];
        memset(w->few, 0, sizeof w->few);
    } else {
        for (int i = 0; i < PATTERNS; i++) {
            uint64_t n = (uint64_t)w->many[i] + w->many[SECOND + i];
            if (n != 0) {
                w->patterns[i] += n;
                w->many[i] = w->many[SECOND + i] = 0;
            }
        }
    }
    w->seen = 0;
}

void count_patterns(Worker *w, Kind kind, const char *data, size_t n)
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
        /* two tables and two positions: neighbors are often equal, and an increment waits for the
         * previous one at the same address */
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
        flush_patterns(w, kind);
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

Moments of_patterns(Worker *w, const uint64_t *times, double *values, double *weights)
{
    const Job *job = w->job;
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
    double factor = ldexp(1.0, -unit); /* no dtype of 16 bits makes it overflow */
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
