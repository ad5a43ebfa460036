// Rows that are not finite, once more, without products: of whole tiles these let a NaN or an infinity at a masked key reach every row (0 NaN is NaN).
//
// Slow, short and rarely run. A warp takes its rows one by one, and 32 keys at a time: a lane has a key for scores, and columns 2 lane + 64 c + e of V.

#if FP16
typedef half Element;
#else
typedef bfloat Element;
#endif

struct alignas(16) Eight { Element x[8]; };                     // TMA asks for rows that begin at 16 bytes, and head dims are multiples of 8
struct alignas(4) Pair { Element x[2]; };

// A tensor's head, found by the address in its tensor map.
DEV const Element* head_of(const TensorMap& map, const long long (&strides)[4], int map_address, int batch, int head) {
    const Element* start = *(const Element* const*)((const char*)&map + map_address);
    return start + batch * strides[0] + head * strides[1];
}

DEV float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}
DEV float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

// scale: into base 2; sink: in base 2, or -inf.
DEV void repair_row(const Args& a, int bh, int row, float scale, float sink) {
    int batch = bh / a.n_heads, head = bh % a.n_heads, kv_head = head / a.ratio, lane = threadIdx.x % 32;
    const Element* q = head_of(a.q, a.q_strides, a.map_address, batch, head) + row * a.q_strides[2];
    const Element* k = head_of(a.k, a.k_strides, a.map_address, batch, kv_head);
    const Element* v = head_of(a.v, a.v_strides, a.map_address, batch, kv_head);
#if BANDED
    int first = max(row + a.low, 0), stop = min(row + a.high, a.n_kv - 1) + 1;
#else
    int first = 0, stop = a.n_kv;
#endif
    float top = -INF, total = 0.0f, sum[2 * V_CHUNKS];          // of an online softmax; of this lane's columns
#pragma unroll
    for (int n = 0; n < 2 * V_CHUNKS; n++) sum[n] = 0.0f;
#pragma unroll 1
    for (int begin = first; begin < stop; begin += 32) {
        int count = min(stop - begin, 32);
        float x = -INF;
        if (lane < count) {
            const Element* line = k + (begin + lane) * a.k_strides[2];
            x = 0.0f;
#pragma unroll 1
            for (int n = 0; n < a.q_sizes[3]; n += 8) {
                Eight own = *(const Eight*)(q + n), other = *(const Eight*)(line + n);
#pragma unroll
                for (int j = 0; j < 8; j++) x = fmaf(widen(own.x[j]), widen(other.x[j]), x);
            }
            x = __fmul_rn(x, scale);                            // rounded before a maximum is taken off, which may be large
        }
        if (__any_sync(0xffffffff, !(x < INF))) {               // makes all of the row NaN: with NaN in its queries, a model's rows end here
            total = QUIET_NAN;
#pragma unroll
            for (int n = 0; n < 2 * V_CHUNKS; n++) sum[n] = QUIET_NAN;
            break;
        }
        float now = fmaxf(top, warp_max(x)), base = now == -INF ? 0.0f : now, weight = exp2_of(x - base), decay = exp2_of(top - base);
        top = now;
        total = total * decay + warp_sum(weight);
#pragma unroll
        for (int n = 0; n < 2 * V_CHUNKS; n++) sum[n] *= decay;
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            float w = __shfl_sync(0xffffffff, weight, i);
            bool attends = __shfl_sync(0xffffffff, x, i) != -INF;
            const Element* line = v + (begin + i) * a.v_strides[2] + 2 * lane;
#pragma unroll
            for (int c = 0; c < V_CHUNKS; c++) {
                Pair given = {};
                if (attends && 64 * c + 2 * lane < a.v_sizes[3]) given = *(const Pair*)(line + 64 * c);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float y = widen(given.x[e]);
                    sum[2 * c + e] += fabsf(y) < INF ? w * y : y;   // weights that have become 0 keep no infinity out
                }
            }
        }
    }
    if (SINKS) {
        float now = fmaxf(top, sink), base = now == -INF ? 0.0f : now, decay = exp2_of(top - base);
        total = total * decay + exp2_of(sink - base);
#pragma unroll
        for (int n = 0; n < 2 * V_CHUNKS; n++) sum[n] *= decay;
        top = base;
    }
    bool nothing = total == 0.0f;                               // to attend
    float factor = nothing ? 0.0f : 1.0f / total;
    if (lane == 0) a.lse[(size_t)bh * a.n_q + row] = nothing ? -INF : (top + log2_of(total)) * LN2;
    char* line = (char*)a.out + 2 * (batch * a.s_out_0 + head * a.s_out_1 + row * a.s_out_2);
#pragma unroll
    for (int c = 0; c < V_CHUNKS; c++) {
        int column = 64 * c + 2 * lane;
        if (column < a.v_sizes[3]) *(u32*)(line + 2 * column) = pack(sum[2 * c] * factor, sum[2 * c + 1] * factor);
    }
}

// Of a warp's 16 rows from `first` on: a thread's are 8 apart, and bit h of its `lost` says that the one of them is. Bounds of loops are known to be uniform, or
// ptxas takes the loop around for divergent, too, and keeps its addresses in vector registers.
DEV void repair(const Args& a, int bh, int first, u32 lost, float scale, float sink) {
    __syncwarp();                                               // what was stored of these rows is overwritten by other threads
    first = uniform(first);
#pragma unroll 1
    for (int i = 0; i < 16; i++)
        if (uniform(__shfl_sync(0xffffffff, lost, i % 8 * 4) >> i / 8 & 1)) repair_row(a, bh, first + i, scale, sink);
}
