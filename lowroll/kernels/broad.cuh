// From 65 rows of x on: Hopper's warpgroup products, weights decoded in registers as A, both operands by the copy engine.
//
// A block has tiles of 256 rows of the weights (16 a warp) and 8 NT rows of x. Its first thread orders the copies, of
// chunks of 128 along k, into a ring of stages with a barrier each; a stage is given back when the tensor cores have read
// it. A kernel before has put x into the 8x8 core matrices that they read, in the order of the codes (`arrange`), so that
// a chunk of x is one run of bytes.
#pragma once
#include "tiles.cuh"

template <int FMT, int NT, int STAGES> struct Broad : Sizes<FMT, NT, STAGES> {
    static constexpr int THREADS = 32 * Broad::WARPS;
};

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

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1)
broad(const Problem p, const __grid_constant__ Maps maps, const int tiles, const int shared) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    constexpr int NT = S::NT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    const int tiles_m = (p.M + S::BM - 1) / S::BM;
    const Run run(p.K / S::KC, tiles, shared, blockIdx.x, gridDim.x);
    uint8_t* const scales = smem + S::STAGES * S::STAGE;
    uint8_t* const paper = scales + S::SLOTS * S::SCALES + warp * S::PAPER;
    const uint32_t full = smem_address(scales) + S::SLOTS * S::SCALES + S::WARPS * S::PAPER, empty = full + S::STAGES * 8;
    if (threadIdx.x < S::STAGES) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + threadIdx.x * 8) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + threadIdx.x * 8), "r"(S::WARPS) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_others_start();

    // what thread 0 orders: the chunks ahead
    Cursor ahead(run, tiles_m);
    int next_slot = S::SLOTS - 1;
    auto fetch_codes = [&](int stage) {
        const uint32_t to = smem_address(smem) + stage * S::STAGE + S::X_STAGE, barrier = full + stage * 8;
        const int n0 = ahead.n * S::BN;
        expect(barrier, S::STAGE + (ahead.fresh ? S::SCALES : 0));
        fetch(to, maps.codes, ahead.chunk * 64, n0, barrier);
        if (ahead.fresh) {
            next_slot = next_slot == S::SLOTS - 1 ? 0 : next_slot + 1;
            const uint32_t to = smem_address(scales) + next_slot * S::SCALES;
            fetch(to, maps.scales, ahead.chunk / 4 * S::S_ROW, n0, barrier);
            if constexpr (FMT == INT4_ASYM) fetch(to + S::BN * S::S_ROW, maps.zeros, ahead.chunk / 4 * 16, n0 / 8, barrier);
        }
        ahead.step(tiles_m);
    };
    auto fetch_x = [&](const Cursor& at, int stage) {
        fetch(smem_address(smem) + stage * S::STAGE,
              (const uint8_t*)p.arranged + (size_t)(at.chunk * tiles_m + at.m) * S::X_STAGE, S::X_STAGE, full + stage * 8);
    };
    if (threadIdx.x == 0)
        for (int stage = 0; stage < S::STAGES && ahead.more; ++stage) fetch_codes(stage);
    after_others();
    if (threadIdx.x == 0) {
        Cursor first(run, tiles_m);
        for (int stage = 0; stage < S::STAGES && first.more; ++stage, first.step(tiles_m)) fetch_x(first, stage);
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
                fetch_x(ahead, free);
                fetch_codes(free);
            }
            __syncwarp();
            const int stage = done % S::STAGES, before = (done + S::STAGES - 1) % S::STAGES;
            await(full + stage * 8, done / S::STAGES & 1);
            const uint8_t* const x = smem + stage * S::STAGE;
            const uint4* const mine = (const uint4*)(x + S::X_STAGE) + warp * 64 + lane;
            uint4 words[2] = {mine[0], mine[32]};
            uint32_t factor[2][2], zero[2];
            read_scales<FMT, S>(scales + slot * S::SCALES, chunk % 4, warp, lane, factor, zero);
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
                if (i == 1) arrive_if(lane == 0 && done > 0, empty + before * 8);
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
        const int n0 = parts.tile / tiles_m * S::BN + warp * 16, m0 = parts.tile % tiles_m * S::BM;
        if (parts.until - parts.from == parts.chunks) {
            const Finish<FMT> finish(p, n0 + g);
#pragma unroll
            for (int i = 0; i < NT; ++i) finish.write(p, sum + i * 4, n0, m0 + i * 8, paper, lane);
        } else {                                              // others have chunks of this tile too
            const int which = run.unit < parts.tile * run.chunks;     // its last tile, not its first
            float4* const to = (float4*)p.partial + (int)((blockIdx.x * 2 + which) * NT * 512 + threadIdx.x);
#pragma unroll
            for (int i = 0; i < NT; ++i)
                __stcg(to + i * 512, make_float4(sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) atomicAdd(p.arrived + 2 * parts.tile, 1);
        }
    }

    for (int tile = run.unit / run.chunks; tile * run.chunks < run.end; ++tile) {     // with blocks that it is shared with
        const int first = run.owner_of(tile * run.chunks), last = run.owner_of((tile + 1) * run.chunks - 1);
        if (first == last) continue;
        const int shares = last - first + 1, n0 = tile / tiles_m * S::BN + warp * 16;
        int* const arrived = p.arrived + 2 * tile;
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
        for (int i = blockIdx.x - first; i < NT; i += shares) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int block = first; block <= last; ++block) {
                const int which = run.start_of(block) < tile * run.chunks;      // its last tile, not its first
                const float4 v =
                    __ldcg((const float4*)p.partial + (int)(((block * 2 + which) * NT + i) * 512 + threadIdx.x));
                total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
            }
            finish.write(p, total, n0, tile % tiles_m * S::BM + i * 8, paper, lane);
        }
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd(arrived + 1, 1) == shares - 1) arrived[0] = arrived[1] = 0;
    }
}
