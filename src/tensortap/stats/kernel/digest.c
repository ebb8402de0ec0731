/* A digest that does not depend on how a tensor is split: two sums over its words, modulo 2**64.
 *
 * A word is 32 bits of the whole tensor in C order, zeros where another shard has the bytes. Each
 * position has two keys of 64 bits, mixed from its number. One sum is of word times key, the other
 * of the word with its halves exchanged times the other key. Both are linear, so the digests of
 * shards add up to that of the whole, and both are universal hashes: for any two tensors that differ,
 * the sums agree in at most one of 2**82 choices of the keys. (The worst case are differences in bit
 * 15 or 31 alone, of which a sum keeps 33 bits and the other one 49.) The keys are no secret: it is
 * no defense against somebody who constructs a collision.
 */
#include <string.h>

#include "worker.h"

static Keys keys;

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
    for (int i = 0; i < KEYS; i++)
        for (int each = 0; each < 2; each++) {
            uint64_t key = key_of(0, (uint64_t)(2 * i + each));
            keys.of[2 * each][i] = (uint32_t)key;
            keys.of[2 * each + 1][i] = (uint32_t)(key >> 32);
        }
    __atomic_store_n(&made, 1, __ATOMIC_RELEASE);
}

/* Add n words, whose numbers begin with `at`. */
static void add_words(const char *data, size_t n, uint64_t at, uint64_t seed, uint64_t *sums)
{
    while (n > 0) {
        size_t first = at % KEYS, run = KEYS - first < n ? KEYS - first : n;
        uint64_t block = at / KEYS, masks[2] = {key_of(seed, 2 * block), key_of(seed, 2 * block + 1)};
        used_passes()->digest(data, run, &keys, first, masks, sums);
        data += run * 4;
        at += run;
        n -= run;
    }
}

/* Add n bytes, which begin with the byte `at` of the whole. */
static void add_bytes(const char *data, size_t n, uint64_t at, uint64_t seed, uint64_t *sums)
{
    while (n > 0) {
        size_t before = at % 4, taken = n - n % 4;
        if (before == 0 && n >= 4) {
            add_words(data, n / 4, at / 4, seed, sums);
        } else { /* a part of a word */
            char word[4] = {0};
            taken = 4 - before < n ? 4 - before : n;
            memcpy(word + before, data, taken);
            add_words(word, 1, at / 4, seed, sums);
        }
        data += taken;
        at += taken;
        n -= taken;
    }
}

void digest(const Elements *elements, const ptrdiff_t *whole, const ptrdiff_t *offsets,
            uint64_t seed, uint64_t sums[2])
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
            add_bytes(array->data + run * length * itemsize, length * itemsize, at * itemsize, seed,
                      sums);
            continue;
        }
        for (size_t done = 0; done < length; done += CHUNK) {
            size_t n = length - done < CHUNK ? length - done : CHUNK;
            gather(array, itemsize, run * length + done, n, (char *)gathered);
            add_bytes((const char *)gathered, n * itemsize, (at + done) * itemsize, seed, sums);
        }
    }
}
