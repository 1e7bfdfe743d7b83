// y_MN = x_MK W_NK^T for few rows M: the weights are streamed once, at the speed of the memory.
//
// The weights are the 16-row A operand of mma.m16n8k16, decoded in registers; the activations are B, from shared
// memory. A sum over k may run in any order, so a lane takes the 16 bytes of a row that it loads as its share of k, and
// the stored layout needs no repacking: 32 codes of 4 bits, or 8 values of bf16. Of a word with codes 0..7, the codes j
// and j + 4 lie 16 bits apart: they are the pair that one register of A holds, and x is brought into the same order
// (0 4 1 5 2 6 3 7) when it reaches shared memory.
//
//     e2m1 s|ee|m -> bf16 bits s<<15 | eem<<6 = value 2^-126: one mask, one multiplication by 2^a + 2^b, one mask
//     nvfp4    times e4m3 scale 2^118, exact in bf16; 2^8 / global scale is applied to the sum
//     mxfp4    times 2^(E - 23);                      2^22 is applied to the sum
//     int4     0x4300 | code = 128 + code, less 136 (or 128 + zero point); the sum of a group of 128 is scaled in fp32
//     bf16     as it is
//
// Work: tiles of BN rows, each a row of steps along k. The blocks of the grid take equal runs of these steps (stream-K,
// Osama et al. 2023), so all of them end together whatever the shape. What two blocks share of a tile goes to a
// workspace, and the last one there sums it in the order of k: no float atomics, the same bits in every run.
// A warp owns 16 R rows and one half of a step. The copies (cp.async) of a ring of stages run ahead over tile borders.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

enum Format { NVFP4 = 0, MXFP4 = 1, INT4 = 2, INT4_ASYM = 3, BF16 = 4 };
#ifndef FORMAT
#define FORMAT NVFP4
#endif

constexpr int WARPS_N = 4, WARPS_K = 2, THREADS = 32 * WARPS_N * WARPS_K;

struct Problem {
    const uint8_t* weight;            // [N, K] codes, rows of K / 2 bytes (bf16: 2 K)
    const uint8_t* scale;             // nvfp4 e4m3 [N, K / 16], mxfp4 e8m0 [N, K / 32], int4 fp32 [N, K / 128]
    const uint8_t* zero;              // int4_asym: int32 [N / 8, K / 128]
    const float* global;              // nvfp4: [1] or [N]
    const void* bias;                 // [N] or null
    const __nv_bfloat16* x;           // [M, K]
    void* y;                          // [M, N]
    float* partial;                   // two tiles a block
    int* arrived;                     // one a tile, zero between launches
    int M, N, K, global_per_row, bias_fp32, y_fp32;
};

template <int FMT, int NT_, int R_, int STAGES_> struct Shape {
    static constexpr int NT = NT_, R = R_, STAGES = STAGES_;
    static constexpr int BN = WARPS_N * 16 * R;               // rows of a tile
    static constexpr int BM = 8 * NT;                         // columns: rows of x
    static constexpr int KC = FMT == BF16 ? 32 : 128;         // k of a warp in a step
    static constexpr int STEP = KC * WARPS_K;
    static constexpr int UNITS = STEP / 8;                    // 16-byte units of a row of x
    static constexpr int W_BYTES = THREADS * 2 * R * 16;
    static constexpr int X_BYTES = BM * STEP * 2;
    static constexpr int S_ROW = FMT == NVFP4 ? 16 : FMT == BF16 ? 0 : 8;
    static constexpr int Z_BYTES = FMT == INT4_ASYM ? BN / 8 * 2 * 4 : 0;
    static constexpr int STAGE = W_BYTES + X_BYTES + BN * S_ROW + Z_BYTES;
    static constexpr int ACC = R * NT * 4;                    // sums of a lane
    static constexpr int PASS = ACC < 16 ? ACC : 16;          // sums that the halves exchange at a time
    static constexpr int RED_BYTES = WARPS_N * 32 * PASS * 4;
    static constexpr int SMEM = STAGES * STAGE + RED_BYTES;
};

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t sub2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t twice(float f) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(f));
    return d;
}

// Two pairs of a word, codes (0, 4) and (1, 5); the word shifted by 8 gives (2, 6) and (3, 7).
__device__ __forceinline__ void decode_e2m1(uint32_t word, uint32_t scale, uint32_t& first, uint32_t& second) {
    first = mul2((word & 0x000F000Fu) * 0x1040u & 0x81C081C0u, scale);
    second = mul2((word & 0x00F000F0u) * 0x0104u & 0x81C081C0u, scale);
}
__device__ __forceinline__ void decode_int4(uint32_t word, uint32_t zero, uint32_t& first, uint32_t& second) {
    first = sub2((word & 0x000F000Fu) | 0x43004300u, zero);
    second = sub2((word >> 4 & 0x000F000Fu) | 0x43004300u, zero);
}

template <class S> __device__ __forceinline__ int place(int row, int unit) {      // of a unit of x in its stage
    if constexpr (S::UNITS == 32) unit = (unit & 16) | ((unit & 3) ^ (row & 1)) << 2 | (unit >> 2 & 3);
    else unit ^= (row & 1) << 2;
    return (row * S::UNITS + unit) * 16;
}

template <int FMT, class S> struct Ring {                 // what a thread copies, step by step
    const Problem& p;
    uint32_t base;                                        // shared memory
    int wn, wk, lane, steps, tiles_m;
    int tile, step;

    __device__ __forceinline__ void load(int slot) {
        const int n0 = tile / tiles_m * S::BN, m0 = tile % tiles_m * S::BM, k0 = step * S::STEP;
        const uint32_t to = base + slot * S::STAGE;
        const int warp = wk * WARPS_N + wn, t = lane & 3, g = lane >> 2;
        const size_t pitch = FMT == BF16 ? (size_t)p.K * 2 : (size_t)p.K / 2;
        const bool half_in = k0 + wk * S::KC < p.K;
        const size_t offset = FMT == BF16 ? (size_t)k0 * 2 : (size_t)k0 / 2;
#pragma unroll
        for (int j = 0; j < 2 * S::R; ++j) {
            const int n = min(n0 + wn * 16 * S::R + j * 8 + g, p.N - 1);
            const uint8_t* from = p.weight + n * pitch + (half_in ? offset + wk * 64 + t * 16 : 0);
            copy16(to + ((warp * 2 * S::R + j) * 32 + lane) * 16, from, half_in ? 16 : 0);
        }
        load_scales(to + S::W_BYTES + S::X_BYTES, n0, k0);
        load_x(to + S::W_BYTES, m0, k0);
        if (++step == steps) step = 0, ++tile;
    }
    __device__ __forceinline__ void load_x(uint32_t to, int m0, int k0) {
#pragma unroll
        for (int i = threadIdx.x; i < S::BM * S::UNITS; i += THREADS) {
            const int row = i / S::UNITS, unit = i % S::UNITS, k = k0 + unit * 8;
            if (m0 + row < p.M)
                copy16(to + place<S>(row, unit), p.x + (size_t)(m0 + row) * p.K + (k < p.K ? k : 0), k < p.K ? 16 : 0);
        }
    }
    __device__ __forceinline__ void load_scales(uint32_t to, int n0, int k0) {
#pragma unroll
        for (int i = threadIdx.x; i < (FMT == BF16 ? 0 : S::BN * 2); i += THREADS) {
            const int row = i >> 1, half = i & 1, n = min(n0 + row, p.N - 1);
            const bool in = k0 + half * S::KC < p.K;
            const size_t chunk = (size_t)n * (p.K / 128) + (in ? k0 / 128 + half : 0);
            if constexpr (FMT == NVFP4) copy8(to + i * 8, p.scale + chunk * 8, in ? 8 : 0);
            else copy4(to + i * 4, p.scale + chunk * 4, in ? 4 : 0);
        }
        if constexpr (FMT == INT4_ASYM) {
            if (threadIdx.x < S::BN / 4) {
                const int row = threadIdx.x >> 1, half = threadIdx.x & 1, n = min(n0 / 8 + row, (p.N + 7) / 8 - 1);
                const bool in = k0 + half * S::KC < p.K;
                copy4(to + S::BN * S::S_ROW + threadIdx.x * 4,
                      p.zero + ((size_t)n * (p.K / 128) + (in ? k0 / 128 + half : 0)) * 4, in ? 4 : 0);
            }
        }
    }
    // The units of x that this thread copied, into the order of the codes of a word.
    __device__ __forceinline__ void reorder_x(uint8_t* smem, int slot, int m0) {
#pragma unroll
        for (int i = threadIdx.x; i < (FMT == BF16 ? 0 : S::BM * S::UNITS); i += THREADS) {
            const int row = i / S::UNITS;
            if (m0 + row < p.M) {
                uint4* unit = (uint4*)(smem + slot * S::STAGE + S::W_BYTES + place<S>(row, i % S::UNITS));
                const uint4 v = *unit;
                *unit = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                   __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
            }
        }
    }
};

// What the codes of a row are multiplied with (e2m1: words 2 i and 2 i + 1 of the lane), or what int4's are lessened by.
template <int FMT, class S>
__device__ __forceinline__ uint32_t factor_of(const uint8_t* scales, int row, int wk, int t, int i) {
    if constexpr (FMT == NVFP4) {
        const uint16_t code = scales[row * 16 + wk * 8 + t * 2 + i];
        uint32_t halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(code));
        return twice(__low2float(*(__half2*)&halves) * 0x1p118f);
    } else if constexpr (FMT == MXFP4) {
        return min((uint32_t)scales[row * 8 + wk * 4 + t] + 104u, 254u) * 0x00800080u;
    } else if constexpr (FMT == INT4) {
        return 0x43084308u;                               // 136
    } else {
        const uint32_t zeros = ((const uint32_t*)(scales + S::BN * S::S_ROW))[(row >> 3) * 2 + wk];
        return (zeros >> 4 * (row & 7) & 15u) * 0x00010001u | 0x43004300u;
    }
}

// One step: acc += decode(weights of the warp) times x.
template <int FMT, class S>
__device__ __forceinline__ void multiply(const uint8_t* stage, int wn, int wk, int lane, float (&sum)[S::R][S::NT][4]) {
    constexpr int R = S::R, NT = S::NT;
    const int t = lane & 3, g = lane >> 2, warp = wk * WARPS_N + wn;
    const uint8_t* xs = stage + S::W_BYTES;
    const uint8_t* scales = xs + S::X_BYTES;
    uint4 words[2 * R];
#pragma unroll
    for (int j = 0; j < 2 * R; ++j) words[j] = ((const uint4*)stage)[(warp * 2 * R + j) * 32 + lane];

    if constexpr (FMT == BF16) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const uint4 b = *(const uint4*)(xs + place<S>(nt * 8 + g, wk * 4 + t));
#pragma unroll
            for (int r = 0; r < R; ++r) {
                mma(sum[r][nt], words[2 * r].x, words[2 * r + 1].x, words[2 * r].y, words[2 * r + 1].y, b.x, b.y);
                mma(sum[r][nt], words[2 * r].z, words[2 * r + 1].z, words[2 * r].w, words[2 * r + 1].w, b.z, b.w);
            }
        }
        return;
    }
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    uint32_t factor[2 * R];                               // scales of the codes at hand, or int4's zeros
    float group[R][NT][4];
    if constexpr (INT) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) group[r][nt][c] = 0.f;
    }
    float(&acc)[R][NT][4] = INT ? group : sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i == 0 || FMT == NVFP4 && i == 2) {
#pragma unroll
            for (int j = 0; j < 2 * R; ++j) factor[j] = factor_of<FMT, S>(scales, wn * 16 * R + j * 8 + g, wk, t, i >> 1);
        }
        uint4 b[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) b[nt] = *(const uint4*)(xs + place<S>(nt * 8 + g, wk * 16 + t * 4 + i));
#pragma unroll
        for (int r = 0; r < R; ++r) {
            uint32_t a[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 w = words[2 * r + h];
                const uint32_t word = i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, f = factor[2 * r + h];
                if constexpr (INT) {
                    decode_int4(word, f, a[h][0], a[h][1]);
                    decode_int4(word >> 8, f, a[h][2], a[h][3]);
                } else {
                    decode_e2m1(word, f, a[h][0], a[h][1]);
                    decode_e2m1(word >> 8, f, a[h][2], a[h][3]);
                }
            }
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) mma(acc[r][nt], a[0][0], a[1][0], a[0][1], a[1][1], b[nt].x, b[nt].y);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) mma(acc[r][nt], a[0][2], a[1][2], a[0][3], a[1][3], b[nt].z, b[nt].w);
        }
    }
    if constexpr (INT) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float* row = (const float*)scales + (wn * 16 * R + r * 16 + g) * 2 + wk;
            const float low = row[0], high = row[16];
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                sum[r][nt][0] += low * group[r][nt][0], sum[r][nt][1] += low * group[r][nt][1];
                sum[r][nt][2] += high * group[r][nt][2], sum[r][nt][3] += high * group[r][nt][3];
            }
        }
    }
}

template <int FMT, class S>
__device__ __forceinline__ void write(const Problem& p, const float* sum, int tile, int tiles_m, int wn, int lane) {
    const int n0 = tile / tiles_m * S::BN + wn * 16 * S::R, m0 = tile % tiles_m * S::BM, t = lane & 3, g = lane >> 2;
#pragma unroll
    for (int j = 0; j < 2 * S::R; ++j) {
        const int n = n0 + j * 8 + g;
        if (n >= p.N) continue;
        float factor = 1.f, bias = 0.f;
        if constexpr (FMT == NVFP4) factor = 256.f / p.global[p.global_per_row ? n : 0];
        if constexpr (FMT == MXFP4) factor = 0x1p22f;
        if (p.bias) bias = p.bias_fp32 ? ((const float*)p.bias)[n] : __bfloat162float(((const __nv_bfloat16*)p.bias)[n]);
#pragma unroll
        for (int nt = 0; nt < S::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int m = m0 + nt * 8 + t * 2 + c;
                if (m >= p.M) continue;
                const float y = fmaf(sum[((j >> 1) * S::NT + nt) * 4 + (j & 1) * 2 + c], factor, bias);
                if (p.y_fp32) ((float*)p.y)[(size_t)m * p.N + n] = y;
                else ((__nv_bfloat16*)p.y)[(size_t)m * p.N + n] = __float2bfloat16(y);
            }
    }
}

template <int FMT, class S, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) streamed(const Problem p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ int is_last;
    constexpr int ACC = S::ACC, PASS = S::PASS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wn = warp % WARPS_N, wk = warp / WARPS_N;
    const int steps = (p.K + S::STEP - 1) / S::STEP, tiles_m = (p.M + S::BM - 1) / S::BM;
    const long long units = (long long)((p.N + S::BN - 1) / S::BN) * tiles_m * steps, blocks = gridDim.x;
    auto start_of = [&](long long block) { return (int)(units * block / blocks); };
    auto owner_of = [&](long long unit) { return (int)(((unit + 1) * blocks - 1) / units); };
    const int begin = start_of(blockIdx.x), end = start_of(blockIdx.x + 1);
    if (begin == end) return;

    int tile = begin / steps, step = begin % steps, first_step = step;
    Ring<FMT, S> ring{p, smem_address(smem), wn, wk, lane, steps, tiles_m, tile, step};
    int loaded = begin;
#pragma unroll
    for (int slot = 0; slot < S::STAGES - 1; ++slot) {
        if (loaded < end) ring.load(slot);
        ++loaded;
        commit();
    }
    wait<S::STAGES - 2>();
    ring.reorder_x(smem, 0, tile % tiles_m * S::BM);

    float sum[S::R][S::NT][4];
    float* flat = &sum[0][0][0];
#pragma unroll
    for (int i = 0; i < ACC; ++i) flat[i] = 0.f;
    float* shared_sums = (float*)(smem + S::STAGES * S::STAGE) + wn * 32 + lane;

    for (int unit = begin, slot = 0; unit < end; ++unit) {
        __syncthreads();
        const int free = slot == 0 ? S::STAGES - 1 : slot - 1, next = slot == S::STAGES - 1 ? 0 : slot + 1;
        if (loaded < end) ring.load(free);
        ++loaded;
        commit();
        multiply<FMT, S>(smem + slot * S::STAGE, wn, wk, lane, sum);
        wait<S::STAGES - 2>();
        const bool tile_ends = step == steps - 1;
        if (unit + 1 < end) ring.reorder_x(smem, next, (tile_ends ? tile + 1 : tile) % tiles_m * S::BM);
        slot = next;
        if (!tile_ends && unit + 1 < end) {
            ++step;
            continue;
        }
        // The halves of k meet in the warps of the first half.
#pragma unroll
        for (int from = 0; from < ACC; from += PASS) {
            if (wk == 1) {
#pragma unroll
                for (int i = 0; i < PASS; ++i) shared_sums[i * WARPS_N * 32] = flat[from + i];
            }
            __syncthreads();
            if (wk == 0) {
#pragma unroll
                for (int i = 0; i < PASS; ++i) flat[from + i] += shared_sums[i * WARPS_N * 32];
            }
            __syncthreads();
        }
        if (first_step == 0 && tile_ends) {
            if (wk == 0) write<FMT, S>(p, flat, tile, tiles_m, wn, lane);
        } else {                                          // others have steps of this tile too
            const int first = owner_of((long long)tile * steps), last = owner_of((long long)(tile + 1) * steps - 1);
            const size_t size = (size_t)S::BN * S::BM, at = wn * 32 + lane;
            if (wk == 0) {
                float* mine = p.partial + (blockIdx.x * 2 + (begin / steps == tile ? 0 : 1)) * size + at;
#pragma unroll
                for (int i = 0; i < ACC; ++i) __stcg(mine + i * WARPS_N * 32, flat[i]);
                __threadfence();
            }
            __syncthreads();
            if (threadIdx.x == 0) is_last = atomicAdd(p.arrived + tile, 1) == last - first;
            __syncthreads();
            if (is_last && wk == 0) {
                __threadfence();
#pragma unroll
                for (int i = 0; i < ACC; ++i) flat[i] = 0.f;
                for (int block = first; block <= last; ++block) {
                    const float* theirs = p.partial + (block * 2 + (start_of(block) / steps == tile ? 0 : 1)) * size + at;
#pragma unroll
                    for (int i = 0; i < ACC; ++i) flat[i] += __ldcg(theirs + i * WARPS_N * 32);
                }
                write<FMT, S>(p, flat, tile, tiles_m, wn, lane);
                if (threadIdx.x == 0) p.arrived[tile] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < ACC; ++i) flat[i] = 0.f;
        ++tile, step = 0, first_step = 0;
    }
}

// Tiles by rows of x, four digits: 16-row blocks of weights a warp, stages of the ring (two), blocks a multiprocessor.
#ifndef TILES8
#if FORMAT == 4
#define TILES8 2062
#define TILES16 2052
#define TILES32 2042
#define TILES64 4041
#elif FORMAT == 2 || FORMAT == 3
#define TILES8 2042
#define TILES16 2042
#define TILES32 2051
#define TILES64 2041
#else
#define TILES8 2042
#define TILES16 2042
#define TILES32 2032
#define TILES64 2041
#endif
#endif

template <int FMT, int NT, int TILES>
static int start(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Shape<FMT, NT, TILES / 1000, TILES / 10 % 100>;
    constexpr int BLOCKS = TILES % 10;
    const long long steps = (p.K + S::STEP - 1) / S::STEP;
    const long long tiles = (long long)((p.N + S::BN - 1) / S::BN) * ((p.M + S::BM - 1) / S::BM);
    const long long most = (long long)processors * BLOCKS, blocks = tiles * steps < most ? tiles * steps : most;
    if (needed) {
        needed[0] = most * 2 * S::BN * S::BM, needed[1] = tiles;
        return 0;
    }
    auto* kernel = streamed<FMT, S, BLOCKS>;
    static bool ready[64] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess && !ready[device & 63]) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SMEM);
        ready[device & 63] = error == cudaSuccess;
    }
    if (error != cudaSuccess) return (int)error;
    kernel<<<(unsigned)blocks, THREADS, S::SMEM, stream>>>(p);
    return (int)cudaGetLastError();
}

// Launches the product, or tells what it needs: floats of `partial`, ints of `arrived`. Returns a cudaError_t.
extern "C" int streamed_linear(const Problem* p, int processors, long long* needed, void* stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (p->M <= 8) return start<FORMAT, 1, TILES8>(*p, processors, needed, s);
    if (p->M <= 16) return start<FORMAT, 2, TILES16>(*p, processors, needed, s);
    if (p->M <= 32) return start<FORMAT, 4, TILES32>(*p, processors, needed, s);
    return start<FORMAT, 8, TILES64>(*p, processors, needed, s);
}

extern "C" const char* streamed_error(int error) { return cudaGetErrorString((cudaError_t)error); }
