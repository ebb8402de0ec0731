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
        uint64_t key = key_of(state->seed, 8 * state->block + i);
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

void digest(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
            uint64_t seed, uint32_t sums[4])
{
    const Array *array = &elements->array;
    size_t itemsize = itemsize_of(elements->kind), runs = 1, length = 1, expected = itemsize;
    uint64_t strides[MAX_DIMS + 1];
    int contiguous = 1, split = 0; /* dimensions after `split` are not */
    double gathered[2 * CHUNK];
    State state = {.seed = seed, .sums = sums};
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
            add_bytes(&state, array->data + run * length * itemsize, length * itemsize, at * itemsize);
            continue;
        }
        for (size_t done = 0; done < length; done += CHUNK) {
            size_t n = length - done < CHUNK ? length - done : CHUNK;
            gather(array, itemsize, run * length + done, n, (char *)gathered);
            add_bytes(&state, (const char *)gathered, n * itemsize, (at + done) * itemsize);
        }
    }
    begin_block(&state, 0);
}
