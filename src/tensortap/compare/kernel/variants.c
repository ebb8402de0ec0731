/* passes.h, compiled for every kind of processor. */
#include "variants.h"

#include <math.h>
#include <string.h>

#include "../../stats/kernel/targets.h"

/* which of them is used, the statistics say: their variants.c is part of this module, too */
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
