// y = x W^T on a CPU with AVX-512 VNNI, W in 8 bits: rows of x are rotated where that is asked for, rounded to 8-bit
// integers, and multiplied in one call.
//
//     y[m, n] = (sum_k x^[m, k] w[n, k]) scale[n] row[m] + bias[n]     rounded after each of these
//
// `vpdpbusd` multiplies unsigned bytes with signed ones, so the codes of W have 128 added, and 128 sum_k x^[m, k] is
// taken off. Sums are exact, so the bits are those of any other integer product.
//
// W lies in tiles of 32 channels, [K / 4][32][4]: a vector has four neighbours in k of 16 channels, and no lanes are
// added up.
#include <type_traits>
#include <vector>

#include "../rows.h"

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vnni")))

struct Problem {
    const float* x;         // [M, K]
    const uint8_t* w;       // tiles, 64 bytes aligned or not
    const float* scale;     // [N]
    const float* bias;      // [N], or null
    float* y;               // [M, N]
    int8_t* scratch;        // what `Rows` of at_once rows take: K + 8 bytes a row, K a multiple of 4
    int M, N, K, width, at_once, threads;
};

constexpr int TILE = 32;    // channels
constexpr int PANEL = 8;    // rows of x whose sums fit in the registers
constexpr int FEW = 4;      // rows that do not pay for waking threads to round them
constexpr int ROWS = 64;    // of x, in a task

struct Rows {
    int8_t* codes;          // [M, K]
    float* scale;           // [M]
    int* sum;               // [M], of the codes, times 128
};

static WIDE void round_row(const Problem& p, const Rows& rows, int m) {
    static thread_local std::vector<float> rotated;
    const float* x = p.x + m * (int64_t)p.K;
    int8_t* codes = rows.codes + m * (int64_t)p.K;
    if (p.width > 1) {
        if (rotated.size() < (size_t)p.K) rotated.resize(p.K);
        rotate(x, rotated.data(), p.K, p.width);
        x = rotated.data();
    }
    encode(x, codes, rows.scale + m, p.K);
    int sum = 0;
    for (int k = 0; k < p.K; ++k) sum += codes[k];
    rows.sum[m] = 128 * sum;
}

// R rows of x, from m on, times a tile of W.
template <int R> static WIDE void multiply(const Problem& p, const Rows& rows, int m, int tile) {
    const int8_t* x = rows.codes + m * (int64_t)p.K;
    const uint8_t* w = p.w + tile * (int64_t)TILE * p.K;
    __m512i sums[R][2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_si512();
    for (int k = 0; k < p.K; k += 4, w += 4 * TILE) {
        const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t four;
            memcpy(&four, x + r * (int64_t)p.K + k, 4);
            const __m512i a = _mm512_set1_epi32(four);
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, a);
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, a);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const int n = tile * TILE + half * 16, live = least(16, p.N - n);
        if (live <= 0) return;
        const __mmask16 mask = (__mmask16)((1u << live) - 1);
        const __m512 scale = _mm512_maskz_loadu_ps(mask, p.scale + n);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i sum = _mm512_sub_epi32(sums[r][half], _mm512_set1_epi32(rows.sum[m + r]));
            __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
            y = _mm512_mul_ps(y, _mm512_set1_ps(rows.scale[m + r]));
            if (p.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, p.bias + n));
            _mm512_mask_storeu_ps(p.y + (m + r) * (int64_t)p.N + n, mask, y);
        }
    }
}

static void multiply_rows(const Problem& p, const Rows& rows, int m, int count, int tile) {
    switch (count) {
        case 1: return multiply<1>(p, rows, m, tile);
        case 2: return multiply<2>(p, rows, m, tile);
        case 3: return multiply<3>(p, rows, m, tile);
        case 4: return multiply<4>(p, rows, m, tile);
        case 5: return multiply<5>(p, rows, m, tile);
        case 6: return multiply<6>(p, rows, m, tile);
        case 7: return multiply<7>(p, rows, m, tile);
        default: return multiply<8>(p, rows, m, tile);
    }
}

// Up to at_once rows.
static void multiply_block(const Problem& p, Parallel parallel) {
    float* scales = (float*)(p.scratch + p.M * (int64_t)p.K);
    const Rows rows{p.scratch, scales, (int*)(scales + p.M)};
    share(parallel, p.threads, p.M, FEW, [&](int m) { round_row(p, rows, m); });
    const int tiles = (p.N + TILE - 1) / TILE, blocks = (p.M + ROWS - 1) / ROWS;
    share(parallel, p.threads, tiles * blocks, 1, [&](int i) {
        const int last = least(p.M, (i % blocks + 1) * ROWS);
        for (int m = i % blocks * ROWS; m < last; m += PANEL)
            multiply_rows(p, rows, m, least(PANEL, last - m), i / blocks);
    });
}

extern "C" void vnni_linear(const Problem* p, Parallel parallel) {
    for (int m = 0; m < p->M; m += p->at_once) {
        Problem block = *p;
        block.x += m * (int64_t)p->K, block.y += m * (int64_t)p->N;
        block.M = least(p->at_once, p->M - m);
        multiply_block(block, parallel);
    }
}
