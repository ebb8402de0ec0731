/* passes.h, compiled for each kind of processor. */
#include "variants.h"

#include <math.h>
#include <string.h>

/* code between BEGIN_AVX2 or BEGIN_AVX512 and END_TARGET is compiled for such processors */
#if defined(__clang__)
#define BEGIN_AVX2                                                                                \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,bmi,bmi2,popcnt\"))), apply_to = function)")
#define BEGIN_AVX512                                                                              \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\"))), apply_to = function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX2                                                                                \
    _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,bmi,bmi2,popcnt\")")
#define BEGIN_AVX512                                                                              \
    _Pragma("GCC push_options")                                                                   \
    _Pragma("GCC target(\"avx2,fma,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

#define PASS(name) name##_baseline
#define WIDTH 16
#define BYTES_WIDTH 16
#include "passes.h"

#if defined(__x86_64__)
BEGIN_AVX2
#define PASS(name) name##_avx2
#define WIDTH 32
#define BYTES_WIDTH 32
#include "passes.h"
END_TARGET

BEGIN_AVX512
#define PASS(name) name##_avx512
#define WIDTH 64
#define BYTES_WIDTH 32
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
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("popcnt");
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
