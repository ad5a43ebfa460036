// What generated functions are written with, besides the operations themselves (operations.h).
#pragma once
#include "arguments.h"
#include "elements.h"

constexpr int LANES = 64;  // as in tiles.h

// The mathematical functions by their one name; no header is needed, which halves the time a program takes to compile.
#define FUNCTION_OF_FLOATS(name) \
    INLINE float name(float x) { return __builtin_##name##f(x); } \
    INLINE double name(double x) { return __builtin_##name(x); }
FUNCTION_OF_FLOATS(fabs)
FUNCTION_OF_FLOATS(floor)
FUNCTION_OF_FLOATS(ceil)
FUNCTION_OF_FLOATS(trunc)
FUNCTION_OF_FLOATS(rint)
FUNCTION_OF_FLOATS(exp2)
FUNCTION_OF_FLOATS(log)
FUNCTION_OF_FLOATS(log2)
FUNCTION_OF_FLOATS(log10)
FUNCTION_OF_FLOATS(log1p)
FUNCTION_OF_FLOATS(expm1)
FUNCTION_OF_FLOATS(sqrt)
FUNCTION_OF_FLOATS(sin)
FUNCTION_OF_FLOATS(cos)
FUNCTION_OF_FLOATS(tan)
FUNCTION_OF_FLOATS(atan)
FUNCTION_OF_FLOATS(sinh)
FUNCTION_OF_FLOATS(cosh)
FUNCTION_OF_FLOATS(erf)
FUNCTION_OF_FLOATS(erfc)
INLINE float pow(float x, float y) { return __builtin_powf(x, y); }
INLINE double pow(double x, double y) { return __builtin_pow(x, y); }
INLINE float fmod(float x, float y) { return __builtin_fmodf(x, y); }
INLINE double fmod(double x, double y) { return __builtin_fmod(x, y); }
INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
INLINE double copysign(double x, double y) { return __builtin_copysign(x, y); }
INLINE float atan2(float y, float x) { return __builtin_atan2f(y, x); }
INLINE double atan2(double y, double x) { return __builtin_atan2(y, x); }
INLINE float multiply_add(float a, float b, float c) {  // rounded once where the machine can, else twice
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

template <typename T> constexpr T INFINITE = std::numeric_limits<T>::infinity();
template <typename T> INLINE T infinite() { return INFINITE<T>; }
template <typename T> INLINE T not_a_number() { return std::numeric_limits<T>::quiet_NaN(); }

INLINE float to_half(float x) { half h; narrow(x, h); return widen(h); }
INLINE float to_bfloat(float x) { bfloat h; narrow(x, h); return widen(h); }

// exp(x) = 2^n exp(r), x = n ln 2 + r; 2^n in two factors, so that subnormal results and the largest ones come out right.
INLINE float exp_of(float x) {
    const float bounded = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x), usable = bounded == bounded ? bounded : 0.0f;
    const float n = __builtin_rintf(usable * 1.44269504f);
    const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, usable));
    float p = 1.9875691500e-4f;
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1.0f;
    const i32 whole = (i32)n, first = whole >> 1, second = whole - first;
    const float result = p * bits_as<float>((u32)(first + 127) << 23) * bits_as<float>((u32)(second + 127) << 23);
    return x == x ? result : x;
}
INLINE double exp_of(double x) { return __builtin_exp(x); }

// A quotient of polynomials in x^2 (those of Eigen), 1 or 2 roundings off; beyond 9 it is 1 in float32.
INLINE float tanh_of(float x) {
    const float bounded = x < -9.0f ? -9.0f : (x > 9.0f ? 9.0f : x), y = bounded * bounded;
    float p = -2.76076847742355e-16f;
    p = multiply_add(p, y, 2.00018790482477e-13f);
    p = multiply_add(p, y, -8.60467152213735e-11f);
    p = multiply_add(p, y, 5.12229709037114e-08f);
    p = multiply_add(p, y, 1.48572235717979e-05f);
    p = multiply_add(p, y, 6.37261928875436e-04f);
    p = multiply_add(p, y, 4.89352455891786e-03f);
    float q = 1.19825839466702e-06f;
    q = multiply_add(q, y, 1.18534705686654e-04f);
    q = multiply_add(q, y, 2.26843463243900e-03f);
    q = multiply_add(q, y, 4.89352518554385e-03f);
    const float small = __builtin_fabsf(x) < 0.0004f ? x : bounded * p / q;
    return small > 1.0f ? 1.0f : (small < -1.0f ? -1.0f : small);
}
INLINE double tanh_of(double x) { return __builtin_tanh(x); }

#include "operations.h"
