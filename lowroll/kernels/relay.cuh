// From 33 to 64 rows of x: Hopper's warpgroup products, weights decoded in registers as A, x in shared memory as B.
//
// A block has tiles of 256 rows of the weights (16 a warp) and 64 rows of x. Four warps bring chunks of 128 along k into a
// ring of stages: codes and scales by the copy engine, x by their own hands, into the 8x8 core matrices that the tensor
// cores read and in the order of the codes. Sixteen others decode and multiply, and give a stage back when the tensor
// cores have read it.
#pragma once
#include "tiles.cuh"

template <int FMT, int STAGES> struct Relay : Sizes<FMT, 8, STAGES> {
    static constexpr int BRINGERS = 4, THREADS = 32 * (Relay::WARPS + BRINGERS);
    static constexpr int REGISTERS = 104, FEWER = 64;         // of a thread that multiplies, that brings
    static constexpr int PIECES = Relay::BM / 32;                    // a thread's of a chunk of x
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
        expect(barrier, S::W_STAGE + (codes.fresh ? S::SCALES : 0));
        fetch(to, maps.codes, codes.chunk * 64, codes.n * S::BN, barrier);
        if (codes.fresh) {
            const uint32_t to = smem_address(scales) + slot * S::SCALES;
            fetch(to, maps.scales, codes.chunk / 4 * S::S_ROW, codes.n * S::BN, barrier);
            if constexpr (FMT == INT4_ASYM)
                fetch(to + S::BN * S::S_ROW, maps.zeros, codes.chunk / 4 * 16, codes.n * (S::BN / 8), barrier);
        }
        codes.step(tiles_m);
    };
    for (int stage = 0; stage < S::STAGES && codes.more; ++stage)
        if (thread == 0) fetch_codes(stage);
    after_others();
    for (int stage = 0, round = 0; x.more; x.step(tiles_m)) {
        const int m0 = x.m * S::BM + row;
        const __nv_bfloat16* from = p.x + (size_t)m0 * p.K + x.chunk * S::KC + i * 8;
        uint8_t* const to = smem + stage * S::STAGE + (4 * i * S::BM + row) * 16;
        uint4 v[S::PIECES][4];
#pragma unroll
        for (int j = 0; j < S::PIECES; ++j)
            if (m0 + j * 32 < p.M)
#pragma unroll
                for (int t = 0; t < 4; ++t) v[j][t] = __ldcg((const uint4*)(from + (size_t)j * 32 * p.K + t * 32));
        if (round > 0) {
            await(empty + stage * 8, round - 1 & 1);
            if (thread == 0) fetch_codes(stage);
        }
#pragma unroll
        for (int j = 0; j < S::PIECES; ++j)
            if (m0 + j * 32 < p.M) {
#pragma unroll
                for (int t = 0; t < 4; ++t) v[j][t] = reordered(v[j][t]);
                uint4* const at = (uint4*)(to + j * 32 * 16);
                at[0] = make_uint4(v[j][0].x, v[j][1].x, v[j][2].x, v[j][3].x);
                at[S::BM] = make_uint4(v[j][0].y, v[j][1].y, v[j][2].y, v[j][3].y);
                at[2 * S::BM] = make_uint4(v[j][0].z, v[j][1].z, v[j][2].z, v[j][3].z);
                at[3 * S::BM] = make_uint4(v[j][0].w, v[j][1].w, v[j][2].w, v[j][3].w);
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
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
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
            uint32_t factor[2][2], zero[2];
            read_scales<FMT, S>(scales + slot * S::SCALES, chunk % 4, warp, lane, factor, zero);
            const uint64_t b = describe<S::BM>(smem_address(x));
            uint32_t a[2][2][4];
#pragma unroll
            for (int s = 0; s < 8; s += 2) {
                warpgroup_wait<1>();                          // the products that read this half of a
                if (s == 2) arrive_if(lane == 0 && before >= 0, empty + before * 8);
#pragma unroll
                for (int u = 0; u < 2; ++u)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int i = s + u >> 1;
                        const uint32_t word = i == 0 ? words[j].x : i == 1 ? words[j].y : i == 2 ? words[j].z : words[j].w;
                        uint32_t pairs[2];
                        decode_two<INT>(word >> (s + u & 1) * 8, INT ? zero[j] : factor[j][i >> 1], pairs);
#pragma unroll
                        for (int q = 0; q < 2; ++q)
                            a[s / 2 & 1][u][q * 2 + j] =
                                INT ? fma2(pairs[q], factor[j][0], mul2(pairs[q], factor[j][1])) : pairs[q];
                    }
                warpgroup_fence();
#pragma unroll
                for (int u = 0; u < 2; ++u)
                    warpgroup_mma<NT>(sum, a[s / 2 & 1][u], b + (s + u) * (S::BM * 32 >> 4),
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
relay(const Problem p, const __grid_constant__ Maps maps, const int tiles, const int shared) {
    extern __shared__ __align__(128) uint8_t smem[];
    uint8_t* const scales = smem + S::STAGES * S::STAGE;
    const uint32_t full = smem_address(scales) + S::SLOTS * S::SCALES + S::WARPS * S::PAPER, empty = full + S::STAGES * 8;
    if (threadIdx.x < S::STAGES) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + threadIdx.x * 8), "r"(1 + S::BRINGERS) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + threadIdx.x * 8), "r"(S::WARPS) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_others_start();
    if (threadIdx.x >= 32 * S::WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FEWER));
        bring<FMT, S>(p, maps, Run(p.K / S::KC, tiles, shared, blockIdx.x, gridDim.x), smem, scales, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
        after_others();
        multiply<FMT, S>(p, Run(p.K / S::KC, tiles, shared, blockIdx.x, gridDim.x), smem, scales, full, empty);
    }
}
