/* The passes over a chunk, and the choice of the code for this processor. */
#ifndef TENSORTAP_VARIANTS_H
#define TENSORTAP_VARIANTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 4096 /* elements: as float64 they fit into the first-level cache */
#define BLOCK 1024 /* pairs: all intermediate results fit into it, too */
#define WINDOW 16  /* exponents that are counted by comparisons at once */
#define BIAS 127   /* of float32 exponents */

typedef struct {
    int16_t low, high; /* integers in the order of the floats: see passes.h */
    uint16_t small, large;
} Range16;

typedef struct {
    int32_t low, high;
    uint32_t small, large;
} Range32;

typedef struct {
    int64_t low, high;
    uint64_t small, large;
} Range64;

typedef struct {
    double sum, sizes, p2, p4, p8;
} Sums;

typedef struct {
    double atol, rtol, max_abs, max_rel, excess, factor; /* so far */
} Limits;

typedef struct {
    int64_t mismatches;
    int64_t beyond; /* nonzero if a limit was exceeded */
} Verdict;

typedef struct {
    double abs, squares, rel, aa, bb, ab;
} PairSums;

typedef struct {
    int digits;
    int64_t base;         /* offset from the bits of a float64 to its ordinal */
    double least, scale;  /* smallest normal number; scale that makes subnormals integers */
    int64_t end;          /* ordinal after the last finite number */
} Ruler;

/* Sums of squares and products: of x, of d = x - a and p = y - b. */
typedef struct {
    double xx, dd, pp, dp;
} MoveSums;

#define PIECES 4096 /* of 16 bits in a block of a digest: their keys fit into the first-level cache */
#define KEY_STEP 32 /* from the key of a piece for one sum to that for the next */

typedef struct {
    void (*halves)(const uint16_t *, size_t, float *);
    void (*upper_halves)(const uint16_t *, size_t, float *);
    void (*range16)(const uint16_t *, size_t, Range16 *);
    void (*range32)(const uint32_t *, size_t, Range32 *);
    void (*range64)(const uint64_t *, size_t, Range64 *);
    size_t (*zeros32)(const uint32_t *, size_t);
    size_t (*zeros64)(const uint64_t *, size_t);
    void (*exponents32)(const uint32_t *, size_t, uint8_t *);
    void (*exponents64)(const uint64_t *, size_t, uint8_t *);
    size_t (*window)(const uint8_t *, size_t, uint8_t, uint64_t *);
    size_t (*outside)(const uint8_t *, size_t, uint8_t, uint8_t, uint64_t *);
    void (*sums32)(const float *, size_t, const char *next, size_t step, Sums *);
    void (*sums64)(const double *, size_t, const char *next, size_t step, Sums *);
    void (*deviations32)(const float *, size_t, double, double *);
    void (*deviations64)(const double *, size_t, double, double *);
    void (*widen)(const float *, size_t, double *);
    void (*brains)(const uint16_t *, size_t, double *);
    uint32_t (*steps32)(const uint32_t *, const uint32_t *, size_t, uint32_t *largest);
    uint32_t (*largest32)(const void *, size_t);
    uint64_t (*largest64)(const void *, size_t);
    Verdict (*pairs32)(const float *, const float *, size_t, const Limits *, const char *next_a,
                       const char *next_b, PairSums *);
    Verdict (*pairs64)(const double *, const double *, size_t, const Limits *, const char *next_a,
                       const char *next_b, PairSums *);
    double (*squares32)(const float *, size_t, const char *next);
    double (*squares64)(const double *, size_t, const char *next);
    void (*moves32)(const float *, const float *, const float *, const float *, size_t, MoveSums *);
    void (*moves64)(const double *, const double *, const double *, const double *, size_t,
                    MoveSums *);
    void (*places)(const double *, size_t, const Ruler *, int64_t *);
    uint64_t (*apart)(const int64_t *, const int64_t *, size_t);
    void (*digest)(const void *, size_t, const int16_t *, uint32_t[4]);
    void (*narrow_to_brains)(const void *, size_t, uint16_t *);
    void (*narrow_to_halves)(const void *, size_t, uint16_t *);
    void (*channels32)(const float *, ptrdiff_t stride, size_t rows, size_t, double shift,
                       double *squares, double sums[4]);
    void (*channels64)(const double *, ptrdiff_t stride, size_t rows, size_t, double shift,
                       double *squares, double sums[4]);
} Passes;

const Passes *used_passes(void);

/* Return the name of a variant, the best one last; NULL if this processor cannot run it. */
const char *variant(int index);
const char *used_variant(void);
int use_variant(const char *name); /* 0 if this processor cannot run it */
void choose_variant(void);         /* use the best */

#endif
