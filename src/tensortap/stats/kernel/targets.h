/* Code between BEGIN_AVX2 or BEGIN_AVX512 and END_TARGET is compiled for such processors. */
#ifndef TENSORTAP_TARGETS_H
#define TENSORTAP_TARGETS_H

#if defined(__clang__)
#define BEGIN_AVX2                                                                                \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt\"))), apply_to = function)")
#define BEGIN_AVX512                                                                              \
    _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\"))), apply_to = function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX2                                                                                \
    _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt\")")
#define BEGIN_AVX512                                                                              \
    _Pragma("GCC push_options")                                                                   \
    _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

#endif
