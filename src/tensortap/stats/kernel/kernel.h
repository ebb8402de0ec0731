/* Statistics of an array in memory, and the comparison of two; independent of Python. */
#ifndef TENSORTAP_KERNEL_H
#define TENSORTAP_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "variants.h"

/* The kind of an element. All 8-bit dtypes are BYTES, with a table of their 256 values. */
typedef enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT16, UINT16, INT32, UINT32, INT64, UINT64,
    COMPLEX64, COMPLEX128, BYTES, KINDS
} Kind;

#define MAX_DIMS 64
#define FIRST_EXPONENT (-1074) /* of the smallest float64 */
#define EXPONENTS 2098         /* up to 2**1023 */

/* An array in memory. Strides are in bytes and may be zero or negative. */
typedef struct {
    const char *data;
    int ndim;
    ptrdiff_t shape[MAX_DIMS];
    ptrdiff_t strides[MAX_DIMS];
} Array;

typedef struct {
    Array array;
    Kind kind;
    const double *table; /* the values of BYTES */
} Elements;

#define FIGURES                                                                                   \
    int64_t count, zeros, nans, posinfs, neginfs;                                                 \
    double min, max, mean, std, mean_abs, max_abs, min_abs, rm2, rm4, rm8;                        \
    int first_bin, bins;

typedef struct {
    FIGURES
    uint64_t bin[EXPONENTS];
} Statistics;

typedef enum { DONE, NO_MEMORY, BEYOND } Outcome; /* BEYOND: float64 cannot hold a magnitude */

size_t itemsize_of(Kind kind);

/* Functions of an OpenMP runtime: GOMP_parallel, omp_get_thread_num and omp_get_max_threads. */
typedef struct {
    void (*run)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
    int (*number)(void);
    int (*size)(void);
} Team;

/* Use the threads of an OpenMP runtime. */
void use_team(Team given);

/* Call `work` for up to n arguments at the same time, in threads of which this one is the first. */
void work_together(void *(*work)(void *), void **arguments, int n);

/* Return how many threads to use for this many elements. */
int threads_for(size_t count, int requested);

/* `threads` 0 means as many as the process may use, for a large array. */
Outcome summarize(const Elements *elements, int threads, Statistics *result);

#define FEW_BINS 64

typedef struct {
    struct {
        FIGURES
    } figures; /* the first fields of Statistics */
    uint64_t *bin, few[FEW_BINS]; /* `bin` is `few` if these are enough, else allocated */
} Kept;

/* Keep the result of an array; return 0 if there is no memory. */
int keep_result(Kept *kept, const Statistics *result);

typedef struct {
    const Elements *elements; /* of n arrays */
    Kept *kept;               /* their results; `bin` is NULL at first */
    size_t n, next;
} Many;

/* Summarize many arrays; the large ones one after the other, the others side by side. */
Outcome summarize_many(Many *many, int threads);

/* Add the digest of an array to four sums. It lies at `offsets` in an array of the shape `whole`. */
void digest(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
            uint64_t seed, uint32_t sums[4]);

#define FORMS 3 /* of elements: as they are, and of FLOAT32 rounded to bfloat16 and to float16 */
#define RING 5  /* numbers in the digest of rows */

/* Add the digest of rows of an array to five sums for each form, with a seed for each form. Rows are
 * counted by the first `outer` dimensions. */
void digest_rows(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
                 int outer, int forms, const uint64_t *seeds, uint32_t sums[FORMS][RING]);

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

/* Compare two arrays of real numbers with the same shape; return DONE or NO_MEMORY. */
Outcome compare(const Elements *a, const Elements *b, const Rules *rules, int threads,
                Difference *found);

/* Arrays of n elements of one kind of float: x, and NULL for those that are zero. What moved is d = x - a,
 * what moved before is p = y - b. Afterwards `kept` holds a copy of x; it may be y. */
typedef struct {
    Kind kind;
    size_t n;
    const char *x, *a, *y, *b;
    char *kept;
    MoveSums sums;
} Movement;

/* Compute the sums of n movements; return DONE or NO_MEMORY. */
Outcome sum_movements(Movement *movements, size_t n, int threads);

#endif
