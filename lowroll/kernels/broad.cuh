// From 33 rows of x on: Hopper's warpgroup products, weights decoded in registers as A, both operands by the copy engine.
//
// A block has tiles of 256 rows of the weights (16 a warp) and 8 NT rows of x. One warp orders the copies, of chunks of
// 128 along k, into a ring of stages with a barrier each; the others decode and multiply, and give a stage back when the
// tensor cores have read it. A kernel before has put x into the core matrices that they read, in the order of the codes
// (`arrange`), so that a chunk of x is one run of bytes.
//
// Whole tiles are dealt in turns. Those that are left, fewer than the blocks, are shared: as rows of chunks they are cut
// into equal runs (stream-K, Osama et al. 2023). A block does its run first and leaves the sums in a workspace; at the end
// the blocks of a tile add it up in the order of k, each its share: no float atomics, the same bits in every run. They
// wait for each other, so all blocks of the grid must be on the device at once: one a multiprocessor, and no two such
// products at a time.
#pragma once
#include <cuda.h>

#include "warpgroup.cuh"

template <int FMT, int NT_, int STAGES_, int RANKS_> struct Broad {
    static constexpr int NT = NT_, STAGES = STAGES_, RANKS = RANKS_, WARPS = 16, THREADS = 32 * WARPS;
    static constexpr int BN = 16 * WARPS, BM = 8 * NT, KC = 128;
    // Scales come four chunks at a time: a sector of 32 bytes a row (nvfp4) or half of one.
    static constexpr int S_ROW = FMT == NVFP4 ? 32 : 16, Z_BYTES = FMT == INT4_ASYM ? BN / 8 * 16 : 0;
    static constexpr int NEEDS = FMT == NVFP4 ? 256 : 512;    // that divides K: the copy engine wants rows of 16 bytes
    static constexpr int SLOTS = (STAGES + 3) / 2;           // of scales: as many as the stages can touch
    static constexpr int X_STAGE = BM * KC * 2, W_STAGE = BN * KC / 2, STAGE = X_STAGE + W_STAGE;
    static constexpr int SCALES = BN * S_ROW + Z_BYTES, PAPER = 256;        // bytes of a warp to turn sums on
    static constexpr int SMEM = STAGES * (STAGE + 16) + SLOTS * SCALES + WARPS * PAPER;
};

struct Maps {                                                 // of what the copy engine cuts out of matrices
    CUtensorMap codes, scales, zeros;
};

// The parts of tiles that a block has: (tile, chunks from..until).
struct Run {
    int chunks, tiles, blocks, shared, unit, end, whole, tile, from, until;
    __device__ __forceinline__ Run(int chunks, int tiles, int shared, int block, int blocks)
        : chunks(chunks), tiles(tiles), blocks(blocks), shared(shared), unit(start_of(block)), end(start_of(block + 1)),
          whole(shared + block) {}
    __device__ __forceinline__ int start_of(int block) const { return shared * chunks * block / blocks; }
    __device__ __forceinline__ int owner_of(int unit) const { return ((unit + 1) * blocks - 1) / (shared * chunks); }
    __device__ __forceinline__ bool next() {
        if (unit < end) {
            tile = unit / chunks, from = unit - tile * chunks, until = min(chunks, from + end - unit);
            unit += until - from;
            return true;
        }
        tile = whole, whole += blocks, from = 0, until = chunks;
        return tile < tiles;
    }
};
struct Cursor : Run {                                         // over the chunks of a run
    int chunk;
    bool more, fresh;                                         // is there a chunk, and has it new scales?
    __device__ __forceinline__ explicit Cursor(const Run& run) : Run(run) { enter(); }
    __device__ __forceinline__ void enter() { more = next(), fresh = true, chunk = from; }
    __device__ __forceinline__ void step() {
        fresh = ++chunk % 4 == 0;
        if (chunk == until) enter();
    }
};

__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fetch(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap& map, int byte, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void fetch_for_both(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3)
        : "memory");
}
__device__ __forceinline__ uint32_t of_rank(uint32_t address, int rank) {       // the same place in another block's memory
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void arrive_there_if(bool really, uint32_t barrier) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
                     barrier),
                 "r"((int)really)
                 : "memory");
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_if(bool really, uint32_t barrier) {     // without a branch between products
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
                 "r"((int)really)
                 : "memory");
}
template <int N> __device__ __forceinline__ void settle(float (&sums)[N]) {     // read them only after the wait before
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// x into [chunk][tile of BM rows][16 columns][row][8 values]: column 4 i + q has the codes q and q + 4 of the words i of
// the four lanes. A thread has word i of one row.
__global__ void __launch_bounds__(256) arrange(const __nv_bfloat16* x, uint4* to, int M, int K, int BM) {
    let_others_start();
    after_others();
    const int chunks = K / 128, warp = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, i = lane & 3;
    const int chunk = warp % chunks, m = warp / chunks * 8 + (lane >> 2), tiles = (M + BM - 1) / BM;
    if (m >= M) return;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) v[t] = reordered(*(const uint4*)(x + (size_t)m * K + chunk * 128 + t * 32 + i * 8));
    uint4* const at = to + ((size_t)(chunk * tiles + m / BM) * 16 + 4 * i) * BM + m % BM;
    at[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    at[BM] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    at[2 * BM] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    at[3 * BM] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
}

// What the sums of a lane's two rows of the weights, n and n + 8, become.
template <int FMT> struct Finish {
    float factor[2], bias[2];
    __device__ __forceinline__ Finish(const Problem& p, int n) {
#pragma unroll
        for (int r = 0; r < 2; ++r, n += 8) {
            factor[r] = FMT == MXFP4 ? 0x1p22f : 1.f, bias[r] = 0.f;
            if (n >= p.N) continue;
            if constexpr (FMT == NVFP4) factor[r] = 256.f / p.global[p.global_per_row ? n : 0];
            if (p.bias) bias[r] = p.bias_fp32 ? ((const float*)p.bias)[n] : __bfloat162float(((const __nv_bfloat16*)p.bias)[n]);
        }
    }
    // A warp's 16 rows from n0 on and 8 rows of x from m0 on, turned on `paper`.
    __device__ __forceinline__ void write(const Problem& p, const float* sum, int n0, int m0, uint8_t* paper, int lane) const {
        const int t = lane & 3, g = lane >> 2;
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = fmaf(sum[i], factor[i >> 1], bias[i >> 1]);
        if (p.y_fp32) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = m0 + t * 2 + (i & 1), n = n0 + g + (i >> 1) * 8;
                if (m < p.M && n < p.N) ((float*)p.y)[(size_t)m * p.N + n] = y[i];
            }
            return;
        }
        uint32_t low, high;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(y[1]), "f"(y[0]));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y[3]), "f"(y[2]));
        const uint32_t at = smem_address(paper) + (lane & 7) * 32 + (lane >> 3 & 1) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(low), "r"(high) : "memory");
        __syncwarp();
        const int m = m0 + (lane >> 1), n = n0 + (lane & 1) * 8;
        if (lane < 16 && m < p.M && n < p.N) *(uint4*)((__nv_bfloat16*)p.y + (size_t)m * p.N + n) = ((const uint4*)paper)[lane];
        __syncwarp();
    }
};

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1)
broad(const Problem p, const __grid_constant__ Maps maps, const int tiles, const int shared) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    constexpr int NT = S::NT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const int tiles_m = (p.M + S::BM - 1) / S::BM, rank = S::RANKS == 2 ? blockIdx.x & 1 : 0;
    const Run run(p.K / S::KC, tiles, shared, blockIdx.x / S::RANKS, gridDim.x / S::RANKS);
    auto row_of = [&](int tile) { return (tile / tiles_m * S::RANKS + rank) * S::BN; };
    uint8_t* const scales = smem + S::STAGES * S::STAGE;
    uint8_t* const paper = scales + S::SLOTS * S::SCALES + warp * S::PAPER;
    const uint32_t full = smem_address(scales) + S::SLOTS * S::SCALES + S::WARPS * S::PAPER, empty = full + S::STAGES * 8;
    if (threadIdx.x < S::STAGES) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + threadIdx.x * 8) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + threadIdx.x * 8), "r"(S::RANKS * S::WARPS) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (S::RANKS == 2) meet_cluster();
    else __syncthreads();
    let_others_start();

    // what thread 0 orders: the chunks ahead
    Cursor ahead(run);
    int next_slot = S::SLOTS - 1;
    auto fetch_codes = [&](int stage) {
        const uint32_t to = smem_address(smem) + stage * S::STAGE + S::X_STAGE, barrier = full + stage * 8;
        const int n0 = row_of(ahead.tile);
        expect(barrier, S::STAGE + (ahead.fresh ? S::SCALES : 0));
        fetch(to, maps.codes, ahead.chunk * 64, n0, barrier);
        if (ahead.fresh) {
            next_slot = next_slot == S::SLOTS - 1 ? 0 : next_slot + 1;
            const uint32_t to = smem_address(scales) + next_slot * S::SCALES;
            fetch(to, maps.scales, ahead.chunk / 4 * S::S_ROW, n0, barrier);
            if constexpr (FMT == INT4_ASYM) fetch(to + S::BN * S::S_ROW, maps.zeros, ahead.chunk / 4 * 16, n0 / 8, barrier);
        }
        ahead.step();
    };
    auto fetch_x = [&](int tile, int chunk, int stage) {
        constexpr int SHARE = S::X_STAGE / S::RANKS;
        const uint32_t to = smem_address(smem) + stage * S::STAGE + rank * SHARE;
        const uint8_t* const from = (const uint8_t*)p.arranged + (size_t)(chunk * tiles_m + tile % tiles_m) * S::X_STAGE + rank * SHARE;
        if constexpr (S::RANKS == 2) fetch_for_both(to, from, SHARE, full + stage * 8);
        else fetch(to, from, SHARE, full + stage * 8);
    };
    if (threadIdx.x == 0)
        for (int stage = 0; stage < S::STAGES && ahead.more; ++stage) fetch_codes(stage);
    after_others();
    if (threadIdx.x == 0) {
        Cursor first(run);
        for (int stage = 0; stage < S::STAGES && first.more; ++stage, first.step()) fetch_x(first.tile, first.chunk, stage);
    }

    float sum[NT * 4];
    int slot = S::SLOTS - 1, done = 0;                        // chunks
    Run parts = run;
    while (parts.next()) {
        for (int chunk = parts.from; chunk < parts.until; ++chunk) {
            if (chunk == parts.from || chunk % 4 == 0) slot = slot == S::SLOTS - 1 ? 0 : slot + 1;
            if (threadIdx.x == 0 && ahead.more && done > 1) {     // the stage of two chunks ago is free
                const int free = (done - 2) % S::STAGES;
                await(empty + free * 8, (done - 2) / S::STAGES & 1);
                fetch_x(ahead.tile, ahead.chunk, free);
                fetch_codes(free);
            }
            __syncwarp();
            const int stage = done % S::STAGES, before = (done + S::STAGES - 1) % S::STAGES;
            await(full + stage * 8, done / S::STAGES & 1);
            const uint8_t* const x = smem + stage * S::STAGE;
            const uint4* const mine = (const uint4*)(x + S::X_STAGE) + warp * 64 + lane;
            uint4 words[2] = {mine[0], mine[32]};
            const uint8_t* const of = scales + slot * S::SCALES + (warp * 16 + g) * S::S_ROW;
            uint32_t factor[2][2], zero[2];                   // INT: the two parts of a scale
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint8_t* const row = of + j * 8 * S::S_ROW;
                if constexpr (FMT == NVFP4) e4m3_factors(*(const uint16_t*)(row + chunk % 4 * 8 + t * 2), factor[j]);
                else if constexpr (FMT == MXFP4) factor[j][0] = factor[j][1] = e8m0_factor(row[chunk % 4 * 4 + t]);
                else {
                    const float scale = ((const float*)row)[chunk % 4];
                    factor[j][0] = twice(scale), factor[j][1] = twice(scale - __uint_as_float(factor[j][0] << 16));
                    zero[j] = 0x43084308u;                    // 136
                    if constexpr (FMT == INT4_ASYM)
                        zero[j] = int4_zero(
                            ((const uint32_t*)(scales + slot * S::SCALES + S::BN * S::S_ROW))[(warp * 2 + j) * 4 + chunk % 4], g);
                }
            }
            const uint64_t b = describe<S::BM>(smem_address(x));
            uint32_t a[2][2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t pairs[2][4];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint4 w = words[j];
                    decode<INT>(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, INT ? zero[j] : factor[j][i >> 1], pairs[j]);
                    if constexpr (INT)
#pragma unroll
                        for (int q = 0; q < 4; ++q) pairs[j][q] = fma2(pairs[j][q], factor[j][0], mul2(pairs[j][q], factor[j][1]));
                }
                warpgroup_wait<1>();                          // the products that read this half of a
                if (i == 1) {
                    if constexpr (S::RANKS == 2) arrive_there_if(lane < 2 && done > 0, of_rank(empty + before * 8, lane & 1));
                    else arrive_if(lane == 0 && done > 0, empty + before * 8);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    a[i & 1][h][0] = pairs[0][2 * h], a[i & 1][h][1] = pairs[1][2 * h];
                    a[i & 1][h][2] = pairs[0][2 * h + 1], a[i & 1][h][3] = pairs[1][2 * h + 1];
                }
                warpgroup_fence();
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    warpgroup_mma<NT>(sum, a[i & 1][h], b + (2 * i + h) * (S::BM * 32 >> 4), i + h > 0 || chunk > parts.from);
                warpgroup_commit();
            }
            ++done;
        }
        warpgroup_wait<0>();
        settle(sum);
        const int n0 = row_of(parts.tile) + warp * 16, m0 = parts.tile % tiles_m * S::BM;
        if (parts.until - parts.from == parts.chunks) {
            const Finish<FMT> finish(p, n0 + g);
#pragma unroll
            for (int i = 0; i < NT; ++i) finish.write(p, sum + i * 4, n0, m0 + i * 8, paper, lane);
        } else {                                              // others have chunks of this tile too
            const int which = run.unit < parts.tile * run.chunks;     // its last tile, not its first
            float4* const to = (float4*)p.partial + (size_t)(blockIdx.x * 2 + which) * NT * 512 + threadIdx.x;
#pragma unroll
            for (int i = 0; i < NT; ++i)
                __stcg(to + i * 512, make_float4(sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) atomicAdd(p.arrived + 2 * (parts.tile * S::RANKS + rank), 1);
        }
    }

    for (int tile = run.unit / run.chunks; tile * run.chunks < run.end; ++tile) {     // with blocks that it is shared with
        const int first = run.owner_of(tile * run.chunks), last = run.owner_of((tile + 1) * run.chunks - 1);
        if (first == last) continue;
        const int shares = last - first + 1, n0 = row_of(tile) + warp * 16;
        int* const arrived = p.arrived + 2 * (tile * S::RANKS + rank);
        if (threadIdx.x == 0) {
            const long long since = clock64();
            int count;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
                if (clock64() - since > 4000000000ll) __trap();
            } while (count < shares);
        }
        __syncthreads();
        __threadfence();
        const Finish<FMT> finish(p, n0 + g);
        for (int i = blockIdx.x / S::RANKS - first; i < NT; i += shares) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int block = first; block <= last; ++block) {
                const int which = run.start_of(block) < tile * run.chunks;      // its last tile, not its first
                const float4 v =
                    __ldcg((const float4*)p.partial + (size_t)((block * S::RANKS + rank) * 2 + which) * NT * 512 + i * 512 + threadIdx.x);
                total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
            }
            finish.write(p, total, n0, tile % tiles_m * S::BM + i * 8, paper, lane);
        }
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd(arrived + 1, 1) == shares - 1) arrived[0] = arrived[1] = 0;
    }
    if constexpr (S::RANKS == 2) meet_cluster();              // a block's memory is there until the other has ended
}
