// From 17 rows of x on: Hopper's warpgroup products, with the weights decoded in registers as A and x in shared memory.
//
// A block has tiles of 256 rows of the weights (16 R a warp) and 8 NT rows of x. The tiles are rows of chunks along k, and
// the blocks of the grid take equal runs of these chunks (stream-K, Osama et al. 2023), so all of them end together
// whatever the shape. Every lane copies (cp.async) its own weights and its own pieces of x into a ring that runs ahead
// over tile borders; a chunk ahead of its use, x goes into the 8x8 core matrices that the tensor cores read, in the order
// of the codes, and a warp says so at a barrier that the others pass before they multiply, not before they decode.
//
// What several blocks share of a tile goes to a workspace. At the end each of them adds up its share of the tile in the
// order of k: no float atomics, the same bits in every run. They wait for each other, so all blocks of the grid must be
// on the device at once: one a multiprocessor, and no two such products at a time.
#pragma once
#include "warpgroup.cuh"

template <int FMT, int NT_, int R_, int STAGES_> struct Group {
    static constexpr int NT = NT_, R = R_, STAGES = STAGES_, WARPS = 16 / R, THREADS = 32 * WARPS;
    static constexpr int BN = 256, BM = 8 * NT, KC = 128;     // a warp has 16 rows of each BN / R
    // Scales come four chunks at a time, a sector of 32 bytes a row (nvfp4) or half of one.
    static constexpr int S_ROW = FMT == NVFP4 ? 32 : 16, SCALES = R * (16 * S_ROW + (FMT == INT4_ASYM ? 32 : 0));
    static constexpr int NEEDS = FMT == NVFP4 ? 256 : 512;    // that divides K
    static constexpr int PIECES = BM * 16 / THREADS;          // of 16 bytes of x, a thread and chunk
    static constexpr int W_STAGE = R * 16 * 64;
    static constexpr int X_CHUNK = BM * KC * 2, X_STAGES = 3;
    static constexpr int STAGE = WARPS * W_STAGE + X_CHUNK;
    static constexpr int SMEM = 64 + X_STAGES * X_CHUNK + STAGES * (STAGE + WARPS * SCALES);
};

template <int NT_> struct Rows {                           // 16 of the weights, 8 NT of x
    static constexpr int R = 1, NT = NT_;
};

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1) group(const Problem p) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    constexpr int NT = S::NT, R = S::R, SUMS = NT * 4, APART = S::BN / R;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const int chunks = p.K / S::KC, tiles_m = (p.M + S::BM - 1) / S::BM, blocks = gridDim.x;
    const int units = (p.N + S::BN - 1) / S::BN * tiles_m * chunks;
    auto start_of = [&](int block) { return (int)((long long)units * block / blocks); };
    auto owner_of = [&](int unit) { return (int)(((long long)(unit + 1) * blocks - 1) / units); };
    const int begin = start_of(blockIdx.x), end = start_of(blockIdx.x + 1);
    uint8_t* const ring = smem + S::X_STAGES * S::X_CHUNK;
    const uint32_t arranged = smem_address(ring) + S::STAGES * (S::STAGE + S::WARPS * S::SCALES);     // barriers
    const uint32_t to = smem_address(ring) + warp * S::W_STAGE, x_to = smem_address(ring) + S::WARPS * S::W_STAGE;
    uint8_t* const scale_ring = ring + S::STAGES * S::STAGE + warp * S::STAGES * S::SCALES;
    const size_t pitch = (size_t)p.K / 2;

    // what this thread copies
    int load_tile = begin / chunks, load_chunk = begin % chunks, scale_slot = S::STAGES - 1, rows, x_rows;
    bool fresh;
    const uint8_t* weight;
    const __nv_bfloat16* x;
    auto aim = [&]() {
        const int n0 = load_tile / tiles_m * S::BN + warp * 16;
        weight = p.weight + (size_t)(n0 + g) * pitch + load_chunk * 64 + t * 16;
        rows = p.N - n0, fresh = true;
    };
    int x_tile = load_tile, x_chunk = load_chunk;
    auto aim_x = [&]() {
        const int m = x_tile % tiles_m * S::BM + (warp >> 2) * 8 + g;
        x = p.x + (size_t)m * p.K + x_chunk * S::KC + t * 32 + (warp & 3) * 8, x_rows = p.M - m;
    };
    auto load_scales = [&]() {                            // of the four chunks around this one
        const int n0 = load_tile / tiles_m * S::BN + warp * 16, quad = load_chunk >> 2;
        scale_slot = scale_slot == S::STAGES - 1 ? 0 : scale_slot + 1;
        const uint32_t at = smem_address(scale_ring) + scale_slot * S::SCALES + lane * 16;
        constexpr int HALVES = S::S_ROW / 16, SIZE = S::SCALES / R;
        const int row = lane / HALVES, half = lane % HALVES;
        const bool in = quad * 4 + half * 2 < chunks;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (lane < 16 * HALVES)
                copy16(at + r * SIZE,
                       p.scale + (size_t)(n0 + r * APART + row) * (chunks * (S::S_ROW / 4)) + quad * S::S_ROW + half * 16,
                       in && r * APART + row < rows ? 16 : 0);
            if constexpr (FMT == INT4_ASYM)
                if (lane < 2)
                    copy16(at + r * SIZE + 16 * S::S_ROW,
                           p.zero + ((size_t)((n0 + r * APART) / 8 + lane) * chunks + quad * 4) * 4,
                           r * APART + lane * 8 < rows ? 16 : 0);
        }
    };
    auto load = [&](int slot) {
        const uint32_t at = to + slot * S::STAGE;
#pragma unroll
        for (int j = 0; j < 2 * R; ++j) {
            const int row = j / 2 * APART + j % 2 * 8;
            copy16(at + (j * 32 + lane) * 16, weight + row * pitch, g + row < rows ? 16 : 0);
        }
        if (fresh || load_chunk % 4 == 0) load_scales();
        weight += 64, fresh = false;
        if (++load_chunk == chunks) {
            load_chunk = 0, ++load_tile;
            aim();
        }
    };
    auto load_x = [&](int slot) {
#pragma unroll
        for (int j = 0; j < S::PIECES; ++j)               // rows of x: 8 for each four warps
            copy16(x_to + slot * S::STAGE + (j * S::THREADS + threadIdx.x) * 16, x + (size_t)j * (S::THREADS / 16) * p.K,
                   j * (S::THREADS / 16) < x_rows ? 16 : 0);
        x += S::KC;
        if (++x_chunk == chunks) {
            x_chunk = 0, ++x_tile;
            aim_x();
        }
    };
    auto arrange = [&](int slot, int to_stage) {          // x into core matrices
        const uint4* from = (const uint4*)(ring + slot * S::STAGE + S::WARPS * S::W_STAGE) + threadIdx.x;
        uint8_t* at = smem + to_stage * S::X_CHUNK + (warp & 3) * 2 * (S::BM * 32) + (warp >> 2) * 128 + lane * 4;
#pragma unroll
        for (int j = 0; j < S::PIECES; ++j) {
            const uint4 v = from[j * S::THREADS];
            uint8_t* const m = at + j * S::THREADS;
            *(uint32_t*)m = __byte_perm(v.x, v.z, 0x5410);
            *(uint32_t*)(m + S::BM * 16) = __byte_perm(v.x, v.z, 0x7632);
            *(uint32_t*)(m + S::BM * 32) = __byte_perm(v.y, v.w, 0x5410);
            *(uint32_t*)(m + S::BM * 48) = __byte_perm(v.y, v.w, 0x7632);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(arranged + to_stage * 8);
    };
    if (threadIdx.x < S::X_STAGES)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(arranged + threadIdx.x * 8), "r"(S::WARPS) : "memory");
    __syncthreads();
    let_others_start();
    aim(), aim_x();
#pragma unroll
    for (int slot = 0; slot < S::STAGES - 1; ++slot)
        if (begin + slot < end) load(slot);
    after_others();
#pragma unroll
    for (int slot = 0; slot < S::STAGES - 1; ++slot) {
        if (begin + slot < end) load_x(slot);
        commit();
    }
    wait<S::STAGES - 2>();
    __syncwarp();
    arrange(0, 0);

    float sum[R][SUMS], part[INT ? R : 1][INT ? SUMS : 4];
    int tile = begin / chunks, head = -1, tail = -1, unit = begin, slot = 0, stage = 0, parity = 0, at_scales = S::STAGES - 1;
    const int first_tile = tile;
    for (; unit < end; ++tile) {
        const int from = unit, until = min(end, (tile + 1) * chunks);
        if constexpr (INT) {
#pragma unroll
            for (int i = 0; i < R * SUMS; ++i) (&sum[0][0])[i] = 0.f;
        }
        for (; unit < until; ++unit) {
            if (unit + S::STAGES - 1 < end) {
                const int free = slot == 0 ? S::STAGES - 1 : slot - 1;
                load(free), load_x(free);
            }
            commit();

            const uint8_t* mine = ring + slot * S::STAGE + warp * S::W_STAGE;
            uint4 words[2 * R];
#pragma unroll
            for (int j = 0; j < 2 * R; ++j) words[j] = ((const uint4*)mine)[j * 32 + lane];
            const int quarter = (unit - tile * chunks) % 4;
            if (unit == from || quarter == 0) at_scales = at_scales == S::STAGES - 1 ? 0 : at_scales + 1;
            const uint8_t* scales = scale_ring + at_scales * S::SCALES;
            uint32_t factor[2 * R][2];
#pragma unroll
            for (int j = 0; j < 2 * R; ++j) {
                const uint8_t* const of = scales + j / 2 * (S::SCALES / R);
                const int row = j % 2 * 8 + g;
                if constexpr (FMT == NVFP4) e4m3_factors(*(const uint16_t*)(of + row * 32 + quarter * 8 + t * 2), factor[j]);
                else if constexpr (FMT == MXFP4) factor[j][0] = factor[j][1] = e8m0_factor(of[row * 16 + quarter * 4 + t]);
                else if constexpr (FMT == INT4) factor[j][0] = factor[j][1] = 0x43084308u;       // 136
                else factor[j][0] = factor[j][1] = int4_zero(((const uint32_t*)(of + 256))[j % 2 * 4 + quarter], g);
            }
            const uint64_t b = describe<S::BM>(smem_address(smem) + stage * S::X_CHUNK);
            uint32_t a[2][R][2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t pairs[2 * R][4];
#pragma unroll
                for (int j = 0; j < 2 * R; ++j) {
                    const uint4 w = words[j];
                    decode<INT>(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, factor[j][i >> 1], pairs[j]);
                }
                if (i == 0) await(arranged + stage * 8, parity);
                warpgroup_wait<1>();                          // the products that read this half of a
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        a[i & 1][r][h][0] = pairs[2 * r][2 * h], a[i & 1][r][h][1] = pairs[2 * r + 1][2 * h];
                        a[i & 1][r][h][2] = pairs[2 * r][2 * h + 1], a[i & 1][r][h][3] = pairs[2 * r + 1][2 * h + 1];
                    }
                warpgroup_fence();
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int r = 0; r < R; ++r)
                        warpgroup_mma<NT>(*(float(*)[SUMS])(INT ? part[INT ? r : 0] : sum[r]), a[i & 1][r][h],
                                          b + (2 * i + h) * (S::BM * 32 >> 4), i + h > 0 || (!INT && unit > from));
                warpgroup_commit();
            }
            if constexpr (INT) {
                warpgroup_wait<0>();
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const float* row = (const float*)(scales + r * (S::SCALES / R)) + g * 4 + quarter;
                    const float lower = row[0], upper = row[32];
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) sum[r][i] += (i & 2 ? upper : lower) * part[r][i];
                }
            }
            wait<S::STAGES - 2>();
            __syncwarp();                                     // scales are for all lanes
            slot = slot == S::STAGES - 1 ? 0 : slot + 1;
            if (++stage == S::X_STAGES) stage = 0, parity ^= 1;
            if (unit + 1 < end) arrange(slot, stage);
        }
        warpgroup_wait<0>();
        const int n0 = tile / tiles_m * S::BN + warp * 16, m0 = tile % tiles_m * S::BM;
        if (until - from == chunks) {
#pragma unroll
            for (int r = 0; r < R; ++r) write<FMT, Rows<NT>>(p, sum[r], n0 + r * APART, m0, lane);
        } else {                                          // others have chunks of this tile too
            const int which = tile == first_tile ? 0 : 1;
            float4* mine = (float4*)p.partial + (size_t)(blockIdx.x * 2 + which) * NT * 512 + threadIdx.x;
#pragma unroll
            for (int i = 0; i < R * NT; ++i) {
                const float* f = sum[i % R] + i / R * 4;
                __stcg(mine + i * S::THREADS, make_float4(f[0], f[1], f[2], f[3]));
            }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) atomicAdd(p.arrived + 2 * tile, 1);
            if (which) tail = tile;
            else head = tile;
        }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        tile = i == 0 ? head : tail;
        if (tile < 0) continue;
        const int first = owner_of(tile * chunks), last = owner_of((tile + 1) * chunks - 1), shares = last - first + 1;
        if (threadIdx.x == 0) {
            const long long since = clock64();
            int count;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(p.arrived + 2 * tile) : "memory");
                if (clock64() - since > 4000000000ll) __trap();
            } while (count < shares);
        }
        __syncthreads();
        __threadfence();
        for (int i = blockIdx.x - first; i < R * NT; i += shares) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int block = first; block <= last; ++block) {
                const int which = start_of(block) < tile * chunks;      // its last tile, not its first
                const float4 v = __ldcg((const float4*)p.partial + (size_t)(block * 2 + which) * NT * 512 + i * S::THREADS
                                        + threadIdx.x);
                total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
            }
            write<FMT, Rows<1>>(p, total, tile / tiles_m * S::BN + i % R * APART + warp * 16,
                                tile % tiles_m * S::BM + i / R * 8, lane);
        }
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd(p.arrived + 2 * tile + 1, 1) == shares - 1)
            p.arrived[2 * tile] = p.arrived[2 * tile + 1] = 0;
    }
}
