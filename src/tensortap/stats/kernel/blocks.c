/* What blocks of float32 lose in a format with one scale per block: MX formats and NVFP4. */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

#define ENOUGH (1 << 17) /* values for a thread of their own */

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Take the sums of a block with infinities over its finite values only. */
static void skip_infinities(const float *in, const float *made, size_t n, RoundedSums *sums)
{
    sums->signal = sums->noise = 0.0;
    for (size_t i = 0; i < n; i++) {
        double x = in[i], error = (double)made[i] - x;
        sums->saturated -= isinf(in[i]) != 0;
        sums->signal += isinf(in[i]) ? 0.0 : x * x;
        sums->noise += isinf(in[i]) ? 0.0 : error * error;
    }
}

/* Return the scale of a block with this largest magnitude, and what its values are multiplied by. */
static float scale_of(uint32_t largest, const BlockRules *rules, float *inverse)
{
    if (rules->scale.digits == 0) { /* a power of two, not below the smallest normal float32 */
        int exponent = (int)(largest >> 23) - rules->top;
        exponent = exponent < 1 ? 1 : exponent;
        *inverse = ldexpf(1.0f, BIAS - exponent);
        return as_float((uint32_t)exponent << 23);
    }
    float scale = as_float(largest) / rules->element.largest / rules->whole;
    scale = round_to(scale < rules->least ? rules->least : scale, &rules->scale);
    *inverse = 1.0f / rules->whole / scale;
    return scale * rules->whole;
}

/* Rows of values, and where their results go. */
typedef struct {
    const float *in;
    size_t rows, length;
    const BlockRules *rules;
    float *values;
    BlockColumns out;
} Part;

typedef struct {
    const Part *parts;
    int n, next; /* the next part to take */
} BlockJob;

static void quantize_part(const Part *part)
{
    const BlockRules *rules = part->rules;
    const Passes *passes = used_passes();
    FloatMode before;
    size_t block = 0;
    use_ieee_mode(&before);
    for (size_t row = 0; row < part->rows; row++) {
        for (size_t at = 0; at < part->length; at += rules->block, block++) {
            size_t n = part->length - at < rules->block ? part->length - at : rules->block;
            const float *in = part->in + row * part->length + at;
            float *to = part->values + row * part->length + at;
            uint32_t largest = passes->largest32(in, n);
            RoundedSums sums = {0};
            if (largest > INF32) { /* one NaN makes the scale NaN, and so the whole block */
                part->out.scale[block] = NAN;
                for (size_t i = 0; i < n; i++)
                    to[i] = NAN;
            } else {
                float inverse, scale = scale_of(largest, rules, &inverse);
                part->out.scale[block] = scale;
                passes->round_block(in, n, inverse, scale, &rules->element, to, &sums);
                if (largest == INF32)
                    skip_infinities(in, to, n, &sums);
            }
            part->out.underflow[block] = sums.underflow;
            part->out.saturated[block] = sums.saturated;
            part->out.signal[block] = sums.signal;
            part->out.noise[block] = sums.noise;
        }
    }
    restore_mode(&before);
}

static void *take_parts(void *given)
{
    BlockJob *job = given;
    for (int i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->n;)
        quantize_part(&job->parts[i]);
    return NULL;
}

void quantize_blocks(const float *in, size_t rows, size_t length, const BlockRules *rules,
                     float *values, BlockColumns out)
{
    Part parts[MAX_THREADS];
    void *arguments[MAX_THREADS];
    size_t useful = rows * length / ENOUGH, blocks = (length + rules->block - 1) / rules->block;
    int threads = thread_count(useful < rows ? useful : rows, 0);
    BlockJob job = {parts, threads, 0};
    for (int i = 0; i < threads; i++) {
        size_t first = rows * (size_t)i / (size_t)threads;
        size_t last = rows * (size_t)(i + 1) / (size_t)threads, at = first * blocks;
        BlockColumns columns = {out.scale + at, out.underflow + at, out.saturated + at,
                                out.signal + at, out.noise + at};
        parts[i] = (Part){in + first * length,     last - first, length, rules,
                          values + first * length, columns};
        arguments[i] = &job;
    }
    run_threads(take_parts, arguments, threads);
}
