// exp(x) of a vector, for the weights of a softmax: 0 below the smallest normal number, 1 or 2 roundings off at most.
#pragma once
#include "vectors.h"

typedef i32 ints __attribute__((vector_size(VECTOR_BYTES)));
typedef i64 longs __attribute__((vector_size(VECTOR_BYTES)));

// x = n ln 2 + r: exp(x) = 2^n exp(r). Adding 1.5 * 2^23 + 127 leaves n + 127 in the low bits of the sum, which shifted up are 2^n. Below the
// smallest normal number, -inf included, whatever comes out is replaced by 0; a NaN stays one.
INLINE vec<float> exponential(vec<float> x) {
    const vec<float> shift = spread(12583039.0f), shifted = x * spread(1.44269504f) + shift, n = shifted - shift;
    const vec<float> r = n * spread(2.12194440e-4f) + (n * spread(-0.693359375f) + x);
    vec<float> p = spread(1.9875691500e-4f);
    p = p * r + spread(1.3981999507e-3f);
    p = p * r + spread(8.3334519073e-3f);
    p = p * r + spread(4.1665795894e-2f);
    p = p * r + spread(1.6666665459e-1f);
    p = p * r + spread(5.0000001201e-1f);
    p = p * r + spread(1.0f);
    p = p * r + spread(1.0f);
    return x < spread(-87.33654f) ? vec<float>{} : p * (vec<float>)((ints)shifted << 23);
}

INLINE vec<double> exponential(vec<double> x) {
    const vec<double> shift = spread(6755399441056767.0), shifted = x * spread(1.4426950408889634) + shift, n = shifted - shift;  // 1.5 * 2^52 + 1023
    const vec<double> r = n * spread(-1.9082149292705877e-10) + (n * spread(-0.6931471803691238) + x);
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
    p = p * r + spread(1.0);
    p = p * r + spread(1.0);
    return x < spread(-708.39) ? vec<double>{} : p * (vec<double>)((longs)shifted << 52);
}
