// exp(x) of a vector, for the weights of a softmax: 0 below the smallest normal number, 1 or 2 roundings off at most.
#pragma once
#include "vectors.h"

typedef i32 ints __attribute__((vector_size(VECTOR_BYTES)));
typedef i64 longs __attribute__((vector_size(VECTOR_BYTES)));

// x = n ln 2 + r: exp(x) = 2^n exp(r). Adding 1.5 * 2^23 leaves n in the low bits of the sum.
INLINE vec<float> exponential(vec<float> x) {
    const vec<float> lowest = spread(-87.33654f), highest = spread(88.72f), shift = spread(12582912.0f);
    const vec<float> inside = x < lowest ? lowest : (x > highest ? highest : x);
    const vec<float> shifted = inside * spread(1.44269504f) + shift;
    const vec<float> n = shifted - shift;
    const vec<float> r = n * spread(2.12194440e-4f) + (n * spread(-0.693359375f) + inside);
    vec<float> p = spread(1.9875691500e-4f);
    p = p * r + spread(1.3981999507e-3f);
    p = p * r + spread(8.3334519073e-3f);
    p = p * r + spread(4.1665795894e-2f);
    p = p * r + spread(1.6666665459e-1f);
    p = p * r + spread(5.0000001201e-1f);
    p = (p * r * r + r) + spread(1.0f);
    const vec<float> scaled = (vec<float>)((ints)p + ((ints)shifted << 23));
    return x < lowest ? vec<float>{} : (x == x ? scaled : x);
}

INLINE vec<double> exponential(vec<double> x) {
    const vec<double> lowest = spread(-708.39), highest = spread(709.7), shift = spread(6755399441055744.0);
    const vec<double> inside = x < lowest ? lowest : (x > highest ? highest : x);
    const vec<double> shifted = inside * spread(1.4426950408889634) + shift;
    const vec<double> n = shifted - shift;
    const vec<double> r = n * spread(-1.9082149292705877e-10) + (n * spread(-0.6931471803691238) + inside);
    vec<double> p = spread(1.0 / 6227020800.0);  // Taylor: |r| < 0.35, so the term of order 14 is below the rounding
    p = p * r + spread(1.0 / 479001600.0);
    p = p * r + spread(1.0 / 39916800.0);
    p = p * r + spread(1.0 / 3628800.0);
    p = p * r + spread(1.0 / 362880.0);
    p = p * r + spread(1.0 / 40320.0);
    p = p * r + spread(1.0 / 5040.0);
    p = p * r + spread(1.0 / 720.0);
    p = p * r + spread(1.0 / 120.0);
    p = p * r + spread(1.0 / 24.0);
    p = p * r + spread(1.0 / 6.0);
    p = p * r + spread(0.5);
    p = (p * r * r + r) + spread(1.0);
    const vec<double> scaled = (vec<double>)((longs)p + ((longs)shifted << 52));
    return x < lowest ? vec<double>{} : (x == x ? scaled : x);
}
