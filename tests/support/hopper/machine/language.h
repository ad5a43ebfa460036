// What CUDA C++ has and C++ has not.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "machine.h"

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __cvta_generic_to_shared(name) hopper::window()  // the only array there is

#define threadIdx hopper::place->thread
#define blockIdx hopper::place->block
#define gridDim hopper::place->grid

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

template <typename To, typename From> inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }

inline float __fmul_rn(float x, float y) { return x * y; }

template <typename T> inline T __ldg(const T* p) { return *p; }
inline u32 atomicInc(u32* at, u32 most) { return hopper::count_up(at, most); }

inline void __syncthreads() { hopper::barrier_of_all(); }
inline void __syncwarp() { hopper::meet(); }
inline bool __any_sync(u32, bool value) { return hopper::any(value); }
template <typename T> inline T __shfl_sync(u32, T value, u32 lane) { return bits_as<T>(hopper::shuffle(bits_as<u32>(value), lane)); }
template <typename T> inline T __shfl_xor_sync(u32, T value, u32 lanes) {
    return bits_as<T>(hopper::shuffle(bits_as<u32>(value), (threadIdx.x % 32) ^ lanes));
}
