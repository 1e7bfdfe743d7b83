// y_MN = x_MK W_NK^T for few rows M: the weights are streamed once, at the speed of the memory.
//
// Up to 32 rows by `narrow` where a part of x fits into shared memory. On Hopper by `group` up to 32, by `relay` up to
// 64 and by `broad` beyond; `wide` takes what is left. One library a weight format.
// Every choice depends on shapes and the device alone: a product has the same bits in every run.
#if HOPPER
#include <dlfcn.h>

#include "../broad.cuh"
#include "../group.cuh"
#include "../relay.cuh"
#endif
#include "../launch.cuh"
#include "../narrow.cuh"
#include "../wide.cuh"

#ifndef FORMAT
#define FORMAT NVFP4
#endif
#ifndef STAGES1
#define STAGES1 4
#define STAGES2 2
#define GROUP_STAGES 6
#endif

constexpr int MEMORY = 227 * 1024;

struct Plan {
    int R = 0, ranks = 0, teams = 0, bytes = 0;
    Cut cut;
    double cost = 1e30;
};

// How a narrow product with 16 R rows a tile and clusters of that many ranks would be cut. Costs are in chunks of a warp.
template <int NT, int R> static int consider(const Problem& p, int processors, int ranks, Plan& best) {
    using S = Narrow<FORMAT, NT, R, R == 1 ? STAGES1 : STAGES2, 16>;
    static int teams_of[MAX_DEVICES][9] = {};
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return (int)error;
    int& teams = teams_of[device % MAX_DEVICES][ranks];
    if (teams == 0) {
        if (const cudaError_t error = give_memory<narrow<FORMAT, S>>(MEMORY)) return (int)error;
        const Launch launch(ranks, S::THREADS, MEMORY, ranks, false, nullptr);
        if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&teams, narrow<FORMAT, S>, &launch.config))
            return (int)error;
    }
    const int all_tiles = (p.N + S::BN - 1) / S::BN, all_chunks = p.K / S::KC;
    if (teams == 0 || all_chunks < ranks || p.K % S::NEEDS) return 0;
    const int used = teams < all_tiles ? teams : all_tiles, tiles = (all_tiles + used - 1) / used;
    const int chunks = (all_chunks + ranks - 1) / ranks, bytes = S::bytes(all_tiles / used + 1, chunks);
    const double cost = ((tiles * chunks + S::WARPS - 1) / S::WARPS) * (R == 1 ? 1.08 : 2) + (ranks > 1);
    const Cut cut{all_tiles / used, all_tiles % used, all_chunks / ranks, all_chunks % ranks};
    if (bytes && bytes <= MEMORY && cost < best.cost) best = Plan{R, ranks, used, bytes, cut, cost};
    return 0;
}

template <int NT, int R> static int start_narrow(const Problem& p, const Plan& plan, cudaStream_t stream) {
    using S = Narrow<FORMAT, NT, R, R == 1 ? STAGES1 : STAGES2, 16>;
    const Launch launch(plan.ranks * plan.teams, S::THREADS, plan.bytes, plan.ranks, p.early, stream);
    return (int)cudaLaunchKernelEx(&launch.config, narrow<FORMAT, S>, p, plan.cut);
}

// -1 where nothing fits. tuning (for measurements): 100 R + 10 ranks + 1.
template <int NT> static int narrow_product(const Problem& p, int processors, cudaStream_t stream) {
    Plan plan;
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        if (p.tuning && p.tuning / 10 % 10 != ranks) continue;
        int error = 0;
        if constexpr (NT < 4)
            if (!p.tuning || p.tuning / 100 == 2) error = consider<NT, 2>(p, processors, ranks, plan);
        if (!error && (!p.tuning || p.tuning / 100 == 1)) error = consider<NT, 1>(p, processors, ranks, plan);
        if (error) return error;
    }
    if (plan.ranks == 0) return -1;
    if constexpr (NT < 4)
        if (plan.R == 2) return start_narrow<NT, 2>(p, plan, stream);
    return start_narrow<NT, 1>(p, plan, stream);
}

// Tiles by rows of x, four digits: 16-row blocks of weights a warp, stages of the ring (two), blocks a multiprocessor.
#ifndef TILES8
#if FORMAT == 4
#define TILES8 2062
#define TILES16 2052
#define TILES32 2042
#define TILES64 4041
#elif FORMAT == 2 || FORMAT == 3
#define TILES8 2042
#define TILES16 2042
#define TILES32 2051
#define TILES64 2041
#else
#define TILES8 2042
#define TILES16 2042
#define TILES32 2032
#define TILES64 2041
#endif
#endif

template <int NT, int TILES> static int start_wide(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Shape<FORMAT, NT, TILES / 1000, TILES / 10 % 100>;
    constexpr int BLOCKS = TILES % 10;
    const long long steps = (p.K + S::STEP - 1) / S::STEP;
    const long long tiles = (long long)((p.N + S::BN - 1) / S::BN) * ((p.M + S::BM - 1) / S::BM);
    const long long most = (long long)processors * BLOCKS, blocks = tiles * steps < most ? tiles * steps : most;
    if (needed) {
        needed[0] = most * 2 * S::BN * S::BM, needed[1] = tiles;
        return 0;
    }
    if (const cudaError_t error = give_memory<wide<FORMAT, S, BLOCKS>>(S::SMEM)) return (int)error;
    wide<FORMAT, S, BLOCKS><<<(unsigned)blocks, THREADS, S::SMEM, stream>>>(p);
    return (int)cudaGetLastError();
}

#if HOPPER && FORMAT != 4
static int start_group(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Group<FORMAT, 4, 1, GROUP_STAGES>;
    const long long tiles = (long long)((p.N + S::BN - 1) / S::BN) * ((p.M + S::BM - 1) / S::BM);
    const long long units = tiles * (p.K / S::KC), blocks = units < processors ? units : processors;
    if (needed) {
        needed[0] = blocks * 2 * S::BN * S::BM, needed[1] = 2 * tiles;
        return 0;
    }
    if (const cudaError_t error = give_memory<group<FORMAT, S>>(S::SMEM)) return (int)error;
    const Launch launch((unsigned)blocks, S::THREADS, S::SMEM, 1, p.early, stream);
    return (int)cudaLaunchKernelEx(&launch.config, group<FORMAT, S>, p);
}

// Boxes of `width` bytes and `height` rows of a matrix [rows, bytes]; zeros beyond it.
static bool map(CUtensorMap& map, const void* matrix, long long bytes, long long rows, int width, int height) {
    static const auto encode =
        (decltype(&cuTensorMapEncodeTiled))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled");
    const cuuint64_t sizes[2] = {(cuuint64_t)bytes, (cuuint64_t)rows}, pitch[1] = {(cuuint64_t)bytes};
    const cuuint32_t box[2] = {(cuuint32_t)width, (cuuint32_t)height}, steps[2] = {1, 1};
    return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void*)matrix, sizes, pitch, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S> static bool map_all(Maps& maps, const Problem& p) {
    const long long scales = (long long)p.K / 512 * S::S_ROW + (p.K % 512 ? S::S_ROW / 2 : 0);
    return map(maps.codes, p.weight, p.K / 2, p.N, S::KC / 2, S::BN) && map(maps.scales, p.scale, scales, p.N, S::S_ROW, S::BN) &&
           (FORMAT != INT4_ASYM || map(maps.zeros, p.zero, p.K / 32, (p.N + 7) / 8, 16, S::BN / 8));
}

static int start_relay(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Relay<FORMAT, 5>;
    const long long tiles = (long long)((p.N + S::BN - 1) / S::BN) * ((p.M + S::BM - 1) / S::BM);
    const long long units = tiles * (p.K / S::KC), blocks = units < processors ? units : processors;
    if (needed) {
        needed[0] = blocks * 2 * S::BN * S::BM, needed[1] = 2 * blocks;
        return 0;
    }
    Maps maps = {};
    if (!map_all<S>(maps, p)) return (int)cudaErrorInvalidValue;
    if (const cudaError_t error = give_memory<relay<FORMAT, S>>(S::SMEM)) return (int)error;
    const Launch launch((unsigned)blocks, S::THREADS, S::SMEM, 1, p.early, stream);
    return (int)cudaLaunchKernelEx(&launch.config, relay<FORMAT, S>, p, maps, (int)tiles, (int)(tiles % blocks));
}

template <int NT, int STAGES> static int start_broad(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    using S = Broad<FORMAT, NT, STAGES>;
    const long long tiles_m = (p.M + S::BM - 1) / S::BM, tiles = (p.N + S::BN - 1) / S::BN * tiles_m;
    const long long units = tiles * (p.K / S::KC), blocks = units < processors ? units : processors;
    if (needed) {
        needed[0] = blocks * 2 * S::BN * S::BM, needed[1] = 2 * blocks, needed[2] = tiles_m * S::BM * p.K * 2;
        return 0;
    }
    Maps maps = {};
    if (!map_all<S>(maps, p)) return (int)cudaErrorInvalidValue;
    if (const cudaError_t error = give_memory<broad<FORMAT, S>>(S::SMEM)) return (int)error;
    const Launch before((unsigned)((p.M + 7) / 8 * (p.K / 128) + 7) / 8, 256, 0, 0, p.early, stream);
    if (const cudaError_t error = cudaLaunchKernelEx(&before.config, arrange, p.x, (uint4*)p.arranged, p.M, p.K, S::BM))
        return (int)error;
    const Launch launch((unsigned)blocks, S::THREADS, S::SMEM, 0, true, stream);
    return (int)cudaLaunchKernelEx(&launch.config, broad<FORMAT, S>, p, maps, (int)tiles, (int)(tiles % blocks));
}

// Tiles of 96 or 128 rows of x, as few as there can be.
static int broad_product(const Problem& p, int processors, long long* needed, cudaStream_t stream) {
    const int tiles = (p.M + 127) / 128, rows = (p.M + tiles - 1) / tiles;
    if (rows <= 96) return start_broad<12, 4>(p, processors, needed, stream);
    return start_broad<16, 4>(p, processors, needed, stream);
}
#endif

// Launches the product, or tells what it needs: floats of `partial`, ints of `arrived`, bytes of `arranged`. Returns a
// cudaError_t.
extern "C" int streamed_linear(const Problem* p, int processors, long long* needed, void* stream) {
    cudaStream_t s = (cudaStream_t)stream;
    if (!needed && p->M <= 32 && p->tuning != 2 && p->tuning != 3) {
        const int done = p->M <= 8    ? narrow_product<1>(*p, processors, s)
                         : p->M <= 16 ? narrow_product<2>(*p, processors, s)
                                      : narrow_product<4>(*p, processors, s);
        if (done >= 0) return done;
    }
#if HOPPER && FORMAT != 4
    if (p->M > 8 && p->tuning != 2 && p->K % Group<FORMAT, 4, 1, 4>::NEEDS == 0) {
        if (p->M <= 32) return start_group(*p, processors, needed, s);
        if (p->N % 8 == 0 && p->M <= 64) return start_relay(*p, processors, needed, s);
        if (p->N % 8 == 0) return broad_product(*p, processors, needed, s);
    }
#endif
    if (p->M <= 8) return start_wide<1, TILES8>(*p, processors, needed, s);
    if (p->M <= 16) return start_wide<2, TILES16>(*p, processors, needed, s);
    if (p->M <= 32) return start_wide<4, TILES32>(*p, processors, needed, s);
    return start_wide<8, TILES64>(*p, processors, needed, s);
}

extern "C" const char* streamed_error(int error) { return cudaGetErrorString((cudaError_t)error); }
