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
