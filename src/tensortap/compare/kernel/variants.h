/* The passes over a block of pairs, by instruction set. */
#ifndef TENSORTAP_COMPARE_VARIANTS_H
#define TENSORTAP_COMPARE_VARIANTS_H

#include <stddef.h>
#include <stdint.h>

#define BLOCK 1024 /* pairs: all intermediate results fit into the first-level cache */

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

typedef struct {
    void (*widen)(const float *, size_t, double *);
    void (*brains)(const uint16_t *, size_t, double *);
    uint32_t (*steps32)(const uint32_t *, const uint32_t *, size_t, uint32_t *largest);
    uint32_t (*largest32)(const uint32_t *, size_t);
    uint64_t (*largest64)(const double *, size_t);
    Verdict (*pairs32)(const float *, const float *, size_t, const Limits *, const char *next_a,
                       const char *next_b, PairSums *);
    Verdict (*pairs64)(const double *, const double *, size_t, const Limits *, const char *next_a,
                       const char *next_b, PairSums *);
    double (*squares32)(const float *, size_t, const char *next);
    double (*squares64)(const double *, size_t, const char *next);
    void (*places)(const double *, size_t, const Ruler *, int64_t *);
    uint64_t (*apart)(const int64_t *, const int64_t *, size_t);
} Comparing;

/* Selects the variant that the statistics use. */
const Comparing *used_comparing(void);

#endif
