/* Averages over finite values, in units of a power of two: no eighth power leaves float64. */
#ifndef TENSORTAP_MOMENTS_H
#define TENSORTAP_MOMENTS_H

#include "variants.h"

#include <limits.h>

#define NOTHING INT_MIN /* the unit of moments that hold only zeros */

/* Over n values, in units of 2**unit to the power concerned. */
typedef struct {
    int64_t n;
    int unit;
    double mean, m2, mean_abs, p2, p4, p8; /* m2: the sum of squared deviations from the mean */
    double low, high, min_abs;             /* these three in units of 1 */
} Moments;

/* Add b to a, by Chan's formula. */
void add(Moments *a, Moments b);

/* The unit for values up to max_abs: 1 wherever that is safe. */
int unit_for(double max_abs);

Moments of_constant(int64_t n, double value, int unit);
Moments of_sums(int64_t n, int unit, const Sums *s);

/* Whether the mean is so small beside the deviations that the squares alone tell them. */
int tells_deviations(const Moments *m);

/* Set them from the sums of the deviations, and of their squares, from the mean as it is. */
void set_deviations(Moments *m, double rest, double squares);

#endif
