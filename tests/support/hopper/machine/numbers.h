// 16-bit numbers, rounded to nearest even, and the approximate functions of the special function unit.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace hopper {

inline uint32_t bits_of(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
inline float float_of(uint32_t x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

inline uint16_t to_bfloat16(float x) {
    const uint32_t u = bits_of(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

inline float from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float size = float_of(rest << 13) * 0x1p112f;  // the exponent's bias: 127 - 15
    return sign ? -size : size;
}
inline uint16_t to_float16(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const float size = fabsf(x);
    if (x != x) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint32_t)lrintf(size * 0x1p24f);
    const uint32_t u = bits_of(size) - (112u << 23);
    return sign | (u + 0xfff + (u >> 13 & 1)) >> 13;
}

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

// 2^x to a few units in the last place, as ex2.approx is.
inline float exp2_approx(float x) {
    if (!(x < 128.0f)) return x != x ? x : INFINITY;
    if (x < -126.0f) return 0.0f;  // what would be subnormal is flushed
    const float whole = rintf(x), f = x - whole;
    float y = 1.5403530e-4f;
    y = fmaf(y, f, 1.3333558e-3f);
    y = fmaf(y, f, 9.6181291e-3f);
    y = fmaf(y, f, 5.5504109e-2f);
    y = fmaf(y, f, 2.4022651e-1f);
    y = fmaf(y, f, 6.9314718e-1f);
    y = fmaf(y, f, 1.0f);
    const int w = (int)whole, half = w / 2;  // two factors: 2^128 is no number
    return flushed(y * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(w - half + 127) << 23));
}
inline float log2_approx(float x) { return log2f(flushed(x)); }

}  // namespace hopper
