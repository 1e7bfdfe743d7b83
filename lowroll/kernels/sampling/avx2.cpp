// The token of each row by Gumbel-max, on a CPU with AVX2: the id whose score x - log(E) is the largest, the lower one of
// equal scores, where E is the exponential number that key, position and id have (`gumbel_noise.py`).
//
// An id of a smaller logit wins only with a tiny E, and E is never below the uniform number v that it is made of. So its
// score is at most x + n log(2), if v is 2^-n or more: most ids are left out by that, before any logarithm. A block whose
// largest logit is too far below the best score needs no noise at all. Neither changes what wins. The block of the largest
// logit comes first, whose best score is the one to exceed.
#include <cstring>
#include <limits>
#include <vector>

#include "../avx2.h"

struct Problem {
    const float* x;             // rows of V logits over temperature, `stride` apart
    const int64_t* keys;        // [B]
    const int64_t* positions;   // [B]
    const uint8_t* greedy;      // [B], or null: rows without noise
    int64_t* tokens;            // [B]
    int64_t stride;
    uint32_t stream;
    int B, V, threads;
};

constexpr int BLOCK = 1024;     // ids
constexpr int COUNTERS = 256;   // of a block; each has a word for four ids, which are as far apart
constexpr float MOST = 22.875f; // noise of an id
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Best {
    float score;
    int id;
};

// One multiplication of a Philox round, of the lower halves of four lanes: what the upper ones hold is nobody's.
static INLINE void round_of(__m256i* c, __m256i k0, __m256i k1) {
    const __m256i p = _mm256_mul_epu32(c[0], _mm256_set1_epi64x(0xD2511F53));
    const __m256i q = _mm256_mul_epu32(c[2], _mm256_set1_epi64x(0xCD9E8D57));
    c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), c[1]), k0);
    c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), c[3]), k1);
    c[1] = q;
    c[3] = p;
}

// Philox4x32-10 of eight counters in a row: words j of all eight in words[j].
static INLINE void philox(int64_t key, int64_t position, uint32_t counter, uint32_t stream, __m256i* words) {
    const __m256i lanes = _mm256_setr_epi64x(0, 2, 4, 6);
    __m256i c[2][4];
    for (int odd = 0; odd < 2; ++odd) {
        c[odd][0] = _mm256_set1_epi64x(position);
        c[odd][1] = _mm256_set1_epi64x((int64_t)((uint64_t)position >> 32));
        c[odd][2] = _mm256_add_epi64(_mm256_set1_epi64x(counter + odd), lanes);
        c[odd][3] = _mm256_set1_epi64x(stream);
    }
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)((uint64_t)key >> 32);
#pragma GCC unroll 10
    for (int i = 0; i < 10; ++i, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const __m256i a = _mm256_set1_epi64x(k0), b = _mm256_set1_epi64x(k1);
        round_of(c[0], a, b);
        round_of(c[1], a, b);
    }
    for (int j = 0; j < 4; ++j) words[j] = _mm256_blend_epi32(c[0][j], _mm256_slli_epi64(c[1][j], 32), 0xaa);
}

// (w + 0.5) / 2^32 in (0, 1), each operation rounded to nearest.
static INLINE __m256 uniform(__m256i w) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(w, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff)));
    const __m256 whole = _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
    const __m256 v = _mm256_mul_ps(_mm256_add_ps(whole, _mm256_set1_ps(0.5f)), _mm256_set1_ps(0x1p-32f));
    return _mm256_min_ps(v, _mm256_set1_ps(1 - 0x1p-24f));
}

// log(y) of y in (0, inf), by the polynomial of Cephes' logf, within two units of the last place. It takes
// y - 1 for [sqrt(1/2), sqrt(2)) from `less`: beside 1 that has digits which y has not.
static INLINE __m256 logarithm(__m256 y, __m256 less) {
    const __m256i root = _mm256_set1_epi32(0x3f3504f3);     // sqrt(1/2)
    const __m256i from = _mm256_sub_epi32(_mm256_castps_si256(y), root);
    const __m256i power = _mm256_srai_epi32(from, 23);
    const __m256i rest = _mm256_add_epi32(_mm256_and_si256(from, _mm256_set1_epi32(0x7fffff)), root);
    const __m256 is_near = _mm256_castsi256_ps(_mm256_cmpeq_epi32(power, _mm256_setzero_si256()));
    const __m256 f = _mm256_blendv_ps(_mm256_sub_ps(_mm256_castsi256_ps(rest), _mm256_set1_ps(1)), less, is_near);
    const __m256 e = _mm256_cvtepi32_ps(power), z = _mm256_mul_ps(f, f);
    __m256 p = _mm256_set1_ps(7.0376836292e-2f);
    for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                             2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(next));
    p = _mm256_mul_ps(_mm256_mul_ps(p, f), z);
    p = _mm256_fmadd_ps(e, _mm256_set1_ps(-2.12194440e-4f), p);
    p = _mm256_fnmadd_ps(z, _mm256_set1_ps(0.5f), p);
    return _mm256_fmadd_ps(e, _mm256_set1_ps(0.693359375f), _mm256_add_ps(f, p));
}

// log(E) of E = -log(1 - v).
static INLINE __m256 log_exponential(__m256 v) {
    const __m256 one = _mm256_set1_ps(1), zero = _mm256_setzero_ps();
    const __m256 e = _mm256_sub_ps(zero, logarithm(_mm256_sub_ps(one, v), _mm256_sub_ps(zero, v)));
    return logarithm(e, _mm256_sub_ps(e, one));
}

// No score of such a uniform number exceeds it: x + n log(2), rounded up, for v >= 2^-n.
static INLINE __m256 bound(__m256 x, __m256 v) {
    const __m256i power = _mm256_srli_epi32(_mm256_castps_si256(v), 23);
    const __m256 n = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(127), power));
    return _mm256_fmadd_ps(n, _mm256_set1_ps(0.693148f), x);
}

static void take(__m256 x, __m256 v, int id, Best& best) {
    alignas(32) float scores[8];
    _mm256_store_ps(scores, _mm256_sub_ps(x, log_exponential(v)));
    for (int i = 0; i < 8; ++i)
        if (scores[i] > best.score || (scores[i] == best.score && id + i < best.id)) best = {scores[i], id + i};
}

// The best of a block and of what was found before it.
static void scan(const Problem& p, int row, const float* x, int block, Best& best) {
    for (int l = 0; l < COUNTERS; l += 8) {
        __m256i words[4];
        __m256 v[4], reaches = _mm256_setzero_ps();
        philox(p.keys[row], p.positions[row], block * COUNTERS + l, p.stream, words);
        const __m256 least = _mm256_set1_ps(best.score);
        for (int j = 0; j < 4; ++j) {
            v[j] = uniform(words[j]);
            const __m256 most = bound(_mm256_loadu_ps(x + j * COUNTERS + l), v[j]);
            reaches = _mm256_or_ps(reaches, _mm256_cmp_ps(most, least, _CMP_GE_OQ));
        }
        if (!_mm256_movemask_ps(reaches)) continue;
        for (int j = 0; j < 4; ++j) {
            const int at = j * COUNTERS + l;
            take(_mm256_loadu_ps(x + at), v[j], block * BLOCK + at, best);
        }
    }
}

static float largest(const float* x) {
    __m256 most[4];
    for (auto& one : most) one = _mm256_set1_ps(LOWEST);
    for (int i = 0; i < BLOCK; i += 32)
        for (int j = 0; j < 4; ++j) most[j] = _mm256_max_ps(most[j], _mm256_loadu_ps(x + i + 8 * j));
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_max_ps(_mm256_max_ps(most[0], most[1]), _mm256_max_ps(most[2], most[3])));
    float found = LOWEST;
    for (const float lane : lanes) found = lane > found ? lane : found;
    return found;
}

static int64_t draw(const Problem& p, int row) {
    const float* x = p.x + row * p.stride;
    const int blocks = (p.V + BLOCK - 1) / BLOCK, whole = p.V / BLOCK;
    float tail[BLOCK];          // the block that the vocabulary does not fill
    for (float& one : tail) one = LOWEST;
    memcpy(tail, x + (int64_t)whole * BLOCK, sizeof(float) * (p.V % BLOCK));
    const auto at = [&](int block) { return block < whole ? x + (int64_t)block * BLOCK : tail; };
    std::vector<float> peaks(blocks);
    int first = 0;
    for (int b = 0; b < blocks; ++b) {
        peaks[b] = largest(at(b));
        if (peaks[b] > peaks[first]) first = b;
    }
    if (p.greedy && p.greedy[row]) {
        for (int i = 0; i < BLOCK; ++i)
            if (at(first)[i] == peaks[first]) return least(first * BLOCK + i, p.V - 1);
        return 0;
    }
    Best best{LOWEST, 0};
    scan(p, row, at(first), first, best);
    for (int b = 0; b < blocks; ++b)
        if (b != first && peaks[b] > LOWEST && peaks[b] + MOST >= best.score) scan(p, row, at(b), b, best);
    return best.id;
}

extern "C" void avx2_draw(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->B, 1, [p](int row) { p->tokens[row] = draw(*p, row); });
}
