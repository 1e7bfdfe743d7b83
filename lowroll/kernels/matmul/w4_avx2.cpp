// y = x W^T on a CPU with AVX2, W in 4 bits: products of 16-bit integers, summed exactly in 32 bits.
//
// x is rounded to 16-bit integers with a scale for 256 of a row. The codes of 64 weights of a channel (32 bytes) become
// four vectors of 16 words, and lane j of their products with x has the sum over k = 8 j .. 8 j + 7 of the chunk, so a
// vector of 8 scales covers groups of 16, 32 or more. Up to 8 rows the codes are decoded in registers; more rows read
// them from a tile in the first cache. The sums of a row are added in the same order for any number of rows.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../avx2.h"

enum Kind { NVFP4, MXFP4, INT4, INT4_ASYM };

constexpr int CHUNK = 64;   // k of 32 bytes of codes
constexpr int BLOCK = 4;    // chunks of x that share a scale
constexpr int PANEL = 8;    // rows of x whose sums fit in the registers
constexpr int TILE = 16;    // channels of a task
constexpr int ROWS = 64;    // of x, in a task

struct Problem {
    const uint8_t* codes;
    const void* scale;
    const uint32_t* zero;   // int4_asym
    const float* global_;   // nvfp4: one, or one a channel
    const float* bias;      // or null
    const float* x;
    float* y;
    int16_t* words;         // room for M K of them, at a multiple of 32 bytes
    float* steps;           // room for the scales of x
    int M, N, K, kind, global_per_row, integers, threads;
};

static INLINE int blocks(int K) { return (K / CHUNK + BLOCK - 1) / BLOCK; }

struct Weights {            // of a channel, in a chunk
    __m256i words[4];
    __m256 scale;
};

// What 256 times a sum is multiplied with: codes stay in the high bytes of their words, which saves shifts.
template <int KIND> constexpr float UNIT = (KIND == NVFP4 ? 128.0f : KIND == MXFP4 ? 0.5f : 1.0f) / 256;

template <int KIND> struct Channel {
    static constexpr int GROUP = KIND == NVFP4 ? 16 : KIND == MXFP4 ? 32 : 128;
    const uint8_t* codes;
    const uint8_t* scale;   // a byte a group, or
    const float* step;      // a float
    const uint32_t* zero;
    int shift;

    Channel(const Problem& p, int n) {
        const int64_t groups = (p.K + GROUP - 1) / GROUP;
        codes = p.codes + n * (int64_t)(p.K / 2);
        scale = (const uint8_t*)p.scale + n * groups;
        step = (const float*)p.scale + n * groups;
        zero = p.zero + n / 8 * groups;
        shift = n % 8 * 4;
    }

    INLINE Weights decode(int chunk) const {
        const __m256i four = _mm256_set1_epi8(15);
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(codes + chunk * (int64_t)32));
        __m256i even = _mm256_and_si256(bytes, four), odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), four);
        if constexpr (KIND == NVFP4 || KIND == MXFP4) {
            const __m256i twice = _mm256_broadcastsi128_si256(
                _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
            even = _mm256_shuffle_epi8(twice, even);
            odd = _mm256_shuffle_epi8(twice, odd);
        } else {
            const int middle = KIND == INT4_ASYM ? zero[chunk / 2] >> shift & 15 : 8;
            even = _mm256_sub_epi8(even, _mm256_set1_epi8((char)middle));
            odd = _mm256_sub_epi8(odd, _mm256_set1_epi8((char)middle));
        }
        const __m256i high = _mm256_set1_epi16((short)0xFF00);
        return {{_mm256_slli_epi16(even, 8), _mm256_slli_epi16(odd, 8), _mm256_and_si256(even, high),
                 _mm256_and_si256(odd, high)},
                scales(chunk)};
    }

    INLINE __m256 scales(int chunk) const {
        if constexpr (KIND == NVFP4) {          // e4m3 shifted into float16: 2^-8 of its value
            uint32_t bytes;
            memcpy(&bytes, scale + chunk * (int64_t)4, 4);
            const __m128i high = _mm_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3);
            return _mm256_cvtph_ps(_mm_srli_epi16(_mm_shuffle_epi8(_mm_cvtsi32_si128((int)bytes), high), 1));
        } else if constexpr (KIND == MXFP4) {   // the exponent of a float32
            const uint8_t* at = scale + chunk * (int64_t)2;
            const __m128i first = _mm_set1_epi32(at[0] << 23), second = _mm_set1_epi32(at[1] << 23);
            return _mm256_castsi256_ps(_mm256_set_m128i(second, first));
        } else {
            return _mm256_broadcast_ss(step + chunk / 2);
        }
    }
};

// sums[r] += R rows of a panel, from x on, times `count` chunks of a channel, of which weights(i) gives one.
template <int R, class Source>
static INLINE void multiply(const Source& weights, const int16_t* x, const float* step, int count, __m256* sums) {
    __m256 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
    for (int i = 0; i < count; ++i) {
        const Weights& w = weights(i);
        const __m256i* at = (const __m256i*)(x + i * R * CHUNK);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(w.words[0], at[r * 4]),
                                                 _mm256_madd_epi16(w.words[1], at[r * 4 + 1]));
            const __m256i high = _mm256_add_epi32(_mm256_madd_epi16(w.words[2], at[r * 4 + 2]),
                                                  _mm256_madd_epi16(w.words[3], at[r * 4 + 3]));
            sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(low, high)), w.scale, sum[r]);
        }
    }
    for (int r = 0; r < R; ++r) sums[r] = _mm256_fmadd_ps(sum[r], _mm256_broadcast_ss(step + r), sums[r]);
}

// -- x ----------------------------------------------------------------------------------------------------------------

// The scale of 64 `count` numbers, and in `inverse` what they are multiplied with; NaN where one is not finite.
static INLINE float measure(const float* x, int count, float* inverse) {
    __m256 most = _mm256_setzero_ps(), odd = most;
    for (int k = 0; k < count * CHUNK; k += 8) {
        const __m256 v = _mm256_loadu_ps(x + k);
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
        odd = _mm256_or_ps(odd, _mm256_sub_ps(v, v));   // 0, or the NaN of a number that is not finite
    }
    float lanes[8], largest = 0;
    _mm256_storeu_ps(lanes, most);
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    *inverse = 0;
    if (_mm256_movemask_ps(_mm256_cmp_ps(odd, odd, _CMP_UNORD_Q))) return NAN;
    if (largest < 1e-30f) return 0;
    *inverse = 32767 / largest;
    return largest / 32767;
}

// 64 numbers as words, in the order in which codes become words: vector t has k = 4 w + t.
static INLINE void round_chunk(const float* x, float inverse, __m256i* out) {
    const __m256i pairs = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * 16), by));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * 16 + 8), by));
        q[i] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8), pairs);
    }
    const __m256i a = _mm256_unpacklo_epi32(q[0], q[1]), b = _mm256_unpackhi_epi32(q[0], q[1]);
    const __m256i c = _mm256_unpacklo_epi32(q[2], q[3]), d = _mm256_unpackhi_epi32(q[2], q[3]);
    out[0] = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(a, c), order);
    out[1] = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(a, c), order);
    out[2] = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(b, d), order);
    out[3] = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(b, d), order);
}

// The words of a panel lie [chunk][row][64], their scales [block][row].
static void round_panel(const Problem& p, int first) {
    const int rows = least(PANEL, p.M - first), chunks = p.K / CHUNK;
    int16_t* words = p.words + first * (int64_t)p.K;
    float* steps = p.steps + first * (int64_t)blocks(p.K);
    for (int r = 0; r < rows; ++r) {
        const float* x = p.x + (first + r) * (int64_t)p.K;
        for (int c = 0; c < chunks; c += BLOCK) {
            const int count = least(BLOCK, chunks - c);
            float inverse = 1;
            steps[c / BLOCK * rows + r] = p.integers ? 1 : measure(x + c * CHUNK, count, &inverse);
            for (int i = c; i < c + count; ++i)
                round_chunk(x + i * CHUNK, inverse, (__m256i*)(words + ((int64_t)i * rows + r) * CHUNK));
        }
    }
}

// -- tasks ------------------------------------------------------------------------------------------------------------

template <int KIND>
static void write(const Problem& p, int m, int rows, int n, int channels, const __m256 (*sums)[ROWS]) {
    float unit[TILE], bias[TILE] = {};
    for (int i = 0; i < channels; ++i) {
        unit[i] = UNIT<KIND>;
        if (KIND == NVFP4) unit[i] /= p.global_[p.global_per_row ? n + i : 0];
        if (p.bias) bias[i] = p.bias[n + i];
    }
    for (int i = 0; i < channels; i += 8)
        for (int r = 0; r < rows; ++r) {
            const __m256 sum = _mm256_mul_ps(add_lanes(&sums[i][r], ROWS), _mm256_loadu_ps(unit + i));
            float y[8];
            _mm256_storeu_ps(y, _mm256_add_ps(sum, _mm256_loadu_ps(bias + i)));
            memcpy(p.y + (m + r) * (int64_t)p.N + n + i, y, sizeof(float) * least(8, channels - i));
        }
}

// One panel is all of x: each code is read and decoded once.
template <int KIND, int R> static void narrow(const Problem& p, int n, int channels, __m256 (*sums)[ROWS]) {
    const int chunks = p.K / CHUNK;
    for (int i = 0; i < channels; ++i) {
        const Channel<KIND> channel(p, n + i);
        for (int c = 0; c < chunks; c += BLOCK)
            multiply<R>([&](int j) LAMBDA { return channel.decode(c + j); }, p.words + c * (int64_t)R * CHUNK,
                        p.steps + c / BLOCK * R, least(BLOCK, chunks - c), sums[i]);
    }
}

// A panel times `count` chunks of channels that are decoded already.
template <int R>
static void wide(const Weights (*tile)[BLOCK], int channels, const int16_t* words, const float* steps, int count,
                 __m256 (*sums)[ROWS], int m) {
    for (int i = 0; i < channels; ++i)
        multiply<R>([&](int j) LAMBDA -> const Weights& { return tile[i][j]; }, words, steps, count, sums[i] + m);
}

template <class Call> static INLINE void with_rows(int rows, Call call) {
    switch (rows) {
        case 1: return call(std::integral_constant<int, 1>());
        case 2: return call(std::integral_constant<int, 2>());
        case 3: return call(std::integral_constant<int, 3>());
        case 4: return call(std::integral_constant<int, 4>());
        case 5: return call(std::integral_constant<int, 5>());
        case 6: return call(std::integral_constant<int, 6>());
        case 7: return call(std::integral_constant<int, 7>());
        default: return call(std::integral_constant<int, 8>());
    }
}

template <int KIND> static void task(const Problem& p, int m0, int n) {
    const int rows = least(ROWS, p.M - m0), channels = least(TILE, p.N - n), chunks = p.K / CHUNK;
    __m256 sums[TILE][ROWS];
    for (auto& channel : sums)
        for (int r = 0; r < rows; ++r) channel[r] = _mm256_setzero_ps();
    if (p.M <= PANEL) {
        with_rows(rows, [&](auto R) { narrow<KIND, R()>(p, n, channels, sums); });
    } else {
        Weights tile[TILE][BLOCK];
        for (int c = 0; c < chunks; c += BLOCK) {
            const int count = least(BLOCK, chunks - c);
            for (int i = 0; i < channels; ++i)
                for (int j = 0; j < count; ++j) tile[i][j] = Channel<KIND>(p, n + i).decode(c + j);
            for (int m = 0; m < rows; m += PANEL) {
                const int panel = least(PANEL, rows - m);
                const int16_t* words = p.words + (m0 + m) * (int64_t)p.K + c * (int64_t)panel * CHUNK;
                const float* steps = p.steps + (m0 + m) * (int64_t)blocks(p.K) + c / BLOCK * panel;
                with_rows(panel, [&](auto R) { wide<R()>(tile, channels, words, steps, count, sums, m); });
            }
        }
    }
    write<KIND>(p, m0, rows, n, channels, sums);
}

static void multiply_tile(const Problem& p, int m, int n) {
    if (p.kind == NVFP4) task<NVFP4>(p, m, n);
    else if (p.kind == MXFP4) task<MXFP4>(p, m, n);
    else if (p.kind == INT4) task<INT4>(p, m, n);
    else task<INT4_ASYM>(p, m, n);
}

extern "C" void avx2_linear(const Problem* p, Parallel parallel) {
    const int panels = (p->M + PANEL - 1) / PANEL, down = (p->M + ROWS - 1) / ROWS, across = (p->N + TILE - 1) / TILE;
    share(parallel, p->threads, panels, 1, [p](int i) { round_panel(*p, i * PANEL); });
    share(parallel, p->threads, across * down, 1,
          [p, across](int i) { multiply_tile(*p, i / across * ROWS, i % across * TILE); });
}
