/* The passes over a chunk, and the choice of the code for this processor. */
#ifndef TENSORTAP_VARIANTS_H
#define TENSORTAP_VARIANTS_H

#include <stddef.h>
#include <stdint.h>

#define CHUNK 4096 /* elements: as float64 they fit into the first-level cache */
#define WINDOW 16  /* exponents that are counted by comparisons at once */
#define BIAS 127   /* of float32 exponents */

typedef struct {
    int32_t low, high; /* integers in the order of the floats: see passes.h */
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
    void (*halves)(const uint16_t *, size_t, float *);
    void (*range32)(const uint32_t *, size_t, Range32 *);
    void (*range64)(const uint64_t *, size_t, Range64 *);
    size_t (*zeros32)(const uint32_t *, size_t);
    size_t (*zeros64)(const uint64_t *, size_t);
    void (*exponents32)(const uint32_t *, size_t, uint8_t *);
    void (*exponents64)(const uint64_t *, size_t, uint8_t *);
    size_t (*window)(const uint8_t *, size_t, uint8_t, uint64_t *);
    size_t (*outside)(const uint8_t *, size_t, uint8_t, uint8_t, uint64_t *);
    void (*sums32)(const float *, size_t, Sums *);
    void (*sums64)(const double *, size_t, Sums *);
    void (*deviations32)(const float *, size_t, double, double *);
    void (*deviations64)(const double *, size_t, double, double *);
} Passes;

const Passes *used_passes(void);

/* Return the name of a variant, the best one last; NULL if this processor cannot run it. */
const char *variant(int index);
const char *used_variant(void);
int use_variant(const char *name); /* 0 if this processor cannot run it */
void choose_variant(void);         /* use the best */

#endif
