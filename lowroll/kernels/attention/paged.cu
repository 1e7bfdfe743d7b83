// Decode attention over a paged cache: one query a row, the siblings of a prompt together.
//
// A block takes eight neighbouring rows and one key-value head, a warp each row. Where the rows' page tables begin with
// the same pages, the block fetches those pages once and all its warps attend to them; from the first page that differs
// every warp goes on alone, through a ring of its own. The tiles of 16 tokens of a row are dealt to the blocks of a
// cluster by turns, whose sums meet in shared memory. A row's tiles come in the same order whether they are shared or
// not, so its bits do not depend on its neighbours.
//
// A tile in a warp: scores S (16 tokens x 8 heads) = K q^T, weights P = 2^(S - max), and O (d x 8 heads) += V^T P, so that
// the up to eight query heads of a key-value head are the columns of a tensor core's product and none is wasted.
//
// The new token's key and value stand in for its slot of the last tile, and are written there for the next step.
//
// With CODES the cache holds e4m3 codes with scales (kernels/attention/quantized_cache.py). A warp writes those of its new token
// before it fetches the tile that they are in. Codes become float16 on their way into the products: two of a token lie in
// 16 bits, so lane (g, t) has the numbers 4 t .. 4 t + 3 of 16 of a key, where a product of 16-bit numbers has 2 t, 2 t + 1,
// 2 t + 8 and 2 t + 9, and the sums' rows g and g + 8 are the numbers 2 g and 2 g + 1 of 16 of a value. The scales go
// where kernels/attention/decode8.py says.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "../launch.cuh"

#if HALF
using Number = __half;
using Pair = __half2;
#define TYPE "f16"
__device__ __forceinline__ Pair pair(float a, float b) { return __floats2half2_rn(a, b); }
#else
using Number = __nv_bfloat16;
using Pair = __nv_bfloat162;
#define TYPE "bf16"
__device__ __forceinline__ Pair pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
#endif

#if CODES
using Stored = uint8_t;
#define PRODUCT "f16"
#else
using Stored = Number;
#define PRODUCT TYPE
#endif

struct Problem {
    const Number *q, *k, *v;
    Stored *keys, *values;
    const int *table, *lengths;
    Number* out;
    uint8_t *fine, *scales;                             // of codes: [pages, page, kv_heads, 16 and 2]
    const long long* channels;                          // [kv_heads, 16]
    int rows, heads, kv_heads, page, pages;             // pages: of a row of the table
    int q_stride, k_stride, v_stride;                   // numbers from row to row
    float scale;                                        // times log2(e)
    int early;                                          // start while the kernel before ends
};

constexpr int D = HEAD, ROWS = 8, TILE = 16, STAGES = CODES ? 6 : 3, HEADS = 8;
[[maybe_unused]] constexpr int FINE = 16;
constexpr int ROW_BYTES = D * (int)sizeof(Stored), CHUNKS = ROW_BYTES / 16;     // a chunk: 16 bytes
constexpr int SIDE = TILE * ROW_BYTES;                  // keys of a tile; of codes, its fine ones and scales follow the values
constexpr int BYTES = 2 * SIDE + (CODES ? 2 * TILE * 16 : 0), RING = STAGES * BYTES;     // a tile; a warp's tiles
[[maybe_unused]] constexpr float HEADROOM = 8.f;                         // as in decode8.py
constexpr int PITCH = D + 4;                            // floats from head to head where sums meet
constexpr int MEET = ROWS * HEADS * PITCH * 4;
constexpr int MEMORY = ROWS * RING + ROWS * HEADS * 2 * 4;
static_assert(MEET <= ROWS * RING, "the sums lie where the rings were");

__device__ __forceinline__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void fetch(uint32_t to, const void* from, int bytes) {          // 16 or, for zeros, 0
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}

template <typename Two> __device__ __forceinline__ uint32_t transposed(Two x) {         // an 8 x 8 matrix, a row in four lanes
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(*(uint32_t*)&x));
    return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PRODUCT "." PRODUCT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float most(float x) {                        // of the lanes with the same lane % 4
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

__device__ __forceinline__ float total(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// Rounded by itself: where a tile is known to be full, the compiler would draw the product into the sum that follows, and
// a row's bits would depend on which of its tiles are shared.
__device__ __forceinline__ float scaled(float score, float by) { return __fmul_rn(score, by); }

// Where a chunk of a token lies among those of its row, so that the same chunk of eight tokens lies in all banks.
__device__ __forceinline__ int place(int chunk, int token) { return chunk ^ (CHUNKS == 4 ? token / 2 % 4 : token % 8); }

// The kernel after this one may start; the one before has ended (programmatic dependent launch).
__device__ __forceinline__ void let_others_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void after_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float remote(uint32_t at, int block) {
    float x;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}\n"
                 : "=f"(x) : "r"(at), "r"(block) : "memory");
    return x;
}

// One row's softmax and sums. Lane: g = lane / 4, t = lane % 4; heads 2 t and 2 t + 1 of max, norm and sums; sums[i]: of
// numbers 16 i + g (0 and 1, a head each) and 16 i + g + 8 (2 and 3).
struct Row {
    uint32_t q[D / 16][2];
#if CODES
    uint32_t fine[2];                                   // q's fine channels / 16
    int scales;                                         // bytes from a token's piece of the scales to the row's
#endif
    float sums[D / 16][4], max[2], norm[2];
};

// The number of a head at row g + 8 half of the i-th sums.
__device__ __forceinline__ int number(int i, int g, int half) { return CODES ? 16 * i + 2 * g + half : 16 * i + g + 8 * half; }

__device__ __forceinline__ void shrink(Row& row, const float (&old)[2], bool moved) {
    if (!__any_sync(~0u, moved)) return;
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        row.sums[i][0] *= old[0], row.sums[i][1] *= old[1], row.sums[i][2] *= old[0], row.sums[i][3] *= old[1];
}

#if CODES
__device__ __forceinline__ uint32_t halves(uint32_t codes) {            // of the lower two
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((uint16_t)codes));
    return y;
}

__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    const __half2 y = __floats2half2_rn(a, b);
    return *(const uint32_t*)&y;
}

// A tile at shared address `at`, its first `valid` tokens.
__device__ __forceinline__ void attend(Row& row, uint32_t at, int valid, float scale, int lane) {
    const int matrix = lane / 8, in = lane % 8, g = lane / 4, token = (matrix & 1) * 8 + in;
    float s[2][4] = {};
    uint32_t a[4];
    load(a, at + 2 * SIDE + token * 16);
    {
        const uint32_t fine[4] = {halves(a[0]), halves(a[1]), halves(a[0] >> 16), halves(a[1] >> 16)};
        multiply(s[1], fine, row.fine[0], row.fine[1]);
    }
#pragma unroll
    for (int i = 0; i < D / 16; i += 2) {
        load(a, at + token * ROW_BYTES + place(i + matrix / 2, token) * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32_t x = a[2 * j], y = a[2 * j + 1];
            const uint32_t keys[4] = {halves(x), halves(y), halves(x >> 16), halves(y >> 16)};
            multiply(s[j], keys, row.q[i + j][0], row.q[i + j][1]);
        }
    }
    float weight[4], tall[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint16_t both;                                  // scales, the key's in the lower byte
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both)
                     : "r"(at + 2 * SIDE + TILE * 16 + (g + 8 * half) * 16 + row.scales) : "memory");
        const float by = scale * __uint_as_float((both & 255u) << 23), e = (float)(both >> 8) - 127.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int j = 2 * half + h;
            s[0][j] = g + 8 * half < valid ? scaled(s[0][j] + s[1][j], by) : -INFINITY;
            weight[j] = s[0][j] + e;
            tall[h] = fmaxf(tall[h], weight[j]);
        }
    }
    bool moved = false;
    float old[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float now = fmaxf(row.max[h], most(tall[h]) - HEADROOM);
        moved |= now != row.max[h];
        old[h] = exp2f(row.max[h] - now);
        row.max[h] = now;
        weight[h] = exp2f(weight[h] - now), weight[2 + h] = exp2f(weight[2 + h] - now);
        row.norm[h] = row.norm[h] * old[h] + (exp2f(s[0][h] - now) + exp2f(s[0][2 + h] - now));
    }
    shrink(row, old, moved);
    const uint32_t b0 = transposed(half_pair(weight[0], weight[1])), b1 = transposed(half_pair(weight[2], weight[3]));
#pragma unroll
    for (int i = 0; i < D / 16; i += 2) {
        load_transposed(a, at + SIDE + token * ROW_BYTES + place(i + matrix / 2, token) * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {                   // two tokens, two numbers of each: the same number of both together
            const uint32_t x = __byte_perm(a[2 * j], 0, 0x3120), y = __byte_perm(a[2 * j + 1], 0, 0x3120);
            const uint32_t values[4] = {halves(x), halves(x >> 16), halves(y), halves(y >> 16)};
            multiply(row.sums[i + j], values, b0, b1);
        }
    }
}
#else

// A tile at shared address `at`, its first `valid` tokens.
__device__ __forceinline__ void attend(Row& row, uint32_t at, int valid, float scale, int lane) {
    const int matrix = lane / 8, in = lane % 8, g = lane / 4;
    float s[2][4] = {};
    {
        const int token = (matrix & 1) * 8 + in;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            uint32_t a[4];
            load(a, at + token * ROW_BYTES + ((2 * i + matrix / 2) ^ in) * 16);
            multiply(s[i & 1], a, row.q[i][0], row.q[i][1]);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        s[0][j] = scaled(s[0][j] + s[1][j], scale);
        if (g + j / 2 * 8 >= valid) s[0][j] = -INFINITY;
    }
    float weight[4];
    bool moved = false;
    float old[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float now = fmaxf(row.max[h], most(fmaxf(s[0][h], s[0][2 + h])));
        moved |= now != row.max[h];
        old[h] = exp2f(row.max[h] - now);
        row.max[h] = now;
        weight[h] = exp2f(s[0][h] - now), weight[2 + h] = exp2f(s[0][2 + h] - now);
        row.norm[h] = row.norm[h] * old[h] + (weight[h] + weight[2 + h]);
    }
    shrink(row, old, moved);
    const uint32_t b0 = transposed(pair(weight[0], weight[1])), b1 = transposed(pair(weight[2], weight[3]));
    const int token = (matrix / 2) * 8 + in;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        uint32_t a[4];
        load_transposed(a, at + SIDE + token * ROW_BYTES + ((2 * i + (matrix & 1)) ^ in) * 16);
        multiply(row.sums[i], a, b0, b1);
    }
}
#endif

// Where a row's tokens lie. Its tiles in this block: rank, rank + S, rank + 2 S ...
template <int S>
struct Tokens {
    const Stored *keys, *values;                        // of this head
    const Number *new_k, *new_v;
    const uint8_t *fine, *scales;                       // of all heads
    int head, heads;
    const int* table;
    int length, page, token_numbers, rank, lane, window = -1, entry = 0;

    __device__ __forceinline__ int first_number(int i) {        // of the i-th tile; all lanes together
        const int each = page / TILE;
        if (i / 32 != window) {
            window = i / 32;
            const int tile = rank + (window * 32 + lane) * S;
            entry = tile * TILE < length ? table[tile / each] : 0;
        }
        const int tile = rank + i * S;
        return __shfl_sync(~0u, entry, i % 32) * page + tile % each * TILE;
    }

#if CODES
    __device__ __forceinline__ void fetch_tile(int i, uint32_t to) {
        const size_t first = (size_t)first_number(i);
        const int chunk = lane % CHUNKS, left = length - 1 - (rank + i * S) * TILE;     // the last token; it is there
        const uint8_t *k = keys + first * token_numbers + chunk * 16, *v = values + first * token_numbers + chunk * 16;
#pragma unroll
        for (int j = 0; j < TILE * CHUNKS / 32; ++j) {
            const int token = j * (32 / CHUNKS) + lane / CHUNKS;
            const size_t at = (size_t)token * token_numbers;
            const uint32_t there = to + token * ROW_BYTES + place(chunk, token) * 16;
            const int bytes = token <= left ? 16 : 0;
            fetch(there, k + at, bytes), fetch(there + SIDE, v + at, bytes);
        }
        const int token = lane % TILE;                  // scales of several heads in 16 bytes
        const size_t at = (first + token) * heads + head;
        const uint8_t* from = lane < TILE ? fine + at * FINE : scales + (at * 2 & ~(size_t)15);
        fetch(to + 2 * SIDE + lane * 16, from, token <= left ? 16 : 0);
    }
#else
    __device__ __forceinline__ void fetch_tile(int i, uint32_t to) {
        const size_t first = (size_t)first_number(i) * token_numbers;
        const int chunk = lane % CHUNKS, left = length - 1 - (rank + i * S) * TILE;     // tokens before the new one
        const Number *k = keys + first + chunk * 8, *v = values + first + chunk * 8;
#pragma unroll
        for (int j = 0; j < TILE * CHUNKS / 32; ++j) {
            const int token = j * (32 / CHUNKS) + lane / CHUNKS;
            const size_t at = (size_t)token * token_numbers;
            const uint32_t there = to + token * ROW_BYTES + (chunk ^ token % 8) * 16;
            if (left >= TILE) {
                fetch(there, k + at, 16), fetch(there + SIDE, v + at, 16);
            } else {
                fetch(there, token == left ? new_k + chunk * 8 : k + at, token <= left ? 16 : 0);
                fetch(there + SIDE, token == left ? new_v + chunk * 8 : v + at, token <= left ? 16 : 0);
            }
        }
    }
#endif
};

#if CODES
// The codes of the new token's key or value, 1 or 2 numbers of each lane's two by two. Returns the byte of the scale.
__device__ __forceinline__ int encode(const Number* from, uint8_t* to, int lane) {
    float x[D / 32], amax = 0.f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        x[i] = (float)from[i / 2 * 64 + 2 * lane + i % 2];
        amax = fmaxf(amax, fabsf(x[i]));
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
    const int byte = max(((__float_as_int(amax) + 0x1FFFFF) >> 23) - 8, 127 - 60);
    const float by = __int_as_float((254 - byte) << 23);
#pragma unroll
    for (int i = 0; i < D / 64; ++i)
        *(uint16_t*)(to + i * 64 + 2 * lane) =
            __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i] * by, x[2 * i + 1] * by), __NV_SATFINITE, __NV_E4M3);
    return byte;
}

// Write the new token's codes to its slot.
__device__ __forceinline__ void write(const Problem& p, const Number* k, const Number* v, size_t slot, int head, int lane) {
    const size_t at = slot * p.kv_heads + head;
    const int key = encode(k, p.keys + at * D, lane), value = encode(v, p.values + at * D, lane);
    if (lane < FINE) {
        const float x = (float)k[p.channels[head * FINE + lane]] * __int_as_float((254 - key) << 23);
        const uint32_t code = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), as_half = halves(code);
        const float left = x - __low2float(*(const __half2*)&as_half);
        p.fine[at * FINE + lane] = __nv_cvt_float_to_fp8(left * 16.f, __NV_SATFINITE, __NV_E4M3);
    }
    if (lane == 0) *(uint16_t*)(p.scales + at * 2) = (uint16_t)(key | value << 8);
    __threadfence();                                    // other lanes fetch it
    __syncwarp();
}
#endif

// What the block's rows have in common. pages: those that the tables of all live rows begin with, complete and cached; 0
// for a single row. leader: the first live row (of the block), its length beside it.
struct Common {
    int pages, leader, length;
};

__device__ __forceinline__ Common compare(const Problem& p, int first_row, int warp, int lane, int* found) {
    const int length = lane < ROWS && first_row + lane < p.rows ? p.lengths[first_row + lane] : 0;
    const unsigned live = __ballot_sync(~0u, length > 0);
    Common common;
    common.leader = max(__ffs(live) - 1, 0);
    common.length = __shfl_sync(~0u, length, common.leader);
    int same = length > 0 ? (length - 1) / p.page : 0x7FFFFFFF;
#pragma unroll
    for (int i = 1; i < ROWS; i *= 2) same = min(same, __shfl_xor_sync(~0u, same, i));
    const int most = __popc(live) < 2 ? 0 : __shfl_sync(~0u, same, 0);
    same = most;
    if ((live >> warp & 1) && warp != common.leader) {
        const int* mine = p.table + (size_t)(first_row + warp) * p.pages;
        const int* theirs = p.table + (size_t)(first_row + common.leader) * p.pages;
        for (int i = 0; i < most && same == most; i += 128) {
            bool differs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = i + j * 32 + lane;
                differs[j] = at < most && mine[at] != theirs[at];
            }
#pragma unroll
            for (int j = 3; j >= 0; --j) {
                const unsigned where = __ballot_sync(~0u, differs[j]);
                if (where) same = i + j * 32 + __ffs(where) - 1;
            }
        }
    }
    if (lane == 0) found[warp] = same;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) same = min(same, found[i]);
    common.pages = same;
    return common;
}

// A row's output, from one block's sums.
__device__ __forceinline__ void finish(const Problem& p, const Row& row, bool live, int at_row, int head, int each, int lane) {
    const int g = lane / 4, t = lane % 4;
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) by[h] = live ? 1.f / total(row.norm[h]) : 0.f;
    Number* out = p.out + ((size_t)at_row * p.heads + head * each + g) * D + 2 * t;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        uint32_t y[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            y[half] = transposed(pair(row.sums[i][2 * half] * by[0], row.sums[i][2 * half + 1] * by[1]));
            if (!live) y[half] = 0;
        }
        uint32_t* at = (uint32_t*)(out + 16 * i + (CODES ? 2 * t : 0));
        const uint32_t low = CODES ? __byte_perm(y[0], y[1], 0x5410) : y[0];
        const uint32_t high = CODES ? __byte_perm(y[0], y[1], 0x7632) : y[1];
        if (g < each && at_row < p.rows) at[0] = low, at[CODES ? 1 : 4] = high;
    }
}

// The outputs of the block's rows, from the sums of all blocks of the cluster, each of which writes a part of them.
template <int S>
__device__ __forceinline__ void join(const Problem& p, const Row& row, bool live, float* sums, float* ends, int first_row,
                                     int head, int each, int rank, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    __syncthreads();                                    // the rings are read
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            sums[(warp * HEADS + 2 * t + j % 2) * PITCH + number(i, g, j / 2)] = live ? row.sums[i][j] : 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float norm = total(row.norm[h]);
        if (g == 0) {
            float* end = ends + (warp * HEADS + 2 * t + h) * 2;
            end[0] = live ? row.max[h] : -INFINITY, end[1] = live ? norm : 0.f;
        }
    }
    meet_cluster();
    for (int item = rank * ROWS + warp; item < ROWS * each; item += S * ROWS) {
        const int which = item / each, h = item % each, at_row = first_row + which;
        const uint32_t end = address(ends + (which * HEADS + h) * 2), from = address(sums + (which * HEADS + h) * PITCH);
        float max[S], norms[S], highest = -INFINITY, norm = 0.f, y[D / 32] = {};
#pragma unroll
        for (int s = 0; s < S; ++s) {
            max[s] = remote(end, s), norms[s] = remote(end + 4, s);
            highest = fmaxf(highest, max[s]);
        }
#pragma unroll
        for (int s = 0; s < S; ++s) {
            const float weight = norms[s] == 0.f ? 0.f : exp2f(max[s] - highest);     // 0: no tile of the row was there
            norm += weight * norms[s];
#pragma unroll
            for (int i = 0; i < D / 32; ++i) y[i] += weight * remote(from + (i * 32 + lane) * 4, s);
        }
        if (at_row < p.rows) {
            Number* out = p.out + ((size_t)at_row * p.heads + head * each + h) * D + lane;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) out[i * 32] = Number(norm == 0.f ? 0.f : y[i] / norm);
        }
    }
    meet_cluster();                                     // nobody leaves whose sums are still read
}

template <int S>
__global__ void __launch_bounds__(ROWS * 32, 1) decode(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) uint8_t memory[];
    let_others_start();
    float* ends = (float*)(memory + ROWS * RING);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x, head = blockIdx.y, first_row = blockIdx.z * ROWS, mine = first_row + warp;
    const int each = p.heads / p.kv_heads, length = mine < p.rows ? p.lengths[mine] : 0;
    const bool live = length > 0;
    const Common common = compare(p, first_row, warp, lane, (int*)ends);

    Tokens<S> tokens;                                   // a dead row fetches for the others
    tokens.keys = p.keys + head * D, tokens.values = p.values + head * D;
    tokens.new_k = p.k + (size_t)mine * p.k_stride + head * D, tokens.new_v = p.v + (size_t)mine * p.v_stride + head * D;
    tokens.table = p.table + (size_t)(live ? mine : first_row + common.leader) * p.pages;
    tokens.length = live ? length : common.length, tokens.page = p.page, tokens.token_numbers = p.kv_heads * D;
    tokens.rank = rank, tokens.lane = lane;
    tokens.fine = p.fine, tokens.scales = p.scales, tokens.head = head, tokens.heads = p.kv_heads;
    auto share = [&](int tiles) { return tiles > rank ? (tiles - rank + S - 1) / S : 0; };
    const int together = share(common.pages * (p.page / TILE)), all = share((length + TILE - 1) / TILE);
    const int batches = (together + ROWS - 1) / ROWS, steps = live ? batches + all - together : batches;

    const uint32_t rings = address(memory), ring = rings + warp * RING;
    auto tile_of = [&](int step) { return step < batches ? step * ROWS + warp : together + step - batches; };
    auto ask = [&](int step) {
        const int tile = tile_of(step);
        if (step < steps && (step >= batches || tile < together)) tokens.fetch_tile(tile, ring + step % STAGES * BYTES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // lengths, pages and what they hold are from the step before; the new token is not
    const bool ahead = STAGES - 1 <= batches || (rank + tile_of(STAGES - 2) * S + 1) * TILE < length;
    if (ahead)
        for (int i = 0; i < STAGES - 1; ++i) ask(i);
    after_others();
#if CODES
    if (live && (length - 1) / TILE % S == rank) {
        const int last = length - 1;
        const size_t slot = (size_t)tokens.table[last / p.page] * p.page + last % p.page;
        write(p, tokens.new_k, tokens.new_v, slot, head, lane);
    }
#endif
    if (!ahead)
        for (int i = 0; i < STAGES - 1; ++i) ask(i);

    Row row;
    const bool real = g < each && live;
    const Number* q = p.q + (size_t)mine * p.q_stride + (head * each + g) * D + (CODES ? 4 : 2) * t;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#if CODES
        for (int j = 0; j < 2; ++j)
            row.q[i][j] = real ? half_pair((float)q[16 * i + 2 * j], (float)q[16 * i + 2 * j + 1]) : 0;
#else
        row.q[i][0] = real ? *(const uint32_t*)(q + 16 * i) : 0, row.q[i][1] = real ? *(const uint32_t*)(q + 16 * i + 8) : 0;
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) row.sums[i][j] = 0.f;
    }
#if CODES
    for (int j = 0; j < 2; ++j) {
        const long long* channel = p.channels + head * FINE + 4 * t + 2 * j;
        row.fine[j] = real ? half_pair((float)q[channel[0] - 4 * t] / 16.f, (float)q[channel[1] - 4 * t] / 16.f) : 0;
    }
    row.scales = (g * p.kv_heads + head) * 2 % 16;      // 8 tokens on it is the same
#endif
    row.max[0] = row.max[1] = -INFINITY, row.norm[0] = row.norm[1] = 0.f;

    for (int step = 0; step < steps || step <= batches; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        if (step <= batches) __syncthreads();           // the tiles of others are there, and mine are no longer read
        else __syncwarp();
        ask(step + STAGES - 1);
        const uint32_t slot = step % STAGES * BYTES;
        if (!live) continue;
        if (step < batches) {
            const int count = min(ROWS, together - step * ROWS);
            for (int i = 0; i < count; ++i) attend(row, rings + i * RING + slot, TILE, p.scale, lane);
        } else if (step < steps) {
            attend(row, ring + slot, length - (rank + (together + step - batches) * S) * TILE, p.scale, lane);
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");

#if !CODES
    if (live && (length - 1) / TILE % S == rank && lane < 2 * CHUNKS) {      // the new token, for the next step
        const int last = length - 1, chunk = lane % CHUNKS;
        const size_t slot = (size_t)tokens.table[last / p.page] * p.page + last % p.page;
        const size_t at = slot * tokens.token_numbers + head * D + chunk * 8;
        if (lane < CHUNKS) *(uint4*)(p.keys + at) = *(const uint4*)(tokens.new_k + chunk * 8);
        else *(uint4*)(p.values + at) = *(const uint4*)(tokens.new_v + chunk * 8);
    }
#endif
    if constexpr (S == 1) finish(p, row, live, mine, head, each, lane);
    else join<S>(p, row, live, (float*)memory, ends, first_row, head, each, rank, warp, lane);
}

// -- launching -----------------------------------------------------------------------------------------------------------

// Launches with S blocks for a row and head; where `active` is given, only says how many clusters the device holds.
template <int S> static int start(const Problem& p, int* active, cudaStream_t stream) {
    if (const cudaError_t error = give_memory<decode<S>>(MEMORY)) return (int)error;
    const Launch launch(dim3(S, p.kv_heads, (p.rows + ROWS - 1) / ROWS), ROWS * 32, MEMORY, S, p.early, stream);
    if (active) return (int)cudaOccupancyMaxActiveClusters(active, decode<S>, &launch.config);
    return (int)cudaLaunchKernelEx(&launch.config, decode<S>, p);
}

extern "C" int paged_decode(const Problem* p, int splits, int* active, void* stream) {
    cudaStream_t s = (cudaStream_t)stream;
    switch (splits) {
        case 1: return start<1>(*p, active, s);
        case 2: return start<2>(*p, active, s);
        case 3: return start<3>(*p, active, s);
        case 4: return start<4>(*p, active, s);
        case 5: return start<5>(*p, active, s);
        case 6: return start<6>(*p, active, s);
        case 7: return start<7>(*p, active, s);
        case 8: return start<8>(*p, active, s);
    }
    return (int)cudaErrorInvalidValue;
}

extern "C" const char* paged_error(int error) { return cudaGetErrorString((cudaError_t)error); }
