// Up to 32 rows of x: every warp streams on its own, without a barrier between it and the others.
//
// A cluster of blocks shares tiles of 16 R rows of the weights; each of its blocks has a part of k, and that part of x
// lies in its shared memory as a whole. A block's run of (tile, chunk of k) is cut evenly into runs of its warps, each
// with a ring of its own. A run's sums of a tile (a segment) go to shared memory; when all are there, the blocks of the
// cluster add the segments of a tile up in the order of k, each block for the tiles that are its share.
#pragma once
#include <cooperative_groups.h>

#include "decode.cuh"

template <int FMT, int NT_, int R_, int STAGES_, int WARPS_> struct Narrow {
    static constexpr int NT = NT_, R = R_, STAGES = STAGES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int BN = 16 * R, BM = 8 * NT;
    static constexpr int KC = FMT == BF16 ? 32 : 128;         // k of a chunk: 64 bytes of a row
    static constexpr int UNITS = KC / 8;                      // 16-byte units of a row of x in a chunk
    // Scales come four chunks at a time, a sector of 32 bytes a row (nvfp4) or half of one.
    static constexpr int S_ROW = FMT == NVFP4 ? 32 : FMT == BF16 ? 0 : 16;
    static constexpr int Z_BYTES = FMT == INT4_ASYM ? 2 * R * 16 : 0;       // words for 8 rows
    static constexpr int SCALES = BN * S_ROW + Z_BYTES;
    static constexpr int RING = STAGES * (BN * 64 + SCALES);
    static constexpr int NEEDS = FMT == BF16 ? 32 : FMT == NVFP4 ? 256 : 512;   // that divides K
    static constexpr int X_CHUNK = BM * KC * 2;
    static constexpr int SUMS = R * NT * 4;                   // of a lane
    static constexpr int SEGMENT = SUMS / 4 * 32;             // 16-byte vectors

    static __host__ __device__ int segments(int tiles) { return tiles / WARPS + 2; }     // of a warp, at most
    // What a block needs, or 0 where the sums of its tiles do not fit where the rings were.
    static __host__ int bytes(int tiles, int chunks) {
        if (tiles * SEGMENT * 16 > WARPS * RING) return 0;
        return chunks * X_CHUNK + WARPS * (RING + segments(tiles) * SEGMENT * 16);
    }
};

struct Cut {                                              // of tiles among clusters, of chunks among the blocks of one
    int tiles, more_tiles, chunks, more_chunks;
};

template <int UNITS> __device__ __forceinline__ int place_x(int row, int unit) {     // of a unit in its chunk
    if constexpr (UNITS == 16) unit = ((unit & 3) ^ (row & 1)) << 2 | unit >> 2;
    return (row * UNITS + unit) * 16;
}

template <int FMT, class S>
__device__ __forceinline__ void multiply_chunk(const uint8_t* stage, const uint8_t* scales, int quarter,
                                               const uint8_t* xs, int lane, float (&sum)[S::R][S::NT][4]) {
    constexpr int R = S::R, NT = S::NT;
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    const int t = lane & 3, g = lane >> 2;
    uint4 words[2 * R];
#pragma unroll
    for (int j = 0; j < 2 * R; ++j) words[j] = ((const uint4*)stage)[j * 32 + lane];
    if constexpr (FMT == BF16) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const uint4 b = *(const uint4*)(xs + place_x<S::UNITS>(nt * 8 + g, t));
#pragma unroll
            for (int r = 0; r < R; ++r) {
                mma(sum[r][nt], words[2 * r].x, words[2 * r + 1].x, words[2 * r].y, words[2 * r + 1].y, b.x, b.y);
                mma(sum[r][nt], words[2 * r].z, words[2 * r + 1].z, words[2 * r].w, words[2 * r + 1].w, b.z, b.w);
            }
        }
    } else {
        uint32_t factor[2 * R][2];
#pragma unroll
        for (int j = 0; j < 2 * R; ++j) {
            const int row = j * 8 + g;
            if constexpr (FMT == NVFP4) e4m3_factors(*(const uint16_t*)(scales + row * 32 + quarter * 8 + t * 2), factor[j]);
            else if constexpr (FMT == MXFP4) factor[j][0] = factor[j][1] = e8m0_factor(scales[row * 16 + quarter * 4 + t]);
            else if constexpr (FMT == INT4) factor[j][0] = factor[j][1] = 0x43084308u;       // 136
            else factor[j][0] = factor[j][1] = int4_zero(((const uint32_t*)(scales + S::BN * 16))[j * 4 + quarter], g);
        }
        float group[R][NT][4];
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) (&group[0][0][0])[i] = 0.f;
        float(&acc)[R][NT][4] = INT ? group : sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 b[NT];
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) b[nt] = *(const uint4*)(xs + place_x<S::UNITS>(nt * 8 + g, t * 4 + i));
#pragma unroll
            for (int r = 0; r < R; ++r) {
                uint32_t a[2][4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint4 w = words[2 * r + h];
                    decode<INT>(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, factor[2 * r + h][i >> 1], a[h]);
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
                const float* row = (const float*)scales + (r * 16 + g) * 4 + quarter;
                const float low = row[0], high = row[32];
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    sum[r][nt][0] += low * group[r][nt][0], sum[r][nt][1] += low * group[r][nt][1];
                    sum[r][nt][2] += high * group[r][nt][2], sum[r][nt][3] += high * group[r][nt][3];
                }
            }
        }
    }
}

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1) narrow(const Problem p, const Cut cut) {
    namespace cg = cooperative_groups;
    extern __shared__ __align__(128) uint8_t smem[];
    const cg::cluster_group cluster = cg::this_cluster();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const int ranks = cluster.num_blocks(), rank = cluster.block_rank(), team = blockIdx.x / ranks;
    const int tile0 = team * cut.tiles + min(team, cut.more_tiles), tiles = cut.tiles + (team < cut.more_tiles);
    const int chunk0 = rank * cut.chunks + min(rank, cut.more_chunks), chunks = cut.chunks + (rank < cut.more_chunks);
    const int all_chunks = p.K / S::KC, kept = S::segments(cut.tiles + 1);
    uint8_t* const rings = smem + (cut.chunks + (cut.more_chunks > 0)) * S::X_CHUNK;
    float4* const segments = (float4*)(rings + S::WARPS * S::RING);
    uint8_t* const ring = rings + warp * S::RING;
    uint8_t* const scale_ring = ring + S::STAGES * S::BN * 64;

    // the weights: a run of chunks
    let_others_start();
    const int units = tiles * chunks, begin = units * warp / S::WARPS, end = units * (warp + 1) / S::WARPS;
    const size_t pitch = FMT == BF16 ? (size_t)p.K * 2 : (size_t)p.K / 2;
    const int begin_tile = begin / chunks, begin_chunk = begin - begin_tile * chunks;
    int load_tile = begin_tile, load_chunk = begin_chunk, scale_slot = S::STAGES - 1, rows;
    bool fresh;
    const uint8_t* weight;
    auto aim = [&]() {
        const int n0 = (tile0 + load_tile) * S::BN;
        weight = p.weight + (size_t)(n0 + g) * pitch + (chunk0 + load_chunk) * 64 + t * 16;
        rows = p.N - n0, fresh = true;
    };
    auto load_scales = [&](int chunk) {                       // of the four chunks around this one
        const int n0 = (tile0 + load_tile) * S::BN, quad = chunk >> 2;
        scale_slot = scale_slot == S::STAGES - 1 ? 0 : scale_slot + 1;
        const uint32_t at = smem_address(scale_ring) + scale_slot * S::SCALES;
        constexpr int HALVES = S::S_ROW < 32 ? 1 : 2;
#pragma unroll
        for (int i = 0; i < S::BN * HALVES; i += 32) {
            const int row = (i + lane) / HALVES, half = (i + lane) % HALVES;
            const bool in = row < rows && quad * 4 + half * 2 < all_chunks;
            if (S::BN * HALVES >= 32 || lane < S::BN * HALVES)
                copy16(at + (i + lane) * 16,
                       p.scale + (size_t)(n0 + row) * (all_chunks * (S::S_ROW / 4)) + quad * S::S_ROW + half * 16, in ? 16 : 0);
        }
        if constexpr (FMT == INT4_ASYM)
            if (lane < 2 * S::R)
                copy16(at + S::BN * S::S_ROW + lane * 16, p.zero + ((size_t)(n0 / 8 + lane) * all_chunks + quad * 4) * 4,
                       lane * 8 < rows ? 16 : 0);
    };
    auto load = [&](int slot) {
        const uint32_t at = smem_address(ring) + slot * S::BN * 64;
#pragma unroll
        for (int j = 0; j < 2 * S::R; ++j) copy16(at + (j * 32 + lane) * 16, weight + j * 8 * pitch, g + 8 * j < rows ? 16 : 0);
        if constexpr (FMT != BF16)
            if (fresh || (chunk0 + load_chunk) % 4 == 0) load_scales(chunk0 + load_chunk);
        weight += 64, fresh = false;
        if (++load_chunk == chunks) {
            load_chunk = 0, ++load_tile;
            aim();
        }
    };
    aim();
#pragma unroll
    for (int slot = 0; slot < S::STAGES - 1; ++slot) {
        if (begin + slot < end) load(slot);
        commit();
    }
    // what the end needs, while there is time
    for (int i = threadIdx.x * 32; i < tiles * S::BN; i += S::THREADS * 32) {
        const int n = min(tile0 * S::BN + i, p.N - 1);
        if (p.bias) prefetch((const char*)p.bias + (size_t)n * (p.bias_fp32 ? 4 : 2));
        if (FMT == NVFP4) prefetch(p.global + (p.global_per_row ? n : 0));
    }
    // x: this block's part of k
    after_others();
    for (int i = threadIdx.x; i < chunks * S::UNITS; i += S::THREADS) {
        const __nv_bfloat16* from = p.x + chunk0 * S::KC + i * 8;
        uint8_t* to = smem + i / S::UNITS * S::X_CHUNK;
        for (int m0 = 0; m0 < p.M; m0 += 8) {
            uint4 v[8];
#pragma unroll
            for (int m = 0; m < 8; ++m)
                if (m0 + m < p.M) v[m] = *(const uint4*)(from + (size_t)(m0 + m) * p.K);
#pragma unroll
            for (int m = 0; m < 8; ++m)
                if (m0 + m < p.M)
                    *(uint4*)(to + place_x<S::UNITS>(m0 + m, i % S::UNITS)) = FMT == BF16 ? v[m] : reordered(v[m]);
        }
    }
    __syncthreads();

    float sum[S::R][S::NT][4];
    float* const flat = &sum[0][0][0];
#pragma unroll
    for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
    float4* segment = segments + warp * kept * S::SEGMENT + lane;
    for (int unit = begin, slot = 0, at_scales = S::STAGES - 1, chunk = begin_chunk; unit < end; ++unit) {
        wait<S::STAGES - 2>();
        __syncwarp();
        if (unit + S::STAGES - 1 < end) load(slot == 0 ? S::STAGES - 1 : slot - 1);
        commit();
        if (unit == begin || chunk == 0 || (chunk0 + chunk) % 4 == 0)
            at_scales = at_scales == S::STAGES - 1 ? 0 : at_scales + 1;
        multiply_chunk<FMT, S>(ring + slot * S::BN * 64, scale_ring + at_scales * S::SCALES, (chunk0 + chunk) % 4,
                               smem + chunk * S::X_CHUNK, lane, sum);
        slot = slot == S::STAGES - 1 ? 0 : slot + 1;
        if (++chunk == chunks || unit + 1 == end) {
            chunk = 0;
#pragma unroll
            for (int i = 0; i < S::SUMS; i += 4)
                segment[i * 8] = make_float4(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
#pragma unroll
            for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
            segment += S::SEGMENT;
        }
    }

    // The segments of a tile: lane w knows which tiles warp w had.
    const int of = lane % S::WARPS, its_begin = units * of / S::WARPS, its_end = units * (of + 1) / S::WARPS;
    const int its_first = its_begin / chunks, its_last = its_end > its_begin && lane < S::WARPS ? (its_end - 1) / chunks : -1;
    __syncthreads();
    float4* const sums = (float4*)rings + lane;               // of tiles, where the rings were
    auto add = [&](const float4* v) {
#pragma unroll
        for (int i = 0; i < S::SUMS; i += 4) {
            const float4 f = v[i * 8];
            flat[i] += f.x, flat[i + 1] += f.y, flat[i + 2] += f.z, flat[i + 3] += f.w;
        }
    };
    for (int tile = warp; tile < tiles; tile += S::WARPS) {
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
        for (uint32_t had = __ballot_sync(~0u, its_first <= tile && tile <= its_last); had; had &= had - 1) {
            const int w = __ffs(had) - 1;
            add(segments + (w * kept + tile - __shfl_sync(~0u, its_first, w)) * S::SEGMENT + lane);
        }
        if (ranks == 1) write<FMT, S>(p, flat, (tile0 + tile) * S::BN, 0, lane);
        else
#pragma unroll
            for (int i = 0; i < S::SUMS; i += 4)
                sums[tile * S::SEGMENT + i * 8] = make_float4(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
    }
    if (ranks == 1) return;
    cluster.sync();
    for (int tile = rank + ranks * warp; tile < tiles; tile += ranks * S::WARPS) {
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
#pragma unroll 4
        for (int r = 0; r < ranks; ++r) add(cluster.map_shared_rank(sums, r) + tile * S::SEGMENT);
        write<FMT, S>(p, flat, (tile0 + tile) * S::BN, 0, lane);
    }
    cluster.sync();                                           // nobody leaves while others read its sums
}
