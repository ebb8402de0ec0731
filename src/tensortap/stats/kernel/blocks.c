/* What blocks of float32 lose in a format with one scale per block: MX formats and NVFP4. */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "processor.h"
#include "worker.h"

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return a magnitude rounded to the format, ties to even. */
static float rounded(float size, const BlockFormat *f)
{
    RoundedSums unused;
    used_passes()->round_block(&size, 1, 1.0f, 1.0f, f, &size, &unused);
    return size;
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
    scale = rounded(scale < rules->least ? rules->least : scale, &rules->scale);
    *inverse = 1.0f / rules->whole / scale;
    return scale * rules->whole;
}

void quantize_blocks(const float *in, size_t rows, size_t length, const BlockRules *rules,
                     float *values, BlockColumns out)
{
    const Passes *passes = used_passes();
    float scratch[CHUNK];
    FloatMode before;
    size_t block = 0;
    use_ieee_mode(&before);
    for (size_t row = 0; row < rows; row++, in += length) {
        for (size_t at = 0; at < length; at += rules->block, block++) {
            size_t n = length - at < rules->block ? length - at : rules->block;
            float *to = values == NULL ? scratch : values + row * length + at;
            uint32_t largest = passes->largest32(in + at, n);
            RoundedSums sums = {0};
            if (largest > INF32) { /* one NaN makes the scale NaN, and so the whole block */
                out.scale[block] = NAN;
                for (size_t i = 0; i < n; i++)
                    to[i] = NAN;
            } else {
                float inverse;
                out.scale[block] = scale_of(largest, rules, &inverse);
                passes->round_block(in + at, n, inverse, out.scale[block], &rules->element, to,
                                    &sums);
            }
            out.underflow[block] = sums.underflow;
            out.saturated[block] = sums.saturated;
            out.signal[block] = sums.signal;
            out.noise[block] = sums.noise;
        }
    }
    restore_mode(&before);
}
