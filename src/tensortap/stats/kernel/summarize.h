/* The statistics of numbers in memory: what module.c shows to Python. Nothing here knows of it. */
#ifndef TENSORTAP_SUMMARIZE_H
#define TENSORTAP_SUMMARIZE_H

#include <stddef.h>
#include <stdint.h>

/* What an element is. The 8-bit dtypes are all BYTES: a table says what each of the 256 is. */
typedef enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT16, UINT16, INT32, UINT32, INT64, UINT64,
    COMPLEX64, COMPLEX128, BYTES, KINDS
} Kind;

#define MAX_DIMS 64
#define FIRST_EXPONENT (-1074) /* of the smallest float64 */
#define EXPONENTS 2098         /* up to 2**1023 */

/* Where the elements lie: strides are in bytes, and may be zero or negative. */
typedef struct {
    const char *data;
    int ndim;
    ptrdiff_t shape[MAX_DIMS];
    ptrdiff_t strides[MAX_DIMS];
} Array;

typedef struct {
    int64_t count, zeros, nans, posinfs, neginfs;
    double min, max, mean, std, mean_abs, max_abs, min_abs, rm2, rm4, rm8;
    int first_bin, bins;
    uint64_t bin[EXPONENTS];
} Statistics;

typedef enum { DONE, NO_MEMORY, BEYOND } Outcome; /* BEYOND: a magnitude that no float64 holds */

size_t itemsize_of(Kind kind);

/* How OpenMP runs a function on its threads: GOMP_parallel, and what it says of them. */
typedef struct {
    void (*run)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
    int (*number)(void);
    int (*size)(void);
} Team;

void use_team(Team given);

/* `table` is for BYTES. `threads` 0: as many as the process may use, if the array is large. */
Outcome summarize(const Array *array, Kind kind, const double *table, int threads,
                  Statistics *found);

/* The same for few elements, in memory that all callers share: only one of them at a time. */
Outcome summarize_few(const Array *array, Kind kind, const double *table, Statistics *found);

#endif
