"""Index mappings of backward.cu in numpy: accumulators -> stmatrix.trans -> what wgmma reads; dQ fragments -> staging / cluster halves -> postprocess."""
import numpy as np
rng = np.random.default_rng(0)

def acc(mat):                      # 64 x N accumulator -> regs[thread][N/2]: PTX m64nN D fragment
    n = mat.shape[1]; r = np.zeros((128, n // 2), mat.dtype)
    for t in range(128):
        w, l = t // 32, t % 32
        for j in range(n // 8):
            for h in range(2):
                for e in range(2):
                    r[t, 4*j+2*h+e] = mat[16*w + l//4 + 8*h, 8*j + 2*(l % 4) + e]
    return r

def a_fragment(regs, i):           # PTX A fragment m64k16 of 16-bit: 4 regs of 2; regs [128][*][2]; returns 64 x 16
    m = np.zeros((64, 16), regs.dtype)
    for t in range(128):
        w, l = t // 32, t % 32
        for x in range(8):         # a0..a7: row l/4 (a0,a1,a4,a5) or +8 (a2,a3,a6,a7); col 2*(l%4)+x%2 (+8 for x >= 4)
            row = l // 4 + (8 if x in (2, 3, 6, 7) else 0)
            col = 2 * (l % 4) + x % 2 + (8 if x >= 4 else 0)
            m[16*w + row, col] = regs[t, 4*i + x // 2, x % 2]
    return m

for BM in (64, 80):
    # ---- P^T / dS^T as left operand: packed pairs
    ST = rng.integers(1, 30000, (64, BM))
    r = acc(ST); packed = r.reshape(128, BM // 4, 2)        # p[i] = (s[2i], s[2i+1])
    for i in range(BM // 16): assert (a_fragment(packed, i) == ST[:, 16*i:16*i+16]).all()
    # ---- dS to shared memory by both consumers
    smem = np.zeros(BM * 256 // 2, np.int64)                # 2-byte elements
    dS = rng.integers(1, 30000, (BM, 128))                  # [query][key]
    for wg in range(2):
        regs = acc(dS[:, 64*wg:64*wg+64].T).reshape(128, BM // 4, 2)
        for warp in range(4):
            to = np.zeros(32, int)
            for lane in range(32):
                row = (lane >> 4) * 8 + (lane & 7); unit = 2*warp + (lane >> 3 & 1)
                to[lane] = wg * (BM*128) + row*128 + ((unit ^ (lane & 7)) << 4)
            for i in range(BM // 16):
                for m in range(4):                          # matrix m: fragment row g = lane/4, columns 2c+e, in register 4i+m; transposed: column x goes to address of lane 8m+x
                    for lane in range(32):
                        for e in range(2):
                            g, x = lane // 4, 2 * (lane % 4) + e
                            at = to[8*m + x] + 2048*i + 2*g
                            smem[at // 2] = regs[32*warp + lane, 4*i + m, e]
                # banks: each matrix' eight rows of 16 bytes
                for m in range(4): assert len({(to[8*m+x] // 16) % 8 for x in range(8)}) == 8
    # wgmma B, K-major, 128-byte swizzle: element (n, k) of instruction i
    for i in range(8):
        start = i // 4 * (BM*128) + i % 4 * 32
        for n in range(BM):
            for k in range(16):
                linear = start + (n // 8) * 1024 + (n % 8) * 128 + k * 2
                swz = linear ^ ((linear >> 7 & 7) << 4)     # address bits 4-6 ^= bits 7-9 (tile base aligned to 1024)
                assert smem[swz // 2] == dS[n, 16*i + k], (BM, i, n, k)
    # ---- A = K^T, MN-major: K tile as TMA writes it [2 chunks][128 keys][64], swizzled
    K = rng.integers(1, 30000, (128, 128)); kt = np.zeros(128*128, np.int64)
    for key in range(128):
        for d in range(128):
            linear = d // 64 * 16384 + key*128 + d % 64 * 2
            kt[(linear ^ ((linear >> 7 & 7) << 4)) // 2] = K[key, d]
    for wg in range(2):
        for i in range(8):
            for k in range(16):
                for m in range(64):
                    linear = wg*16384 + i*2048 + (k // 8) * 1024 + (k % 8) * 128 + m*2
                    assert kt[(linear ^ ((linear >> 7 & 7) << 4)) // 2] == K[16*i + k, 64*wg + m]
    # ---- dQ^T [128 d][BM] -> sums in memory -> postprocess
    for cluster in (1, 2):
        NJ = BM // 8; OWN = NJ // cluster; part = OWN * 2048 // 4
        dqs = [rng.integers(1, 1000, (128, BM)) for _ in range(cluster)]     # of each program
        sums = np.zeros(BM * 128, np.int64)
        staging = np.zeros((cluster, 2, part), np.int64); incoming = np.zeros_like(staging)
        for rank in range(cluster):
            for wg in range(2):
                r = acc(dqs[rank][64*wg:64*wg+64])
                for t in range(128):
                    for j in range(OWN):
                        mine = j + (OWN * rank if cluster == 2 else 0)
                        staging[rank, wg, 512*j + 4*t: 512*j + 4*t + 4] = r[t, 4*mine:4*mine+4]
                        if cluster == 2:
                            other = j + OWN * (1 - rank)
                            incoming[1 - rank, wg, 512*j + 4*t: 512*j + 4*t + 4] = r[t, 4*other:4*other+4]
        for rank in range(cluster):
            for wg in range(2):
                at = wg * BM*64 + rank * OWN*512
                sums[at: at + part] += staging[rank, wg] + incoming[rank, wg]
        out = np.zeros((BM, 128), np.int64)
        for i in range(BM*32):
            wg, j, t = i // (BM*16), i % (BM*16) // 128, i % 128
            q, d = 8*j + 2*(t & 3), 64*wg + 16*(t // 32) + t % 32 // 4
            x = sums[4*i:4*i+4]
            out[q, d], out[q+1, d], out[q, d+8], out[q+1, d+8] = x
        assert (out == sum(dqs).T).all()
        # the store warp's walk in clusters: (32 j + lane) * 16 bytes and + 512, j = 0, 2, .., covers the part once
        seen = sorted((32*j + lane)*16 + 512*n for j in range(0, OWN*4, 2) for lane in range(32) for n in range(2))
        assert seen == list(range(0, part*4, 16)), (BM, cluster)
# ---- causal limits and work split
def work(S, BM, cluster, causal):
    q_tiles = -(-S // BM); units = -(-S // (128*cluster)); todo = {}
    for unit in range(units):
        for rank in range(cluster):
            tile = unit*cluster + rank; begin = unit*(cluster*128)//BM
            if causal: ms = range(begin, q_tiles)
            else: ms = [(begin % q_tiles + it) - (q_tiles if begin % q_tiles + it >= q_tiles else 0) for it in range(q_tiles)]
            assert len(ms) >= 1 and len(set(ms)) == len(ms)
            todo[tile] = set(ms)
    for n in range(S // 128 + (S % 128 > 0)):
        for m in range(q_tiles):
            needed = not causal or min(S, (m+1)*BM) - 1 >= n*128
            assert not needed or m in todo[n], (S, BM, n, m)
for S in (128, 256, 512, 1000, 1024, 1100, 2048, 8192):
    for BM in (64, 80):
        for cluster in (1, 2):
            for causal in (0, 1): work(S, BM, cluster, causal)
for first_key in (0, 64, 128, 320):
    for m0 in range(0, 480, 80):
        for warp in range(4):
            for lane in range(32):
                limit = first_key + (16*warp + lane//4 - 2*(lane & 3)) - m0
                for i in range(40):
                    key = first_key + 16*warp + lane//4 + 8*(i//2 % 2); q = m0 + 8*(i//4) + 2*(lane & 3) + i % 2
                    masked = (8*(i//4) + i % 2 < limit + 8*(i//2 % 2)) and m0 < first_key + 63
                    assert masked == (q < key)
# ---- heads and units: every (head, unit) once
for heads, units, group in ((128, 16, 16), (32, 64, 4), (16, 128, 2), (7, 5, 3), (3, 9, 3), (5, 4, 1)):
    got = set()
    for t in range(heads*units):
        first = t // (units*group) * group; inn = t - first*units; hs = min(group, heads - first)
        got.add((first + inn % hs, inn // hs)); assert inn // hs < units
    assert len(got) == heads*units
print("all index mappings agree")
