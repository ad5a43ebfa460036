// Vectors of the machine's width, by the vector extensions that GCC and clang share.
#pragma once
#include <stdint.h>
#include <limits>

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

template <typename T> INLINE vec<T> load(const T* p) { vec<T> v; __builtin_memcpy(&v, p, sizeof v); return v; }
template <typename T> INLINE void store(T* p, vec<T> v) { __builtin_memcpy(p, &v, sizeof v); }
template <typename T> INLINE vec<T> broadcast(T x) { return x - vec<T>{}; }  // x in every lane; x - 0 preserves NaN and the sign of zero
