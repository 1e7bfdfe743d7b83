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
    static constexpr int S_ROW = FMT == NVFP4 ? 8 : FMT == BF16 ? 0 : 4;
    static constexpr int Z_BYTES = FMT == INT4_ASYM ? 16 : 0; // a word for 8 rows
    static constexpr int STAGE = BN * 64 + BN * S_ROW + Z_BYTES;
    static constexpr int X_CHUNK = BM * KC * 2;
    static constexpr int SUMS = R * NT * 4;                   // of a lane
    static constexpr int SEGMENT = SUMS * 32 * 4;

    static __host__ __device__ int segments(int tiles) {               // of a warp, at most
        return tiles / WARPS + 2;
    }
    static __host__ int bytes(int tiles, int chunks) {
        return chunks * X_CHUNK + WARPS * (STAGES * STAGE + segments(tiles) * SEGMENT);
    }
};

template <int UNITS> __device__ __forceinline__ int place_x(int row, int unit) {     // of a unit in its chunk
    if constexpr (UNITS == 16) unit = ((unit & 3) ^ (row & 1)) << 2 | unit >> 2;
    return (row * UNITS + unit) * 16;
}

template <int FMT, class S>
__device__ __forceinline__ void multiply_chunk(const uint8_t* stage, const uint8_t* xs, int lane,
                                               float (&sum)[S::R][S::NT][4]) {
    constexpr int R = S::R, NT = S::NT;
    constexpr bool INT = FMT == INT4 || FMT == INT4_ASYM;
    const int t = lane & 3, g = lane >> 2;
    const uint8_t* scales = stage + S::BN * 64;
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
            if constexpr (FMT == NVFP4) e4m3_factors(*(const uint16_t*)(scales + row * 8 + t * 2), factor[j]);
            else if constexpr (FMT == MXFP4) factor[j][0] = factor[j][1] = e8m0_factor(scales[row * 4 + t]);
            else if constexpr (FMT == INT4) factor[j][0] = factor[j][1] = 0x43084308u;       // 136
            else factor[j][0] = factor[j][1] = int4_zero(((const uint32_t*)(scales + S::BN * 4))[j], g);
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
                const float low = ((const float*)scales)[r * 16 + g], high = ((const float*)scales)[r * 16 + 8 + g];
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    sum[r][nt][0] += low * group[r][nt][0], sum[r][nt][1] += low * group[r][nt][1];
                    sum[r][nt][2] += high * group[r][nt][2], sum[r][nt][3] += high * group[r][nt][3];
                }
            }
        }
    }
}

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1) narrow(const Problem p) {
    namespace cg = cooperative_groups;
    extern __shared__ __align__(128) uint8_t smem[];
    const cg::cluster_group cluster = cg::this_cluster();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const int ranks = cluster.num_blocks(), rank = cluster.block_rank();
    const int teams = gridDim.x / ranks, team = blockIdx.x / ranks, all_chunks = p.K / S::KC;
    const int all_tiles = (p.N + S::BN - 1) / S::BN;
    const int tile0 = all_tiles * team / teams, tiles = all_tiles * (team + 1) / teams - tile0;
    const int chunk0 = all_chunks * rank / ranks, chunks = all_chunks * (rank + 1) / ranks - chunk0;
    const int most = (all_tiles + teams - 1) / teams, most_chunks = (all_chunks + ranks - 1) / ranks;
    const int kept = S::segments(most);
    uint8_t* const ring = smem + most_chunks * S::X_CHUNK + warp * S::STAGES * S::STAGE;
    float* const segments = (float*)(smem + most_chunks * S::X_CHUNK + S::WARPS * S::STAGES * S::STAGE);

    // x: this block's part of k
    const uint32_t xs = smem_address(smem);
    for (int m = 0; m < p.M; ++m)
        for (int i = threadIdx.x; i < chunks * S::UNITS; i += S::THREADS)
            copy16(xs + i / S::UNITS * S::X_CHUNK + place_x<S::UNITS>(m, i % S::UNITS),
                   p.x + (size_t)m * p.K + chunk0 * S::KC + i * 8, 16);
    commit();

    const int units = tiles * chunks, begin = units * warp / S::WARPS, end = units * (warp + 1) / S::WARPS;
    const size_t pitch = FMT == BF16 ? (size_t)p.K * 2 : (size_t)p.K / 2;
    const uint32_t to = smem_address(ring);
    int load_tile = begin / chunks, load_chunk = begin % chunks;
    const uint8_t *weight, *scale = nullptr, *zero = nullptr;
    int rows;
    auto aim = [&]() {
        const int n0 = (tile0 + load_tile) * S::BN, chunk = chunk0 + load_chunk;
        weight = p.weight + (size_t)(n0 + g) * pitch + chunk * 64 + t * 16;
        rows = p.N - n0;
        if constexpr (FMT != BF16) scale = p.scale + ((size_t)(n0 + lane) * all_chunks + chunk) * S::S_ROW;
        if constexpr (FMT == INT4_ASYM) zero = p.zero + ((size_t)(n0 / 8 + lane) * all_chunks + chunk) * 4;
    };
    auto load = [&](int slot) {
        const uint32_t at = to + slot * S::STAGE;
#pragma unroll
        for (int j = 0; j < 2 * S::R; ++j) copy16(at + (j * 32 + lane) * 16, weight + j * 8 * pitch, g + 8 * j < rows ? 16 : 0);
        if constexpr (FMT != BF16)
            if (lane < S::BN) copy<S::S_ROW>(at + S::BN * 64 + lane * S::S_ROW, scale, lane < rows);
        if constexpr (FMT == INT4_ASYM)
            if (lane < S::BN / 8) copy<4>(at + S::BN * (64 + S::S_ROW) + lane * 4, zero, lane * 8 < rows);
        weight += 64, scale += S::S_ROW, zero += 4;
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
    wait<S::STAGES - 1>();
    if constexpr (FMT != BF16)
        for (int m = 0; m < p.M; ++m)
            for (int i = threadIdx.x; i < chunks * S::UNITS; i += S::THREADS)
                reorder((uint4*)(smem + i / S::UNITS * S::X_CHUNK + place_x<S::UNITS>(m, i % S::UNITS)));
    __syncthreads();

    float sum[S::R][S::NT][4];
    float* const flat = &sum[0][0][0];
#pragma unroll
    for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
    float* segment = segments + warp * kept * (S::SEGMENT / 4) + lane;
    for (int unit = begin, slot = 0, chunk = begin % chunks; unit < end; ++unit) {
        wait<S::STAGES - 2>();
        __syncwarp();
        if (unit + S::STAGES - 1 < end) load(slot == 0 ? S::STAGES - 1 : slot - 1);
        commit();
        multiply_chunk<FMT, S>(ring + slot * S::STAGE, smem + chunk * S::X_CHUNK, lane, sum);
        slot = slot == S::STAGES - 1 ? 0 : slot + 1;
        if (++chunk == chunks || unit + 1 == end) {
            chunk = 0;
#pragma unroll
            for (int i = 0; i < S::SUMS; ++i) segment[i * 32] = flat[i], flat[i] = 0.f;
            segment += S::SEGMENT / 4;
        }
    }

    if (ranks > 1) cluster.sync();
    else __syncthreads();
    for (int tile = rank + ranks * warp; tile < tiles; tile += ranks * S::WARPS) {
        for (int r = 0; r < ranks; ++r) {
            const float* theirs = ranks > 1 ? cluster.map_shared_rank(segments, r) : segments;
            const int part = all_chunks * (r + 1) / ranks - all_chunks * r / ranks, count = tiles * part;
            const int first = ((tile * part + 1) * S::WARPS - 1) / count, last = ((tile + 1) * part * S::WARPS - 1) / count;
            for (int w = first; w <= last; ++w) {
                const int from = count * w / S::WARPS;
                if (from == count * (w + 1) / S::WARPS) continue;
                const float* one = theirs + (w * kept + tile - from / part) * (S::SEGMENT / 4) + lane;
#pragma unroll
                for (int i = 0; i < S::SUMS; ++i) flat[i] += one[i * 32];
            }
        }
        write<FMT, S>(p, flat, (tile0 + tile) * S::BN, 0, lane);
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
    }
    if (ranks > 1) cluster.sync();                        // nobody leaves while others read its sums
}
