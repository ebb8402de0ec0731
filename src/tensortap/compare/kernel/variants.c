/* Compile passes.h for every instruction set. */
#include "variants.h"

#include <math.h>
#include <string.h>

#include "../../stats/kernel/targets.h"

/* the variants.c of the statistics, linked into this module, chooses the set */
const char *used_variant(void);

#define PASS(name) name##_baseline
#define WIDTH 16
#include "passes.h"

#if defined(__x86_64__)
BEGIN_AVX2
#define PASS(name) name##_avx2
#define WIDTH 32
#include "passes.h"
END_TARGET

BEGIN_AVX512
#define PASS(name) name##_avx512
#define WIDTH 64
#include "passes.h"
END_TARGET
#endif

const Comparing *used_comparing(void)
{
#if defined(__x86_64__)
    if (strcmp(used_variant(), "avx512") == 0)
        return &comparing_avx512;
    if (strcmp(used_variant(), "avx2") == 0)
        return &comparing_avx2;
#endif
    return &comparing_baseline;
}
