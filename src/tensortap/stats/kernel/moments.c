#include "worker.h"

#include <math.h>

#define SAFE 100 /* within 2**±100, no eighth power leaves float64 */

static void to_unit(Moments *m, int unit)
{
    if (m->unit == unit)
        return;
    if (m->unit != ONLY_ZEROS) {
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

void add(Moments *a, Moments b)
{
    if (b.n == 0)
        return;
    if (a->n == 0) {
        *a = b;
        return;
    }
    /* the larger unit: what the smaller one loses to underflow is far below the precision */
    int unit = a->unit > b.unit ? a->unit : b.unit;
    to_unit(a, unit);
    to_unit(&b, unit);
    double n = (double)(a->n + b.n);
    double share_a = (double)a->n / n, share_b = (double)b.n / n, delta = b.mean - a->mean;
    a->m2 += b.m2 + delta * delta * share_b * (double)a->n;
    a->mean += delta * share_b;
    a->mean_abs = a->mean_abs * share_a + b.mean_abs * share_b;
    a->p2 = a->p2 * share_a + b.p2 * share_b;
    a->p4 = a->p4 * share_a + b.p4 * share_b;
    a->p8 = a->p8 * share_a + b.p8 * share_b;
    a->n += b.n;
    a->low = b.low < a->low ? b.low : a->low;
    a->high = b.high > a->high ? b.high : a->high;
    a->min_abs = b.min_abs < a->min_abs ? b.min_abs : a->min_abs;
}

int unit_for(double max_abs)
{
    int exponent;
    if (max_abs == 0.0)
        return ONLY_ZEROS;
    frexp(max_abs, &exponent);
    return exponent >= -SAFE && exponent <= SAFE ? 0 : exponent;
}

Moments of_constant(int64_t n, double value, int unit)
{
    double y = unit == ONLY_ZEROS ? 0.0 : ldexp(value, -unit), y2 = y * y, y4 = y2 * y2;
    return (Moments){n, unit, y, 0.0, fabs(y), y2, y4, y4 * y4, value, value, fabs(value)};
}

Moments of_sums(int64_t n, int unit, const Sums *s)
{
    double d = (double)n, mean = s->sum / d;
    double m2 = s->p2 - mean * mean * d;
    return (Moments){n, unit, mean, m2, s->sizes / d, s->p2 / d, s->p4 / d, s->p8 / d, 0, 0, 0};
}

int deviations_are_accurate(const Moments *m)
{
    return m->m2 >= 0.25 * m->p2 * (double)m->n;
}

void set_deviations(Moments *m, double rest, double squares)
{
    double d = (double)m->n;
    double m2 = squares - rest * rest / d;
    m->m2 = m2 > 0.0 ? m2 : 0.0;
    m->mean += rest / d;
}
