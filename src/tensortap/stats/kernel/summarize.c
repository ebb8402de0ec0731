/* The statistics of numbers in memory, in one pass.
 *
 * The elements are cut into tasks and these into chunks, always in the same places. A chunk fits
 * into the first-level cache, where the passes of passes.h go over it a few times: range,
 * exponents, sums, and deviations where the sums alone would not tell them. What the chunks of a
 * task come to is added up by Chan's formula, and so are the tasks, in their order: the figures
 * do not depend on how many threads there were.
 *
 * Of 8-bit elements, and of many 16-bit ones, the bit patterns are counted instead.
 *
 * Whatever can be told by bits is told by bits. For the rest the processor is set to treat
 * subnormal numbers as IEEE 754 says, and set back: training may run with them flushed to zero.
 */
#define _GNU_SOURCE /* sched_getaffinity: processor.h */
#include "summarize.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

#define TASK (16 * CHUNK)       /* what a thread takes at a time */
#define A_THREAD (8 * TASK)     /* elements that are worth a thread */
#define WORTH_A_TABLE (1 << 20) /* 16-bit elements from which counting patterns is faster */
#define WORTH_A_SMALL (1 << 18) /* bfloat16 uses few of them, which stay in the cache */

/* ---- tasks and threads ---- */

typedef struct {
    Job *job;
    Worker *worker;
    pthread_t thread;
    int started;
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
    hand->started = 1;
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

/* The team of threads of the program's OpenMP, which wait for work anyway: torch's. Threads of
 * our own would fight with them for the processors. A forked child has no team. */
static Team team;
static pid_t team_of;

void use_team(Team given)
{
    team = given;
    team_of = getpid();
}

static int has_team(void)
{
    return team.run != NULL && team_of == getpid();
}

typedef struct {
    Hand *hands;
    int n;
} Crew;

static void work_in_team(void *argument)
{
    Crew *crew = argument;
    int i = team.number();
    if (i < crew->n)
        work(&crew->hands[i]);
}

/* Run the job with as many hands as there are; the first is this thread itself. */
static void work_together(Hand *hands, int n)
{
    sigset_t all, before;
    int started = 1;
    if (n > 1 && has_team()) {
        Crew crew = {hands, n};
        team.run(work_in_team, &crew, (unsigned)n, 0);
        for (int i = 0; i < n; i++)
            if (!hands[i].started)
                start(hands[i].worker, hands[i].job); /* a smaller team: nothing counted */
        return;
    }
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
                 .passes = used_passes()};
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

/* Workers are kept for the next call: the kernel clears every page of fresh memory. */
static Worker *idle[MOST_THREADS];

static void dismiss(int place, Worker *w)
{
    if (w != NULL && place < MOST_THREADS)
        w = __atomic_exchange_n(&idle[place], w, __ATOMIC_ACQ_REL);
    if (w == NULL)
        return;
    free(w->patterns);
    free(w->many);
    free(w);
}

/* A worker with room for so many patterns; NULL if there is no memory. */
static Worker *hire(int place, size_t patterns)
{
    Worker *w = NULL;
    if (place < MOST_THREADS)
        w = __atomic_exchange_n(&idle[place], NULL, __ATOMIC_ACQ_REL);
    if (w == NULL) {
        w = malloc(sizeof *w);
        if (w == NULL)
            return NULL;
        w->patterns = NULL;
        w->many = NULL;
    }
    if (patterns > 0 && w->patterns != NULL)
        memset(w->patterns, 0, patterns * sizeof *w->patterns);
    else if (patterns > 0)
        w->patterns = calloc(PATTERNS, sizeof *w->patterns);
    if (patterns > 256 && w->many == NULL)
        w->many = calloc(SECOND + PATTERNS, sizeof *w->many);
    if ((patterns > 0 && w->patterns == NULL) || (patterns > 256 && w->many == NULL)) {
        dismiss(place, w);
        return NULL;
    }
    return w;
}

Outcome summarize(const Array *array, Kind kind, const double *table, int threads,
                  Statistics *found)
{
    Job job;
    Moments total = {0};
    Environment before;
    Outcome outcome = NO_MEMORY;
    prepare(&job, array, kind, table);
    if (threads <= 0 && has_team())
        threads = team.size() < MOST_THREADS ? team.size() : MOST_THREADS;
    int n = hands_for(job.count / (has_team() ? TASK : A_THREAD), threads);
    size_t patterns = job.by_patterns ? (kind == BYTES ? 256 : PATTERNS) : 0;
    double *values = NULL;
    Hand *hands = calloc((size_t)n, sizeof *hands);
    job.parts = calloc(job.tasks + 1, sizeof *job.parts);
    if (hands == NULL || job.parts == NULL)
        goto end;
    for (int i = 0; i < n; i++) {
        hands[i].job = &job;
        hands[i].worker = hire(i, patterns);
        if (hands[i].worker == NULL)
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
    for (int i = 0; hands != NULL && i < n && hands[i].worker != NULL; i++)
        dismiss(i, hands[i].worker);
    free(values);
    free(job.parts);
    free(hands);
    return outcome;
}
