// Rows of activations on a CPU with AVX2: rotated in blocks of features, and rounded to 8-bit integers with one scale a row.
// Bits are those of plain torch: the same sums in the same order, nothing fused.
#pragma once

#include <cstring>

#include "avx2.h"

// Sums and differences within the halves of every four features, then of their pairs.
static INLINE __m256 four(__m256 v) {
    const __m256 signs_1 = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f);
    const __m256 signs_2 = _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f);
    // x_even + x_odd, and x_even + (-x_odd), which is the difference
    v = _mm256_add_ps(_mm256_moveldup_ps(v), _mm256_xor_ps(_mm256_movehdup_ps(v), signs_1));
    const __m256 low = _mm256_permute_ps(v, 0x44), high = _mm256_permute_ps(v, 0xee);
    return _mm256_add_ps(low, _mm256_xor_ps(high, signs_2));
}

// The rotation of `width` (4, 16, 64 or 256) features at a time; K is a multiple of it.
static INLINE void rotate(const float* x, float* y, int K, int width) {
    const __m256 inverse = _mm256_set1_ps(width == 4 ? 0.5f : width == 16 ? 0.25f : width == 64 ? 0.125f : 0.0625f);
    int k = 0;
    for (; k + 8 <= K; k += 8) _mm256_storeu_ps(y + k, four(_mm256_loadu_ps(x + k)));
    if (k < K) {  // the last four of a row
        float rest[8] = {x[k], x[k + 1], x[k + 2], x[k + 3]};
        _mm256_storeu_ps(rest, four(_mm256_loadu_ps(rest)));
        memcpy(y + k, rest, 4 * sizeof(float));
    }
    if (width > 4) {  // pairs of four apart lie in the two halves of a vector
        const __m256 signs = _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f);
        for (int j = 0; j < K; j += 8) {
            const __m256 v = _mm256_loadu_ps(y + j);
            const __m256 low = _mm256_permute2f128_ps(v, v, 0x00), high = _mm256_permute2f128_ps(v, v, 0x11);
            _mm256_storeu_ps(y + j, _mm256_add_ps(low, _mm256_xor_ps(high, signs)));
        }
        for (int half = 8; half < width; half *= 2)
            for (int block = 0; block < K; block += 2 * half)
                for (int j = block; j < block + half; j += 8) {
                    const __m256 a = _mm256_loadu_ps(y + j), b = _mm256_loadu_ps(y + j + half);
                    _mm256_storeu_ps(y + j, _mm256_add_ps(a, b));
                    _mm256_storeu_ps(y + j + half, _mm256_sub_ps(a, b));
                }
    }
    for (k = 0; k + 8 <= K; k += 8) _mm256_storeu_ps(y + k, _mm256_mul_ps(_mm256_loadu_ps(y + k), inverse));
    for (; k < K; ++k) y[k] *= _mm256_cvtss_f32(inverse);
}

// The largest magnitude; NaN where there is one: its bits are above those of every number.
static INLINE float largest(const float* x, int K) {
    const __m256i sign = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    int k = 0;
    for (; k + 8 <= K; k += 8)
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + k)), sign));
    int32_t lanes[8], top = 0;
    _mm256_storeu_si256((__m256i*)lanes, most);
    for (int lane : lanes) top = lane > top ? lane : top;
    for (; k < K; ++k) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float found;
    memcpy(&found, &top, 4);
    return found;
}

static INLINE __m256i rounded(const float* x, __m256 factor) {  // to the nearest, half to even; the low byte of each
    return _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor)), _mm256_set1_epi32(0xff));
}

static INLINE void encode(const float* x, int8_t* codes, float* scale, int K) {
    const float amax = largest(x, K);
    *scale = amax / 127.0f;
    const float reciprocal = 1.0f / (amax < 1e-30f ? 1e-30f : amax), factor = reciprocal * 127.0f;
    const __m256 factors = _mm256_set1_ps(factor);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
    int k = 0;
    for (; k + 32 <= K; k += 32) {
        const __m256i low = _mm256_packus_epi32(rounded(x + k, factors), rounded(x + k + 8, factors));
        const __m256i high = _mm256_packus_epi32(rounded(x + k + 16, factors), rounded(x + k + 24, factors));
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i*)(codes + k), bytes);
    }
    for (; k < K; ++k) codes[k] = (int8_t)_mm_cvtss_si32(_mm_set_ss(x[k] * factor));
}
