// exp(x) of a vector, for softmax weights: at most 2 ulp off; results below the smallest normal number are 0.
#pragma once
#include "vectors.h"

typedef i32 ints __attribute__((vector_size(VECTOR_BYTES)));
typedef i64 longs __attribute__((vector_size(VECTOR_BYTES)));

// x = n ln 2 + r: exp(x) = 2^n exp(r). Adding 1.5 * 2^23 + 127 leaves n + 127 in the low bits of the sum; shifted up, they are 2^n. Results below the
// smallest normal number, x = -inf included, are replaced by 0; NaN stays NaN. The polynomial is 1 + r + r^2 q(r) with the least largest relative error,
// 3e-9, for |r| <= ln 2 / 2.
//
// Several vectors at a time, step by step: every step waits for the one before, and a processor looks no further ahead than a few vectors.
template <int N> INLINE void exponentials(vec<float> (&x)[N]) {
    const vec<float> shift = broadcast(12583039.0f);
    vec<float> r[N], p[N], power[N];
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < N; i++)
    EACH {
        const vec<float> shifted = x[i] * broadcast(1.44269504f) + shift, n = shifted - shift;
        r[i] = n * broadcast(2.12194440e-4f) + (n * broadcast(-0.693359375f) + x[i]);
        power[i] = (vec<float>)((ints)shifted << 23);
    }
    EACH p[i] = broadcast(1.3814539e-3f) * r[i] + broadcast(8.3687454e-3f);
    EACH p[i] = p[i] * r[i] + broadcast(4.1668389e-2f);
    EACH p[i] = p[i] * r[i] + broadcast(1.6666521e-1f);
    EACH p[i] = p[i] * r[i] + broadcast(4.9999994e-1f);
    EACH p[i] = p[i] * r[i] + broadcast(1.0f);
    EACH p[i] = p[i] * r[i] + broadcast(1.0f);
    EACH x[i] = x[i] < broadcast(-87.33654f) ? vec<float>{} : p[i] * power[i];
#undef EACH
}

INLINE vec<float> exponential(vec<float> x) {
    vec<float> one[1] = {x};
    exponentials(one);
    return one[0];
}

INLINE vec<double> exponential(vec<double> x) {
    const vec<double> shift = broadcast(6755399441056767.0), shifted = x * broadcast(1.4426950408889634) + shift, n = shifted - shift;  // 1.5 * 2^52 + 1023
    const vec<double> r = n * broadcast(-1.9082149292705877e-10) + (n * broadcast(-0.6931471803691238) + x);
    vec<double> p = broadcast(1.0 / 6227020800.0);  // Taylor: |r| < 0.35, so the term of order 14 is below rounding error
    p = p * r + broadcast(1.0 / 479001600.0);
    p = p * r + broadcast(1.0 / 39916800.0);
    p = p * r + broadcast(1.0 / 3628800.0);
    p = p * r + broadcast(1.0 / 362880.0);
    p = p * r + broadcast(1.0 / 40320.0);
    p = p * r + broadcast(1.0 / 5040.0);
    p = p * r + broadcast(1.0 / 720.0);
    p = p * r + broadcast(1.0 / 120.0);
    p = p * r + broadcast(1.0 / 24.0);
    p = p * r + broadcast(1.0 / 6.0);
    p = p * r + broadcast(0.5);
    p = p * r + broadcast(1.0);
    p = p * r + broadcast(1.0);
    return x < broadcast(-708.39) ? vec<double>{} : p * (vec<double>)((longs)shifted << 52);
}

template <int N> INLINE void exponentials(vec<double> (&x)[N]) {
    for (int i = 0; i < N; i++) x[i] = exponential(x[i]);
}
