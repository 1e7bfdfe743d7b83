// float32 rows to three bytes a number, and the sums of their products to the rows' scale, on a CPU with AVX2.
// A row's bits depend on the row alone.
#include <cmath>
#include <vector>

#include "../avx2.h"

struct Problem {
    const float* x;         // split: rows of K, `stride` apart
    const float* scale;     // of each column, or null
    uint8_t* bytes;         // [3, M, K]: the highest first, with 128 added
    float* step;            // [M]
    const float* sums;      // join: [M, N]
    float* y;               // rows of N, `y_stride` apart: the product is added
    int64_t stride, y_stride;
    float most;
    int M, K, N, threads;
};

constexpr int FEW = 8;      // rows that do not pay for waking threads
constexpr int LANES = 32;   // numbers at a time

// The lowest bytes of 32 numbers, with 128 added.
static INLINE void store_bytes(uint8_t* out, const __m256i* q) {
    const __m256i mask = _mm256_set1_epi32(255);
    __m256i a[4];
    for (int i = 0; i < 4; ++i) a[i] = _mm256_and_si256(q[i], mask);
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a[0], a[1]), _mm256_packus_epi32(a[2], a[3]));
    const __m256i sorted = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)out, _mm256_xor_si256(sorted, _mm256_set1_epi8((char)128)));
}

static void split_row(const Problem& p, int m) {
    const int K = p.K, padded = (K + LANES - 1) / LANES * LANES;
    static thread_local std::vector<float> held;
    if ((int)held.size() < padded) held.resize(padded);
    float* v = held.data();
    const float* x = p.x + m * p.stride;
    for (int k = 0; k < K; ++k) v[k] = p.scale ? x[k] * p.scale[k] : x[k];
    for (int k = K; k < padded; ++k) v[k] = 0;
    __m256 most8 = _mm256_setzero_ps(), odd8 = most8;
    for (int k = 0; k < padded; k += 8) {
        const __m256 a = _mm256_loadu_ps(v + k);
        most8 = _mm256_max_ps(most8, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a));
        odd8 = _mm256_add_ps(odd8, _mm256_sub_ps(a, a));    // 0, or NaN
    }
    alignas(32) float lanes[16];
    _mm256_store_ps(lanes, most8);
    _mm256_store_ps(lanes + 8, odd8);
    float largest = 0, odd = 0;
    for (int i = 0; i < 8; ++i) largest = std::fmax(largest, lanes[i]), odd += lanes[i + 8];
    const float inverse = p.most / largest;
    const bool whole = odd == 0 && largest > 0 && inverse < INFINITY;
    p.step[m] = whole ? largest / p.most : odd;
    const __m256 inverse8 = _mm256_set1_ps(whole ? inverse : 0);
    const __m256i half = _mm256_set1_epi32(128);
    const int64_t size = (int64_t)p.M * K;
    uint8_t* out = p.bytes + (int64_t)m * K;
    uint8_t ends[3][LANES];
    for (int k = 0; k < K; k += LANES) {
        __m256i q[4];
        for (int i = 0; i < 4; ++i)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(v + k + 8 * i), inverse8));
        for (int part = 2; part >= 0; --part) {
            uint8_t* at = k + LANES <= K ? out + part * size + k : ends[part];
            store_bytes(at, q);
            if (at == ends[part])
                for (int i = k; i < K; ++i) out[part * size + i] = at[i - k];
            for (int i = 0; i < 4; ++i) q[i] = _mm256_srai_epi32(_mm256_add_epi32(q[i], half), 8);
        }
    }
}

static void join_row(const Problem& p, int m) {
    const float* sums = p.sums + (int64_t)m * p.N;
    float* y = p.y + m * p.y_stride;
    const float step = p.step[m];
    for (int n = 0; n < p.N; ++n) y[n] += step * sums[n];
}

extern "C" void limbs_split(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->M, FEW, [p](int m) { split_row(*p, m); });
}

extern "C" void limbs_join(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->M, FEW, [p](int m) { join_row(*p, m); });
}
