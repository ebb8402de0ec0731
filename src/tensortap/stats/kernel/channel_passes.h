/* The passes over a few rows of a matrix whose columns are channels; a part of passes.h. */

/* Add up the first four powers of the deviations from `shift`, and the squares of each channel. */
#define ADD_CHANNELS(y)                                                                           \
    FOR_VECTORS {                                                                                 \
        F64 d = (y)[k] - shift, d2 = d * d;                                                       \
        p1[k] += d;                                                                               \
        p2[k] += d2;                                                                              \
        p3[k] += d2 * d;                                                                          \
        p4[k] += d2 * d2;                                                                         \
        total[k] += (y)[k] * (y)[k];                                                              \
    }

/* `stride` is in bytes. */
#define CHANNELS(type, LOAD)                                                                      \
    const char *const first = (const void *)x;                                                    \
    F64 p1[VECTORS] = {{0}}, p2[VECTORS] = {{0}}, p3[VECTORS] = {{0}}, p4[VECTORS] = {{0}},       \
        y[VECTORS], total[VECTORS];                                                               \
    size_t i = 0;                                                                                 \
    for (; i + 8 <= n; i += 8) {                                                                  \
        memcpy(total, squares + i, sizeof total);                                                 \
        for (size_t row = 0; row < rows; row++) {                                                 \
            const type *from = (const void *)(first + (ptrdiff_t)row * stride);                   \
            FOR_VECTORS LOAD(y[k], from + i);                                                     \
            ADD_CHANNELS(y)                                                                       \
        }                                                                                         \
        memcpy(squares + i, total, sizeof total);                                                 \
    }                                                                                             \
    for (size_t row = 0; i < n && row < rows; row++) {                                            \
        const type *from = (const void *)(first + (ptrdiff_t)row * stride);                       \
        double ends[8];                                                                           \
        memset(total, 0, sizeof total);                                                           \
        LOAD_END(y, from + i, n - i, shift);                                                      \
        ADD_CHANNELS(y)                                                                           \
        memcpy(ends, total, sizeof ends);                                                         \
        for (size_t j = 0; j < n - i; j++)                                                        \
            squares[i + j] += ends[j];                                                            \
    }                                                                                             \
    sums[0] = PASS(fold)(p1);                                                                     \
    sums[1] = PASS(fold)(p2);                                                                     \
    sums[2] = PASS(fold)(p3);                                                                     \
    sums[3] = PASS(fold)(p4)

static void PASS(channels32)(const float *restrict x, ptrdiff_t stride, size_t rows, size_t n,
                             double shift, double *restrict squares, double sums[4])
{
    CHANNELS(float, LOAD32);
}

static void PASS(channels64)(const double *restrict x, ptrdiff_t stride, size_t rows, size_t n,
                             double shift, double *restrict squares, double sums[4])
{
    CHANNELS(double, LOAD64);
}

#undef ADD_CHANNELS
#undef CHANNELS
