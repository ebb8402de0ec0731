/* Two arrays, element by element: what module.c shows to Python. Nothing here knows of it. */
#ifndef TENSORTAP_COMPARE_H
#define TENSORTAP_COMPARE_H

#include "../../stats/kernel/summarize.h"

/* One of the two: BYTES have a table of values. Contiguous or not, in C order of the indices. */
typedef struct {
    Array array;
    Kind kind;
    const double *table;
} Side;

typedef struct {
    double atol, rtol;
    int equal_nan;
    /* the floating-point format whose steps are counted: digits with the first one, the exponent
     * of its smallest normal number, and its largest number; no digits: none are counted */
    int digits, least_exponent;
    double largest;
} Rules;

typedef struct {
    int64_t count, finite; /* pairs, and those of two finite numbers */
    int64_t mismatches;    /* pairs that are not close, and of these … */
    int64_t nonfinite;     /* … those where one is not finite */
    int64_t first_nonfinite, worst; /* indices; -1 for none */
    double max_abs, mean_abs, max_rel, mean_rel;
    double excess;         /* the largest |a - b| - rtol*|b| of pairs that differ; or -inf */
    double factor;         /* the largest (|a - b| - atol) / |b|, or 0 */
    double cosine, rel_l2;
    uint64_t steps;        /* of the format, between the two */
    int identical;         /* all bytes were */
} Difference;

/* The outcome is DONE or NO_MEMORY. */
Outcome compare(const Side *a, const Side *b, const Rules *rules, int threads, Difference *found);

#endif
