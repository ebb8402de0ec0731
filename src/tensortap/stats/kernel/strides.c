/* Arrays with arbitrary strides. */
#include "worker.h"

#include <string.h>

size_t itemsize_of(Kind kind)
{
    static const size_t sizes[KINDS] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8, 8, 16, 1};
    return sizes[kind];
}

void normalize(Array *a, size_t itemsize)
{
    int kept = 0;
    for (int i = 0; i < a->ndim; i++) {
        ptrdiff_t size = a->shape[i], stride = a->strides[i];
        if (size == 1)
            continue;
        if (stride < 0) {
            a->data += stride * (size - 1);
            stride = -stride;
        }
        int at = kept++;
        for (; at > 0 && a->strides[at - 1] < stride; at--) {
            a->shape[at] = a->shape[at - 1];
            a->strides[at] = a->strides[at - 1];
        }
        a->shape[at] = size;
        a->strides[at] = stride;
    }
    int dims = 0;
    for (int i = 0; i < kept; i++) {
        if (dims > 0 && a->strides[dims - 1] == a->shape[i] * a->strides[i]) {
            a->shape[dims - 1] *= a->shape[i];
            a->strides[dims - 1] = a->strides[i];
        } else {
            a->shape[dims] = a->shape[i];
            a->strides[dims++] = a->strides[i];
        }
    }
    if (dims == 0) {
        a->shape[0] = 1;
        a->strides[0] = (ptrdiff_t)itemsize;
        dims = 1;
    }
    a->ndim = dims;
}

#define COPY_ROW(size)                                                                            \
    case size:                                                                                    \
        for (size_t j = 0; j < row; j++)                                                          \
            memcpy(out + j * (size), from + (ptrdiff_t)j * stride, size);                         \
        break

void gather(const Array *a, size_t itemsize, size_t first, size_t n, char *out)
{
    ptrdiff_t index[MAX_DIMS];
    int last = a->ndim - 1;
    const char *from = a->data;
    for (int i = last; i >= 0; i--) {
        index[i] = (ptrdiff_t)(first % (size_t)a->shape[i]);
        first /= (size_t)a->shape[i];
        from += index[i] * a->strides[i];
    }
    ptrdiff_t stride = a->strides[last];
    while (n > 0) {
        size_t row = (size_t)(a->shape[last] - index[last]);
        row = row < n ? row : n;
        if (stride == (ptrdiff_t)itemsize) {
            memcpy(out, from, row * itemsize);
        } else {
            switch (itemsize) {
                COPY_ROW(1);
                COPY_ROW(2);
                COPY_ROW(4);
                COPY_ROW(8);
                COPY_ROW(16);
            }
        }
        out += row * itemsize;
        n -= row;
        index[last] += (ptrdiff_t)row;
        from += (ptrdiff_t)row * stride;
        for (int i = last; i > 0 && index[i] == a->shape[i]; i--) {
            from += a->strides[i - 1] - index[i] * a->strides[i];
            index[i] = 0;
            index[i - 1]++;
        }
    }
}
