// Attention over a paged cache on a CPU with AVX2, in float32: of rows whose new key and value go to their slot first, or
// of any queries over keys that lie there already.
//
// A task is a key-value head of a row, and up to four of its query heads share every key and value that is read. Keys
// come in blocks of 64 with a running maximum (Milakov and Gimelshein 2018), so nothing grows with the context. What a
// row gives depends on nothing but the row.
#include <cmath>
#include <cstring>

#include "../avx2.h"

constexpr int BLOCK = 64;   // keys
constexpr int HEADS = 4;    // query heads at a time
constexpr int WIDEST = 256; // numbers of a head

struct Problem {
    const float* q;         // [B, H, d]
    const float* k;         // rows of [G, d], k_stride apart; null: all keys are in the cache
    const float* v;
    float* keys;            // [pages, P, G, d]
    float* values;
    const int32_t* table;   // rows of pages, table_stride apart
    const int32_t* rows;    // of the table, one a query; null: its own
    const int32_t* lengths; // keys of a row, the new one's included; 0: nothing is written, the output is 0
    const float* sinks;     // [H], logits without a value; null: none
    float* out;             // [B, H, d]
    int64_t k_stride, v_stride, table_stride;
    float scale;
    int B, H, G, d, P, window, threads;
};

static INLINE float largest(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// R query heads of a row over its keys: running maximum, sum of weights, and weighted values.
template <int R> struct State {
    alignas(32) float q[R][WIDEST], total[R][WIDEST];
    float most[R], weight[R];
    alignas(32) float p[R][BLOCK];
};

// p = q . k of a block, whose keys are at `from` of `keys`; -inf behind `count`. Fetches the values, which are next.
template <int R>
static INLINE void score(State<R>& s, const float* keys, const float* values, const int64_t* from, int count, int d) {
    __m256 dot[R][BLOCK];
    const int whole = (count + 7) / 8 * 8;
    for (int t = 0; t < whole; t += 2) {
        const float *a = keys + from[t], *b = keys + from[t + 1];
        __m256 first[R], second[R];
        for (int r = 0; r < R; ++r) first[r] = second[r] = _mm256_setzero_ps();
        for (int j = 0; j < d; j += 16) {
            _mm_prefetch((const char*)(values + from[t] + j), _MM_HINT_T0);
            _mm_prefetch((const char*)(values + from[t + 1] + j), _MM_HINT_T0);
        }
        for (int j = 0; j < d; j += 8) {
            const __m256 x = _mm256_loadu_ps(a + j), y = _mm256_loadu_ps(b + j);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256 q = _mm256_load_ps(s.q[r] + j);
                first[r] = _mm256_fmadd_ps(x, q, first[r]);
                second[r] = _mm256_fmadd_ps(y, q, second[r]);
            }
        }
        for (int r = 0; r < R; ++r) dot[r][t] = first[r], dot[r][t + 1] = second[r];
    }
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < whole; t += 8) _mm256_store_ps(s.p[r] + t, add_lanes(dot[r] + t, 1));
        for (int t = count; t < whole; ++t) s.p[r][t] = -INFINITY;
    }
}

// p = e^(p - maximum), and what there was before under the new maximum.
template <int R> static INLINE void weigh(State<R>& s, int count, int d) {
    for (int r = 0; r < R; ++r) {
        __m256 most = _mm256_set1_ps(s.most[r]), weight = _mm256_setzero_ps();
        for (int t = 0; t < count; t += 8) most = _mm256_max_ps(most, _mm256_load_ps(s.p[r] + t));
        const float now = largest(most), old = std::exp(s.most[r] - now);
        for (int t = 0; t < count; t += 8) {
            const __m256 p = exponential(_mm256_sub_ps(_mm256_load_ps(s.p[r] + t), _mm256_set1_ps(now)));
            _mm256_store_ps(s.p[r] + t, p);
            weight = _mm256_add_ps(weight, p);
        }
        s.weight[r] = s.weight[r] * old + add_lanes(weight);
        s.most[r] = now;
        for (int j = 0; j < d; j += 8)
            _mm256_store_ps(s.total[r] + j, _mm256_mul_ps(_mm256_load_ps(s.total[r] + j), _mm256_set1_ps(old)));
    }
}

// total += p v of a block, 8 WIDTH numbers of the head from j on.
template <int R, int WIDTH>
static INLINE void gather(State<R>& s, const float* values, const int64_t* from, int count, int j) {
    __m256 total[R][WIDTH];
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < WIDTH; ++w) total[r][w] = _mm256_load_ps(s.total[r] + j + 8 * w);
    for (int t = 0; t < count; ++t) {
        __m256 v[WIDTH];
        for (int w = 0; w < WIDTH; ++w) v[w] = _mm256_loadu_ps(values + from[t] + j + 8 * w);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256 p = _mm256_broadcast_ss(s.p[r] + t);
            for (int w = 0; w < WIDTH; ++w) total[r][w] = _mm256_fmadd_ps(p, v[w], total[r][w]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < WIDTH; ++w) _mm256_store_ps(s.total[r] + j + 8 * w, total[r][w]);
}

// Query heads head .. head + R - 1 of a row, which read key-value head g.
template <int R> static void attend(const Problem& p, int row, int g, int head) {
    State<R> s;
    const int length = p.lengths[row], d = p.d;
    const int32_t* pages = p.table + (p.rows ? p.rows[row] : row) * p.table_stride;
    const int64_t at = ((int64_t)row * p.H + head) * d;
    for (int r = 0; r < R; ++r) {
        s.most[r] = p.sinks ? p.sinks[head + r] : -INFINITY, s.weight[r] = p.sinks ? 1 : 0;
        for (int j = 0; j < d; ++j) s.q[r][j] = p.q[at + r * d + j] * p.scale, s.total[r][j] = 0;
    }
    const int begin = p.window > 0 && length > p.window ? length - p.window : 0;
    for (int first = begin; first < length; first += BLOCK) {
        const int count = least(BLOCK, length - first);
        int64_t from[BLOCK];
        for (int t = 0; t < BLOCK; ++t) {
            const int i = first + least(t, count - 1);
            from[t] = (((int64_t)pages[i / p.P] * p.P + i % p.P) * p.G + g) * d;
        }
        score(s, p.keys, p.values, from, count, d);
        weigh(s, count, d);
        int j = 0;
        for (; j + 16 <= d; j += 16) gather<R, 2>(s, p.values, from, count, j);
        for (; j < d; j += 8) gather<R, 1>(s, p.values, from, count, j);
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < d; ++j) p.out[at + r * d + j] = length > 0 ? s.total[r][j] / s.weight[r] : 0;
}

static void attend_heads(const Problem& p, int row, int g) {
    const int length = p.lengths[row], d = p.d, each = p.H / p.G;
    if (p.k && length > 0) {
        const int64_t page = p.table[row * p.table_stride + (length - 1) / p.P];
        const int64_t slot = ((page * p.P + (length - 1) % p.P) * p.G + g) * d;
        memcpy(p.keys + slot, p.k + row * p.k_stride + g * d, sizeof(float) * d);
        memcpy(p.values + slot, p.v + row * p.v_stride + g * d, sizeof(float) * d);
    }
    for (int r = 0; r < each; r += HEADS) switch (each - r) {
        case 1: attend<1>(p, row, g, g * each + r); break;
        case 2: attend<2>(p, row, g, g * each + r); break;
        case 3: attend<3>(p, row, g, g * each + r); break;
        default: attend<HEADS>(p, row, g, g * each + r);
    }
}

extern "C" void avx2_decode(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->B * p->G, 1, [p](int i) { attend_heads(*p, i / p->G, i % p->G); });
}
