/* A job, and the counts of each thread that works on it. */
#ifndef TENSORTAP_WORKER_H
#define TENSORTAP_WORKER_H

#include <limits.h>

#include "kernel.h"
#include "variants.h"

#define INF32 0x7F800000u /* the bits of infinity */
#define INF64 0x7FF0000000000000u
#define ONLY_ZEROS INT_MIN /* the unit of moments of zeros */

/* Evaluate `body` for each element in[i] of a type. */
#define EACH(type, body)                                                                          \
    do {                                                                                          \
        const type *in = (const void *)data;                                                      \
        for (size_t i = 0; i < n; i++)                                                            \
            body;                                                                                 \
    } while (0)

/* Averages over n finite values, in units of 2**unit to the respective power, so that no eighth power
 * overflows. */
typedef struct {
    int64_t n;
    int unit;
    double mean, m2, mean_abs, p2, p4, p8; /* m2: the sum of squared deviations from the mean */
    double low, high, min_abs;             /* in units of 1 */
} Moments;

typedef struct {
    Array array;
    Kind kind;
    size_t itemsize, count, tasks;
    int contiguous;
    const Passes *passes;
    const double *table;
    Moments *parts; /* of each task */
    size_t next;    /* the next task to take */
    int beyond;     /* float64 cannot hold a magnitude */
} Job;

typedef struct {
    Job *job;
    /* counts; they are only added to, so it does not matter which thread counts what */
    int64_t zeros, nans, posinfs, neginfs;
    uint64_t near[256];      /* by exponent plus BIAS, for normal numbers of float32 */
    uint64_t far[EXPONENTS]; /* by all other exponents, from FIRST_EXPONENT */
    int any_far;             /* `far` is cleared and used only if there are any */
    /* how exponents are counted at present */
    int base, width;    /* of the windows */
    int scatter, pause; /* chunks without windows, and how many next time */
    uint32_t few[4][256];   /* counts of 8-bit patterns */
    uint64_t patterns[256]; /* where these counts are added up from time to time */
    uint64_t seen;          /* elements since then */
    const char *next;       /* the chunk after this one, to be fetched */
    uint8_t exponents[CHUNK];
    float floats[CHUNK], finite32[CHUNK];
    double doubles[CHUNK], finite64[CHUNK], rulers[CHUNK], finite_rulers[CHUNK], scaled[CHUNK];
    double gathered[2 * CHUNK]; /* elements of up to 16 bytes */
} Worker;

/* moments.c */

/* Add b to a, by Chan's formula. */
void add(Moments *a, Moments b);

/* Return the unit for values up to max_abs: 2**0 if that is safe. */
int unit_for(double max_abs);

/* Return the moments of n equal values. */
Moments of_constant(int64_t n, double value, int unit);
Moments of_sums(int64_t n, int unit, const Sums *s);

/* Return whether the deviations are accurate although they come from the squares: they are if the
 * mean is small compared with them. */
int deviations_are_accurate(const Moments *m);

/* Set the deviations from the sums of the deviations from the present mean, and of their squares. */
void set_deviations(Moments *m, double rest, double squares);

/* chunks.c */

void count_exponent(Worker *w, int exponent, uint64_t times);

/* Return the moments of a chunk of aligned elements, and count everything else in the worker. */
Moments take_chunk(Worker *w, const char *data, size_t n);

/* patterns.c */

void count_patterns(Worker *w, const uint8_t *in, size_t n);

/* Add the counts to w->patterns and clear them. */
void flush_patterns(Worker *w);

/* Return the moments of all elements from w->patterns. */
Moments of_patterns(Worker *w);

/* strides.c */

/* Reorder the dimensions for memory access: decreasing strides, none negative, and adjacent
 * dimensions merged. */
void normalize(Array *a, size_t itemsize);

/* Copy elements `first` to `first + n` of a normalized array. */
void gather(const Array *a, size_t itemsize, size_t first, size_t n, char *out);

#endif
