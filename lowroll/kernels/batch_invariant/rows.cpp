// Rows on a CPU with AVX2, in float32: RMSNorm with the residual added before it, and silu(gate) * up. Every row is made by
// itself, and what is left of it behind the last whole vector by the same instructions as the rest: its bits depend on the
// row alone.
#include <cmath>

#include "../avx2.h"

struct Problem {
    const float* x;         // [T, D], rows `x_stride` apart; of a gate: [T, 2 D]
    const float* update;    // [T, D], rows `update_stride` apart, or null
    const float* weight;    // [D]
    float* sum;             // [T, D], or null where there is no update
    float* out;             // [T, D]
    int64_t x_stride, update_stride;
    float eps;
    int T, D, threads;
};

constexpr int FEW = 16;     // rows that do not pay for waking threads

// The lanes of a vector that are left of a row.
static INLINE __m256i lanes(int left) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

template <class Piece> static INLINE void each(int D, const Piece& piece) {
    for (int j = 0; j < D; j += 8) piece(j, lanes(D - j));
}

// sum = x + update, then sum / sqrt(mean(sum^2) + eps) * weight. Squares add up in 16 lanes.
static void norm(const Problem& p, int t) {
    const float *x = p.x + t * p.x_stride, *update = p.update ? p.update + t * p.update_stride : nullptr;
    float *sum = p.sum ? p.sum + (int64_t)t * p.D : nullptr, *out = p.out + (int64_t)t * p.D;
    __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    each(p.D, [&](int j, __m256i m) LAMBDA {
        __m256 v = _mm256_maskload_ps(x + j, m);
        if (update) {
            v = _mm256_add_ps(v, _mm256_maskload_ps(update + j, m));
            _mm256_maskstore_ps(sum + j, m, v);
        }
        __m256& total = squares[j / 8 % 2];
        total = _mm256_fmadd_ps(v, v, total);
    });
    const float mean = add_lanes(_mm256_add_ps(squares[0], squares[1])) / p.D;
    const __m256 inverse = _mm256_set1_ps(1 / std::sqrt(mean + p.eps));
    const float* made = update ? sum : x;
    each(p.D, [&](int j, __m256i m) LAMBDA {
        const __m256 v = _mm256_mul_ps(_mm256_maskload_ps(made + j, m), inverse);
        _mm256_maskstore_ps(out + j, m, _mm256_mul_ps(v, _mm256_maskload_ps(p.weight + j, m)));
    });
}

// silu(g) u = g s u with s = 1 / (1 + e^-g), by the power of -|g|, which never overflows.
static void gate(const Problem& p, int t) {
    const float *x = p.x + t * p.x_stride, *up = x + p.D;
    float* out = p.out + (int64_t)t * p.D;
    const __m256 one = _mm256_set1_ps(1), sign = _mm256_set1_ps(-0.0f);
    each(p.D, [&](int j, __m256i m) LAMBDA {
        const __m256 g = _mm256_maskload_ps(x + j, m);
        const __m256 e = exponential(_mm256_or_ps(g, sign));
        const __m256 above = _mm256_blendv_ps(one, e, g);   // e^-|g| where g is negative
        const __m256 silu = _mm256_mul_ps(g, _mm256_div_ps(above, _mm256_add_ps(one, e)));
        _mm256_maskstore_ps(out + j, m, _mm256_mul_ps(silu, _mm256_maskload_ps(up + j, m)));
    });
}

extern "C" void invariant_norm(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->T, FEW, [p](int t) { norm(*p, t); });
}

extern "C" void invariant_gate(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->T, FEW, [p](int t) { gate(*p, t); });
}
