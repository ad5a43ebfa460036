// One product on the matrix unit, to see whether it runs and is right. The process that calls this may end here.
#include "amx.h"

extern "C" __attribute__((visibility("default"))) int tilewise_try_matrix_unit() {
    if (!amx_allowed()) return 0;
    static bfloat a[32 * 32];
    static u32 b[16 * 32];
    static float c[32 * 32];
    for (int k = 0; k < 32 * 32; k++) a[k].bits = 0x3f80;         // 1
    for (int k = 0; k < 16 * 32; k++) b[k] = 0x40003f80;          // 1 and 2
    const MatrixUnit unit;
    matrix_product(a, 32, b, 32, c, 32, 32, 32, 32, false);
    for (int k = 0; k < 32 * 32; k++)
        if (c[k] != 48.0f) return 0;  // 16 pairs of 1 * 1 + 1 * 2
    return 1;
}
