// From the fused qkv product to heads, on a CPU with AVX2, in float32: QK-norm where the model has one, and the half-rotation.
// A row's bits depend on the row alone.
#include <cmath>

#include "../avx2.h"

struct Problem {
    const float* qkv;       // rows of [H + 2 G, d], `stride` apart
    const float* cosine;    // [T, d / 2]
    const float* sine;
    const float* q_norm;    // [d], or null
    const float* k_norm;
    float* q;               // [T, H, d]
    float* k;               // [T, G, d]
    int64_t stride;
    float eps;
    int T, H, G, d, threads;
};

constexpr int FEW = 16;     // rows that do not pay for waking threads

// 1 / sqrt(mean(x^2) + eps) of d numbers, a multiple of 16.
static INLINE __m256 inverse_rms(const float* x, int d, float eps) {
    __m256 even = _mm256_setzero_ps(), odd = even;
    for (int j = 0; j < d; j += 16) {
        const __m256 a = _mm256_loadu_ps(x + j), b = _mm256_loadu_ps(x + j + 8);
        even = _mm256_fmadd_ps(a, a, even);
        odd = _mm256_fmadd_ps(b, b, odd);
    }
    return _mm256_set1_ps(1 / std::sqrt(add_lanes(_mm256_add_ps(even, odd)) / d + eps));
}

// One head, d a multiple of 16: the halves a, b become a cos - b sin, b cos + a sin.
static INLINE void rotate(const float* x, const float* norm, const float* cosine, const float* sine, float* out, int d,
                          float eps) {
    const int half = d / 2;
    const __m256 inverse = norm ? inverse_rms(x, d, eps) : _mm256_setzero_ps();
    for (int j = 0; j < half; j += 8) {
        __m256 a = _mm256_loadu_ps(x + j), b = _mm256_loadu_ps(x + half + j);
        if (norm) {
            a = _mm256_mul_ps(_mm256_mul_ps(a, inverse), _mm256_loadu_ps(norm + j));
            b = _mm256_mul_ps(_mm256_mul_ps(b, inverse), _mm256_loadu_ps(norm + half + j));
        }
        const __m256 c = _mm256_loadu_ps(cosine + j), s = _mm256_loadu_ps(sine + j);
        _mm256_storeu_ps(out + j, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(out + half + j, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
}

static void rotate_row(const Problem& p, int t) {
    const float *x = p.qkv + t * p.stride, *c = p.cosine + t * (int64_t)(p.d / 2), *s = p.sine + t * (int64_t)(p.d / 2);
    for (int h = 0; h < p.H; ++h) rotate(x + h * p.d, p.q_norm, c, s, p.q + ((int64_t)t * p.H + h) * p.d, p.d, p.eps);
    x += p.H * p.d;
    for (int g = 0; g < p.G; ++g) rotate(x + g * p.d, p.k_norm, c, s, p.k + ((int64_t)t * p.G + g) * p.d, p.d, p.eps);
}

extern "C" void avx2_heads(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->T, FEW, [p](int t) { rotate_row(*p, t); });
}
