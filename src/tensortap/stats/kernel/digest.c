/* A digest that does not depend on how a tensor is split: four sums over its bytes, modulo 2**32.
 *
 * The bytes of the whole tensor in C order form blocks of PIECES signed numbers of 16 bits, in which
 * the bytes of other shards are zero. Each block has four sums of piece times key, where the k-th
 * sum takes the key of the piece 32 * k places further on. A matrix of 4 * 4 keys, which belongs to
 * the block, multiplies these sums, and the products of all blocks are added up. All of it is
 * linear, so the digests of shards add up to that of the whole.
 *
 * With random keys, two tensors that differ have the same digest with a probability of at most
 * 2**-63. Take a block that differs, and the largest 2**v that divides all differences of its
 * pieces; v < 16. Look at the last piece whose difference is an odd multiple of 2**v: modulo 2,
 * its four keys determine the four sums as a triangular matrix does. So for n <= 16, 2**(v + n)
 * divides the differences of all four sums with a probability of 2**-4n. If 2**t is the largest
 * power that divides them, the matrix of the block maps them to 2**(128 - 4t) values with equal
 * probability. For each n < 16 this gives 2**-4n * 2**-(128 - 4(v + n)) <= 2**-68, in sum
 * 2**-64, and for n = 16 another 2**-64. The keys are no secret: it is no defense against somebody
 * who constructs a collision.
 */
#include <string.h>

#include "worker.h"

#define BLOCK_BYTES (2 * PIECES)

typedef struct {
    uint64_t seed, block;
    uint32_t inner[4]; /* the sums of the block so far */
    uint32_t *sums;
    const uint64_t (*matrices)[8]; /* of the first blocks, if they are known */
    uint64_t known;                /* how many */
} State;

static int16_t keys[PIECES + 3 * KEY_STEP];

/* The finalizer of splitmix64 */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t key_of(uint64_t seed, uint64_t number)
{
    return mix(mix(seed) + (number + 1) * 0x9E3779B97F4A7C15u);
}

static void make_keys(void)
{
    static int made;
    if (__atomic_load_n(&made, __ATOMIC_ACQUIRE))
        return;
    for (int i = 0; i < PIECES + 3 * KEY_STEP; i++)
        keys[i] = (int16_t)(key_of(0, (uint64_t)i / 4) >> 16 * (i % 4));
    __atomic_store_n(&made, 1, __ATOMIC_RELEASE);
}

/* Multiply the sums of the block with its matrix, add the products, and begin another block. */
static void begin_block(State *state, uint64_t block)
{
    uint32_t *inner = state->inner;
    for (unsigned i = 0; i < 8; i++) { /* halves of rows */
        uint64_t key = state->block < state->known ? state->matrices[state->block][i]
                                                   : key_of(state->seed, 8 * state->block + i);
        unsigned column = 2 * (i % 2);
        state->sums[i / 2] += (uint32_t)key * inner[column] + (uint32_t)(key >> 32) * inner[column + 1];
    }
    memset(inner, 0, sizeof state->inner);
    state->block = block;
}

/* Add n bytes, which begin with the byte `at` of the whole. */
static void add_bytes(State *state, const char *data, size_t n, uint64_t at)
{
    while (n > 0) {
        size_t before = at % BLOCK_BYTES, taken = BLOCK_BYTES - before < n ? BLOCK_BYTES - before : n;
        if (at / BLOCK_BYTES != state->block)
            begin_block(state, at / BLOCK_BYTES);
        if (at % 2 == 0 && taken > 1) {
            taken -= taken % 2;
            used_passes()->digest(data, taken / 2, keys + before / 2, state->inner);
        } else { /* half of a piece */
            char piece[2] = {0};
            taken = 1;
            piece[at % 2] = *data;
            used_passes()->digest(piece, 1, keys + before / 2, state->inner);
        }
        data += taken;
        at += taken;
        n -= taken;
    }
}

/* Add elements in each form: `at` is the place of the first one in the whole. */
static void add_forms(State *states, int forms, size_t itemsize, const char *data, size_t n, uint64_t at)
{
    size_t most = forms > 1 ? CHUNK : n;
    for (size_t done = 0; done < n; done += most) {
        size_t taken = n - done < most ? n - done : most;
        uint16_t narrow[CHUNK];
        add_bytes(states, data + done * itemsize, taken * itemsize, (at + done) * itemsize);
        for (int form = 1; form < forms; form++) {
            const Passes *passes = used_passes();
            (form == 1 ? passes->narrow_to_brains : passes->narrow_to_halves)(
                data + done * itemsize, taken, narrow);
            add_bytes(states + form, (const char *)narrow, 2 * taken, 2 * (at + done));
        }
    }
}

static void digest_forms(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
                         State *states, int forms)
{
    const Array *array = &elements->array;
    size_t itemsize = itemsize_of(elements->kind), runs = 1, length = 1, expected = itemsize;
    uint64_t strides[MAX_DIMS + 1];
    int contiguous = 1, split = 0; /* dimensions after `split` are not */
    double gathered[2 * CHUNK];
    make_keys();
    strides[array->ndim] = 1;
    for (int i = array->ndim - 1; i >= 0; i--) {
        strides[i] = strides[i + 1] * (uint64_t)whole[i];
        contiguous &= array->shape[i] == 1 || array->strides[i] == (ptrdiff_t)expected;
        expected *= (size_t)array->shape[i];
    }
    for (int i = 0; i < array->ndim; i++)
        if (array->shape[i] != whole[i])
            split = i;
    for (int i = 0; i < array->ndim; i++)
        *(i < split ? &runs : &length) *= (size_t)array->shape[i];
    for (size_t run = 0; run < runs; run++) {
        uint64_t at = 0;
        size_t rest = run;
        for (int i = split - 1; i >= 0; i--) {
            at += (rest % (size_t)array->shape[i] + (uint64_t)offsets[i]) * strides[i + 1];
            rest /= (size_t)array->shape[i];
        }
        if (array->ndim > 0)
            at += (uint64_t)offsets[split] * strides[split + 1];
        if (contiguous) {
            add_forms(states, forms, itemsize, array->data + run * length * itemsize, length, at);
            continue;
        }
        for (size_t done = 0; done < length; done += CHUNK) {
            size_t n = length - done < CHUNK ? length - done : CHUNK;
            gather(array, itemsize, run * length + done, n, (char *)gathered);
            add_forms(states, forms, itemsize, (const char *)gathered, n, at + done);
        }
    }
    for (int form = 0; form < forms; form++)
        begin_block(states + form, 0);
}

void digest(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
            uint64_t seed, uint32_t sums[4])
{
    State state = {.seed = seed, .sums = sums};
    digest_forms(elements, whole, offsets, &state, 1);
}

/* Digests of rows are made such that those of tensors can be put together to that of their
 * concatenation. The four sums of a row are a polynomial in the ring of integers modulo 2**32, in
 * which x**5 is the polynomial below, and the digest is the sum of the r-th row times x**r. So rows
 * that follow others are multiplied by x to the power of their number, and shards add up.
 *
 * A row that differs changes the digest unless its four sums stay: x has an inverse. Modulo 2, x**31
 * is 1, modulo 2**(k + 1) x**(31 * 2**k) is. If the same difference is in 31 * 2**k rows in a
 * row, or comes in one row and goes from another one so far away, k + 1 of the 32 bits of each number
 * do not show it. */
static const uint32_t modulus[RING] = {0x9E3779B1, 0x7F4A7C16, 0xBF58476D, 0x94D049BA, 0x3C6EF372};

static void times_x(uint32_t d[RING])
{
    uint32_t top = d[RING - 1];
    for (int i = RING - 1; i > 0; i--)
        d[i] = d[i - 1] + top * modulus[i];
    d[0] = top * modulus[0];
}

#define INVERSE 0xE8B2F51U /* times modulus[0] is 1 */

static void over_x(uint32_t d[RING])
{
    uint32_t top = d[0] * INVERSE;
    for (int i = 1; i < RING; i++)
        d[i - 1] = d[i] - top * modulus[i];
    d[RING - 1] = top;
}

static void multiply(uint32_t a[RING], const uint32_t b[RING])
{
    uint32_t product[RING] = {0};
    for (int i = RING - 1; i >= 0; i--) {
        times_x(product);
        for (int j = 0; j < RING; j++)
            product[j] += a[j] * b[i];
    }
    memcpy(a, product, sizeof product);
}

static void times_power_of_x(uint32_t d[RING], uint64_t power)
{
    uint32_t factor[RING] = {0, 1}, copy[RING];
    for (; power; power >>= 1) {
        if (power & 1)
            multiply(d, factor);
        memcpy(copy, factor, sizeof copy);
        multiply(factor, copy);
    }
}

#define KNOWN 16 /* blocks at the beginning of rows, whose matrices are made once */

/* What each piece of a row of one element adds to the four sums, times its value. */
typedef struct {
    uint32_t of[8][4];
} ShortRow;

static void prepare_short_row(ShortRow *row, uint64_t seed)
{
    for (int piece = 0; piece < 8; piece++) {
        State state = {.seed = seed, .sums = row->of[piece]};
        memset(row->of[piece], 0, sizeof row->of[piece]);
        for (int k = 0; k < 4; k++)
            state.inner[k] = (uint32_t)(int32_t)keys[piece + KEY_STEP * k];
        begin_block(&state, 0);
    }
}

static void add_number(const ShortRow *row, const char *data, size_t bytes, uint32_t sums[RING])
{
    for (size_t piece = 0; 2 * piece < bytes; piece++) {
        int16_t value = 0;
        memcpy(&value, data + 2 * piece, bytes > 1 ? 2 : 1);
        for (int k = 0; k < 4; k++)
            sums[k] += (uint32_t)(int32_t)value * row->of[piece][k];
    }
}

void digest_rows(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
                 int outer, int forms, const uint64_t *seeds, uint32_t sums[FORMS][RING])
{
    const Array *array = &elements->array;
    size_t itemsize = itemsize_of(elements->kind), groups = 1;
    size_t rows = outer ? (size_t)array->shape[outer - 1] : 1;
    ptrdiff_t stride = outer ? array->strides[outer - 1] : 0;
    int numbers = outer == array->ndim; /* rows of one element */
    Elements row = *elements;
    ShortRow of_number[FORMS];
    uint64_t matrices[FORMS][KNOWN][8];
    make_keys();
    for (int form = 0; form < forms; form++)
        for (unsigned i = 0; i < KNOWN * 8; i++)
            matrices[form][i / 8][i % 8] = key_of(seeds[form], i);
    row.array.ndim = array->ndim - outer;
    for (int i = 0; i < row.array.ndim; i++) {
        row.array.shape[i] = array->shape[i + outer];
        row.array.strides[i] = array->strides[i + outer];
    }
    for (int form = 0; form < forms && numbers; form++)
        prepare_short_row(of_number + form, seeds[form]);
    for (int i = 0; i < outer - 1; i++)
        groups *= (size_t)array->shape[i];
    for (size_t group = 0; group < groups; group++) {
        const char *data = array->data;
        uint64_t at = 0, after = 1;
        size_t rest = group;
        if (outer) {
            at = (uint64_t)offsets[outer - 1];
            after = (uint64_t)whole[outer - 1];
        }
        for (int i = outer - 2; i >= 0; i--) {
            size_t index = rest % (size_t)array->shape[i];
            rest /= (size_t)array->shape[i];
            data += (ptrdiff_t)index * array->strides[i];
            at += (index + (uint64_t)offsets[i]) * after;
            after *= (uint64_t)whole[i];
        }
        uint32_t found[FORMS][RING] = {{0}};
        /* By Horner's rule with 1 / x: processors fetch rows ahead of time only in this order. */
        for (size_t i = 0; i < rows; i++) {
            State states[FORMS];
            uint16_t narrow;
            row.array.data = data + (ptrdiff_t)i * stride;
            for (int form = 0; form < forms; form++) {
                over_x(found[form]);
                states[form] = (State){.seed = seeds[form], .sums = found[form],
                                       .matrices = matrices[form], .known = KNOWN};
            }
            if (!numbers) {
                digest_forms(&row, whole + outer, offsets + outer, states, forms);
                continue;
            }
            add_number(of_number, row.array.data, itemsize, found[0]);
            for (int form = 1; form < forms; form++) {
                const Passes *passes = used_passes();
                (form == 1 ? passes->narrow_to_brains : passes->narrow_to_halves)(
                    row.array.data, 1, &narrow);
                add_number(of_number + form, (const char *)&narrow, 2, found[form]);
            }
        }
        for (int form = 0; form < forms; form++) {
            times_power_of_x(found[form], at + rows - 1);
            for (int i = 0; i < RING; i++)
                sums[form][i] += found[form][i];
        }
    }
}
