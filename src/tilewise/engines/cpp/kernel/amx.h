// pair_product (pairs.h) on AMX, the processor's matrix unit: C[16 x 16] += A[16 x 32] B[32 x 16] in one instruction.
#pragma once
#include "tiles.h"

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, bytes) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(bytes) : "memory")
#define TILE_STORE(t, to, bytes) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(bytes) : "memory")
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Configures eight tile registers of 16 rows of 64 bytes, until the end of the scope.
class PairUnit {
  public:
    PairUnit() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            u16 bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~PairUnit() { asm volatile("tilerelease" ::); }
};

// Two sums at a time, and every register is cleared after its last use: a cleared register needs no physical one, of which there are few more than
// eight, and fewer while the sibling hyperthread holds tiles too. When they run out, loads wait for earlier products.
inline void pair_product(const bfloat* a, i64 a_row, const u32* b, i64 b_row, float* c, i64 c_row, i64 n_rows, i64 n_columns, i64 n_k, bool add) {
    const i64 a_bytes = a_row * 2, b_bytes = b_row * 4, c_bytes = c_row * 4;
    for (i64 i = 0; i < n_rows; i += 16)
        for (i64 x = 0; x < n_columns; x += STEP) {
            float* target = c + i * c_row + x;
            if (add) {
                TILE_LOAD(0, target, c_bytes);
                TILE_LOAD(1, target + 16, c_bytes);
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
            }
            for (i64 k = 0; k < n_k; k += STEP) {
                TILE_LOAD(2, a + i * a_row + k, a_bytes);
                TILE_LOAD(3, b + k / 2 * b_row + x, b_bytes);
                TILE_MULTIPLY(0, 2, 3);
                TILE_ZERO(3);
                TILE_LOAD(4, b + k / 2 * b_row + x + 16, b_bytes);
                TILE_MULTIPLY(1, 2, 4);
                TILE_ZERO(4);
                TILE_ZERO(2);
            }
            TILE_STORE(0, target, c_bytes);
            TILE_ZERO(0);
            TILE_STORE(1, target + 16, c_bytes);
            TILE_ZERO(1);
        }
}
