// One token of the gated delta rule for each row (model/recurrence.py), on a CPU with AVX2: the state of a head is read from
// memory once and written once. A row's bits depend on the row alone.
#include "../avx2.h"

struct Problem {
    const float* q;         // [B, H, k]
    const float* k;
    const float* v;         // [B, H, v]
    const float* kept;      // [B, H]: exp(decay)
    const float* beta;      // [B, H]
    const int64_t* slots;   // [B], different ones but for the dead slot, whose state no one reads
    float* state;           // [N, H, k, v]
    float* o;               // [B, H, v]
    int B, H, K, V, threads;
};

constexpr int FEW = 1;      // heads of rows that a thread takes at once: each is thousands of numbers

// Columns `at` to `at + 8 N` of a head's state, which stay in the first cache between the two passes.
template <int N> static INLINE void columns(const Problem& p, int64_t row, float* state, int at) {
    const float *q = p.q + row * p.K, *k = p.k + row * p.K;
    const __m256 kept = _mm256_set1_ps(p.kept[row]), beta = _mm256_set1_ps(p.beta[row]);
    __m256 change[N], o[N];
    for (int n = 0; n < N; ++n) change[n] = o[n] = _mm256_setzero_ps();
    for (int i = 0; i < p.K; ++i)
        for (int n = 0; n < N; ++n) {
            const __m256 s = _mm256_mul_ps(_mm256_loadu_ps(state + (int64_t)i * p.V + at + 8 * n), kept);
            change[n] = _mm256_fmadd_ps(s, _mm256_set1_ps(k[i]), change[n]);  // so far what the key recalls
        }
    for (int n = 0; n < N; ++n)
        change[n] = _mm256_mul_ps(beta, _mm256_sub_ps(_mm256_loadu_ps(p.v + row * p.V + at + 8 * n), change[n]));
    for (int i = 0; i < p.K; ++i)
        for (int n = 0; n < N; ++n) {
            float* place = state + (int64_t)i * p.V + at + 8 * n;
            const __m256 s = _mm256_fmadd_ps(_mm256_set1_ps(k[i]), change[n], _mm256_mul_ps(_mm256_loadu_ps(place), kept));
            _mm256_storeu_ps(place, s);
            o[n] = _mm256_fmadd_ps(s, _mm256_set1_ps(q[i]), o[n]);
        }
    for (int n = 0; n < N; ++n) _mm256_storeu_ps(p.o + row * p.V + at + 8 * n, o[n]);
}

static void step(const Problem& p, int row) {
    float* state = p.state + (p.slots[row / p.H] * p.H + row % p.H) * p.K * p.V;
    int at = 0;
    for (; at + 32 <= p.V; at += 32) columns<4>(p, row, state, at);
    for (; at < p.V; at += 8) columns<1>(p, row, state, at);
}

extern "C" void avx2_delta_step(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->B * p->H, FEW, [p](int row) { step(*p, row); });
}
