// Torch's meaning of the operations that C++ has no operator or function for, in forms that vectorise in a loop over lanes.
//
// Whoever includes this has defined INLINE, i64, the mathematical functions by their one name for float and double (floor, exp2, log1p, ...) and exp_of and
// tanh_of, which are as exact as it needs (cpp/kernel/program.h, cuda/kernels/program.cuh).
#pragma once

constexpr i64 LOWEST = -9223372036854775807LL - 1;
template <typename I> constexpr bool SIGNED = (I)-1 < (I)0;

// -- conversions -------------------------------------------------------------------------------------------------------

// Numbers outside the range, and NaN, become the lowest integer before they are cut to fewer bits. Those next to 0 become 0 by hand: of an integer that is
// made a float again, compilers make trunc(x), which is -0 for them.
template <typename I, typename F> INLINE I to_integer(F x) {
    const bool holds = x >= (F)-9223372036854775808.0 && x < (F)9223372036854775808.0;
    const bool whole = holds && (x >= 1 || x <= -1);
    return (I)(holds ? (i64)(whole ? x : 0) : LOWEST);
}

// Where element `index` of a dimension lies: negative ones count from the end, others are kept inside.
template <typename I> INLINE I inside(I index, i64 size) {
    const I n = (I)size, from_start = index < 0 ? index + n : index, low = from_start < 0 ? 0 : from_start;
    return low < n ? low : n - 1;
}

// -- integers (signed arithmetic wraps) -----------------------------------------------------------------------

template <typename I> INLINE I integer_quotient(I a, I b) {  // rounded down; by 0 it is 0, in place of a trap
    if (b == 0) return 0;
    if (SIGNED<I> && b == (I)-1) return (I)(0 - a);  // the lowest number has no opposite: it wraps
    const I quotient = a / b;
    return (I)(quotient - ((a % b != 0) & ((a < 0) != (b < 0))));
}
template <typename I> INLINE I integer_remainder(I a, I b) {  // has the divisor's sign
    if (b == 0 || (SIGNED<I> && b == (I)-1)) return 0;
    const I remainder = a % b;
    return (I)(remainder + ((remainder != 0) & ((remainder < 0) != (b < 0)) ? b : 0));
}
template <typename I> INLINE I truncated_remainder(I a, I b) {  // has the dividend's sign
    return b == 0 || (SIGNED<I> && b == (I)-1) ? (I)0 : (I)(a % b);
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
    constexpr int most = BITS<I> - SIGNED<I>;
    return b < 0 || b >= most ? (I)(most == BITS<I> ? 0 : a >> (most - (most == BITS<I>))) : (I)(a >> b);
}

// -- either ------------------------------------------------------------------------------------------------------------

template <typename T> INLINE T absolute(T x) { return x < 0 ? (T)-x : x; }
INLINE float absolute(float x) { return fabs(x); }
INLINE double absolute(double x) { return fabs(x); }
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
    if (quotient == 0) return copysign((F)0, a / b);  // as torch: 0 divided by a negative number is -0
    const F below = floor(quotient);
    return quotient - below > (F)0.5 ? below + 1 : below;
}

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
