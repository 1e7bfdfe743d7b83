// From 33 rows of x on: Hopper's warpgroup products, weights decoded in registers as A, x in shared memory as B.
//
// A block has tiles of 16 rows of the weights a warp and 8 NT rows of x. Four warps bring chunks of 128 along k into a
// ring of stages: codes and scales by the copy engine, x by their own hands, into the 8x8 core matrices that the tensor
// cores read and in the order of the codes. The others, sixteen or twelve, decode and multiply, and give a stage back when
// the tensor cores have read it.
//
// Whole tiles are dealt in turns. Those that are left, fewer than the blocks, are shared: as rows of chunks they are cut
// into equal runs (stream-K, Osama et al. 2023). A block does its run first and leaves the sums in a workspace; at the end
// the blocks of a tile add it up in the order of k, each its share: no float atomics, the same bits in every run. They
// wait for each other, so all blocks of the grid must be on the device at once: one a multiprocessor, and no two such
// products at a time.
#pragma once
#include <cuda.h>

#include "warpgroup.cuh"

#ifndef BROAD_BY_HAND
#define BROAD_BY_HAND 0
#endif
#ifndef BROAD_PACE
#define BROAD_PACE 2
#endif

template <int FMT, int NT_, int STAGES_, int WARPS_> struct Broad {
    static constexpr int NT = NT_, STAGES = STAGES_, WARPS = WARPS_, BRINGERS = 4, THREADS = 32 * (WARPS + BRINGERS);
    static constexpr int REGISTERS = WARPS == 16 ? 104 : 144, FEWER = WARPS == 16 ? 64 : 80;     // of a thread, by its role
    static constexpr int BN = 16 * WARPS, BM = 8 * NT, KC = 128;
    static constexpr int PACE = BROAD_PACE;                   // products of 16 along k that are decoded at a time
    // Scales come four chunks at a time: a sector of 32 bytes a row (nvfp4) or half of one.
    static constexpr int S_ROW = FMT == NVFP4 ? 32 : 16, Z_BYTES = FMT == INT4_ASYM ? BN / 8 * 16 : 0;
    static constexpr int NEEDS = FMT == NVFP4 ? 256 : 512;    // that divides K: the copy engine wants rows of 16 bytes
    static constexpr int SLOTS = (STAGES + 3) / 2;            // of scales: as many as the stages can touch
    static constexpr int X_STAGE = BM * KC * 2, W_STAGE = BN * KC / 2, STAGE = X_STAGE + W_STAGE;
    static constexpr int SCALES = BN * S_ROW + Z_BYTES, PAPER = 256;        // bytes of a warp to turn sums on
    static constexpr int SMEM = STAGES * (STAGE + 16) + SLOTS * SCALES + WARPS * PAPER;
    static constexpr bool BY_HAND = BROAD_BY_HAND;            // codes by the bringers' own copies
    static constexpr int PIECES = BM / 32, AT_ONCE = WARPS == 16 ? 2 : 3;       // a thread's of a chunk of x, and those on their way
};

struct Maps {                                                 // of what the copy engine cuts out of matrices
    CUtensorMap codes, scales, zeros;
};

// The parts of tiles that a block has: (tile, chunks from..until).
struct Run {
    int chunks, tiles, blocks, shared, unit, end, whole, tile, from, until;
    __device__ __forceinline__ Run(int chunks, int tiles, int shared)
        : chunks(chunks), tiles(tiles), blocks(gridDim.x), shared(shared), unit(start_of(blockIdx.x)),
          end(start_of(blockIdx.x + 1)), whole(shared + blockIdx.x) {}
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
    int chunk, n, m;                                          // tiles of the weights, of x
    bool more, fresh;                                         // is there a chunk, and has it new scales?
    __device__ __forceinline__ Cursor(const Run& run, int tiles_m) : Run(run) { enter(tiles_m); }
    __device__ __forceinline__ void enter(int tiles_m) {
        more = next(), fresh = true, chunk = from, n = tile / tiles_m, m = tile - n * tiles_m;
    }
    __device__ __forceinline__ void step(int tiles_m) {
        fresh = ++chunk % 4 == 0;
        if (chunk == until) enter(tiles_m);
    }
};

__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap& map, int byte, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
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
template <int N> __device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
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

// The four warps that fill the stages. x lies there as [16 columns][row][8 values]: column 4 i + q has the codes q and
// q + 4 of the words i of the four lanes. A thread's piece is word i of one row.
template <int FMT, class S>
__device__ __forceinline__ void bring(const Problem& p, const Maps& maps, const Run& run, uint8_t* smem, uint8_t* scales,
                                      uint32_t full, uint32_t empty) {
    const int thread = threadIdx.x - 32 * S::WARPS, lane = thread & 31, tiles_m = (p.M + S::BM - 1) / S::BM;
    const int i = lane >> 3, row = (thread >> 5) * 8 + (lane & 7);            // and 32 rows on for the next piece
    Cursor codes(run, tiles_m), x(run, tiles_m);
    int slot = S::SLOTS - 1;
    auto fetch_codes = [&](int stage) {
        const uint32_t to = smem_address(smem) + stage * S::STAGE + S::X_STAGE, barrier = full + stage * 8;
        if (codes.fresh) slot = slot == S::SLOTS - 1 ? 0 : slot + 1;
        if (thread == 0) {
            expect(barrier, (S::BY_HAND ? 0 : S::W_STAGE) + (codes.fresh ? S::SCALES : 0));
            if constexpr (!S::BY_HAND) fetch(to, maps.codes, codes.chunk * 64, codes.n * S::BN, barrier);
            if (codes.fresh) {
                const uint32_t to = smem_address(scales) + slot * S::SCALES;
                fetch(to, maps.scales, codes.chunk / 4 * S::S_ROW, codes.n * S::BN, barrier);
                if constexpr (FMT == INT4_ASYM)
                    fetch(to + S::BN * S::S_ROW, maps.zeros, codes.chunk / 4 * 16, codes.n * (S::BN / 8), barrier);
            }
        }
        if constexpr (S::BY_HAND) {
            const int first = codes.n * S::BN + (thread >> 2);
            const uint8_t* from = p.weight + (size_t)first * (p.K / 2) + codes.chunk * 64 + (thread & 3) * 16;
#pragma unroll
            for (int j = 0; j < S::BN / 32; ++j)
                copy16(to + (j * 128 + thread) * 16, from + (size_t)j * 16 * p.K, first + j * 32 < p.N ? 16 : 0);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
        }
        codes.step(tiles_m);
    };
    for (int stage = 0; stage < S::STAGES && codes.more; ++stage)
        if (S::BY_HAND || thread == 0) fetch_codes(stage);
    after_others();
    for (int stage = 0, round = 0; x.more; x.step(tiles_m)) {
        const int m0 = x.m * S::BM + row;
        const __nv_bfloat16* from = p.x + (size_t)m0 * p.K + x.chunk * S::KC + i * 8;
        uint8_t* const to = smem + stage * S::STAGE + (4 * i * S::BM + row) * 16;
#pragma unroll
        for (int first = 0; first < S::PIECES; first += S::AT_ONCE) {
            uint4 v[S::AT_ONCE][4];
#pragma unroll
            for (int j = 0; j < S::AT_ONCE; ++j)
                if (first + j < S::PIECES && m0 + (first + j) * 32 < p.M)
#pragma unroll
                    for (int t = 0; t < 4; ++t) v[j][t] = __ldcg((const uint4*)(from + (size_t)(first + j) * 32 * p.K + t * 32));
            if (first == 0 && round > 0) {
                await(empty + stage * 8, round - 1 & 1);
                if (S::BY_HAND || thread == 0) fetch_codes(stage);
            }
#pragma unroll
            for (int j = 0; j < S::AT_ONCE; ++j)
                if (first + j < S::PIECES && m0 + (first + j) * 32 < p.M) {
#pragma unroll
                    for (int t = 0; t < 4; ++t) v[j][t] = reordered(v[j][t]);
                    uint4* const at = (uint4*)(to + (first + j) * 32 * 16);
                    at[0] = make_uint4(v[j][0].x, v[j][1].x, v[j][2].x, v[j][3].x);
                    at[S::BM] = make_uint4(v[j][0].y, v[j][1].y, v[j][2].y, v[j][3].y);
                    at[2 * S::BM] = make_uint4(v[j][0].z, v[j][1].z, v[j][2].z, v[j][3].z);
                    at[3 * S::BM] = make_uint4(v[j][0].w, v[j][1].w, v[j][2].w, v[j][3].w);
                }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(full + stage * 8);
        if (++stage == S::STAGES) stage = 0, ++round;
    }
}

// The warps that decode and multiply.
template <int FMT, class S>
__device__ __forceinline__ void multiply(const Problem& p, const Run& run, uint8_t* smem, uint8_t* scales, uint32_t full,
                                         uint32_t empty) {
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    constexpr int NT = S::NT, ALL = 32 * S::WARPS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const int tiles_m = (p.M + S::BM - 1) / S::BM;
    uint8_t* const paper = scales + S::SLOTS * S::SCALES + warp * S::PAPER;
    float sum[NT * 4];
    int slot = S::SLOTS - 1, stage = 0, parity = 0, before = -1;             // the stage to be given back
    Run parts = run;
    while (parts.next()) {
        for (int chunk = parts.from; chunk < parts.until; ++chunk) {
            if (chunk == parts.from || chunk % 4 == 0) slot = slot == S::SLOTS - 1 ? 0 : slot + 1;
            await(full + stage * 8, parity);
            const uint8_t* const x = smem + stage * S::STAGE;
            const uint4* const mine = (const uint4*)(x + S::X_STAGE) + warp * 64 + lane;
            const uint4 words[2] = {mine[0], mine[32]};
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
            uint32_t a[2][S::PACE][4];
#pragma unroll
            for (int s = 0; s < 8; s += S::PACE) {
                warpgroup_wait<1>();                          // the products that read this half of a
                if (s == S::PACE) arrive_if(lane == 0 && before >= 0, empty + before * 8);
#pragma unroll
                for (int u = 0; u < S::PACE; ++u)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int i = s + u >> 1;
                        const uint32_t word = i == 0 ? words[j].x : i == 1 ? words[j].y : i == 2 ? words[j].z : words[j].w;
                        uint32_t pairs[2];
                        decode_two<INT>(word >> (s + u & 1) * 8, INT ? zero[j] : factor[j][i >> 1], pairs);
#pragma unroll
                        for (int q = 0; q < 2; ++q)
                            a[s / S::PACE & 1][u][q * 2 + j] =
                                INT ? fma2(pairs[q], factor[j][0], mul2(pairs[q], factor[j][1])) : pairs[q];
                    }
                warpgroup_fence();
#pragma unroll
                for (int u = 0; u < S::PACE; ++u)
                    warpgroup_mma<NT>(sum, a[s / S::PACE & 1][u], b + (s + u) * (S::BM * 32 >> 4),
                                      s + u > 0 || chunk > parts.from);
                warpgroup_commit();
            }
            before = stage;
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
        warpgroup_wait<0>();
        settle(sum);
        arrive_if(lane == 0, empty + before * 8);
        before = -1;
        const int n0 = parts.tile / tiles_m * S::BN + warp * 16, m0 = parts.tile % tiles_m * S::BM;
        if (parts.until - parts.from == parts.chunks) {
            const Finish<FMT> finish(p, n0 + g);
#pragma unroll
            for (int i = 0; i < NT; ++i) finish.write(p, sum + i * 4, n0, m0 + i * 8, paper, lane);
        } else {                                              // others have chunks of this tile too
            const int which = run.unit < parts.tile * run.chunks;     // its last tile, not its first
            float4* const to = (float4*)p.partial + (int)((blockIdx.x * 2 + which) * NT * ALL + threadIdx.x);
#pragma unroll
            for (int i = 0; i < NT; ++i)
                __stcg(to + i * ALL, make_float4(sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]));
            meet<ALL>();
            if (threadIdx.x == 0) {
                __threadfence();                              // what all of them wrote before they met
                atomicAdd(p.arrived + 2 * parts.tile, 1);
            }
        }
    }

    for (int tile = run.unit / run.chunks; tile * run.chunks < run.end; ++tile) {     // with blocks that it is shared with
        const int first = run.owner_of(tile * run.chunks), last = run.owner_of((tile + 1) * run.chunks - 1);
        if (first == last) continue;
        const int shares = last - first + 1, n0 = tile / tiles_m * S::BN + warp * 16;
        if (threadIdx.x == 0) {
            const long long since = clock64();
            int count;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(p.arrived + 2 * tile) : "memory");
                if (clock64() - since > 4000000000ll) __trap();
            } while (count < shares);
        }
        meet<ALL>();
        const Finish<FMT> finish(p, n0 + g);
        for (int i = blockIdx.x - first; i < NT; i += shares) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int block = first; block <= last; ++block) {
                const int which = run.start_of(block) < tile * run.chunks;      // its last tile, not its first
                const float4 v =
                    __ldcg((const float4*)p.partial + (int)(((block * 2 + which) * NT + i) * ALL + threadIdx.x));
                total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
            }
            finish.write(p, total, n0, tile % tiles_m * S::BM + i * 8, paper, lane);
        }
        meet<ALL>();
        if (threadIdx.x == 0 && atomicAdd(p.arrived + 2 * tile + 1, 1) == shares - 1)
            p.arrived[2 * tile] = p.arrived[2 * tile + 1] = 0;
    }
}

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1)
broad(const Problem p, const __grid_constant__ Maps maps, const int tiles, const int shared) {
    extern __shared__ __align__(128) uint8_t smem[];
    uint8_t* const scales = smem + S::STAGES * S::STAGE;
    const uint32_t full = smem_address(scales) + S::SLOTS * S::SCALES + S::WARPS * S::PAPER, empty = full + S::STAGES * 8;
    if (threadIdx.x < S::STAGES) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + threadIdx.x * 8),
                     "r"(1 + S::BRINGERS + (S::BY_HAND ? 32 * S::BRINGERS : 0)) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + threadIdx.x * 8), "r"(S::WARPS) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_others_start();
    if (threadIdx.x >= 32 * S::WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FEWER));
        bring<FMT, S>(p, maps, Run(p.K / S::KC, tiles, shared), smem, scales, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
        after_others();
        multiply<FMT, S>(p, Run(p.K / S::KC, tiles, shared), smem, scales, full, empty);
    }
}
