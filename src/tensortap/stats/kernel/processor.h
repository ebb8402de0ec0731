/* The floating-point mode of the processor, and threads.
 *
 * Define _GNU_SOURCE before including the first header.
 */
#ifndef TENSORTAP_PROCESSOR_H
#define TENSORTAP_PROCESSOR_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

#define DEFAULT_THREADS 8 /* at most: more do not read memory any faster */
#define MAX_THREADS 64    /* whatever the caller asks for */

#if defined(__x86_64__)
typedef unsigned int FloatMode;
static inline void use_ieee_mode(FloatMode *before)
{
    *before = _mm_getcsr();
    _mm_setcsr(0x1F80); /* exceptions masked, round to nearest, subnormals not flushed */
}
static inline void restore_mode(const FloatMode *before)
{
    _mm_setcsr(*before);
}
#else
typedef fenv_t FloatMode;
static inline void use_ieee_mode(FloatMode *before)
{
    fegetenv(before);
    fesetenv(FE_DFL_ENV);
}
static inline void restore_mode(const FloatMode *before)
{
    fesetenv(before);
}
#endif

static inline int usable_processors(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

/* Return how many threads to use, if the work is enough for `useful` of them. `requested` 0 means
 * as many as the process may use. */
static inline int thread_count(size_t useful, int requested)
{
    if (useful <= 1)
        return 1;
    if (requested <= 0) {
        requested = usable_processors();
        requested = requested < DEFAULT_THREADS ? requested : DEFAULT_THREADS;
    }
    requested = requested < MAX_THREADS ? requested : MAX_THREADS;
    return useful < (size_t)requested ? (int)useful : requested;
}

/* Call `work` for each of n arguments, in as many threads, of which this one is the first; fewer if
 * the system has no more. */
static inline void run_threads(void *(*work)(void *), void **arguments, int n)
{
    pthread_t threads[MAX_THREADS];
    sigset_t all, before;
    int created = 1;
    if (n > 1) {
        sigfillset(&all); /* signals belong to the program's own threads */
        pthread_sigmask(SIG_BLOCK, &all, &before);
        while (created < n &&
               pthread_create(&threads[created], NULL, work, arguments[created]) == 0)
            created++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(arguments[0]);
    for (int i = 1; i < created; i++)
        pthread_join(threads[i], NULL);
}

#endif
