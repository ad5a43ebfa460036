// Vectors of the machine's width, written with the vector extensions that GCC and clang share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

typedef int64_t i64;
typedef int32_t i32;
typedef uint32_t u32;
typedef uint16_t u16;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, BLOCK_ROWS = 6, BLOCK_VECTORS = 4;  // 24 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, BLOCK_ROWS = 6, BLOCK_VECTORS = 2;  // 12 of 16
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, BLOCK_ROWS = 6, BLOCK_VECTORS = 4;  // 24 of 32
#else
constexpr int VECTOR_BYTES = 16, BLOCK_ROWS = 6, BLOCK_VECTORS = 2;  // 12 of 16
#endif

template <typename T> struct vector_of;
template <> struct vector_of<float> { typedef float type __attribute__((vector_size(VECTOR_BYTES))); };
template <> struct vector_of<double> { typedef double type __attribute__((vector_size(VECTOR_BYTES))); };
template <typename T> using vec = typename vector_of<T>::type;
template <typename T> constexpr int WIDTH = VECTOR_BYTES / sizeof(T);

template <typename T> INLINE vec<T> load(const T* p) { vec<T> v; std::memcpy(&v, p, sizeof v); return v; }
template <typename T> INLINE void store(T* p, vec<T> v) { std::memcpy(p, &v, sizeof v); }
template <typename T> INLINE vec<T> spread(T x) { return x - vec<T>{}; }  // x in every lane; x - 0 is x, its NaN and sign of zero included

// a * b + c, rounded once where the machine can: programs are compiled without contraction, products ask for it here.
INLINE vec<float> multiply_add(vec<float> a, vec<float> b, vec<float> c) {
#if defined(__AVX512F__)
    return (vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE vec<double> multiply_add(vec<double> a, vec<double> b, vec<double> c) {
#if defined(__AVX512F__)
    return (vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    return (vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
INLINE double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}
