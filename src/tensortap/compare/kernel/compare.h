/* Compare two arrays: the interface of module.c. Nothing here depends on Python. */
#ifndef TENSORTAP_COMPARE_H
#define TENSORTAP_COMPARE_H

#include "../../stats/kernel/summarize.h"

/* One array, strided, in C order of the indices; BYTES has a table of values. */
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
    int64_t count, finite; /* pairs; pairs of finite numbers */
    int64_t mismatches;    /* pairs that are not close */
    int64_t nonfinite;     /* of these, pairs with a value that is not finite */
    int64_t first_nonfinite, worst; /* indices; -1 for none */
    double max_abs, mean_abs, max_rel, mean_rel;
    double excess;         /* largest |a - b| - rtol*|b| of pairs that differ, or -inf */
    double factor;         /* largest (|a - b| - atol) / |b|, or 0 */
    double cosine, rel_l2;
    uint64_t steps;        /* largest distance in units of the format */
    int identical;         /* all bytes are equal */
} Difference;

/* Returns DONE or NO_MEMORY. */
Outcome compare(const Side *a, const Side *b, const Rules *rules, int threads, Difference *found);

#endif
