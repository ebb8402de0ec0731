/* The processor: how it treats numbers, and how many threads it is worth to have.
 *
 * Define _GNU_SOURCE before the first header.
 */
#ifndef TENSORTAP_PROCESSOR_H
#define TENSORTAP_PROCESSOR_H

#include <sched.h>
#include <stddef.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

#define MOST_THREADS 8 /* by default: memory has no more to give */
#define LIMIT 64       /* threads, whatever the caller says */

#if defined(__x86_64__)
typedef unsigned int Environment;
static inline void enter(Environment *before)
{
    *before = _mm_getcsr();
    _mm_setcsr(0x1F80); /* all exceptions masked, to nearest, subnormals as they are */
}
static inline void leave(const Environment *before)
{
    _mm_setcsr(*before);
}
#else
typedef fenv_t Environment;
static inline void enter(Environment *before)
{
    fegetenv(before);
    fesetenv(FE_DFL_ENV);
}
static inline void leave(const Environment *before)
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

/* How many threads, where so many are worth it; `threads` 0: as many as the process may use. */
static inline int hands_for(size_t worth, int threads)
{
    if (worth <= 1)
        return 1;
    if (threads <= 0) {
        threads = usable_processors();
        threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    }
    threads = threads < LIMIT ? threads : LIMIT;
    return worth < (size_t)threads ? (int)worth : threads;
}

#endif
