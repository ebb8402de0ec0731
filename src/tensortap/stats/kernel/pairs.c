/* Blocks of pairs: converted to float64, judged, and added up. */
#include "pairs.h"

#include <math.h>
#include <string.h>

#include "worker.h"

/* ---- conversion to float64 ---- */

#define MANY ((int64_t)1 << 53)

static void load(Desk *w, int side, const char *data, size_t n)
{
    const Comparison *job = w->job;
    const double *table = job->sides[side]->table;
    double *out = w->values[side], *rest = w->rests[side];
    int beyond = 0;
    w->has_rests[side] = 0;
    switch (job->sides[side]->kind) {
    case FLOAT32:
        job->passes->widen((const void *)data, n, out);
        return;
    case FLOAT64:
        memcpy(out, data, n * sizeof *out);
        return;
    case FLOAT16:
        job->passes->halves((const void *)data, n, w->floats);
        job->passes->widen(w->floats, n, out);
        return;
    case BFLOAT16:
        job->passes->brains((const void *)data, n, out);
        return;
    case INT16:
        EACH(int16_t, out[i] = (double)in[i]);
        return;
    case UINT16:
        EACH(uint16_t, out[i] = (double)in[i]);
        return;
    case INT32:
        EACH(int32_t, out[i] = (double)in[i]);
        return;
    case UINT32:
        EACH(uint32_t, out[i] = (double)in[i]);
        return;
    case INT64:
        EACH(int64_t, (out[i] = (double)in[i], beyond |= in[i] > MANY || in[i] < -MANY));
        if (beyond)
            EACH(int64_t, rest[i] = out[i] == 0x1p63 ? (double)(in[i] - INT64_MAX) - 1.0
                                                     : (double)(in[i] - (int64_t)out[i]));
        w->has_rests[side] = beyond;
        return;
    case UINT64:
        EACH(uint64_t, (out[i] = (double)in[i], beyond |= in[i] > (uint64_t)MANY));
        if (beyond)
            EACH(uint64_t, rest[i] = out[i] == 0x1p64
                                         ? -(double)(UINT64_MAX - in[i]) - 1.0
                                         : (double)(int64_t)(in[i] - (uint64_t)out[i]));
        w->has_rests[side] = beyond;
        return;
    default:
        EACH(uint8_t, out[i] = table[in[i]]);
        return;
    }
}

/* ---- sums ---- */

static void rescale(Scaled *s, int unit_d, int unit_a, int unit_b)
{
    int d = s->unit_d - unit_d, a = s->unit_a - unit_a, b = s->unit_b - unit_b;
    if ((d | a | b) == 0)
        return;
    s->sums.abs = ldexp(s->sums.abs, d);
    s->sums.squares = ldexp(s->sums.squares, 2 * d);
    s->sums.aa = ldexp(s->sums.aa, 2 * a);
    s->sums.bb = ldexp(s->sums.bb, 2 * b);
    s->sums.ab = ldexp(s->sums.ab, a + b);
    s->unit_d = unit_d;
    s->unit_a = unit_a;
    s->unit_b = unit_b;
}

/* Return the unit for the sum of two; that of a zero does not matter. */
static int common(int x, int x_is_zero, int y, int y_is_zero)
{
    if (x_is_zero || y_is_zero)
        return x_is_zero ? y : x;
    return LARGER(x, y);
}

void add_sums(Scaled *to, Scaled from)
{
    PairSums *s = &to->sums;
    int d = common(to->unit_d, s->abs == 0, from.unit_d, from.sums.abs == 0);
    int a = common(to->unit_a, s->aa == 0, from.unit_a, from.sums.aa == 0);
    int b = common(to->unit_b, s->bb == 0, from.unit_b, from.sums.bb == 0);
    rescale(to, d, a, b);
    rescale(&from, d, a, b);
    s->abs += from.sums.abs;
    s->squares += from.sums.squares;
    s->rel += from.sums.rel;
    s->aa += from.sums.aa;
    s->bb += from.sums.bb;
    s->ab += from.sums.ab;
}

/* Return the exponent of two to divide by before squaring numbers up to this one. */
static int unit_below(double largest)
{
    int exponent;
    if (largest == 0.0 || isinf(largest))
        return 0;
    frexp(largest, &exponent);
    return exponent;
}

/* ---- blocks ---- */

/* Judge pairs with a value that is not finite, then set both to zero. */
static void sift(Desk *w, size_t n, size_t at)
{
    double *a = w->values[0], *b = w->values[1];
    for (size_t i = 0; i < n; i++) {
        if (isfinite(a[i]) && isfinite(b[i]))
            continue;
        int equal = isnan(a[i]) || isnan(b[i])
                        ? isnan(a[i]) && isnan(b[i]) && w->job->rules.equal_nan
                        : a[i] == b[i];
        w->not_both_finite++;
        if (!equal) {
            w->nonfinite++;
            w->mismatches++;
            if (w->first_nonfinite < 0)
                w->first_nonfinite = (int64_t)(at + i);
        }
        a[i] = b[i] = 0.0;
        w->rests[0][i] = w->rests[1][i] = 0.0;
    }
}

/* Return |a - b| including the remainders of integers, which the passes ignore. */
static double apart(const Desk *w, size_t i)
{
    double rest = (w->has_rests[0] ? w->rests[0][i] : 0.0) - (w->has_rests[1] ? w->rests[1][i] : 0.0);
    return fabs((w->values[0][i] - w->values[1][i]) + rest);
}

/* Find the maxima of a block that exceeds the current ones. */
static void look_closer(Desk *w, size_t n, size_t at)
{
    Limits *l = &w->limits;
    for (size_t i = 0; i < n; i++) {
        double d = apart(w, i), size = fabs(w->values[1][i]), excess = d - l->rtol * size;
        if (d == 0.0)
            continue;
        l->max_abs = d > l->max_abs ? d : l->max_abs;
        l->max_rel = d / size > l->max_rel ? d / size : l->max_rel;
        if (d > l->atol && (d - l->atol) / size > l->factor)
            l->factor = (d - l->atol) / size;
        if (excess > l->excess || w->worst < 0) {
            l->excess = excess;
            w->worst = (int64_t)(at + i);
        }
    }
}

/* Add a block that the passes cannot: with remainders, or with squares beyond float64. */
static Scaled add_slowly(Desk *w, size_t n, int64_t *mismatches)
{
    const double *a = w->values[0], *b = w->values[1];
    double large_a = 0.0, large_b = 0.0, large_d = 0.0;
    Scaled found = {.unit_d = 0};
    PairSums *s = &found.sums;
    for (size_t i = 0; i < n; i++) {
        double d = w->d[i] = apart(w, i);
        large_a = fabs(a[i]) > large_a ? fabs(a[i]) : large_a;
        large_b = fabs(b[i]) > large_b ? fabs(b[i]) : large_b;
        large_d = d > large_d ? d : large_d;
        s->rel += d > 0.0 ? d / fabs(b[i]) : 0.0;
        *mismatches += d > w->limits.atol + w->limits.rtol * fabs(b[i]);
    }
    found.unit_a = unit_below(large_a);
    found.unit_b = unit_below(large_b);
    found.unit_d = unit_below(large_d);
    for (size_t i = 0; i < n; i++) {
        double x = ldexp(a[i], -found.unit_a), y = ldexp(b[i], -found.unit_b);
        double d = ldexp(w->d[i], -found.unit_d);
        s->abs += d;
        s->squares += d * d;
        s->aa += x * x;
        s->bb += y * y;
        s->ab += x * y;
    }
    return found;
}

/* Return whether squares of numbers up to this one (as bits) stay within float64. */
static int is_ordinary(uint64_t largest)
{
    int exponent = (int)(largest >> 52) - 1023;
    return largest == 0 || (exponent < 480 && exponent > -300);
}

Scaled take_pairs(Desk *w, const char *const data[2], size_t n, size_t at)
{
    const Comparison *job = w->job;
    const Passes *p = job->passes;
    const double *a = w->values[0], *b = w->values[1];
    const char *next[2];
    for (int side = 0; side < 2; side++)
        next[side] = data[side] + BLOCK * job->itemsizes[side];
    Scaled found = {.unit_d = 0};
    if (job->singles) {
        uint32_t largest;
        uint32_t steps = p->steps32((const void *)data[0], (const void *)data[1], n, &largest);
        if (largest < INF32) {
            Verdict verdict = p->pairs32((const void *)data[0], (const void *)data[1], n,
                                         &w->limits, next[0], next[1], &found.sums);
            w->mismatches += verdict.mismatches;
            w->steps = LARGER(w->steps, steps);
            if (verdict.beyond) {
                load(w, 0, data[0], n);
                load(w, 1, data[1], n);
                look_closer(w, n, at);
            }
            return found;
        }
    }
    load(w, 0, data[0], n);
    load(w, 1, data[1], n);
    uint64_t large_a = p->largest64(a, n), large_b = p->largest64(b, n);
    if (large_a >= INF64 || large_b >= INF64) {
        sift(w, n, at);
        large_a = p->largest64(a, n);
        large_b = p->largest64(b, n);
    }
    if (job->ruler.digits != 0) {
        p->places(a, n, &job->ruler, w->places[0]);
        p->places(b, n, &job->ruler, w->places[1]);
        uint64_t steps = p->apart(w->places[0], w->places[1], n);
        w->steps = LARGER(w->steps, steps);
    }
    if (!w->has_rests[0] && !w->has_rests[1] && is_ordinary(large_a) && is_ordinary(large_b)) {
        Verdict verdict = p->pairs64(a, b, n, &w->limits, next[0], next[1], &found.sums);
        /* squares of small differences of large numbers may underflow */
        if (found.sums.squares > 0x1p-900 || found.sums.abs == 0.0) {
            w->mismatches += verdict.mismatches;
            if (verdict.beyond)
                look_closer(w, n, at);
            return found;
        }
    }
    look_closer(w, n, at);
    return add_slowly(w, n, &w->mismatches);
}

/* Return whether all elements are finite by their bits; 0 if the bits do not say. */
static int surely_finite(const Comparison *job, const char *data, size_t n)
{
    int16_t large = 0, end;
    switch (job->sides[0]->kind) {
    case FLOAT32:
        return job->passes->largest32(data, n) < INF32;
    case FLOAT64:
        return job->passes->largest64(data, n) < INF64;
    case FLOAT16:
    case BFLOAT16:
        EACH(int16_t, large = (in[i] & INT16_MAX) > large ? in[i] & INT16_MAX : large);
        end = job->sides[0]->kind == FLOAT16 ? 0x7C00 : 0x7F80;
        return large < end;
    case BYTES:
        return job->all_finite;
    default:
        return 1;
    }
}

void note_equals(Desk *w, const char *data, size_t n)
{
    if (surely_finite(w->job, data, n))
        return;
    load(w, 0, data, n);
    for (size_t i = 0; i < n; i++)
        w->not_both_finite += !isfinite(w->values[0][i]);
}

Scaled take_equals(Desk *w, const char *data, size_t n)
{
    const Comparison *job = w->job;
    const Passes *p = job->passes;
    const char *next = data + BLOCK * job->itemsizes[0];
    double *a = w->values[0];
    Scaled found = {.unit_d = 0};
    if (job->singles && p->largest32(data, n) < INF32) {
        found.sums.aa = p->squares32((const void *)data, n, next);
        found.sums.bb = found.sums.ab = found.sums.aa;
        return found;
    }
    load(w, 0, data, n);
    uint64_t large = p->largest64(a, n);
    if (large >= INF64) {
        for (size_t i = 0; i < n; i++)
            a[i] = isfinite(a[i]) ? a[i] : 0.0;
        large = p->largest64(a, n);
    }
    if (!is_ordinary(large)) {
        double largest;
        memcpy(&largest, &large, sizeof largest);
        found.unit_a = found.unit_b = unit_below(largest);
        for (size_t i = 0; i < n; i++)
            a[i] = ldexp(a[i], -found.unit_a);
    }
    found.sums.aa = found.sums.bb = found.sums.ab = p->squares64(a, n, next);
    return found;
}
