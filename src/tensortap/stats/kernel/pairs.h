/* A comparison of two arrays, and what each thread that works on it has found. */
#ifndef TENSORTAP_PAIRS_H
#define TENSORTAP_PAIRS_H

#include "kernel.h"
#include "variants.h"

#define LARGER(x, y) ((x) > (y) ? (x) : (y))

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

void add_sums(Scaled *to, Scaled from);

/* Compare a block of n pairs, of which the first has the index `at`; return its sums. */
Scaled take_pairs(Desk *w, const char *const data[2], size_t n, size_t at);

/* The same for a block of equal bytes; what is not finite in it is counted separately. */
Scaled take_equals(Desk *w, const char *data, size_t n);
void note_equals(Desk *w, const char *data, size_t n);

#endif
