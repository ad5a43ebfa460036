// What generated functions are written with: torch's meaning of each operation, in forms that vectorise in a loop over lanes.
#pragma once
#include "arguments.h"
#include "elements.h"

constexpr int LANES = 64;  // as in tiles.h

// The mathematical functions by their one name; no header is needed, which halves the time a program takes to compile.
#define FUNCTION_OF_FLOATS(name) \
    INLINE float name(float x) { return __builtin_##name##f(x); } \
    INLINE double name(double x) { return __builtin_##name(x); }
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
template <typename T> constexpr T NOT_A_NUMBER = std::numeric_limits<T>::quiet_NaN();

// -- conversions -------------------------------------------------------------------------------------------------------

INLINE float to_half(float x) { half h; narrow(x, h); return widen(h); }
INLINE float to_bfloat(float x) { bfloat h; narrow(x, h); return widen(h); }

// Numbers outside the range, and NaN, become the lowest integer before they are cut to fewer bits. Those next to 0 become 0 by hand: of an integer that is
// made a float again, compilers make trunc(x), which is -0 for them.
template <typename I, typename F> INLINE I to_integer(F x) {
    const bool holds = x >= (F)-9223372036854775808.0 && x < (F)9223372036854775808.0;
    const bool whole = holds && (x >= 1 || x <= -1);
    return (I)(holds ? (i64)(whole ? x : 0) : std::numeric_limits<i64>::min());
}

// Where element `index` of a dimension lies: negative ones count from the end, others are kept inside.
template <typename I> INLINE I inside(I index, i64 size) {
    const I n = (I)size, from_start = index < 0 ? index + n : index, low = from_start < 0 ? 0 : from_start;
    return low < n ? low : n - 1;
}

// -- integers (signed arithmetic wraps: -fwrapv) -----------------------------------------------------------------------

template <typename I> INLINE I integer_quotient(I a, I b) {  // rounded down; by 0 it is 0, in place of a trap
    if (b == 0) return 0;
    if (std::numeric_limits<I>::is_signed && b == (I)-1) return (I)(0 - a);  // the lowest number has no opposite: it wraps
    const I quotient = a / b;
    return (I)(quotient - ((a % b != 0) & ((a < 0) != (b < 0))));
}
template <typename I> INLINE I integer_remainder(I a, I b) {  // has the divisor's sign
    if (b == 0 || (std::numeric_limits<I>::is_signed && b == (I)-1)) return 0;
    const I remainder = a % b;
    return (I)(remainder + ((remainder != 0) & ((remainder < 0) != (b < 0)) ? b : 0));
}
template <typename I> INLINE I truncated_remainder(I a, I b) {  // has the dividend's sign
    return b == 0 || (std::numeric_limits<I>::is_signed && b == (I)-1) ? (I)0 : (I)(a % b);
}
template <typename I> INLINE I positive_quotient(I a, I b) { return a / b; }  // a >= 0 and b > 0, as the bounds show
template <typename I> INLINE I positive_remainder(I a, I b) { return a % b; }

template <typename I> INLINE I integer_power(I base, I exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == (I)-1 ? (exponent % 2 ? (I)-1 : 1) : 0;
    I result = 1;
    for (; exponent; exponent = (I)(exponent / 2), base = (I)(base * base))
        if (exponent & 1) result = (I)(result * base);
    return result;
}

template <typename I> constexpr int BITS = 8 * sizeof(I);
template <typename I> INLINE I shift_left(I a, I b) { return b < 0 || b >= BITS<I> ? (I)0 : (I)(a << b); }
template <typename I> INLINE I shift_right(I a, I b) {
    constexpr int most = BITS<I> - std::numeric_limits<I>::is_signed;
    return b < 0 || b >= most ? (I)(most == BITS<I> ? 0 : a >> (most - (most == BITS<I>))) : (I)(a >> b);
}

// -- either ------------------------------------------------------------------------------------------------------------

template <typename T> INLINE T absolute(T x) { return x < 0 ? (T)-x : x; }
INLINE float absolute(float x) { return __builtin_fabsf(x); }
INLINE double absolute(double x) { return __builtin_fabs(x); }
template <typename T> INLINE T lesser(T a, T b) { return a < b || a != a ? a : b; }  // NaN if either is
template <typename T> INLINE T greater(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> INLINE T sign(T x) { return (T)((x > 0) - (x < 0)); }
template <typename T> INLINE T positive_part(T x) { return x <= 0 ? 0 : x; }

// -- floats ------------------------------------------------------------------------------------------------------------

template <typename F> INLINE F float_remainder(F a, F b) {
    const F remainder = fmod(a, b);
    return remainder != 0 && (b < 0) != (remainder < 0) ? remainder + b : remainder;
}
template <typename F> INLINE F float_quotient(F a, F b) {
    if (b == 0) return a / b;
    const F remainder = fmod(a, b);
    F quotient = (a - remainder) / b;
    if (remainder != 0 && (b < 0) != (remainder < 0)) quotient -= 1;
    if (quotient == 0) return (F)__builtin_copysign(0.0, (double)(a / b));  // as torch: 0 divided by a negative number is -0
    const F below = floor(quotient);
    return quotient - below > (F)0.5 ? below + 1 : below;
}

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

template <typename F> INLINE F sigmoid(F x) { return 1 / (1 + exp_of(-x)); }
template <typename F> INLINE F silu(F x) { return x / (1 + exp_of(-x)); }
template <typename F> INLINE F softplus(F x) { return x > 20 ? x : log1p(exp_of(x)); }
template <typename F> INLINE F gelu(F x) { return x * (F)0.5 * (1 + erf(x * (F)0.70710678118654752440)); }
template <typename F> INLINE F gelu_tanh(F x) {
    return (F)0.5 * x * (1 + tanh_of((F)0.79788456080286535588 * (x + (F)0.044715 * x * x * x)));
}
template <typename F> INLINE F logaddexp(F a, F b) {  // equal ones may be infinite
    const F largest = greater(a, b);
    return a == b ? largest + (F)0.69314718055994530942 : largest + log1p(exp_of(-absolute(a - b)));
}
template <typename F> INLINE F reciprocal_root(F x) { return 1 / sqrt(x); }
template <typename F> INLINE F rounded(F x) { return rint(x); }  // ties to even
