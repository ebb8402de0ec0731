/* The passes over one chunk of values in the first-level cache.
 *
 * variants.c includes this file once for each kind of processor: PASS(name) gives each copy its own
 * names, and vectors are WIDTH bytes of float64 or BYTES_WIDTH bytes of bytes. There are no
 * intrinsics. For any width there are eight sums side by side, added up in the same order, so that
 * all copies are bit-identical (which needs -ffp-contract=off).
 */

typedef double PASS(F64) __attribute__((vector_size(WIDTH)));
typedef int64_t PASS(I64) __attribute__((vector_size(WIDTH)));
typedef float PASS(F32) __attribute__((vector_size(WIDTH / 2)));
typedef uint8_t PASS(U8) __attribute__((vector_size(BYTES_WIDTH)));
typedef uint64_t PASS(U64) __attribute__((vector_size(BYTES_WIDTH)));

#define F64 PASS(F64)
#define LANES (WIDTH / 8)
#define VECTORS (8 / LANES)

/* Convert float16 to float32, in simple loops that the compiler vectorizes. */
static void PASS(halves)(const uint16_t *restrict in, size_t n, float *restrict out)
{
    uint32_t *bits = (void *)out;
    for (size_t i = 0; i < n; i++) /* subnormals are multiples of this */
        out[i] = (float)(int32_t)(in[i] & 0x7FFF) * 0x1p-24f;
    for (size_t i = 0; i < n; i++) {
        uint32_t size = in[i] & 0x7FFF, sign = (uint32_t)(in[i] & 0x8000) << 16;
        uint32_t normal = (size << 13) + (size >= 0x7C00 ? 0x70000000u : 0x38000000u);
        bits[i] = sign | (size < 0x0400 ? bits[i] : normal);
    }
}

/* Find the largest and smallest values and magnitudes, as bits. */
static void PASS(range32)(const uint32_t *restrict bits, size_t n, Range32 *restrict range)
{
    int32_t low = INT32_MAX, high = INT32_MIN, small = INT32_MAX, large = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t b = (int32_t)bits[i], size = b & INT32_MAX;
        int32_t order = b ^ ((b >> 31) & INT32_MAX); /* integers in the order of the floats */
        low = order < low ? order : low;
        high = order > high ? order : high;
        small = size < small ? size : small;
        large = size > large ? size : large;
    }
    *range = (Range32){low, high, (uint32_t)small, (uint32_t)large};
}

static void PASS(range64)(const uint64_t *restrict bits, size_t n, Range64 *restrict range)
{
    int64_t low = INT64_MAX, high = INT64_MIN, small = INT64_MAX, large = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t b = (int64_t)bits[i], size = b & INT64_MAX;
        int64_t order = b ^ ((b >> 63) & INT64_MAX);
        low = order < low ? order : low;
        high = order > high ? order : high;
        small = size < small ? size : small;
        large = size > large ? size : large;
    }
    *range = (Range64){low, high, (uint64_t)small, (uint64_t)large};
}

static size_t PASS(zeros32)(const uint32_t *restrict bits, size_t n)
{
    uint32_t zeros = 0;
    for (size_t i = 0; i < n; i++)
        zeros += (bits[i] << 1) == 0;
    return zeros;
}

static size_t PASS(zeros64)(const uint64_t *restrict bits, size_t n)
{
    uint64_t zeros = 0;
    for (size_t i = 0; i < n; i++)
        zeros += (bits[i] << 1) == 0;
    return zeros;
}

/* Write the exponent of each element as a byte, biased as in float32; 0 if float32 has no such
 * normal number. */
static void PASS(exponents32)(const uint32_t *restrict bits, size_t n, uint8_t *restrict out)
{
    for (size_t i = 0; i < n; i++)
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

/* Count the bytes from `base` to `base + WINDOW - 1` and return their number. This compares whole
 * vectors, because increments in memory would wait for each other. `n` is a multiple of 64. */
static size_t PASS(window)(const uint8_t *restrict bytes, size_t n, uint8_t base,
                           uint64_t *restrict fields)
{
    size_t counted = 0;
    for (size_t start = 0; start < n; start += 128 * BYTES_WIDTH) { /* a hit count holds at most 255 */
        size_t end = n - start < 128 * BYTES_WIDTH ? n : start + 128 * BYTES_WIDTH;
        for (int first = 0; first < WINDOW; first += 8) {
            PASS(U8) wanted[8], hits[8];
            for (int k = 0; k < 8; k++) {
                wanted[k] = (PASS(U8)){0} + (uint8_t)(base + first + k);
                hits[k] = (PASS(U8)){0};
            }
            for (size_t i = start; i < end; i += BYTES_WIDTH) {
                PASS(U8) x;
                memcpy(&x, bytes + i, sizeof x);
                for (int k = 0; k < 8; k++)
                    hits[k] -= (PASS(U8))(x == wanted[k]);
            }
            for (int k = 0; k < 8; k++) {
                uint8_t each[BYTES_WIDTH];
                uint32_t sum = 0;
                memcpy(each, &hits[k], sizeof each);
                for (int j = 0; j < BYTES_WIDTH; j++)
                    sum += each[j];
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

#define LOAD32(y, from)                                                                           \
    FOR_VECTORS                                                                                   \
    {                                                                                             \
        PASS(F32) v;                                                                              \
        memcpy(&v, (from) + k * LANES, sizeof v);                                                 \
        (y)[k] = __builtin_convertvector(v, F64);                                                 \
    }

#define LOAD64(y, from) FOR_VECTORS memcpy(&(y)[k], (from) + k * LANES, sizeof(F64))

/* Load the last, incomplete vectors and fill them up with `rest`. */
#define LOAD_END(y, from, n, rest)                                                                \
    do {                                                                                          \
        double end[8] = {rest, rest, rest, rest, rest, rest, rest, rest};                         \
        for (size_t j = 0; j < (n); j++)                                                          \
            end[j] = (double)(from)[j];                                                           \
        memcpy(y, end, sizeof end);                                                               \
    } while (0)

#define ADD_POWERS(y)                                                                             \
    FOR_VECTORS                                                                                   \
    {                                                                                             \
        F64 size = (F64)((PASS(I64))(y)[k] & INT64_MAX);                                          \
        F64 y2 = (y)[k] * (y)[k], y4 = y2 * y2;                                                   \
        sum[k] += (y)[k];                                                                         \
        sizes[k] += size;                                                                         \
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
        __builtin_prefetch((const char *)(x + i) + CHUNK * sizeof *x);                            \
        LOAD(y, x + i);                                                                           \
        ADD_POWERS(y)                                                                             \
    }                                                                                             \
    if (i < n) {                                                                                  \
        LOAD_END(y, x + i, n - i, 0.0);                                                           \
        ADD_POWERS(y)                                                                             \
    }                                                                                             \
    *sums = (Sums){PASS(fold)(sum), PASS(fold)(sizes), PASS(fold)(p2), PASS(fold)(p4),            \
                   PASS(fold)(p8)}

static void PASS(sums32)(const float *restrict x, size_t n, Sums *restrict sums)
{
    SUMS(LOAD32);
}

static void PASS(sums64)(const double *restrict x, size_t n, Sums *restrict sums)
{
    SUMS(LOAD64);
}

/* Add up the deviations from `mean` (its rounding error) and their squares. */
#define ADD_DEVIATIONS(y)                                                                         \
    FOR_VECTORS                                                                                   \
    {                                                                                             \
        F64 d = (y)[k] - mean;                                                                    \
        rest[k] += d;                                                                             \
        squares[k] += d * d;                                                                      \
    }

#define DEVIATIONS(LOAD)                                                                          \
    F64 rest[VECTORS] = {{0}}, squares[VECTORS] = {{0}}, y[VECTORS];                              \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        LOAD(y, x + i);                                                                           \
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

static const Passes PASS(passes) = {
    PASS(halves), PASS(range32), PASS(range64), PASS(zeros32), PASS(zeros64),
    PASS(exponents32), PASS(exponents64), PASS(window), PASS(outside), PASS(sums32),
    PASS(sums64), PASS(deviations32), PASS(deviations64),
};

#undef F64
#undef LANES
#undef VECTORS
#undef FOR_VECTORS
#undef LOAD32
#undef LOAD64
#undef LOAD_END
#undef ADD_POWERS
#undef SUMS
#undef ADD_DEVIATIONS
#undef DEVIATIONS
#undef PASS
#undef WIDTH
#undef BYTES_WIDTH
