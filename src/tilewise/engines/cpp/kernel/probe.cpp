// One product of pairs, to check that it runs and is right. The calling process may be killed here: see pairs.py.
#ifdef __AVX512BF16__  // which AMX's kernels use, too
#include <sys/syscall.h>
#include <unistd.h>
#include "pairs.h"

extern "C" __attribute__((visibility("default"))) int tilewise_try_pairs() {
#ifdef MATRIX_UNIT
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;  // requests the tile registers, as pairs.py does
#endif
    static bfloat a[32 * 32];
    static u32 b[16 * 32];
    static float c[32 * 32];
    for (int k = 0; k < 32 * 32; k++) a[k].bits = 0x3f80;         // 1
    for (int k = 0; k < 16 * 32; k++) b[k] = 0x40003f80;          // 1 and 2
    const PairUnit unit;
    pair_product(a, 32, b, 32, c, 32, 32, 32, 32, false);
    for (int k = 0; k < 32 * 32; k++)
        if (c[k] != 48.0f) return 0;  // 16 pairs of 1 * 1 + 1 * 2
    return 1;
}
#else
extern "C" __attribute__((visibility("default"))) int tilewise_try_pairs() { return 0; }
#endif
