// What `relay.cuh` and `broad.cuh` share: how tiles are dealt to blocks, the copy engine, and the way from sums to y.
//
// A block does its run of the shared tiles first (schedule.cuh) and leaves the sums in a workspace; at the end the blocks
// of a tile add it up in the order of k, each its share: no float atomics, the same bits in every run. They wait for each
// other, so all blocks of the grid must be on the device at once: one a multiprocessor, and no two such products at a
// time.
#pragma once
#include <cuda.h>

#include "schedule.cuh"
#include "warpgroup.cuh"

struct Maps {                                                 // of what the copy engine cuts out of matrices
    CUtensorMap codes, scales, zeros;
};

// A block's tiles of BN rows of the weights and BM of x, in stages of KC along k.
template <int FMT, int NT_, int STAGES_> struct Sizes {
    static constexpr int NT = NT_, STAGES = STAGES_, WARPS = 16;
    static constexpr int BN = 16 * WARPS, BM = 8 * NT, KC = 128;
    // Scales come four chunks at a time: a sector of 32 bytes a row (nvfp4) or half of one.
    static constexpr int S_ROW = FMT == NVFP4 ? 32 : 16, Z_BYTES = FMT == INT4_ASYM ? BN / 8 * 16 : 0;
    static constexpr int NEEDS = FMT == NVFP4 ? 256 : 512;    // that divides K: the copy engine wants rows of 16 bytes
    static constexpr int SLOTS = (STAGES + 3) / 2;            // of scales: as many as the stages can touch
    static constexpr int X_STAGE = BM * KC * 2, W_STAGE = BN * KC / 2, STAGE = X_STAGE + W_STAGE;
    static constexpr int SCALES = BN * S_ROW + Z_BYTES, PAPER = 256;        // bytes of a warp to turn sums on
    static constexpr int SMEM = STAGES * (STAGE + 16) + SLOTS * SCALES + WARPS * PAPER;
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

// Factors and zeros of a lane's two rows of the weights, of chunk `part` of the four whose scales lie at `scales`. An
// integer format's factor is the two parts of its scale.
template <int FMT, class S>
__device__ __forceinline__ void read_scales(const uint8_t* scales, int part, int warp, int lane, uint32_t (&factor)[2][2],
                                            uint32_t (&zero)[2]) {
    const int t = lane & 3, g = lane >> 2;
    const uint8_t* const of = scales + (warp * 16 + g) * S::S_ROW;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint8_t* const row = of + j * 8 * S::S_ROW;
        if constexpr (FMT == NVFP4) e4m3_factors(*(const uint16_t*)(row + part * 8 + t * 2), factor[j]);
        else if constexpr (FMT == MXFP4) factor[j][0] = factor[j][1] = e8m0_factor(row[part * 4 + t]);
        else {
            const float scale = ((const float*)row)[part];
            factor[j][0] = twice(scale), factor[j][1] = twice(scale - __uint_as_float(factor[j][0] << 16));
            zero[j] = 0x43084308u;                            // 136
            if constexpr (FMT == INT4_ASYM)
                zero[j] = int4_zero(((const uint32_t*)(scales + S::BN * S::S_ROW))[(warp * 2 + j) * 4 + part], g);
        }
    }
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
