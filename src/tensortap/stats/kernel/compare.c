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
#include "pairs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

#define TASK (32 * BLOCK)
#define A_THREAD (8 * TASK) /* pairs that justify a thread */

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
