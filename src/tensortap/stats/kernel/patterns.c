/* Statistics of 8-bit elements from the number of occurrences of each bit pattern. */
#include "worker.h"

#include <math.h>
#include <string.h>

#define FLUSH ((uint64_t)1 << 31) /* elements until the 32-bit counts must be added up */

void flush_patterns(Worker *w)
{
    for (int i = 0; i < 256; i++)
        w->patterns[i] += (uint64_t)w->few[0][i] + w->few[1][i] + w->few[2][i] + w->few[3][i];
    memset(w->few, 0, sizeof w->few);
    w->seen = 0;
}

void count_patterns(Worker *w, const uint8_t *in, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++)
            w->few[k][in[i + k]]++;
    for (; i < n; i++)
        w->few[0][in[i]]++;
    w->seen += n;
    if (w->seen >= FLUSH)
        flush_patterns(w);
}

Moments of_patterns(Worker *w)
{
    const uint64_t *times = w->patterns;
    double values[256], weights[256];
    size_t kept = 0;
    int64_t n = 0;
    double low = INFINITY, high = -INFINITY, min_abs = INFINITY;
    for (int i = 0; i < 256; i++) {
        if (times[i] == 0)
            continue;
        double x = w->job->table[i];
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
    double factor = ldexp(1.0, -unit); /* no dtype of 8 bits makes it overflow */
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
