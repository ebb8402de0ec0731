/* The passes over one chunk of values, or one block of pairs, in the first-level cache.
 *
 * variants.c includes this file once for each kind of processor: PASS(name) gives each copy its own
 * names, and vectors are WIDTH bytes of float64 or BYTES_WIDTH bytes of bytes. For any width there
 * are eight sums side by side, added up in the same order, so that all copies are bit-identical
 * (which needs -ffp-contract=off).
 */

typedef double PASS(F64) __attribute__((vector_size(WIDTH)));
typedef int64_t PASS(I64) __attribute__((vector_size(WIDTH)));
typedef float PASS(F32) __attribute__((vector_size(WIDTH / 2)));
typedef uint8_t PASS(U8) __attribute__((vector_size(BYTES_WIDTH)));
typedef uint64_t PASS(U64) __attribute__((vector_size(BYTES_WIDTH)));

#define F64 PASS(F64)
#define I64 PASS(I64)
#define LANES (WIDTH / 8)
#define VECTORS (8 / LANES)

/* Convert float16 to float32: by the processor, or in simple loops that the compiler vectorizes. */
static void PASS(halves)(const uint16_t *restrict in, size_t n, float *restrict out)
{
#ifdef FROM_HALVES
    for (; n >= LANES; n -= LANES, in += LANES, out += LANES) {
        PASS(F32) single = FROM_HALVES(in);
        memcpy(out, &single, sizeof single);
    }
#endif
    uint32_t *bits = (void *)out;
    for (size_t i = 0; i < n; i++) /* subnormals are multiples of this */
        out[i] = (float)(int32_t)(in[i] & 0x7FFF) * 0x1p-24f;
    for (size_t i = 0; i < n; i++) {
        uint32_t size = in[i] & 0x7FFF, sign = (uint32_t)(in[i] & 0x8000) << 16;
        uint32_t normal = (size << 13) + (size >= 0x7C00 ? 0x70000000u : 0x38000000u);
        bits[i] = sign | (size < 0x0400 ? bits[i] : normal);
    }
}

/* Convert bfloat16 to float32. */
static void PASS(upper_halves)(const uint16_t *restrict in, size_t n, float *restrict out)
{
    uint32_t *bits = (void *)out;
    for (size_t i = 0; i < n; i++)
        bits[i] = (uint32_t)in[i] << 16;
}

/* Find the largest and smallest values and magnitudes, as bits. As signed integers, the bits of
 * negative floats are in the reverse order: four extremes of the bits are enough for everything. */
#define RANGE(N)                                                                               \
    static void PASS(range##N)(const uint##N##_t *restrict bits, size_t n,                        \
                               Range##N *restrict range)                                          \
    {                                                                                             \
        int##N##_t least = INT##N##_MAX, most = INT##N##_MIN;                                     \
        uint##N##_t bottom = UINT##N##_MAX, top = 0;                                              \
        for (size_t i = 0; i < n; i++) {                                                          \
            uint##N##_t b = bits[i];                                                              \
            least = (int##N##_t)b < least ? (int##N##_t)b : least;                                \
            most = (int##N##_t)b > most ? (int##N##_t)b : most;                                   \
            bottom = b < bottom ? b : bottom;                                                     \
            top = b > top ? b : top;                                                              \
        }                                                                                         \
        *range = as_range##N(least, most, bottom, top);                                     \
    }

RANGE(16)
RANGE(32)
RANGE(64)

#define FOR_BITS(N)                                                                               \
    static uint##N##_t PASS(largest##N)(const void *restrict x, size_t n)                         \
    {                                                                                             \
        const uint##N##_t *bits = x;                                                              \
        int##N##_t large = 0;                                                                     \
        for (size_t i = 0; i < n; i++) {                                                          \
            int##N##_t size = (int##N##_t)(bits[i] & INT##N##_MAX);                               \
            large = size > large ? size : large;                                                  \
        }                                                                                         \
        return (uint##N##_t)large;                                                                \
    }                                                                                             \
                                                                                                  \
    static size_t PASS(zeros##N)(const uint##N##_t *restrict bits, size_t n)                      \
    {                                                                                             \
        uint##N##_t zeros = 0;                                                                    \
        for (size_t i = 0; i < n; i++)                                                            \
            zeros += (bits[i] << 1) == 0;                                                         \
        return zeros;                                                                             \
    }

FOR_BITS(32)
FOR_BITS(64)

/* Write the exponent of each element as a byte, biased as in float32; 0 if float32 has no such
 * normal number. Their order does not matter, because they are only counted. */
static void PASS(exponents32)(const uint32_t *restrict bits, size_t n, uint8_t *restrict out)
{
    size_t quarter = n / 32 * 8;
    uint32_t *restrict four = (void *)out;
    for (size_t i = 0; i < quarter; i++) {
        const uint32_t *x = bits + i;
        four[i] = ((x[0] >> 23) & 0xFF) | ((x[quarter] >> 15) & 0xFF00) |
                  ((x[2 * quarter] >> 7) & 0xFF0000) | ((x[3 * quarter] << 1) & 0xFF000000u);
    }
    for (size_t i = 4 * quarter; i < n; i++)
        out[i] = (uint8_t)((bits[i] << 1) >> 24);
}

static void PASS(exponents64)(const uint64_t *restrict bits, size_t n, uint8_t *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t high = (uint32_t)(bits[i] >> 32); /* 32 bits, for half as many vectors */
        uint32_t exponent = ((high << 1) >> 21) - (1023 - BIAS);
        out[i] = (uint8_t)(exponent - 1 < 254 ? exponent : 0);
    }
}

/* Count the hits of AT_ONCE exponents in vectors of bytes: at most 255 of them. */
#ifdef LOOK_UP
static inline void PASS(count_hits)(const uint8_t *restrict bytes, size_t n, uint8_t base, int first,
                                    PASS(U8) *restrict hits)
{
    PASS(U8) tables[AT_ONCE / 2];
    for (int k = 0; k < AT_ONCE / 2; k++)
        memcpy(&tables[k], two_bins[first / 2 + k], sizeof tables[k]);
    for (size_t start = 0; start < n; start += 15 * BYTES_WIDTH) { /* half a byte holds 15 */
        size_t end = n - start < 15 * BYTES_WIDTH ? n : start + 15 * BYTES_WIDTH;
        PASS(U8) x, both[AT_ONCE / 2];
        for (int k = 0; k < AT_ONCE / 2; k++)
            both[k] = (PASS(U8)){0};
        for (size_t i = start; i < end; i += BYTES_WIDTH) {
            memcpy(&x, bytes + i, sizeof x);
            x = ADD_SATURATED(x - base, (PASS(U8)){0} + 0x70); /* from 0x80 on: no bin */
            for (int k = 0; k < AT_ONCE / 2; k++)
                both[k] += LOOK_UP(tables[k], x);
        }
        for (int k = 0; k < AT_ONCE / 2; k++) {
            hits[2 * k] += both[k] & 15;
            hits[2 * k + 1] += both[k] >> 4;
        }
    }
}
#else
static inline void PASS(count_hits)(const uint8_t *restrict bytes, size_t n, uint8_t base, int first,
                                    PASS(U8) *restrict hits)
{
    PASS(U8) x, wanted[AT_ONCE];
    for (int k = 0; k < AT_ONCE; k++)
        wanted[k] = (PASS(U8)){0} + (uint8_t)(base + first + k);
    for (size_t i = 0; i < n; i += BYTES_WIDTH) {
        memcpy(&x, bytes + i, sizeof x);
        for (int k = 0; k < AT_ONCE; k++)
            hits[k] -= (PASS(U8))(x == wanted[k]);
    }
}
#endif

/* Count the bytes from `base` to `base + WINDOW - 1` and return their number. This uses whole
 * vectors, because increments in memory would wait for each other. `n` is a multiple of 64. */
static size_t PASS(window)(const uint8_t *restrict bytes, size_t n, uint8_t base,
                           uint64_t *restrict fields)
{
    size_t counted = 0;
    for (size_t start = 0; start < n; start += 128 * BYTES_WIDTH) {
        size_t size = n - start < 128 * BYTES_WIDTH ? n - start : 128 * BYTES_WIDTH;
        for (int first = 0; first < WINDOW; first += AT_ONCE) {
            PASS(U8) hits[AT_ONCE];
            for (int k = 0; k < AT_ONCE; k++)
                hits[k] = (PASS(U8)){0};
            PASS(count_hits)(bytes + start, size, base, first, hits);
            for (int k = 0; k < AT_ONCE; k++) {
                uint32_t sum = TOTAL(hits[k]);
                fields[(uint8_t)(base + first + k)] += sum;
                counted += sum;
            }
        }
    }
    return counted;
}

/* Count the bytes that are neither 0 nor from `base` to `base + width - 1`, and return their
 * number. */
static size_t PASS(outside)(const uint8_t *restrict bytes, size_t n, uint8_t base, uint8_t width,
                            uint64_t *restrict fields)
{
    size_t counted = 0;
    for (size_t i = 0; i < n; i += BYTES_WIDTH) {
        PASS(U8) x;
        memcpy(&x, bytes + i, sizeof x);
        PASS(U64) out = (PASS(U64))((x - base >= width) & (x != 0));
        uint64_t any = 0;
        for (int k = 0; k < BYTES_WIDTH / 8; k++)
            any |= out[k];
        if (any == 0)
            continue;
        for (size_t j = i; j < i + BYTES_WIDTH; j++) {
            if ((uint8_t)(bytes[j] - base) >= width && bytes[j] != 0) {
                fields[bytes[j]]++;
                counted++;
            }
        }
    }
    return counted;
}

/* Add up eight sums. */
static double PASS(fold)(const F64 *sums)
{
    double v[8];
    memcpy(v, sums, sizeof v);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#define FOR_VECTORS for (int k = 0; k < VECTORS; k++)
#define SIZE(v) ((F64)((I64)(v) & INT64_MAX))

/* GCC converts four float32 in two halves, one of them through memory. Processors add and convert
 * with one half of their units and multiply with the other: PLUS is an addition on that one. */
#if WIDTH == 64
#define WIDEN(v) ((F64)_mm512_cvtps_pd((__m256)(v)))
#define PLUS(a, b) ((F64)_mm512_fmadd_pd((__m512d)(a), _mm512_set1_pd(1.0), (__m512d)(b)))
#elif WIDTH == 32
#define WIDEN(v) ((F64)_mm256_cvtps_pd((__m128)(v)))
#define PLUS(a, b) ((F64)_mm256_fmadd_pd((__m256d)(a), _mm256_set1_pd(1.0), (__m256d)(b)))
#else
#define WIDEN(v) __builtin_convertvector(v, F64)
#define PLUS(a, b) ((a) + (b))
#endif

/* Load the k-th vector. */
#define LOAD32(v, from)                                                                           \
    do {                                                                                          \
        PASS(F32) single;                                                                         \
        memcpy(&single, (from) + k * LANES, sizeof single);                                       \
        (v) = WIDEN(single);                                                                      \
    } while (0)

#define LOAD64(v, from) memcpy(&(v), (from) + k * LANES, sizeof(F64))

/* Load the last, incomplete vectors and fill them up with `rest`. */
#define LOAD_END(y, from, n, rest)                                                                \
    do {                                                                                          \
        double end[8] = {rest, rest, rest, rest, rest, rest, rest, rest};                         \
        for (size_t j = 0; j < (n); j++)                                                          \
            end[j] = (double)(from)[j];                                                           \
        memcpy(y, end, sizeof end);                                                               \
    } while (0)

#define ADD_POWERS(y)                                                                             \
    FOR_VECTORS {                                                                                 \
        F64 y2 = (y)[k] * (y)[k], y4 = y2 * y2;                                                   \
        sum[k] = PLUS((y)[k], sum[k]);                                                            \
        sizes[k] = PLUS(SIZE((y)[k]), sizes[k]);                                                  \
        p2[k] += y2;                                                                              \
        p4[k] += y4;                                                                              \
        p8[k] += y4 * y4;                                                                         \
    }

#define SUMS(LOAD)                                                                                \
    F64 sum[VECTORS] = {{0}}, sizes[VECTORS] = {{0}}, p2[VECTORS] = {{0}}, p4[VECTORS] = {{0}},   \
        p8[VECTORS] = {{0}}, y[VECTORS];                                                          \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        /* fetch the next chunk while this one is computed */                                     \
        __builtin_prefetch(next + i * step);                                                      \
        FOR_VECTORS LOAD(y[k], x + i);                                                            \
        ADD_POWERS(y)                                                                             \
    }                                                                                             \
    if (i < n) {                                                                                  \
        LOAD_END(y, x + i, n - i, 0.0);                                                           \
        ADD_POWERS(y)                                                                             \
    }                                                                                             \
    *sums = (Sums){PASS(fold)(sum), PASS(fold)(sizes), PASS(fold)(p2), PASS(fold)(p4),            \
                   PASS(fold)(p8)}

/* `next` is the next chunk, whose elements have `step` bytes. */
static void PASS(sums32)(const float *restrict x, size_t n, const char *next, size_t step,
                         Sums *restrict sums)
{
    SUMS(LOAD32);
}

static void PASS(sums64)(const double *restrict x, size_t n, const char *next, size_t step,
                         Sums *restrict sums)
{
    SUMS(LOAD64);
}

/* Add up the deviations from `mean` (its rounding error) and their squares. */
#define ADD_DEVIATIONS(y)                                                                         \
    FOR_VECTORS {                                                                                 \
        F64 d = (y)[k] - mean;                                                                    \
        rest[k] += d;                                                                             \
        squares[k] += d * d;                                                                      \
    }

#define DEVIATIONS(LOAD)                                                                          \
    F64 rest[VECTORS] = {{0}}, squares[VECTORS] = {{0}}, y[VECTORS];                              \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        FOR_VECTORS LOAD(y[k], x + i);                                                            \
        ADD_DEVIATIONS(y)                                                                         \
    }                                                                                             \
    if (i < n) {                                                                                  \
        LOAD_END(y, x + i, n - i, mean);                                                          \
        ADD_DEVIATIONS(y)                                                                         \
    }                                                                                             \
    sums[0] = PASS(fold)(rest);                                                                   \
    sums[1] = PASS(fold)(squares)

static void PASS(deviations32)(const float *restrict x, size_t n, double mean, double sums[2])
{
    DEVIATIONS(LOAD32);
}

static void PASS(deviations64)(const double *restrict x, size_t n, double mean, double sums[2])
{
    DEVIATIONS(LOAD64);
}

#include "pair_passes.h"

/* Add the products of pieces with their keys to the sums of a block: see digest.c. */
static void PASS(digest)(const void *restrict data, size_t n, const int16_t *restrict keys,
                         uint32_t sums[4])
{
    typedef int16_t Piece __attribute__((aligned(1), may_alias));
    const Piece *in = data;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = 0; i < n; i++) {
        a += (uint32_t)(in[i] * keys[i]);
        b += (uint32_t)(in[i] * keys[i + KEY_STEP]);
        c += (uint32_t)(in[i] * keys[i + 2 * KEY_STEP]);
        d += (uint32_t)(in[i] * keys[i + 3 * KEY_STEP]);
    }
    sums[0] += a;
    sums[1] += b;
    sums[2] += c;
    sums[3] += d;
}

typedef uint32_t PASS(Bits) __attribute__((aligned(1), may_alias));

/* Round floats to bfloat16, ties to even, as frameworks do. */
static void PASS(narrow_to_brains)(const void *restrict data, size_t n, uint16_t *restrict out)
{
    const PASS(Bits) *in = data;
    for (size_t i = 0; i < n; i++) {
        uint32_t x = in[i], rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16;
        out[i] = (uint16_t)((x & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

/* Round floats to float16, ties to even. */
static void PASS(narrow_to_halves)(const void *restrict data, size_t n, uint16_t *restrict out)
{
    const PASS(Bits) *in = data;
    const int32_t bias = (127 - 15) << 23;
#ifdef TO_8_HALVES
    for (; n >= 8; n -= 8, in += 8, out += 8)
        TO_8_HALVES(in, out);
#endif
    for (size_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(in[i] & 0x7FFFFFFF), subnormal;
        int32_t normal = (size - bias + 0xFFF + ((size >> 13) & 1)) >> 13;
        float number;
        memcpy(&number, &size, 4);
        number += 0.5f; /* whose last place is that of subnormal halves */
        memcpy(&subnormal, &number, 4);
        int32_t rounded = size < 0x38800000 ? subnormal - 0x3F000000 : normal;
        int32_t large = size > 0x7F800000 ? 0x7E00 | (size >> 13 & 0x3FF) : 0x7C00; /* NaN; 2**16 */
        int32_t found = size < 0x47800000 ? rounded : large;
        out[i] = (uint16_t)((uint32_t)found | (in[i] >> 16 & 0x8000));
    }
}

#include "channel_passes.h"

static const Passes PASS(passes) = {
    PASS(halves), PASS(upper_halves), PASS(range16), PASS(range32), PASS(range64), PASS(zeros32),
    PASS(zeros64), PASS(exponents32), PASS(exponents64), PASS(window),
    PASS(outside), PASS(sums32), PASS(sums64), PASS(deviations32), PASS(deviations64),
    PASS(widen), PASS(brains), PASS(steps32), PASS(largest32), PASS(largest64),
    PASS(pairs32), PASS(pairs64), PASS(squares32), PASS(squares64), PASS(moves32), PASS(moves64),
    PASS(places), PASS(apart), PASS(digest),
    PASS(narrow_to_brains), PASS(narrow_to_halves), PASS(channels32), PASS(channels64),
};

#undef RANGE
#undef FOR_BITS
#undef F64
#undef I64
#undef LANES
#undef VECTORS
#undef FOR_VECTORS
#undef WIDEN
#undef PLUS
#undef LOAD32
#undef LOAD64
#undef LOAD_END
#undef ADD_POWERS
#undef SUMS
#undef ADD_DEVIATIONS
#undef DEVIATIONS
#undef SIZE
#undef PASS
#undef WIDTH
#undef BYTES_WIDTH
#undef AT_ONCE
#undef LOOK_UP
#undef FROM_HALVES
#undef ADD_SATURATED
#undef TOTAL
