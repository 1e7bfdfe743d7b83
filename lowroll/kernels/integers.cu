// Products of int8 rows and int8 weights on Hopper:  y[m, n] = (sum_k x[m, k] w[n, k]) column[n] row[m] + bias[n]
//
// A cluster of two blocks takes 256 channels and TOKENS rows at a time, a block 128 of the channels; both need the same
// rows of x, of which each block fetches half for both (TMA multicast). In a block one warp fetches and two warpgroups
// multiply, 64 channels each: the weights are the left operand of wgmma, so that few rows of x waste nothing.
//
// The steps along k of all tiles, laid end to end, are dealt evenly to the clusters (stream-K: Osama et al. 2023,
// arXiv 2301.03598), so no wave is half empty. Where a border falls within a tile, all its clusters leave their int32
// sums in `partial`, and the last to come adds them: integers, so the order does not matter.
//
// Legend: N channels, M rows of x (tokens), K features; a unit is one step of K for one tile.

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

struct Problem {
    const void *x, *w, *row, *column, *bias;
    void *y, *partial, *arrived;
    int M, N, K, bias_fp32, y_fp32;
};

constexpr int CHANNELS = 128, STEP = 128, GROUP = 128;      // of a block; bytes of k; threads of a warpgroup
constexpr int CLUSTER = 2, THREADS = 3 * GROUP;
constexpr int PITCH = 72;                                   // of the transposed tile: 64 channels and a gap

template <int T>
struct Shape {
    static constexpr int TOKENS = T, SUMS = T / 2;          // int32 sums of a thread
    static constexpr int W_BYTES = CHANNELS * STEP, X_BYTES = T * STEP, STAGE = W_BYTES + X_BYTES;
    static constexpr int STAGES = T == 256 ? 4 : T == 128 ? 6 : T == 64 ? 8 : 10;
    static constexpr int OUT_BYTES = 2 * 16 * PITCH * 2;    // two warpgroups, 16 tokens
    static constexpr int SMEM = 1024 + STAGES * STAGE + OUT_BYTES + 2 * STAGES * 8 + 16;
};

// -- barriers, copies, products ------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void make_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n"
                 ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier, int block) {              // at the barrier of a block of the cluster
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void fetch_for_all(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((uint16_t)((1 << CLUSTER) - 1)) : "memory");
}

__device__ __forceinline__ void meet_cluster() {             // releases nothing: that would be a fence of the whole device
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void meet(int group) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP) : "memory"); }

// Rows of 128 bytes in TMA's 128-byte swizzle; groups of eight rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define D8(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define TEXT8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT16 TEXT8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT32 TEXT16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT64 TEXT32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT128 TEXT64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(tokens, sums, text, list, a_at, b_at, p_at)                                                          \
    __device__ __forceinline__ void multiply(int (&d)[sums], uint64_t a, uint64_t b, int add) {                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" tokens "k32.s32.s8.s8 {" text "}, " a_at ", " b_at ", p;\n}\n" \
                     : list : "l"(a), "l"(b), "r"(add));                                                           \
    }
WGMMA("16", 8, TEXT8, D8(0), "%8", "%9", "%10")
WGMMA("32", 16, TEXT16, D16(0), "%16", "%17", "%18")
WGMMA("64", 32, TEXT32, D32(0), "%32", "%33", "%34")
WGMMA("128", 64, TEXT64, D64(0), "%64", "%65", "%66")
#define D128 D64(0), D64(64)
WGMMA("256", 128, TEXT128, D128, "%128", "%129", "%130")

template <int SUMS>
__device__ __forceinline__ void fence_sums(int (&d)[SUMS]) {       // the compiler keeps away from them
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// -- results -------------------------------------------------------------------------------------------------------------

// The sums of a warpgroup: 64 channels from n0, TOKENS rows from m0. Thread: channels g and g + 8 of its warp's 16,
// tokens 8 j + 2 t and the next; sums 4 j, 4 j + 1 and, for the second channel, 4 j + 2, 4 j + 3.
template <class S>
__device__ __forceinline__ void write(const Problem& p, int (&sums)[S::SUMS], int n0, int m0, int group, int thread,
                                      __nv_bfloat16* shared) {
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    float column[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int n = n0 + warp * 16 + g + 8 * i;
        column[i] = n < p.N ? ((const float*)p.column)[n] : 0.f;
        bias[i] = !p.bias || n >= p.N ? 0.f
            : p.bias_fp32 ? ((const float*)p.bias)[n] : __bfloat162float(((const __nv_bfloat16*)p.bias)[n]);
    }
    const float* row = (const float*)p.row;
    auto value = [&](int sum, int i, float scale) {
        return __fadd_rn(__fmul_rn(__fmul_rn((float)sum, column[i]), scale), bias[i]);
    };
#pragma unroll
    for (int j = 0; j < S::TOKENS / 8; j += 2) {                  // 16 tokens at a time
        if (m0 + 8 * j >= p.M) break;
        uint32_t packed[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = m0 + 8 * (j + half) + 2 * t;
            const float scale0 = m < p.M ? __ldg(row + m) : 0.f, scale1 = m + 1 < p.M ? __ldg(row + m + 1) : 0.f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float y0 = value(sums[4 * (j + half) + 2 * i], i, scale0);
                const float y1 = value(sums[4 * (j + half) + 2 * i + 1], i, scale1);
                if (p.y_fp32) {
                    const int n = n0 + warp * 16 + g + 8 * i;
                    float* y = (float*)p.y + (size_t)m * p.N + n;
                    if (n < p.N && m < p.M) *y = y0;
                    if (n < p.N && m + 1 < p.M) y[p.N] = y1;
                }
                const __nv_bfloat162 both = __floats2bfloat162_rn(y0, y1);
                packed[2 * half + i] = *(const uint32_t*)&both;
            }
        }
        if (p.y_fp32) continue;
        // Transposed through shared memory: matrices (half, i) of 8 tokens x 8 channels, one row address a lane.
        const int lane = thread % 32, matrix = lane / 8;
        __nv_bfloat16* to = shared + (8 * (matrix / 2) + lane % 8) * PITCH + warp * 16 + 8 * (matrix % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(address(to)), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3]) : "memory");
        meet(group);
        const int m = m0 + 8 * j + thread / 8, n = n0 + thread % 8 * 8;
        if (m < p.M && n < p.N)
            *(uint4*)((__nv_bfloat16*)p.y + (size_t)m * p.N + n) = *(const uint4*)(shared + thread / 8 * PITCH + thread % 8 * 8);
        meet(group);
    }
}

// -- the kernel ----------------------------------------------------------------------------------------------------------

template <class S>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
integers(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap w_map,
         const __grid_constant__ CUtensorMap x_map) {
    extern __shared__ uint8_t raw[];
    uint8_t* ring = raw + (1024 - address(raw) % 1024) % 1024;
    __nv_bfloat16* out = (__nv_bfloat16*)(ring + S::STAGES * S::STAGE);
    uint64_t* barriers = (uint64_t*)((uint8_t*)out + S::OUT_BYTES);
    int* is_last = (int*)(barriers + 2 * S::STAGES);
    const uint32_t full = address(barriers), free = full + 8 * S::STAGES;
    const int block = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int steps = (p.K + STEP - 1) / STEP, tiles_m = (p.M + S::TOKENS - 1) / S::TOKENS;
    const int tiles_n = (p.N + CLUSTER * CHANNELS - 1) / (CLUSTER * CHANNELS);
    const long long units = (long long)tiles_m * tiles_n * steps;
    auto start_of = [&](int c) { return (int)(units * c / clusters); };
    const int begin = start_of(cluster), end = start_of(cluster + 1);

    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; ++s) {
            make_barrier(full + 8 * s, 1);
            make_barrier(free + 8 * s, 8 * CLUSTER);              // each warp that multiplies, in both blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet_cluster();

    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            int slot = 0, parity = 1;
            for (int unit = begin; unit < end; ++unit) {
                const int tile = unit / steps, k = unit % steps * STEP;
                const int n = (tile / tiles_m * CLUSTER + block) * CHANNELS, m = tile % tiles_m * S::TOKENS;
                const uint32_t to = address(ring + slot * S::STAGE), ready = full + 8 * slot;
                wait(free + 8 * slot, parity);
                expect(ready, S::STAGE);
                fetch(to, &w_map, k, n, ready);
                constexpr int SHARE = S::TOKENS / CLUSTER;
                fetch_for_all(to + S::W_BYTES + block * SHARE * STEP, &x_map, k, m + block * SHARE, ready);
                if (++slot == S::STAGES) slot = 0, parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / GROUP - 1, thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
        int sums[S::SUMS], slot = 0, parity = 0;
        for (int unit = begin; unit < end;) {
            const int tile = unit / steps, first = unit % steps, last = min(steps, first + end - unit);
            const int n0 = (tile / tiles_m * CLUSTER + block) * CHANNELS + group * 64, m0 = tile % tiles_m * S::TOKENS;
            int before = -1;
            for (int step = first; step < last; ++step) {
                wait(full + 8 * slot, parity);
                const uint64_t a = operand(address(ring + slot * S::STAGE + group * 64 * STEP));
                const uint64_t b = operand(address(ring + slot * S::STAGE + S::W_BYTES));
                fence_sums(sums);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < STEP / 32; ++i) multiply(sums, a + 2 * i, b + 2 * i, step > first || i > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                fence_sums(sums);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (before >= 0 && lane < CLUSTER) arrive(free + 8 * before, lane);
                before = slot;
                if (++slot == S::STAGES) slot = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            fence_sums(sums);
            if (lane < CLUSTER) arrive(free + 8 * before, lane);
            bool mine = true;
            if (last - first < steps) {                           // other clusters have steps of this tile too
                const size_t size = (size_t)CLUSTER * CHANNELS * S::TOKENS / 4;
                auto part = [&](int c) {
                    const int which = start_of(c) / steps == tile ? 0 : 1;
                    return (int4*)p.partial + (c * 2 + which) * size + (block * 2 + group) * (S::SUMS / 4) * GROUP + thread;
                };
                int4* kept = part(cluster);
#pragma unroll
                for (int i = 0; i < S::SUMS / 4; ++i)
                    __stcg(kept + i * GROUP, make_int4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
                const long long lowest = (long long)tile * steps;
                int from = (int)(lowest * clusters / units);      // the cluster that has the first unit of the tile
                while (start_of(from + 1) <= lowest) ++from;
                while (start_of(from) > lowest) --from;
                int to = from;
                while (start_of(to + 1) < lowest + steps) ++to;
                int* count = (int*)p.arrived + ((size_t)tile * CLUSTER + block) * 2 + group;
                __threadfence();
                meet(group);
                if (thread == 0) is_last[group] = atomicAdd(count, 1) == to - from;
                meet(group);
                mine = is_last[group];
                if (mine) {
                    __threadfence();
                    for (int c = from; c <= to; ++c) {
                        if (c == cluster) continue;
                        const int4* theirs = part(c);
#pragma unroll
                        for (int i = 0; i < S::SUMS / 4; ++i) {
                            const int4 other = __ldcg(theirs + i * GROUP);
                            sums[4 * i] += other.x, sums[4 * i + 1] += other.y;
                            sums[4 * i + 2] += other.z, sums[4 * i + 3] += other.w;
                        }
                    }
                    if (thread == 0) *count = 0;
                }
            }
            if (mine) write<S>(p, sums, n0, m0, group, thread, out + group * 16 * PITCH);
            unit += last - first;
        }
    }
    __syncwarp();
    meet_cluster();                                               // nobody leaves while the other still writes to it
}

// -- launching -----------------------------------------------------------------------------------------------------------

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static Encode encoder() {
    static Encode found = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        return result == cudaDriverEntryPointSuccess ? (Encode)entry : nullptr;
    }();
    return found;
}

static bool describe(CUtensorMap* map, const void* data, int rows, int K, int box) {
    const cuuint64_t sizes[2] = {(cuuint64_t)K, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)K};
    const cuuint32_t boxes[2] = {STEP, (cuuint32_t)box}, ones[2] = {1, 1};
    return encoder() && encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void*)data, sizes, strides, boxes, ones,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int TOKENS>
static int start(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Shape<TOKENS>;
    const long long tiles = (long long)((p.N + CLUSTER * CHANNELS - 1) / (CLUSTER * CHANNELS)) * ((p.M + TOKENS - 1) / TOKENS);
    const long long units = tiles * ((p.K + STEP - 1) / STEP), most = processors / CLUSTER;
    const long long clusters = units < most ? units : most;
    if (needed) {
        needed[0] = most * 2 * CLUSTER * CHANNELS * TOKENS, needed[1] = tiles * CLUSTER * 2;
        return 0;
    }
    auto* kernel = integers<S>;
    static bool ready[64] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess && !ready[device & 63]) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SMEM);
        ready[device & 63] = error == cudaSuccess;
    }
    if (error != cudaSuccess) return (int)error;
    CUtensorMap w_map, x_map;
    if (!describe(&w_map, p.w, p.N, p.K, CHANNELS) || !describe(&x_map, p.x, p.M, p.K, TOKENS / CLUSTER))
        return (int)cudaErrorInvalidValue;
    kernel<<<(unsigned)(clusters * CLUSTER), THREADS, S::SMEM, stream>>>(p, w_map, x_map);
    return (int)cudaGetLastError();
}

// Launches the product, or tells what it needs: ints of `partial`, ints of `arrived` (zeros). Returns a cudaError_t.
extern "C" int integers_product(const Problem* p, int tokens, int processors, long long* needed, void* stream) {
    cudaStream_t s = (cudaStream_t)stream;
    switch (tokens) {
        case 16: return start<16>(*p, processors, needed, s);
        case 32: return start<32>(*p, processors, needed, s);
        case 64: return start<64>(*p, processors, needed, s);
        case 128: return start<128>(*p, processors, needed, s);
        case 256: return start<256>(*p, processors, needed, s);
    }
    return (int)cudaErrorInvalidValue;
}

extern "C" const char* integers_error(int error) { return cudaGetErrorString((cudaError_t)error); }
