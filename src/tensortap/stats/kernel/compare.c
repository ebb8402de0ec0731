/* Compare two arrays element by element, in one pass.
 *
 * Pairs are split into tasks and tasks into blocks, always at the same positions. A block is
 * converted to float64 in the first-level cache, where the passes of passes.h run over it.
 * Integers beyond float64 carry the remainder that float64 lacks. Pairs with a value that is not
 * finite are judged one by one and count as zeros afterwards. Sums are added task by task in
 * order, and maxima do not depend on order: the result is the same for any number of threads.
 *
 * Blocks of equal bytes need no arithmetic. Their squares are needed only for the cosine, and
 * only if something differs elsewhere; tasks of such blocks wait until that is known.
 */
#define _GNU_SOURCE /* sched_getaffinity: processor.h */
#include "kernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

#define TASK (32 * BLOCK)
#define A_THREAD (8 * TASK) /* pairs that justify a thread */

/* Sums of products scaled by 2**-unit: squares of float64 overflow float64. */
typedef struct {
    PairSums sums;
    int unit_d, unit_a, unit_b;
} Scaled;

typedef struct {
    const Elements *sides[2];
    Array arrays[2]; /* dimensions merged as far as both allow */
    size_t itemsizes[2];
    int contiguous[2];
    size_t count, tasks;
    int can_match; /* equal bytes are equal numbers */
    int singles;   /* both are float32 */
    int all_finite; /* the value table of the first array holds only finite numbers */
    Rules rules;
    Ruler ruler;
    const Passes *passes;
    Scaled *parts;  /* one per task */
    char *untouched; /* tasks of equal bytes, deferred */
    int differ;     /* whether any block differs */
    int later;      /* second round: the deferred tasks */
    size_t next;    /* next task to take */
} Comparison;

typedef struct {
    Comparison *job;
    Limits limits;
    int64_t mismatches, nonfinite, not_both_finite;
    int64_t first_nonfinite, worst;
    uint64_t steps;
    int has_rests[2]; /* whether the values carry remainders that float64 lacks */
    double values[2][BLOCK], rests[2][BLOCK], d[BLOCK];
    int64_t places[2][BLOCK];
    double gathered[2][BLOCK];
    float floats[BLOCK];
} Desk;

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

#define LARGER(x, y) ((x) > (y) ? (x) : (y))

/* Return the unit for the sum of two; that of a zero does not matter. */
static int common(int x, int x_is_zero, int y, int y_is_zero)
{
    if (x_is_zero || y_is_zero)
        return x_is_zero ? y : x;
    return LARGER(x, y);
}

static void add_sums(Scaled *to, Scaled from)
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

static Scaled take_pairs(Desk *w, const char *const data[2], size_t n, size_t at)
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

/* Count what is not finite in a block of equal bytes. */
static void note_equals(Desk *w, const char *data, size_t n)
{
    if (surely_finite(w->job, data, n))
        return;
    load(w, 0, data, n);
    for (size_t i = 0; i < n; i++)
        w->not_both_finite += !isfinite(w->values[0][i]);
}

/* Add a block of equal bytes. */
static Scaled take_equals(Desk *w, const char *data, size_t n)
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

/* ---- tasks and threads ---- */

static const char *block(Desk *w, int side, size_t at, size_t n)
{
    const Comparison *job = w->job;
    const Array *array = &job->arrays[side];
    if (job->contiguous[side])
        return array->data + at * job->itemsizes[side];
    gather(array, job->itemsizes[side], at, n, (void *)w->gathered[side]);
    return (const void *)w->gathered[side];
}

static void do_task(Desk *w, size_t task)
{
    Comparison *job = w->job;
    Scaled total = {.unit_d = 0};
    size_t start = task * TASK, end = start + TASK < job->count ? start + TASK : job->count;
    int needed = job->later || __atomic_load_n(&job->differ, __ATOMIC_RELAXED);
    size_t waiting = start; /* equal blocks from here on are not added yet */
    for (size_t at = start; at < end; at += BLOCK) {
        size_t n = end - at < BLOCK ? end - at : BLOCK;
        const char *data[2] = {block(w, 0, at, n), NULL};
        if (job->later) {
            add_sums(&total, take_equals(w, data[0], n));
            continue;
        }
        data[1] = block(w, 1, at, n);
        int equal = job->can_match && memcmp(data[0], data[1], n * job->itemsizes[0]) == 0;
        if (equal)
            note_equals(w, data[0], n);
        if (equal && !needed)
            continue;
        if (!needed) {
            __atomic_store_n(&job->differ, 1, __ATOMIC_RELAXED);
            needed = 1;
            for (; waiting < at; waiting += BLOCK)
                add_sums(&total, take_equals(w, block(w, 0, waiting, BLOCK), BLOCK));
            data[0] = block(w, 0, at, n); /* the buffer was reused meanwhile */
        }
        add_sums(&total, equal ? take_equals(w, data[0], n) : take_pairs(w, data, n, at));
    }
    job->untouched[task] = !needed;
    job->parts[task] = total;
}

static void *work(void *argument)
{
    Desk *w = argument;
    Comparison *job = w->job;
    FloatMode before;
    use_ieee_mode(&before);
    for (;;) {
        size_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks)
            break;
        if (!job->later || job->untouched[task])
            do_task(w, task);
    }
    restore_mode(&before);
    return NULL;
}

static void prepare_desk(Desk *w, Comparison *job)
{
    w->job = job;
    w->limits = (Limits){job->rules.atol, job->rules.rtol, 0.0, 0.0, -(double)INFINITY, 0.0};
    w->mismatches = w->nonfinite = w->not_both_finite = 0;
    w->first_nonfinite = w->worst = -1;
    w->steps = 0;
}

/* ---- entry point ---- */

/* Merge dimensions that are contiguous in both arrays. */
static void flatten(Array *a, Array *b)
{
    int dims = 0;
    for (int i = 0; i < a->ndim; i++) {
        ptrdiff_t size = a->shape[i], x = a->strides[i], y = b->strides[i];
        if (size == 1)
            continue;
        if (dims > 0 && a->strides[dims - 1] == size * x && b->strides[dims - 1] == size * y) {
            dims--;
            size *= a->shape[dims];
        }
        a->shape[dims] = b->shape[dims] = size;
        a->strides[dims] = x;
        b->strides[dims++] = y;
    }
    if (dims == 0) {
        a->shape[0] = b->shape[0] = 1;
        a->strides[0] = b->strides[0] = 0;
        dims = 1;
    }
    a->ndim = b->ndim = dims;
}

static Ruler ruler_for(const Rules *rules)
{
    Ruler ruler = {.digits = rules->digits};
    if (rules->digits == 0)
        return ruler;
    ruler.base = (int64_t)(rules->least_exponent - 1 + 1023) * ((int64_t)1 << (rules->digits - 1));
    ruler.end = INT64_MAX;
    if (rules->digits < 53) {
        ruler.least = ldexp(1.0, rules->least_exponent);
        ruler.scale = ldexp(1.0, rules->digits - 1 - rules->least_exponent);
        int64_t last;
        used_passes()->places(&rules->largest, 1, &ruler, &last);
        ruler.end = last + 1;
    }
    return ruler;
}

static void prepare(Comparison *job, const Elements *a, const Elements *b, const Rules *rules)
{
    *job = (Comparison){.sides = {a, b}, .count = 1, .rules = *rules, .passes = used_passes()};
    job->ruler = ruler_for(rules);
    job->singles = a->kind == FLOAT32 && b->kind == FLOAT32;
    job->all_finite = a->table != NULL;
    for (int i = 0; i < 256 && a->table != NULL; i++)
        job->all_finite &= isfinite(a->table[i]) != 0;
    int whole = a->kind >= INT16 && a->kind <= UINT64;
    job->can_match = a->kind == b->kind && a->table == b->table && (rules->equal_nan || whole);
    for (int i = 0; i < a->array.ndim; i++)
        job->count *= (size_t)a->array.shape[i];
    job->tasks = (job->count + TASK - 1) / TASK;
    job->arrays[0] = a->array;
    job->arrays[1] = b->array;
    if (job->count == 0)
        return;
    flatten(&job->arrays[0], &job->arrays[1]);
    for (int side = 0; side < 2; side++) {
        const Array *array = &job->arrays[side];
        size_t size = itemsize_of(job->sides[side]->kind), alignment = size < 8 ? size : 8;
        job->itemsizes[side] = size;
        /* copy unaligned elements to aligned memory */
        job->contiguous[side] =
            (job->count == 1 || (array->ndim == 1 && array->strides[0] == (ptrdiff_t)size)) &&
            (uintptr_t)array->data % alignment == 0;
    }
}

static void put(const Comparison *job, Desk *const *desks, int n, Difference *found)
{
    Scaled total = {.unit_d = 0};
    Limits limits = desks[0]->limits;
    int64_t not_both = 0;
    *found = (Difference){.count = (int64_t)job->count, .first_nonfinite = -1, .worst = -1,
                          .identical = job->can_match && !job->differ};
    limits.excess = -(double)INFINITY;
    for (int i = 0; i < n; i++) {
        const Desk *w = desks[i];
        const Limits *l = &w->limits;
        not_both += w->not_both_finite;
        found->mismatches += w->mismatches;
        found->nonfinite += w->nonfinite;
        found->steps = LARGER(found->steps, w->steps);
        limits.max_abs = LARGER(limits.max_abs, l->max_abs);
        limits.max_rel = LARGER(limits.max_rel, l->max_rel);
        limits.factor = LARGER(limits.factor, l->factor);
        if (w->first_nonfinite >= 0 &&
            (found->first_nonfinite < 0 || w->first_nonfinite < found->first_nonfinite))
            found->first_nonfinite = w->first_nonfinite;
        if (w->worst >= 0 && (found->worst < 0 || l->excess > limits.excess ||
                              (l->excess == limits.excess && w->worst < found->worst))) {
            limits.excess = l->excess;
            found->worst = w->worst;
        }
    }
    for (size_t i = 0; i < job->tasks; i++)
        add_sums(&total, job->parts[i]);
    const PairSums *s = &total.sums;
    found->finite = found->count - not_both;
    found->max_abs = limits.max_abs;
    found->max_rel = limits.max_rel;
    found->excess = limits.excess;
    found->factor = limits.factor;
    double many = found->finite > 0 ? (double)found->finite : 1.0;
    found->mean_abs = ldexp(s->abs / many, total.unit_d);
    found->mean_rel = s->rel / many;
    double a = sqrt(s->aa), b = sqrt(s->bb), d = sqrt(s->squares);
    found->cosine = a > 0 && b > 0 ? s->ab / a / b : a == b ? 1.0 : 0.0;
    if (fabs(found->cosine) > 1.0)
        found->cosine = found->cosine > 0 ? 1.0 : -1.0;
    if (d > 0)
        found->rel_l2 = b > 0 ? ldexp(d / b, total.unit_d - total.unit_b) : (double)INFINITY;
    if (found->identical)
        found->cosine = 1.0;
}

Outcome compare(const Elements *a, const Elements *b, const Rules *rules, int threads,
                Difference *found)
{
    Comparison job;
    FloatMode before;
    Outcome outcome = NO_MEMORY;
    use_ieee_mode(&before);
    prepare(&job, a, b, rules);
    int n = thread_count(job.count / A_THREAD, threads), hired = 0;
    Desk **desks = calloc((size_t)n, sizeof *desks);
    job.parts = calloc(job.tasks + 1, sizeof *job.parts);
    job.untouched = calloc(job.tasks + 1, 1);
    if (desks == NULL || job.parts == NULL || job.untouched == NULL)
        goto end;
    for (; hired < n; hired++) {
        desks[hired] = malloc(sizeof **desks);
        if (desks[hired] == NULL)
            goto end;
        prepare_desk(desks[hired], &job);
    }
    run_threads(work, (void **)desks, n);
    if (job.differ) {
        job.later = 1;
        job.next = 0;
        run_threads(work, (void **)desks, n);
    }
    put(&job, desks, n, found);
    outcome = DONE;
end:
    for (int i = 0; i < hired; i++)
        free(desks[i]);
    free(desks);
    free(job.parts);
    free(job.untouched);
    restore_mode(&before);
    return outcome;
}
