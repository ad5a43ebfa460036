// What generated functions are written with, besides the operations themselves (engines/cxx/operations.h). Scores of 16-bit inputs do not see the last bits:
// exponentials and tanh are the hardware's own.

#define INLINE DEV
#pragma nv_diag_suppress 177                                    // generated functions declare what they do not use

typedef int i32;
typedef long long i64;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef short int16_t;

template <typename T> DEV T infinite() { return (T)INF; }
template <typename T> DEV T not_a_number() { return (T)QUIET_NAN; }

DEV float exp_of(float x) { return exp2_of(x * LOG2E); }
DEV double exp_of(double x) { return exp(x); }
DEV float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV double tanh_of(double x) { return tanh(x); }
DEV float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEV float to_half(float x) {
    half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return widen(y);
}
DEV float to_bfloat(float x) {
    bfloat y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return widen(y);
}

// An element of a captured tensor, which nobody writes meanwhile.
template <typename T> DEV T fetch(const T* p) { return __ldg(p); }
DEV half fetch(const half* p) { return half{__ldg(&p->bits)}; }
DEV bfloat fetch(const bfloat* p) { return bfloat{__ldg(&p->bits)}; }

