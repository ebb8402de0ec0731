/* The passes over pairs of values, to compare them or to measure how they move; a part of passes.h. */

static void PASS(widen)(const float *restrict x, size_t n, double *restrict out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (double)x[i];
}

static void PASS(brains)(const uint16_t *restrict x, size_t n, double *restrict out)
{
    float high[BLOCK];
    PASS(upper_halves)(x, n, high);
    PASS(widen)(high, n, out);
}

/* Return the largest distance in float32 units; `largest` is the largest magnitude, as bits. */
static uint32_t PASS(steps32)(const uint32_t *restrict a, const uint32_t *restrict b, size_t n,
                              uint32_t *restrict largest)
{
    uint32_t most = 0, large = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t x = a[i] & INT32_MAX, y = b[i] & INT32_MAX;
        int32_t p = (int32_t)a[i] < 0 ? -(int32_t)x : (int32_t)x; /* both zeros have one position */
        int32_t q = (int32_t)b[i] < 0 ? -(int32_t)y : (int32_t)y;
        uint32_t apart = p > q ? (uint32_t)p - (uint32_t)q : (uint32_t)q - (uint32_t)p;
        most = apart > most ? apart : most;
        large = x > large ? x : large;
        large = y > large ? y : large;
    }
    *largest = large;
    return most;
}

static int64_t PASS(fold_counts)(const I64 *counts)
{
    int64_t v[8], sum = 0;
    memcpy(v, counts, sizeof v);
    for (int i = 0; i < 8; i++)
        sum += v[i];
    return sum;
}

/* Only detect new maxima here: they are rare, and found one by one afterwards. */
#define ADD_PAIRS(LOAD, a, b)                                                                     \
    FOR_VECTORS {                                                                                 \
        F64 x, y;                                                                                 \
        LOAD(x, a);                                                                               \
        LOAD(y, b);                                                                               \
        F64 d = SIZE(x - y), size = SIZE(y), allowed = size * rtol;                               \
        I64 differ = (I64)(d > 0.0);                                                              \
        F64 ratio = (F64)((I64)(d / size) & differ);                                              \
        mismatches[k] -= (I64)(d > allowed + atol);                                               \
        beyond[k] |= (I64)(d > max_abs) | (I64)(ratio > max_rel) |                                \
                     (I64)(d - atol > size * factor) | ((I64)(d - allowed > excess) & differ);    \
        abs[k] += d;                                                                              \
        squares[k] += d * d;                                                                      \
        rel[k] += ratio;                                                                          \
        aa[k] += x * x;                                                                           \
        bb[k] += y * y;                                                                           \
        ab[k] += x * y;                                                                           \
    }

#define PAIRS(type, LOAD)                                                                         \
    double atol = l->atol, rtol = l->rtol, max_abs = l->max_abs, max_rel = l->max_rel;            \
    double excess = l->excess;                                                                    \
    double factor = l->factor * (1 - 0x1p-50); /* division and product round differently */       \
    F64 abs[VECTORS] = {{0}}, squares[VECTORS] = {{0}}, rel[VECTORS] = {{0}};                     \
    F64 aa[VECTORS] = {{0}}, bb[VECTORS] = {{0}}, ab[VECTORS] = {{0}};                            \
    I64 mismatches[VECTORS] = {{0}}, beyond[VECTORS] = {{0}};                                     \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        /* prefetch the next block */                                                             \
        __builtin_prefetch(next_a + i * sizeof(type));                                            \
        __builtin_prefetch(next_b + i * sizeof(type));                                            \
        ADD_PAIRS(LOAD, a + i, b + i)                                                             \
    }                                                                                             \
    if (i < n) { /* pad with zeros */                                                             \
        type end_a[8] = {0}, end_b[8] = {0};                                                      \
        memcpy(end_a, a + i, (n - i) * sizeof *a);                                                \
        memcpy(end_b, b + i, (n - i) * sizeof *b);                                                \
        ADD_PAIRS(LOAD, end_a, end_b)                                                             \
    }                                                                                             \
    *found = (PairSums){PASS(fold)(abs), PASS(fold)(squares), PASS(fold)(rel),                    \
                        PASS(fold)(aa),  PASS(fold)(bb),      PASS(fold)(ab)};                    \
    return (Verdict){PASS(fold_counts)(mismatches), PASS(fold_counts)(beyond)}

static Verdict PASS(pairs32)(const float *restrict a, const float *restrict b, size_t n,
                             const Limits *restrict l, const char *next_a, const char *next_b,
                             PairSums *restrict found)
{
    PAIRS(float, LOAD32);
}

static Verdict PASS(pairs64)(const double *restrict a, const double *restrict b, size_t n,
                             const Limits *restrict l, const char *next_a, const char *next_b,
                             PairSums *restrict found)
{
    PAIRS(double, LOAD64);
}

/* Return the sum of squares, in the same order. */
#define SQUARES(type, LOAD)                                                                       \
    F64 aa[VECTORS] = {{0}}, x;                                                                   \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        __builtin_prefetch(next + i * sizeof(type));                                              \
        FOR_VECTORS {                                                                             \
            LOAD(x, a + i);                                                                       \
            aa[k] += x * x;                                                                       \
        }                                                                                         \
    }                                                                                             \
    if (i < n) {                                                                                  \
        type end[8] = {0};                                                                        \
        memcpy(end, a + i, (n - i) * sizeof *a);                                                  \
        FOR_VECTORS {                                                                             \
            LOAD(x, end);                                                                         \
            aa[k] += x * x;                                                                       \
        }                                                                                         \
    }                                                                                             \
    return PASS(fold)(aa)

static double PASS(squares32)(const float *restrict a, size_t n, const char *next)
{
    SQUARES(float, LOAD32);
}

static double PASS(squares64)(const double *restrict a, size_t n, const char *next)
{
    SQUARES(double, LOAD64);
}

/* Compute sums of squares and products of x, d = x - a and p = y - b. */
#define ADD_MOVES(LOAD, x, a, y, b)                                                               \
    FOR_VECTORS {                                                                                 \
        F64 v, w, d, p;                                                                           \
        LOAD(v, x);                                                                               \
        LOAD(w, a);                                                                               \
        d = v - w;                                                                                \
        xx[k] += v * v;                                                                           \
        LOAD(p, y);                                                                               \
        LOAD(w, b);                                                                               \
        p -= w;                                                                                   \
        dd[k] += d * d;                                                                           \
        pp[k] += p * p;                                                                           \
        dp[k] += d * p;                                                                           \
    }

#define MOVES(type, LOAD)                                                                         \
    F64 xx[VECTORS] = {{0}}, dd[VECTORS] = {{0}}, pp[VECTORS] = {{0}}, dp[VECTORS] = {{0}};       \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8)                                                                    \
        ADD_MOVES(LOAD, x + i, a + i, y + i, b + i)                                               \
    if (i < n) {                                                                                  \
        type ends[4][8] = {{0}};                                                                  \
        memcpy(ends[0], x + i, (n - i) * sizeof *x);                                              \
        memcpy(ends[1], a + i, (n - i) * sizeof *x);                                              \
        memcpy(ends[2], y + i, (n - i) * sizeof *x);                                              \
        memcpy(ends[3], b + i, (n - i) * sizeof *x);                                              \
        ADD_MOVES(LOAD, ends[0], ends[1], ends[2], ends[3])                                       \
    }                                                                                             \
    *found = (MoveSums){PASS(fold)(xx), PASS(fold)(dd), PASS(fold)(pp), PASS(fold)(dp)}

static void PASS(moves32)(const float *restrict x, const float *restrict a, const float *restrict y,
                          const float *restrict b, size_t n, MoveSums *restrict found)
{
    MOVES(float, LOAD32);
}

static void PASS(moves64)(const double *restrict x, const double *restrict a,
                          const double *restrict y, const double *restrict b, size_t n,
                          MoveSums *restrict found)
{
    MOVES(double, LOAD64);
}

/* Compute the ordinals of numbers within a format, rounded to the nearest: neighbors are one
 * apart, both zeros are 0. */
static void PASS(places)(const double *restrict x, size_t n, const Ruler *restrict ruler,
                         int64_t *restrict out)
{
    const int64_t *bits = (const void *)x;
    int shift = 53 - ruler->digits;
    int64_t base = ruler->base, end = ruler->end, half = shift ? ((int64_t)1 << (shift - 1)) - 1 : 0;
    int64_t odd = shift ? 1 : 0;
    double least = ruler->least, scale = ruler->scale;
    for (size_t i = 0; i < n; i++) {
        int64_t size = bits[i] & INT64_MAX;
        int64_t normal = ((size + half + ((size >> shift) & odd)) >> shift) - base;
        double whole = fabs(x[i]) * scale + 0x1p52; /* rounds to an integer */
        int64_t small;
        memcpy(&small, &whole, sizeof small);
        small -= (int64_t)1075 << 52;
        int64_t place = fabs(x[i]) < least ? small : normal;
        place = place < end ? place : end;
        out[i] = bits[i] < 0 ? -place : place;
    }
}

static uint64_t PASS(apart)(const int64_t *restrict a, const int64_t *restrict b, size_t n)
{
    uint64_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t x = (uint64_t)a[i], y = (uint64_t)b[i];
        uint64_t apart = a[i] > b[i] ? x - y : y - x;
        most = apart > most ? apart : most;
    }
    return most;
}

#undef ADD_PAIRS
#undef PAIRS
#undef SQUARES
#undef ADD_MOVES
#undef MOVES
