// y = w[e] x for rows that are sorted by their experts, 4-bit weights, few rows an expert: the weights are streamed once.
//
// A warp takes 32 rows of an expert's matrix, or 16 gates and their 16 ups, and up to 8 NT of its rows of x. It streams
// them through a ring of its own; x lies in shared memory as a whole. With SPLIT warps to the same rows each has a part
// of k, and the first of them adds the sums in the order of k. The grid is as long as the tiles can be in the worst
// case; a block finds its expert in `ends`, and one that has none leaves.
#include "../launch.cuh"
#include "../narrow.cuh"

#ifndef FORMAT
#define FORMAT NVFP4
#endif

constexpr int MEMORY = 226 * 1024;                       // beside the block's book of places

struct Routed {
    const uint8_t* weight;            // [experts N, K] codes and their scales as in decode.cuh
    const uint8_t* scale;
    const float* global;              // nvfp4: [1] or [experts N]
    const __nv_bfloat16* x;           // by token, slot / choices, or by place if choices is 0
    __nv_bfloat16* y;                 // [slots, rows] by place, or by slot
    const long long* slot;            // of a place
    const int* ends;                  // of an expert's places
    int slots, experts, rows, K, choices, swiglu, to_slots, global_per_row, early, split;
};

template <int FMT, int NT_, int STAGES_, int WARPS_> struct Streams {
    static constexpr int NT = NT_, R = 2, STAGES = STAGES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int BN = 32, BM = 8 * NT, KC = 128, UNITS = KC / 8, SUMS = R * NT * 4;
    static constexpr int S_CHUNK = FMT == NVFP4 ? 8 : 4;      // bytes of scales a row; four chunks lie together
    static constexpr int SCALES = BN * 4 * S_CHUNK;
    static constexpr int RING = STAGES * BN * 64 + 2 * SCALES;
    static constexpr int X_CHUNK = BM * KC * 2;
    static_assert(SUMS * 32 * 4 <= RING && STAGES <= 5);
    static __host__ int bytes(int K) { return K / KC * X_CHUNK + WARPS * RING; }
};

// The expert of a tile of BM places, its first place and its end; the expert is -1 beyond the last tile.
template <int BM> __device__ __forceinline__ int3 places_of(const Routed& p, int tile, int lane) {
    int before = 0;                                           // tiles of the experts before these 32
    for (int base = 0; base < p.experts; base += 32) {
        const int e = base + lane;
        const int end = e < p.experts ? p.ends[e] : 0, start = e > 0 && e < p.experts ? p.ends[e - 1] : 0;
        const int tiles = (end - start + BM - 1) / BM;
        int upto = tiles;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
        upto += before;
        const uint32_t beyond = __ballot_sync(~0u, upto > tile);
        if (beyond) {
            const int who = __ffs(beyond) - 1;
            const int first = start + (tile - (upto - tiles)) * BM;
            return make_int3(base + who, __shfl_sync(~0u, first, who), __shfl_sync(~0u, end, who));
        }
        before = __shfl_sync(~0u, upto, 31);
    }
    return make_int3(-1, 0, 0);
}

__device__ __forceinline__ float rounded(float f) { return __bfloat162float(__float2bfloat16(f)); }

template <int FMT, class S> __global__ void __launch_bounds__(S::THREADS, 1) routed(const Routed p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ long long token[S::BM], out[S::BM];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    let_others_start();
    after_others();
    const int wide = p.swiglu ? 16 : 32, units = (p.rows + wide - 1) / wide, mine = S::WARPS / p.split;
    const int blocks = (units + mine - 1) / mine, all_chunks = p.K / S::KC;
    const int3 at = places_of<S::BM>(p, blockIdx.x / blocks, lane);
    if (at.x < 0) return;
    const int first = at.y, count = min(at.z - first, S::BM);

    // the weights: this warp's rows and its part of k
    const int part = warp % p.split, n0 = ((blockIdx.x % blocks) * mine + warp / p.split) * wide;
    const int begin = all_chunks * part / p.split, end = n0 < p.rows ? all_chunks * (part + 1) / p.split : begin;
    const int second = p.swiglu ? p.rows : 16;                // from the first 16 rows of the tile to the others
    const size_t row0 = (size_t)at.x * p.rows * (p.swiglu ? 2 : 1) + n0, pitch = p.K / 2;
    uint8_t* const ring = smem + all_chunks * S::X_CHUNK + warp * S::RING;
    uint8_t* const scales = ring + S::STAGES * S::BN * 64;
    const uint8_t* const weight = p.weight + (row0 + g) * pitch + t * 16;
    const int s_row = (lane >> 4) * second + (lane & 15);
    const uint8_t* const scale = p.scale + (row0 + s_row) * (size_t)(all_chunks * S::S_CHUNK);
    auto inside = [&](int half, int row) { return n0 + row + (p.swiglu ? 0 : half * 16) < p.rows; };
    auto load = [&](int chunk) {
        const uint32_t to = smem_address(ring) + (chunk - begin) % S::STAGES * (S::BN * 64);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            copy16(to + (j * 32 + lane) * 16, weight + ((j >> 1) * second + (j & 1) * 8) * pitch + chunk * 64,
                   inside(j >> 1, (j & 1) * 8 + g) ? 16 : 0);
        copy<S::S_CHUNK>(smem_address(scales) + (chunk >> 2 & 1) * S::SCALES + lane * (4 * S::S_CHUNK) +
                             (chunk & 3) * S::S_CHUNK,
                         scale + chunk * S::S_CHUNK, inside(lane >> 4, lane & 15));
    };
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; ++i) {
        if (begin + i < end) load(begin + i);
        commit();
    }
    // x, in the order of the codes
    if (threadIdx.x < S::BM) {
        const int place = first + min((int)threadIdx.x, count - 1);
        const long long slot = p.slot[place];
        token[threadIdx.x] = p.choices ? slot / p.choices : place;
        out[threadIdx.x] = p.to_slots ? slot : place;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.K / 8; i += S::THREADS) {
        const __nv_bfloat16* const from = p.x + i * 8;
        uint8_t* const to = smem + i / S::UNITS * S::X_CHUNK;
        for (int m0 = 0; m0 < count; m0 += 8) {
            uint4 v[8];
#pragma unroll
            for (int m = 0; m < 8; ++m)
                if (m0 + m < count) v[m] = *(const uint4*)(from + token[m0 + m] * p.K);
#pragma unroll
            for (int m = 0; m < 8; ++m)
                if (m0 + m < count) *(uint4*)(to + place_x<S::UNITS>(m0 + m, i % S::UNITS)) = reordered(v[m]);
        }
    }
    __syncthreads();

    float sum[2][S::NT][4];
    float* const flat = &sum[0][0][0];
#pragma unroll
    for (int i = 0; i < S::SUMS; ++i) flat[i] = 0.f;
    for (int chunk = begin, slot = 0; chunk < end; ++chunk) {
        wait<S::STAGES - 2>();
        __syncwarp();
        if (chunk + S::STAGES - 1 < end) load(chunk + S::STAGES - 1);
        commit();
        multiply_chunk<FMT, S>(ring + slot * S::BN * 64, scales + (chunk >> 2 & 1) * S::SCALES, chunk & 3,
                               smem + chunk * S::X_CHUNK, lane, sum);
        slot = slot == S::STAGES - 1 ? 0 : slot + 1;
    }
    if (p.split > 1) {
        __syncwarp();
        float4* const mail = (float4*)ring + lane;            // the ring is empty now
        if (part > 0)
#pragma unroll
            for (int i = 0; i < S::SUMS; i += 4) mail[i * 8] = make_float4(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
        __syncthreads();
        if (part > 0) return;
        for (int other = 1; other < p.split; ++other) {
            const float4* const sent = (const float4*)(ring + other * S::RING) + lane;
#pragma unroll
            for (int i = 0; i < S::SUMS; i += 4) {
                const float4 f = sent[i * 8];
                flat[i] += f.x, flat[i + 1] += f.y, flat[i + 2] += f.z, flat[i + 3] += f.w;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {                             // rows g and g + 8 of each half of the tile
        if (n0 + h * 8 + g >= p.rows) continue;
        float factor[2] = {1.f, 1.f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const size_t row = row0 + h * 8 + g + r * second;
            if (FMT == NVFP4 && inside(r, h * 8 + g)) factor[r] = 256.f / p.global[p.global_per_row ? row : 0];
            if (FMT == MXFP4) factor[r] = 0x1p22f;
        }
#pragma unroll
        for (int nt = 0; nt < S::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int m = nt * 8 + t * 2 + c, n = n0 + h * 8 + g;
                if (m >= count) continue;
                const float low = sum[0][nt][h * 2 + c] * factor[0], high = sum[1][nt][h * 2 + c] * factor[1];
                __nv_bfloat16* const y = p.y + out[m] * p.rows + n;
                if (p.swiglu) {
                    const float gate = rounded(low), silu = rounded(gate / (1.f + __expf(-gate)));
                    *y = __float2bfloat16(silu * rounded(high));
                } else {
                    *y = __float2bfloat16(low);
                    if (n + 16 < p.rows) y[16] = __float2bfloat16(high);
                }
            }
    }
}

template <int NT, int STAGES, int WARPS> static int start(const Routed& p, cudaStream_t stream) {
    using S = Streams<FORMAT, NT, STAGES, WARPS>;
    if (const cudaError_t error = give_memory<routed<FORMAT, S>>(MEMORY)) return (int)error;
    const int wide = p.swiglu ? 16 : 32, mine = WARPS / p.split, units = (p.rows + wide - 1) / wide;
    const int active = p.slots < p.experts ? p.slots : p.experts;
    const long long most = (p.slots + (long long)active * (S::BM - 1)) / S::BM;
    const Launch launch((unsigned)(most * ((units + mine - 1) / mine)), S::THREADS, S::bytes(p.K), 0, p.early, stream);
    return (int)cudaLaunchKernelEx(&launch.config, routed<FORMAT, S>, p);
}

// variant: 1000 NT + 100 stages + warps, of `routed.Tiles`. Returns a cudaError_t.
extern "C" int routed_multiply(const Routed* p, int variant, void* stream) {
    cudaStream_t s = (cudaStream_t)stream;
    switch (variant) {
        case 1404: return start<1, 4, 4>(*p, s);
        case 1308: return start<1, 3, 8>(*p, s);
        case 2404: return start<2, 4, 4>(*p, s);
        case 4308: return start<4, 3, 8>(*p, s);
        default: return (int)cudaErrorInvalidValue;
    }
}

extern "C" const char* routed_error(int error) { return cudaGetErrorString((cudaError_t)error); }
