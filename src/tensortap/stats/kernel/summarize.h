/* The statistics of numbers in memory, independent of Python. */
#ifndef TENSORTAP_SUMMARIZE_H
#define TENSORTAP_SUMMARIZE_H

#include <stddef.h>
#include <stdint.h>

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
    int64_t count, zeros, nans, posinfs, neginfs;
    double min, max, mean, std, mean_abs, max_abs, min_abs, rm2, rm4, rm8;
    int first_bin, bins;
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

/* `table` is for BYTES. `threads` 0 means as many as the process may use, for a large array. */
Outcome summarize(const Array *array, Kind kind, const double *table, int threads,
                  Statistics *result);

/* The same for few elements. Uses static memory: only one thread may call it at a time. */
Outcome summarize_few(const Array *array, Kind kind, const double *table, Statistics *result);

#endif
