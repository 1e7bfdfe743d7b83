// More rows of x: the warps of a block share a ring of stages, weights and x, with a barrier a step.
//
// Tiles of BN rows of the weights and BM of x are rows of steps along k, and the blocks of the grid take equal runs of
// these steps (stream-K, Osama et al. 2023), so all of them end together whatever the shape. What two blocks share of a
// tile goes to a workspace, and the last one there sums it in the order of k. A warp owns 16 R rows and one half of k.
#pragma once
#include "decode.cuh"

constexpr int WARPS_N = 4, WARPS_K = 2, THREADS = 32 * WARPS_N * WARPS_K;

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

template <class S> __device__ __forceinline__ int place(int row, int unit) {      // of a unit of x in its stage
    if constexpr (S::UNITS == 32) unit = (unit & 16) | ((unit & 3) ^ (row & 1)) << 2 | (unit >> 2 & 3);
    else unit ^= (row & 1) << 2;
    return (row * S::UNITS + unit) * 16;
}

// What a thread copies, step by step: 2 R lane-private units of weights, scales, and units of x.
template <int FMT, class S> struct Ring {
    const Problem& p;
    uint32_t base;                                        // shared memory
    int wn, wk, lane, steps, tiles_m;
    int tile, step;
    const uint8_t *weight, *scale, *zero;                 // at the step to come
    const __nv_bfloat16* x;
    int rows, scale_rows, x_rows, k_left;                 // that are left below the thread's first one; of its half

    __device__ __forceinline__ void begin() {
        const int n0 = tile / tiles_m * S::BN, m0 = tile % tiles_m * S::BM, half = threadIdx.x & 1;
        const int n = n0 + wn * 16 * S::R + (lane >> 2), row = n0 + (threadIdx.x >> 1), k0 = step * S::STEP;
        weight = p.weight + n * pitch() + step * 128 + wk * 64 + (lane & 3) * 16;
        rows = p.N - n, scale_rows = p.N - row, x_rows = p.M - m0 - (int)threadIdx.x / S::UNITS, k_left = p.K - k0;
        x = p.x + (size_t)(m0 + threadIdx.x / S::UNITS) * p.K + k0 + threadIdx.x % S::UNITS * 8;
        const size_t chunk = k0 / 128 + half, chunks = p.K / 128;
        if constexpr (FMT == NVFP4) scale = p.scale + (row * chunks + chunk) * 8;
        else if constexpr (FMT != BF16) scale = p.scale + (row * chunks + chunk) * 4;
        if constexpr (FMT == INT4_ASYM) zero = p.zero + ((n0 / 8 + (threadIdx.x >> 1)) * chunks + chunk) * 4;
    }
    __device__ __forceinline__ size_t pitch() const { return FMT == BF16 ? (size_t)p.K * 2 : (size_t)p.K / 2; }

    __device__ __forceinline__ void load(int slot) {
        const uint32_t to = base + slot * S::STAGE, warp = wk * WARPS_N + wn;
        const int bytes = wk * S::KC < k_left ? 16 : 0;
#pragma unroll
        for (int j = 0; j < 2 * S::R; ++j)
            copy16(to + ((warp * 2 * S::R + j) * 32 + lane) * 16, weight + j * (8 * pitch()), 8 * j < rows ? bytes : 0);
        if constexpr (FMT != BF16) load_scales(to + S::W_BYTES + S::X_BYTES);
        const int unit = threadIdx.x % S::UNITS, row = threadIdx.x / S::UNITS;
        constexpr int EACH = THREADS / S::UNITS;          // rows of x that all threads copy at a time
#pragma unroll
        for (int j = 0; j < S::BM; j += EACH)
            if (j < x_rows && (S::BM >= EACH || row < S::BM))
                copy16(to + S::W_BYTES + place<S>(row, unit) + j * S::UNITS * 16, x + (size_t)j * p.K,
                       unit * 8 < k_left ? 16 : 0);
        weight += 128, scale += FMT == NVFP4 ? 16 : 8, zero += 8, x += S::STEP, k_left -= S::STEP;
        if (++step == steps) {
            step = 0, ++tile;
            begin();
        }
    }
    __device__ __forceinline__ void load_scales(uint32_t to) {
        constexpr int SIZE = FMT == NVFP4 ? 8 : 4;
        const bool in = (int)(threadIdx.x & 1) * S::KC < k_left;
#pragma unroll
        for (int j = 0; j < S::BN; j += THREADS / 2)
            if (S::BN >= THREADS / 2 || threadIdx.x < S::BN * 2)
                copy<SIZE>(to + threadIdx.x * SIZE + j * 2 * SIZE, scale + (size_t)j * (p.K / 128) * SIZE,
                           in && j < scale_rows);
        if constexpr (FMT == INT4_ASYM)
            if (threadIdx.x < S::BN / 4) copy<4>(to + S::BN * S::S_ROW + threadIdx.x * 4, zero, in && zero_row_in());
    }
    __device__ __forceinline__ bool zero_row_in() const {
        return tile / tiles_m * (S::BN / 8) + (int)(threadIdx.x >> 1) < (p.N + 7) / 8;
    }
    // The units of x that this thread copied, into the order of the codes of a word.
    __device__ __forceinline__ void reorder_x(uint8_t* smem, int slot) {
        if constexpr (FMT != BF16) {
            const int row = threadIdx.x / S::UNITS;
            uint8_t* first = smem + slot * S::STAGE + S::W_BYTES + place<S>(row, threadIdx.x % S::UNITS);
#pragma unroll
            for (int j = 0; j < S::BM; j += THREADS / S::UNITS)
                if (row + j < p.M) {
                    uint4* unit = (uint4*)(first + j * S::UNITS * 16);
                    *unit = reordered(*unit);
                }
        }
    }
};

// The scale of words 2 i and 2 i + 1 of a lane, or int4's zero points.
template <int FMT, class S>
__device__ __forceinline__ uint32_t factor_of(const uint8_t* scales, int row, int wk, int t, int i) {
    uint32_t two[2];
    if constexpr (FMT == NVFP4) return e4m3_factors(scales[row * 16 + wk * 8 + t * 2 + i], two), two[0];
    else if constexpr (FMT == MXFP4) return e8m0_factor(scales[row * 8 + wk * 4 + t]);
    else if constexpr (FMT == INT4) return 0x43084308u;   // 136
    else return int4_zero(((const uint32_t*)(scales + S::BN * S::S_ROW))[(row >> 3) * 2 + wk], row & 7);
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
                decode<INT>(word, f, a[h]);
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

template <int FMT, class S, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) wide(const Problem p) {
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
    ring.begin();
    int loaded = begin;
#pragma unroll
    for (int slot = 0; slot < S::STAGES - 1; ++slot) {
        if (loaded < end) ring.load(slot);
        ++loaded;
        commit();
    }
    wait<S::STAGES - 2>();
    ring.reorder_x(smem, 0);

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
        if (unit + 1 < end) ring.reorder_x(smem, next);
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
            if (wk == 0) write<FMT, S>(p, flat, tile / tiles_m * S::BN + wn * 16 * S::R, tile % tiles_m * S::BM, lane);
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
                write<FMT, S>(p, flat, tile / tiles_m * S::BN + wn * 16 * S::R, tile % tiles_m * S::BM, lane);
                if (threadIdx.x == 0) p.arrived[tile] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < ACC; ++i) flat[i] = 0.f;
        ++tile, step = 0, first_step = 0;
    }
}
