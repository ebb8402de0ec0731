/* A job, and the counts of each thread that works on it. */
#ifndef TENSORTAP_WORKER_H
#define TENSORTAP_WORKER_H

#include "moments.h"
#include "summarize.h"
#include "variants.h"

#define PATTERNS (1 << 16)
#define SECOND (PATTERNS + 1040) /* offset of the second table: no multiple of 4096 bytes */

typedef struct {
    /* counts; they are only added to, so it does not matter which thread counts what */
    int64_t zeros, nans, posinfs, neginfs;
    uint64_t near[256];      /* by exponent plus BIAS, for normal numbers of float32 */
    uint64_t far[EXPONENTS]; /* by all other exponents, from FIRST_EXPONENT */
    int any_far;             /* `far` is cleared and used only if there are any */
    /* how exponents are counted at present */
    int base, width;    /* of the windows */
    int scatter, pause; /* chunks without windows, and how many next time */
    uint32_t few[4][256]; /* counts of 8-bit patterns */
    uint32_t *many;       /* counts of 16-bit patterns: two tables, zero between jobs */
    uint64_t *patterns;   /* where these counts are added up from time to time */
    uint64_t seen;        /* elements since then */
    uint8_t exponents[CHUNK];
    float floats[CHUNK], finite32[CHUNK];
    double doubles[CHUNK], finite64[CHUNK], rulers[CHUNK], finite_rulers[CHUNK], scaled[CHUNK];
    double gathered[2 * CHUNK]; /* elements of up to 16 bytes */
} Worker;

typedef struct {
    Array array;
    Kind kind;
    size_t itemsize, count, tasks;
    int contiguous, by_patterns;
    const Passes *passes;
    const double *table;
    Moments *parts; /* of each task */
    size_t next;    /* the next task to take */
    int beyond;     /* float64 cannot hold a magnitude */
} Job;

/* chunks.c */

void count_exponent(Worker *w, int exponent, uint64_t times);

/* Return the moments of a chunk of aligned elements, and count everything else in the worker. */
Moments take_chunk(Worker *w, Job *job, const char *data, size_t n);

/* patterns.c */

void count_patterns(Worker *w, Kind kind, const char *data, size_t n);

/* Add the counts to w->patterns and clear them. */
void flush_patterns(Worker *w, Kind kind);

/* Return the moments of all patterns, given how many times each occurs. `values` and `weights` are
 * work space for all patterns. */
Moments of_patterns(Worker *w, const Job *job, const uint64_t *times, double *values,
                    double *weights);

/* strides.c */

/* Reorder the dimensions for memory access: decreasing strides, none negative, and adjacent
 * dimensions merged. */
void normalize(Array *a, size_t itemsize);

/* Copy elements `first` to `first + n` of a normalized array. */
void gather(const Array *a, size_t itemsize, size_t first, size_t n, char *out);

#endif
