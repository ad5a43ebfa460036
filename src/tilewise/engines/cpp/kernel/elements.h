// The element types of tensors, and conversion to and from the compute type.
#pragma once
#include "vectors.h"

struct bfloat { u16 bits; };
struct half { u16 bits; };
struct float8_e4m3 { uint8_t bits; };  // no infinities; NaN is 0x7f
struct float8_e5m2 { uint8_t bits; };

template <typename E> struct compute_type { typedef float type; };  // float16, bfloat16 and float32 are computed in float32
template <> struct compute_type<double> { typedef double type; };

template <typename To, typename From> INLINE To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

INLINE float widen(bfloat x) { return bits_as<float>((u32)x.bits << 16); }

// A multiplication rebases the exponent, which also handles subnormals; the largest exponent means Inf or NaN.
INLINE float widen(half x) {
    const u32 magnitude = (u32)(x.bits & 0x7fff) << 13, sign = (u32)(x.bits & 0x8000) << 16;
    const u32 finite = bits_as<u32>(bits_as<float>(magnitude) * bits_as<float>((u32)(254 - 15) << 23));
    return bits_as<float>((magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite) | sign);
}
INLINE float widen(float8_e5m2 x) { return widen(half{(u16)(x.bits << 8)}); }
// Below 8 there is no leading one: it is added, and subtracted again. (A product, as above, takes twice as long.)
INLINE float widen(float8_e4m3 x) {
    const u32 magnitude = x.bits & 0x7f, sign = (u32)(x.bits & 0x80) << 24, leading = (u32)(127 - 6) << 23;
    const float normal = bits_as<float>((magnitude << 20) + ((u32)(127 - 7) << 23)), small = bits_as<float>((magnitude << 20) + leading) - bits_as<float>(leading);
    return bits_as<float>((magnitude == 0x7f ? 0x7fc00000 : bits_as<u32>(magnitude < 8 ? small : normal)) | sign);
}
INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(double x, double& to) { to = x; }
INLINE void narrow(float x, bfloat& to) {
    const u32 b = bits_as<u32>(x);
    const u32 rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    to.bits = (u16)((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
INLINE void narrow(float x, half& to) {
    const u32 b = bits_as<u32>(x), sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
    const u32 normal = (magnitude - ((u32)(127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const u32 small = bits_as<u32>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;  // adding 0.5 shifts a subnormal half into the last bits
    const u32 large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    to.bits = (u16)(sign | (magnitude >= 0x47800000 ? large : magnitude < 0x38800000 ? small : normal > 0x7c00 ? 0x7c00 : normal));
}

// Loads a vector of elements and widens it to the compute type.
INLINE vec<float> load_widened(const float* p) { return load(p); }
INLINE vec<double> load_widened(const double* p) { return load(p); }
INLINE vec<float> load_widened(const bfloat* p) {
    typedef u16 halves __attribute__((vector_size(VECTOR_BYTES / 2)));
    typedef u32 words __attribute__((vector_size(VECTOR_BYTES)));
    halves bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return (vec<float>)(__builtin_convertvector(bits, words) << 16);
}

// Twice as many bfloat16 numbers, those at even and those at odd places: two operations for both, where neighbours in order take four.
struct EvenOdd {
    vec<float> even, odd;
};
INLINE EvenOdd load_even_odd(const bfloat* p) {
    typedef u32 words __attribute__((vector_size(VECTOR_BYTES)));
    words both;
    __builtin_memcpy(&both, p, sizeof both);
    return {(vec<float>)(both << 16), (vec<float>)(both & 0xffff0000u)};
}

INLINE vec<float> load_widened(const half* p) {
    float lane[WIDTH<float>];
    for (int l = 0; l < WIDTH<float>; l++) lane[l] = widen(p[l]);
    return load(lane);
}
