/* Averages over finite values, in units of a power of two, so that no eighth power overflows. */
#ifndef TENSORTAP_MOMENTS_H
#define TENSORTAP_MOMENTS_H

#include "variants.h"

#include <limits.h>

#define ONLY_ZEROS INT_MIN /* the unit of moments of zeros */

/* Over n values, in units of 2**unit to the respective power. */
typedef struct {
    int64_t n;
    int unit;
    double mean, m2, mean_abs, p2, p4, p8; /* m2: the sum of squared deviations from the mean */
    double low, high, min_abs;             /* in units of 1 */
} Moments;

/* Add b to a, by Chan's formula. */
void add(Moments *a, Moments b);

/* Return the unit for values up to max_abs: 2**0 if that is safe. */
int unit_for(double max_abs);

/* Return the moments of n equal values. */
Moments of_constant(int64_t n, double value, int unit);
Moments of_sums(int64_t n, int unit, const Sums *s);

/* Return whether the deviations are accurate although they come from the squares: they are if the
 * mean is small compared with them. */
int deviations_are_accurate(const Moments *m);

/* Set the deviations from the sums of the deviations from the present mean, and of their squares. */
void set_deviations(Moments *m, double rest, double squares);

#endif
