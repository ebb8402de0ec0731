/* passes.h, compiled for each kind of processor. */
#include "variants.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* code between BEGIN_AVX2 or BEGIN_AVX512 and END_TARGET is compiled for such processors */
#if defined(__clang__)
#define BEGIN_AVX2                                                                                \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,f16c,fma,bmi,bmi2,popcnt\"))), apply_to = function)")
#define BEGIN_AVX512                                                                              \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,f16c,fma,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\"))), apply_to = function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX2                                                                                \
    _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,f16c,fma,bmi,bmi2,popcnt\")")
#define BEGIN_AVX512                                                                              \
    _Pragma("GCC push_options")                                                                   \
    _Pragma("GCC target(\"avx2,f16c,fma,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

/* Make a Range from the extremes of the bits of floats, as signed and as unsigned integers. */
#define AS_RANGE(N)                                                                               \
    static Range##N as_range##N(int##N##_t least, int##N##_t most, uint##N##_t bottom,            \
                                uint##N##_t top)                                                  \
    {                                                                                             \
        int##N##_t turn = INT##N##_MAX; /* negative floats are in the reverse order */            \
        uint##N##_t sign = (uint##N##_t)1 << (N - 1);                                             \
        int all_negative = most < 0, any_negative = least < 0;                                    \
        int##N##_t low = any_negative ? (int##N##_t)top ^ turn : least;                           \
        int##N##_t high = all_negative ? (int##N##_t)bottom ^ turn : most;                        \
        uint##N##_t small = all_negative ? bottom & ~sign : bottom;                               \
        uint##N##_t large = all_negative ? 0 : (uint##N##_t)most;                                 \
        if (any_negative && ((uint##N##_t)least & ~sign) < small)                                 \
            small = (uint##N##_t)least & ~sign;                                                   \
        if (any_negative && (top & ~sign) > large)                                                \
            large = top & ~sign;                                                                  \
        return (Range##N){low, high, small, large};                                               \
    }

AS_RANGE(16)
AS_RANGE(32)
AS_RANGE(64)

/* Tables of 16 bytes, repeated for the widest vectors: the k-th has one in the lower half of byte 2k,
 * and one in the upper half of byte 2k + 1. */
#define FOUR_TIMES(k)                                                                             \
    {[2 * k] = 1, [2 * k + 1] = 16, [2 * k + 16] = 1, [2 * k + 17] = 16,                          \
     [2 * k + 32] = 1, [2 * k + 33] = 16, [2 * k + 48] = 1, [2 * k + 49] = 16}
static const uint8_t two_bins[WINDOW / 2][64] = {
    FOUR_TIMES(0), FOUR_TIMES(1), FOUR_TIMES(2), FOUR_TIMES(3),
    FOUR_TIMES(4), FOUR_TIMES(5), FOUR_TIMES(6), FOUR_TIMES(7),
};

static uint32_t total_of(const uint8_t *bytes, int n)
{
    uint32_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += bytes[i];
    return sum;
}

#define PASS(name) name##_baseline
#define WIDTH 16
#define BYTES_WIDTH 16
#define AT_ONCE 8
#define TOTAL(v) total_of((const uint8_t *)&(v), BYTES_WIDTH)
#include "passes.h"

#if defined(__x86_64__)
BEGIN_AVX2
#define PASS(name) name##_avx2
#define WIDTH 32
#define BYTES_WIDTH 32
#define AT_ONCE 8
#define LOOK_UP(table, v) ((PASS(U8))_mm256_shuffle_epi8((__m256i)(table), (__m256i)(v)))
#define ADD_SATURATED(a, b) ((PASS(U8))_mm256_adds_epu8((__m256i)(a), (__m256i)(b)))
#define TO_8_HALVES(p, out)                                                                       \
    _mm_storeu_si128((void *)(out), _mm256_cvtps_ph(_mm256_loadu_ps((const void *)(p)), 0))
#define FROM_HALVES(p) ((PASS(F32))_mm_cvtph_ps(_mm_loadl_epi64((const void *)(p))))
#define SUMS_OF_8(v) ((PASS(U64))_mm256_sad_epu8((__m256i)(v), _mm256_setzero_si256()))
#define TOTAL(v) ((uint32_t)(SUMS_OF_8(v)[0] + SUMS_OF_8(v)[1] + SUMS_OF_8(v)[2] + SUMS_OF_8(v)[3]))
#include "passes.h"
END_TARGET

BEGIN_AVX512
#define PASS(name) name##_avx512
#define WIDTH 64
#define BYTES_WIDTH 64
#define AT_ONCE 16
#define LOOK_UP(table, v) ((PASS(U8))_mm512_shuffle_epi8((__m512i)(table), (__m512i)(v)))
#define ADD_SATURATED(a, b) ((PASS(U8))_mm512_adds_epu8((__m512i)(a), (__m512i)(b)))
#define FROM_HALVES(p) ((PASS(F32))_mm256_cvtph_ps(_mm_loadu_si128((const void *)(p))))
#define TOTAL(v) ((uint32_t)_mm512_reduce_add_epi64(_mm512_sad_epu8((__m512i)(v), _mm512_setzero_si512())))
#include "passes.h"
END_TARGET
#endif

static const struct {
    const char *name;
    const Passes *passes;
} variants[] = {
    {"baseline", &passes_baseline},
#if defined(__x86_64__)
    {"avx2", &passes_avx2},
    {"avx512", &passes_avx512},
#endif
};
#define VARIANTS ((int)(sizeof variants / sizeof *variants))

static int used; /* the index of the variant */

static int can_run(int index)
{
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (index == 1)
        return avx2;
    if (index == 2)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return index == 0;
}

const char *variant(int index)
{
    return index < VARIANTS && can_run(index) ? variants[index].name : NULL;
}

const char *used_variant(void)
{
    return variants[used].name;
}

int use_variant(const char *name)
{
    for (int i = 0; i < VARIANTS; i++) {
        if (strcmp(name, variants[i].name) == 0 && can_run(i)) {
            used = i;
            return 1;
        }
    }
    return 0;
}

void choose_variant(void)
{
    while (used + 1 < VARIANTS && can_run(used + 1))
        used++;
}

const Passes *used_passes(void)
{
    return variants[used].passes;
}
