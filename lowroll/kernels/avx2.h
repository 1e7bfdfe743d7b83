// What the kernels for CPUs with AVX2 share: how tasks go to threads, and sums of a vector's lanes.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>

#define LAMBDA __attribute__((always_inline))
#define INLINE inline LAMBDA

// Of libgomp, whose threads torch's are: call this with these data on so many threads.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

static INLINE int least(int a, int b) { return a < b ? a : b; }

// Call task(i) for i = 0 .. count - 1, on so many threads: each takes `few` in a row when it has none left.
template <class Task> static void share(Parallel parallel, int threads, int count, int few, const Task& task) {
    struct Job {
        const Task& task;
        const int count, few;
        std::atomic<int> next{0};
    } job{task, count, few};
    const auto work = [](void* data) {
        Job& job = *(Job*)data;
        for (int first; (first = job.next.fetch_add(job.few)) < job.count;)
            for (int i = first; i < least(first + job.few, job.count); ++i) job.task(i);
    };
    if (threads == 1 || count <= few) work(&job);
    else parallel(work, &job, threads, 0);
}

static INLINE float add_lanes(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
}

// Lanes of eight vectors, each added up: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
static INLINE __m256 add_lanes(const __m256* v, int stride) {
    const __m256 a = _mm256_hadd_ps(v[0], v[stride]), b = _mm256_hadd_ps(v[2 * stride], v[3 * stride]);
    const __m256 c = _mm256_hadd_ps(v[4 * stride], v[5 * stride]), d = _mm256_hadd_ps(v[6 * stride], v[7 * stride]);
    const __m256 low = _mm256_hadd_ps(a, b), high = _mm256_hadd_ps(c, d);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// e^x of x <= 0, 0 below -87, NaN of NaN: 2^n e^r with |r| <= log(2) / 2, and a polynomial for e^r (Cephes, expf).
static INLINE __m256 exponential(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.0f);
    const __m256 live = _mm256_cmp_ps(x, lowest, _CMP_NLE_UQ);
    const __m256 at = _mm256_max_ps(lowest, x);     // the second where one is NaN
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(at, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), at);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(power)), live);
}
