/* Sums over movements: how far arrays moved, and whether in the direction of the last time. */
#define _GNU_SOURCE /* sched_getaffinity: processor.h */
#include <stdlib.h>
#include <string.h>

#include "kernel.h"
#include "processor.h"

#define TASK (64 * BLOCK) /* elements that a thread takes at once */

static const double zeros[BLOCK];

typedef struct {
    Movement *movement;
    size_t first;
    MoveSums sums;
} MoveTask;

typedef struct {
    MoveTask *tasks;
    size_t n, next;
    const Passes *passes;
} MoveJob;

static const double *as_doubles(const Passes *p, Kind kind, const char *data, size_t n, double *out)
{
    float floats[BLOCK];
    if (data == NULL)
        return zeros;
    switch (kind) {
    case FLOAT64:
        return (const void *)data;
    case FLOAT16:
        p->halves((const void *)data, n, floats);
        p->widen(floats, n, out);
        return out;
    case BFLOAT16:
        p->brains((const void *)data, n, out);
        return out;
    default:
        p->widen((const void *)data, n, out);
        return out;
    }
}

static void do_block(const Passes *p, const Movement *m, size_t at, size_t n, MoveSums *sums)
{
    size_t size = itemsize_of(m->kind);
    const char *given[4] = {m->x, m->a, m->y, m->b};
    double doubles[4][BLOCK];
    MoveSums found;
    for (int i = 0; i < 4; i++)
        given[i] = given[i] == NULL ? NULL : given[i] + at * size;
    if (m->kind == FLOAT32) {
        const float *in[4];
        for (int i = 0; i < 4; i++)
            in[i] = given[i] == NULL ? (const void *)zeros : (const void *)given[i];
        p->moves32(in[0], in[1], in[2], in[3], n, &found);
    } else {
        const double *in[4];
        for (int i = 0; i < 4; i++)
            in[i] = as_doubles(p, m->kind, given[i], n, doubles[i]);
        p->moves64(in[0], in[1], in[2], in[3], n, &found);
    }
    sums->xx += found.xx;
    sums->dd += found.dd;
    sums->pp += found.pp;
    sums->dp += found.dp;
    if (m->kept != NULL)
        memcpy(m->kept + at * size, given[0], n * size);
}

static void *take_tasks(void *argument)
{
    MoveJob *job = argument;
    FloatMode before;
    use_ieee_mode(&before);
    for (;;) {
        size_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->n)
            break;
        MoveTask *task = &job->tasks[i];
        size_t left = task->movement->n - task->first;
        size_t end = task->first + (left < TASK ? left : TASK);
        for (size_t at = task->first; at < end; at += BLOCK)
            do_block(job->passes, task->movement, at, end - at < BLOCK ? end - at : BLOCK,
                     &task->sums);
    }
    restore_mode(&before);
    return NULL;
}

Outcome sum_movements(Movement *movements, size_t n, int threads)
{
    size_t tasks = 0, total = 0, filled = 0;
    void *arguments[MAX_THREADS];
    for (size_t i = 0; i < n; i++) {
        tasks += (movements[i].n + TASK - 1) / TASK;
        total += movements[i].n;
    }
    MoveJob job = {calloc(tasks + 1, sizeof *job.tasks), tasks, 0, used_passes()};
    if (job.tasks == NULL)
        return NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        for (size_t first = 0; first < movements[i].n; first += TASK)
            job.tasks[filled++] = (MoveTask){&movements[i], first, {0, 0, 0, 0}};
    }
    int hired = threads_for(total, threads);
    for (int i = 0; i < hired; i++)
        arguments[i] = &job;
    work_together(take_tasks, arguments, hired);
    for (size_t i = 0; i < tasks; i++) { /* in their order, whoever computed them */
        MoveSums *sums = &job.tasks[i].movement->sums, *more = &job.tasks[i].sums;
        sums->xx += more->xx;
        sums->dd += more->dd;
        sums->pp += more->pp;
        sums->dp += more->dp;
    }
    free(job.tasks);
    return DONE;
}
