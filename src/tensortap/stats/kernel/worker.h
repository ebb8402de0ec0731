/* A job, and what each thread that works on it counts. */
#ifndef TENSORTAP_WORKER_H
#define TENSORTAP_WORKER_H

#include "moments.h"
#include "summarize.h"
#include "variants.h"

#define PATTERNS (1 << 16)
#define SECOND (PATTERNS + 1040) /* where the second table begins: not 4096 bytes times anything */

typedef struct {
    /* counts that are only ever added to, so that who counted what does not matter */
    int64_t zeros, nans, posinfs, neginfs;
    uint64_t near[256];      /* by the exponents that normal numbers of float32 have, plus BIAS */
    uint64_t far[EXPONENTS]; /* by all others, from FIRST_EXPONENT */
    int any_far;             /* far is only used, and cleared, when there are some */
    /* how exponents are counted just now */
    int base, width;    /* of the windows */
    int scatter, pause; /* chunks for which they are not tried, and how many next time */
    uint32_t few[4][256]; /* patterns of 8 bits */
    uint32_t *many;       /* of 16 bits: two tables, zero between jobs */
    uint64_t *patterns;   /* where they are added up from time to time */
    uint64_t seen;        /* since then */
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
    Moments *parts; /* of every task */
    size_t next;    /* the task that nobody has taken yet */
    int beyond;     /* a magnitude that no float64 holds */
} Job;

/* chunks.c */

void count_exponent(Worker *w, int exponent, uint64_t times);

/* The moments of a chunk of aligned elements; everything else is counted in the worker. */
Moments take_chunk(Worker *w, Job *job, const char *data, size_t n);

/* patterns.c */

void count_patterns(Worker *w, Kind kind, const char *data, size_t n);

/* Add up in w->patterns what was counted, and begin anew. */
void settle(Worker *w, Kind kind);

/* The moments of values that occur `times` each; `values` and `weights` have room for them all. */
Moments of_patterns(Worker *w, const Job *job, const uint64_t *times, double *values,
                    double *weights);

/* strides.c */

/* The same elements, in an order that suits memory: from outer to inner with falling strides,
 * none negative, and what lies end to end as one dimension. */
void normalize(Array *a, size_t itemsize);

/* Copy elements `first` to `first + n` of a normalized array. */
void gather(const Array *a, size_t itemsize, size_t first, size_t n, char *out);

#endif
