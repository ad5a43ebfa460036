// The C++ kernels against attention written out in double, for one element type (-DELEMENT=...), meant to be run under sanitizers and for many processors.
// A causal mask and a score of two loads stand in for generated functions. Prints what differs; ends with 1 if anything does.
#include "forward.cpp"
namespace back {
#include "backward.cpp"
}
#include "pool.cpp"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <initializer_list>

enum Way { ROWS, PANELS, DECODING };  // how the forward reads keys and values
static const char* const NAME[] = {"rows", "panels", "decoding"};

struct Shape {
    i64 batch, heads, kv_heads, n_q, n_kv, d, dv;
    bool masked;
    i64 threads;
};

static unsigned state = 1;
static double number() {
    state = state * 1664525u + 1013904223u;
    return (double)(state >> 8) / (1 << 23) - 1.0;
}

struct Array {  // (batch, heads, length, dim), rows one element apart from each other so that strides differ from sizes
    i64 heads, length, dim;
    ELEMENT* data;
    Array(i64 b, i64 h, i64 n, i64 d) : heads(h), length(n), dim(d), data(new ELEMENT[b * h * n * (d + 1)]) {
        for (i64 k = 0; k < b * h * n * (d + 1); k++) narrow((real)number(), data[k]);
    }
    ~Array() { delete[] data; }
    double at(i64 b, i64 h, i64 i, i64 d) const { return widen(data[((b * heads + h) * length + i) * (dim + 1) + d]); }
    Tensor tensor() const { return {data, {heads * length * (dim + 1), length * (dim + 1), dim + 1, 1}}; }
};

static void causal(const Program*, i64, i64, i64 first, i64 rows, i64 first_lane, i64 last_lane, real* tile) {
    for (i64 r = 0; r < rows; r++)
        for (i64 l = 0; l < LANES; l++)
            if (at_most(first_lane + l, last_lane) < first + r) tile[r * LANES + l] = -INFINITE<real>;
}

static void causal_by_key(const Program*, i64, i64, i64 first, i64 rows, i64 first_lane, i64 last_lane, real* tile) {
    for (i64 r = 0; r < rows; r++)
        for (i64 l = 0; l < LANES; l++)
            if (first + r < at_most(first_lane + l, last_lane)) tile[r * LANES + l] = -INFINITE<real>;
}

static double worst = 0;
static void expect(double found, double wanted) {
    const double off = fabs(found - wanted) / (1 + fabs(wanted));
    if (!(off <= worst)) worst = off;
}

static void check(const Shape& s, Way way) {
    Array q(s.batch, s.heads, s.n_q, s.d), k(s.batch, s.kv_heads, s.n_kv, s.d), v(s.batch, s.kv_heads, s.n_kv, s.dv);
    Array out(s.batch, s.heads, s.n_q, s.dv), dout(s.batch, s.heads, s.n_q, s.dv);
    const i64 rows = s.batch * s.heads * s.n_q, tiles = (s.n_q + LANES - 1) / LANES, key_tiles = (s.n_kv + KEYS - 1) / KEYS;
    real* lse = new real[rows];
    real* max_score = new real[rows];
    const double scale = 1 / sqrt((double)s.d);
    // the map of a causal mask: every tile is partial
    i32 *offsets = new i32[tiles + 1], *start = new i32[tiles], *count = new i32[tiles], *order = new i32[tiles + key_tiles], *none = new i32[tiles + key_tiles + 1]();
    i32 *t_offsets = new i32[key_tiles + 1], *t_start = new i32[key_tiles], *t_count = new i32[key_tiles];
    for (i64 i = 0; i < tiles + key_tiles; i++) order[i] = (i32)(i < tiles ? i : i - tiles);
    for (i64 i = 0; i <= tiles; i++) offsets[i] = (i32)i;
    for (i64 i = 0; i < tiles; i++) start[i] = 0, count[i] = (i32)key_tiles;
    for (i64 i = 0; i <= key_tiles; i++) t_offsets[i] = (i32)i;
    for (i64 i = 0; i < key_tiles; i++) t_start[i] = 0, t_count[i] = (i32)tiles;

    Forward f;
    memset((void*)&f, 0, sizeof f);
    Problem& p = f.problem;
    p = Problem{tilewise_run, s.threads, s.batch, s.heads, s.kv_heads, s.n_q, s.n_kv, s.d, s.dv, q.tensor(), k.tensor(), v.tensor(), {}, {}, {}, nullptr, scale, 1.0, 0, 0};
    p.schedule.rows = tiles, p.schedule.tile = LANES, p.schedule.other_tile = KEYS;
    if (s.masked) {
        p.schedule.order = order;
        p.schedule.partial = {offsets, start, count};
        p.schedule.full = {none, nullptr, nullptr};
        p.mask.by_query = (void*)causal;
        p.mask.by_key = (void*)causal_by_key;
    }
    f.out = out.tensor();
    real *k_panels = new real[s.batch * s.kv_heads * key_tiles * KEYS * s.d], *v_panels = new real[s.batch * s.kv_heads * key_tiles * KEYS * s.dv];
    uint8_t* finite = new uint8_t[s.batch * s.kv_heads * key_tiles];
    if (way == PANELS) f.packed = {k_panels, v_panels, finite};
    f.splits = 3;
    real* split_results = new real[f.splits * rows * (s.dv + 2)];
    f.split_results = split_results;
    for (bool rows_are_wanted : {false, true}) {
        f.lse = rows_are_wanted ? lse : nullptr;
        f.max_score = rows_are_wanted ? max_score : nullptr;
        if (way == DECODING)
            tilewise_decode(&f);
        else
            tilewise_forward(&f);
    }

    const i64 blocks = tiles, dp = padded(s.d, 32), dvp = padded(s.dv, 32);
    Backward b;
    memset((void*)&b, 0, sizeof b);
    b.problem = p;
    b.problem.schedule.rows = key_tiles, b.problem.schedule.tile = KEYS, b.problem.schedule.other_tile = LANES;
    if (s.masked) b.problem.schedule.order = order + tiles, b.problem.schedule.partial = {t_offsets, t_start, t_count};
    b.out = out.tensor();
    b.grad_out = dout.tensor();
    b.lse = lse;
    real* delta = new real[rows];
    real *q_lanes = new real[s.batch * s.heads * blocks * s.d * LANES], *do_lanes = new real[s.batch * s.heads * blocks * s.dv * LANES];
    real *q_rows = new real[s.batch * s.heads * blocks * LANES * dp], *do_rows = new real[s.batch * s.heads * blocks * LANES * dvp];
    b.chunks = at_least(1, at_most(2, key_tiles));
    real* dq_lanes = new real[b.chunks * s.batch * s.heads * blocks * dp * LANES];
    uint8_t* dq_written = new uint8_t[b.chunks * s.batch * s.heads * blocks]();
    ELEMENT *dq = new ELEMENT[rows * s.d], *dk = new ELEMENT[s.batch * s.kv_heads * s.n_kv * s.d], *dv = new ELEMENT[s.batch * s.kv_heads * s.n_kv * s.dv];
    b.delta = delta, b.blocks = blocks, b.blocks_per_tile = 1, b.q_lanes = q_lanes, b.do_lanes = do_lanes, b.q_rows = q_rows, b.do_rows = do_rows;
    b.dq_lanes = dq_lanes, b.dq_written = dq_written, b.dq = dq, b.dk = dk, b.dv = dv, b.groups = b.chunks * s.batch * s.kv_heads;
    back::tilewise_backward(&b);

    worst = 0;
    const i64 ratio = s.heads / s.kv_heads;
    double *want_dk = new double[s.batch * s.kv_heads * s.n_kv * s.d](), *want_dv = new double[s.batch * s.kv_heads * s.n_kv * s.dv](), *w = new double[s.n_kv], *dw = new double[s.n_kv];
    for (i64 n = 0; n < rows; n++) {
        const i64 bi = n / s.n_q / s.heads, h = n / s.n_q % s.heads, i = n % s.n_q, hk = h / ratio;
        double total = 0, mean = 0;
        for (i64 j = 0; j < s.n_kv; j++) {
            w[j] = dw[j] = 0;
            for (i64 d = 0; d < s.d; d++) w[j] += q.at(bi, h, i, d) * k.at(bi, hk, j, d) * scale;
            for (i64 d = 0; d < s.dv; d++) dw[j] += dout.at(bi, h, i, d) * v.at(bi, hk, j, d);
            w[j] = s.masked && j > i ? 0 : exp(w[j]);
            total += w[j];
        }
        for (i64 j = 0; j < s.n_kv; j++) w[j] /= total, mean += w[j] * dw[j];
        expect(lse[n], log(total));
        for (i64 d = 0; d < s.dv; d++) {
            double sum = 0;
            for (i64 j = 0; j < s.n_kv; j++) sum += w[j] * v.at(bi, hk, j, d), want_dv[((bi * s.kv_heads + hk) * s.n_kv + j) * s.dv + d] += w[j] * dout.at(bi, h, i, d);
            expect(out.at(bi, h, i, d), sum);
        }
        for (i64 d = 0; d < s.d; d++) {
            double sum = 0;
            for (i64 j = 0; j < s.n_kv; j++) {
                const double ds = w[j] * (dw[j] - mean) * scale;
                sum += ds * k.at(bi, hk, j, d);
                want_dk[((bi * s.kv_heads + hk) * s.n_kv + j) * s.d + d] += ds * q.at(bi, h, i, d);
            }
            expect(widen(dq[n * s.d + d]), sum);
        }
    }
    for (i64 x = 0; x < s.batch * s.kv_heads * s.n_kv * s.d; x++) expect(widen(dk[x]), want_dk[x]);
    for (i64 x = 0; x < s.batch * s.kv_heads * s.n_kv * s.dv; x++) expect(widen(dv[x]), want_dv[x]);
    delete[] lse, delete[] max_score, delete[] offsets, delete[] start, delete[] count, delete[] order, delete[] none, delete[] t_offsets, delete[] t_start, delete[] t_count;
    delete[] delta, delete[] q_lanes, delete[] do_lanes, delete[] q_rows, delete[] do_rows, delete[] dq_lanes, delete[] dq_written, delete[] dq, delete[] dk, delete[] dv;
    delete[] k_panels, delete[] v_panels, delete[] finite, delete[] split_results;
    delete[] want_dk, delete[] want_dv, delete[] w, delete[] dw;
}

// The states of a causal mask's tiles, and of some of them in another order.
static bool classifies(const Shape& s) {
    const i64 tiles = (s.n_q + LANES - 1) / LANES, key_tiles = (s.n_kv + KEYS - 1) / KEYS, count = s.batch * s.heads * tiles * key_tiles;
    i64* numbers = new i64[count];
    uint8_t* states = new uint8_t[count];
    for (i64 n = 0; n < count; n++) numbers[n] = count - 1 - n;
    Program mask{};
    mask.by_query = (void*)causal;
    const Classify c{tilewise_run, s.threads, mask, s.heads, tiles, key_tiles, s.n_q, s.n_kv, numbers, states, count};
    tilewise_classify(&c);
    bool right = true;
    for (i64 n = 0; n < count; n++) {
        const i64 q0 = numbers[n] / key_tiles % tiles * LANES, kv0 = numbers[n] % key_tiles * KEYS;
        const i64 q_last = at_most(q0 + LANES, s.n_q) - 1, kv_last = at_most(kv0 + KEYS, s.n_kv) - 1;
        right &= states[n] == (q_last < kv0 ? EMPTY : q0 >= kv_last ? FULL : PARTIAL);
    }
    delete[] numbers, delete[] states;
    return right;
}

int main() {
    const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1, false, 1},      {2, 2, 1, 5, 70, 8, 24, false, 3},     {1, 2, 2, 65, 64, 16, 16, true, 2},
                            {1, 4, 2, 130, 129, 40, 17, true, 4}, {1, 1, 1, 200, 300, 64, 64, false, 3}, {2, 3, 1, 64, 191, 33, 5, true, 2}};
    const double allowed = sizeof(ELEMENT) == 2 ? 0.02 : sizeof(ELEMENT) == 4 ? 1e-5 : 1e-12;
    int wrong = 0;
    for (const Shape& s : {shapes[0], shapes[3], Shape{2, 3, 1, 200, 300, 8, 8, true, 3}}) {
        if (classifies(s)) continue;
        wrong = 1;
        printf("WRONG states of tiles, n_q %ld n_kv %ld\n", (long)s.n_q, (long)s.n_kv);
    }
    for (const Shape& s : shapes)
        for (Way way : {ROWS, PANELS, DECODING}) {
            check(s, way);
            const bool bad = !(worst <= allowed);
            wrong |= bad;
            printf("%s n_q %ld n_kv %ld d %ld dv %ld, %s: %.1e of %.1e\n", bad ? "WRONG" : "right", (long)s.n_q, (long)s.n_kv, (long)s.d, (long)s.dv, NAME[way],
                   worst, allowed);
        }
    return wrong;
}
