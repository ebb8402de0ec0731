/* The statistics of numbers in memory, which is read once.
 *
 * The elements are divided into tasks and these into chunks, always at the same places. A chunk
 * stays in the first-level cache while the passes of passes.h read it several times: range,
 * exponents, sums, and deviations if the sums alone are not accurate enough. Chunks and tasks are
 * merged in order by Chan's formula, so the result does not depend on the number of threads.
 *
 * For 8-bit elements, the bit patterns are counted instead.
 *
 * Zeros, NaN and infinities are recognized by their bits. For arithmetic, the processor is set to
 * treat subnormal numbers as IEEE 754 says and reset afterwards: training may flush them to zero.
 */
#define _GNU_SOURCE /* sched_getaffinity: processor.h */
#include "kernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

#define TASK (8 * CHUNK)       /* elements that a thread takes at once */
#define A_THREAD (128 * CHUNK) /* elements that justify a thread of our own */

/* ---- tasks and threads ---- */

static void clear_counts(Worker *w, Job *job)
{
    w->job = job;
    w->zeros = w->nans = w->posinfs = w->neginfs = 0;
    memset(w->near, 0, sizeof w->near);
    w->any_far = 0;
    w->base = w->scatter = 0;
    w->width = WINDOW;
    w->pause = 1;
    w->seen = 0;
    if (job->kind == BYTES) {
        memset(w->few, 0, sizeof w->few);
        memset(w->patterns, 0, sizeof w->patterns);
    }
}

static Moments do_task(Worker *w, size_t task)
{
    Job *job = w->job;
    Moments total = {0};
    size_t end = (task + 1) * TASK < job->count ? (task + 1) * TASK : job->count;
    for (size_t at = task * TASK; at < end; at += CHUNK) {
        size_t n = end - at < CHUNK ? end - at : CHUNK;
        const char *data = (const void *)w->gathered;
        if (job->contiguous)
            data = job->array.data + at * job->itemsize;
        else
            gather(&job->array, job->itemsize, at, n, (void *)w->gathered);
        if (job->kind == BYTES)
            count_patterns(w, (const void *)data, n);
        else
            add(&total, take_chunk(w, data, n));
    }
    return total;
}

static void *work(void *argument)
{
    Worker *w = argument;
    Job *job = w->job;
    FloatMode before;
    use_ieee_mode(&before);
    for (;;) {
        size_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks)
            break;
        job->parts[task] = do_task(w, task);
    }
    if (job->kind == BYTES)
        flush_patterns(w);
    restore_mode(&before);
    return NULL;
}

/* The threads of torch's OpenMP runtime, which wait for work anyway. Threads of our own would
 * compete with them for the processors. A forked child does not have them. */
static Team team;
static pid_t team_process;

void use_team(Team given)
{
    team = given;
    team_process = getpid();
}

static int has_team(void)
{
    return team.run != NULL && team_process == getpid();
}

typedef struct {
    void *(*work)(void *);
    void **arguments;
    int n;
} Together;

static void work_in_team(void *argument)
{
    Together *all = argument;
    int i = team.number();
    if (i < all->n)
        all->work(all->arguments[i]);
}

void work_together(void *(*work)(void *), void **arguments, int n)
{
    Together all = {work, arguments, n};
    if (n > 1 && has_team())
        team.run(work_in_team, &all, (unsigned)n, 0);
    else if (n > 0)
        run_threads(work, arguments, n);
}

/* ---- the result ---- */

static void put_counts(const Worker *w, Statistics *result)
{
    result->count = (int64_t)w->job->count;
    result->zeros = w->zeros;
    result->nans = w->nans;
    result->posinfs = w->posinfs;
    result->neginfs = w->neginfs;
    int first = w->any_far ? FIRST_EXPONENT : 1 - BIAS;
    int last = w->any_far ? FIRST_EXPONENT + EXPONENTS - 1 : BIAS;
#define COUNT(e)                                                                                  \
    ((e) > -BIAS && (e) <= BIAS ? w->near[(e) + BIAS] : w->far[(e) - FIRST_EXPONENT])
    while (first <= last && COUNT(first) == 0)
        first++;
    while (last >= first && COUNT(last) == 0)
        last--;
    result->bins = last - first + 1;
    result->first_bin = result->bins ? first : 0;
    for (int e = first; e <= last; e++)
        result->bin[e - first] = COUNT(e);
#undef COUNT
}

static void put_figures(const Moments *m, Statistics *result)
{
    if (m->n == 0) {
        result->min = result->max = result->mean = result->std = result->mean_abs = (double)NAN;
        result->max_abs = result->min_abs = result->rm2 = result->rm4 = result->rm8 = (double)NAN;
        return;
    }
    int unit = m->unit == ONLY_ZEROS ? 0 : m->unit;
    double max_abs = -m->low > m->high ? -m->low : m->high;
    result->min = m->low + 0.0; /* turns -0.0 into 0.0 */
    result->max = m->high + 0.0;
    result->max_abs = max_abs + 0.0;
    result->min_abs = m->min_abs + 0.0;
    result->mean = ldexp(m->mean, unit);
    result->std = ldexp(m->n > 1 ? sqrt(m->m2 / (double)(m->n - 1)) : 0.0, unit);
    result->mean_abs = ldexp(m->mean_abs, unit);
    result->rm2 = ldexp(sqrt(m->p2), unit);
    result->rm4 = ldexp(sqrt(sqrt(m->p4)), unit);
    result->rm8 = ldexp(sqrt(sqrt(sqrt(m->p8))), unit);
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

static void prepare(Job *job, const Elements *elements)
{
    const Array *array = &elements->array;
    Kind kind = elements->kind;
    *job = (Job){.kind = kind, .itemsize = itemsize_of(kind), .count = 1,
                 .table = elements->table, .passes = used_passes()};
    job->array.ndim = array->ndim;
    job->array.data = array->data;
    for (int i = 0; i < array->ndim; i++) {
        job->array.shape[i] = array->shape[i];
        job->array.strides[i] = array->strides[i];
        job->count *= (size_t)array->shape[i];
    }
    if (job->count > 0)
        normalize(&job->array, job->itemsize);
    /* elements that are not aligned are copied */
    size_t alignment = job->itemsize < 8 ? job->itemsize : 8;
    job->contiguous = job->array.ndim == 1 && (size_t)job->array.strides[0] == job->itemsize &&
                      (uintptr_t)job->array.data % alignment == 0;
    job->tasks = (job->count + TASK - 1) / TASK;
}

/* Workers are kept for the next call, because the operating system clears fresh memory. */
static Worker *idle[DEFAULT_THREADS];

static void release_worker(int index, Worker *w)
{
    if (w != NULL && index < DEFAULT_THREADS)
        w = __atomic_exchange_n(&idle[index], w, __ATOMIC_ACQ_REL);
    free(w);
}

/* Return a worker; NULL if there is no memory. */
static Worker *acquire_worker(int index)
{
    Worker *w = NULL;
    if (index < DEFAULT_THREADS)
        w = __atomic_exchange_n(&idle[index], NULL, __ATOMIC_ACQ_REL);
    return w != NULL ? w : malloc(sizeof *w);
}

/* Do a job with n workers. */
static Outcome do_job(Job *job, Worker **workers, int n, Statistics *result)
{
    Moments total = {0}, only = {0};
    FloatMode before;
    Worker *first = workers[0];
    job->parts = job->tasks > 1 ? calloc(job->tasks, sizeof *job->parts) : &only;
    if (job->parts == NULL)
        return NO_MEMORY;
    for (int i = 0; i < n; i++)
        clear_counts(workers[i], job);
    work_together(work, (void **)workers, n);

    use_ieee_mode(&before);
    for (int i = 1; i < n; i++) {
        add_counts(first, workers[i]);
        for (int k = 0; job->kind == BYTES && k < 256; k++)
            first->patterns[k] += workers[i]->patterns[k];
    }
    if (job->kind == BYTES)
        total = of_patterns(first);
    else
        for (size_t i = 0; i < job->tasks; i++)
            add(&total, job->parts[i]);
    put_counts(first, result);
    put_figures(&total, result);
    restore_mode(&before);
    if (job->parts != &only)
        free(job->parts);
    return job->beyond ? BEYOND : DONE;
}

int threads_for(size_t count, int requested)
{
    int teamed = has_team();
    if (requested <= 0 && teamed)
        requested = team.size() < DEFAULT_THREADS ? team.size() : DEFAULT_THREADS;
    return thread_count(count / (teamed ? TASK : A_THREAD), requested);
}

/* Acquire n workers; return how many there is memory for. */
static int acquire_workers(Worker **workers, int n)
{
    int acquired = 0;
    while (acquired < n && (workers[acquired] = acquire_worker(acquired)) != NULL)
        acquired++;
    return acquired;
}

static void release_workers(Worker **workers, int n)
{
    for (int i = 0; i < n; i++)
        release_worker(i, workers[i]);
}

Outcome summarize(const Elements *elements, int requested, Statistics *result)
{
    Job job;
    Worker *workers[MAX_THREADS];
    prepare(&job, elements);
    int n = acquire_workers(workers, job.tasks > 1 ? threads_for(job.count, requested) : 1);
    Outcome outcome = n > 0 ? do_job(&job, workers, n, result) : NO_MEMORY;
    release_workers(workers, n);
    return outcome;
}

/* ---- many arrays ---- */

typedef struct {
    Many *many;
    Worker *worker;
    Outcome outcome;
} Share;

int keep_result(Kept *kept, const Statistics *result)
{
    size_t size = (size_t)result->bins * sizeof *kept->bin;
    memcpy(&kept->figures, result, sizeof kept->figures);
    kept->bin = result->bins > FEW_BINS ? malloc(size) : kept->few;
    if (kept->bin != NULL)
        memcpy(kept->bin, result->bin, size);
    return kept->bin != NULL;
}

/* Summarize arrays that no other thread has taken. */
static void *take_arrays(void *argument)
{
    Share *share = argument;
    Many *many = share->many;
    Statistics result;
    while (share->outcome == DONE) {
        size_t i = __atomic_fetch_add(&many->next, 1, __ATOMIC_RELAXED);
        if (i >= many->n)
            break;
        if (many->kept[i].bin != NULL)
            continue;
        Job job;
        prepare(&job, &many->elements[i]);
        share->outcome = do_job(&job, &share->worker, 1, &result);
        if (share->outcome == DONE && !keep_result(&many->kept[i], &result))
            share->outcome = NO_MEMORY;
    }
    return NULL;
}

Outcome summarize_many(Many *many, int requested)
{
    Worker *workers[MAX_THREADS];
    Share shares[MAX_THREADS];
    void *arguments[MAX_THREADS];
    Outcome outcome = DONE;
    size_t total = 0;
    for (size_t i = 0; i < many->n && outcome == DONE; i++) {
        size_t count = 1;
        for (int k = 0; k < many->elements[i].array.ndim; k++)
            count *= (size_t)many->elements[i].array.shape[k];
        total += count;
        if (count < A_THREAD)
            continue;
        /* all threads together: the last one must not wait for a large array */
        Statistics result;
        outcome = summarize(&many->elements[i], requested, &result);
        if (outcome == DONE && !keep_result(&many->kept[i], &result))
            outcome = NO_MEMORY;
        total -= count;
    }
    int n = acquire_workers(workers, threads_for(total, requested));
    if (n == 0)
        outcome = NO_MEMORY;
    for (int i = 0; i < n; i++) {
        shares[i] = (Share){many, workers[i], outcome};
        arguments[i] = &shares[i];
    }
    work_together(take_arrays, arguments, n);
    for (int i = 0; i < n && outcome == DONE; i++)
        outcome = shares[i].outcome;
    release_workers(workers, n);
    return outcome;
}
