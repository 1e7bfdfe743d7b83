// What the streamed kernels share: the problem, copies, products of fragments, and the codes' bits.
//
// The weights are the 16-row A operand of mma.m16n8k16, decoded in registers; the activations are B, from shared
// memory. A sum over k may run in any order, so a lane takes the 16 bytes of a row that it loads as its share of k, and
// the stored layout needs no repacking: 32 codes of 4 bits, or 8 values of bf16. Of a word with codes 0..7, the codes j
// and j + 4 lie 16 bits apart: they are the pair that one register of A holds, and x is brought into the same order
// (0 4 1 5 2 6 3 7) when it reaches shared memory.
//
//     e2m1 s|ee|m -> bf16 bits s<<15 | eem<<6 = value 2^-126: one mask, one multiplication by 2^a + 2^b, one mask
//     nvfp4    times e4m3 scale 2^118, exact in bf16; 2^8 / global scale is applied to the sum
//     mxfp4    times 2^(E - 23);                      2^22 is applied to the sum
//     int4     0x4300 | code = 128 + code, less 136 (or 128 + zero point); the sum of a group of 128 is scaled in fp32
//     bf16     as it is
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

enum Format { NVFP4 = 0, MXFP4 = 1, INT4 = 2, INT4_ASYM = 3, BF16 = 4 };
struct Problem {
    const uint8_t* weight;            // [N, K] codes, rows of K / 2 bytes (bf16: 2 K)
    const uint8_t* scale;             // nvfp4 e4m3 [N, K / 16], mxfp4 e8m0 [N, K / 32], int4 fp32 [N, K / 128]
    const uint8_t* zero;              // int4_asym: int32 [N / 8, K / 128]
    const float* global;              // nvfp4: [1] or [N]
    const void* bias;                 // [N] or null
    const __nv_bfloat16* x;           // [M, K]
    void* y;                          // [M, N]
    float* partial;                   // two tiles a block
    int* arrived;                     // one a tile, zero between launches
    void* arranged;                   // x as `broad.cuh` reads it, rows of whole tiles; made by the product
    int M, N, K, global_per_row, bias_fp32, y_fp32, early, tuning;
};

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
template <int SIZE> __device__ __forceinline__ void copy(uint32_t to, const void* from, bool in) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE), "r"(in ? SIZE : 0));
}
// Programmatic dependent launch: what comes before `after_others` may run while the kernel before this one ends.
__device__ __forceinline__ void let_others_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void after_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t sub2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t twice(float f) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(f));
    return d;
}

// The pairs (0, 4) (1, 5) of a word's codes. factor: their scale, or int4's zero point.
template <bool INT> __device__ __forceinline__ void decode_two(uint32_t word, uint32_t factor, uint32_t* pairs) {
    if constexpr (INT) {
        pairs[0] = sub2((word & 0x000F000Fu) | 0x43004300u, factor);
        pairs[1] = sub2((word >> 4 & 0x000F000Fu) | 0x43004300u, factor);
    } else {
        pairs[0] = mul2((word & 0x000F000Fu) * 0x1040u & 0x81C081C0u, factor);
        pairs[1] = mul2((word & 0x00F000F0u) * 0x0104u & 0x81C081C0u, factor);
    }
}
template <bool INT> __device__ __forceinline__ void decode(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
    decode_two<INT>(word, factor, pairs), decode_two<INT>(word >> 8, factor, pairs + 2);      // and (2, 6) (3, 7)
}
__device__ __forceinline__ void e4m3_factors(uint16_t codes, uint32_t (&factors)[2]) {     // of two blocks
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    const float2 f = __half22float2(*(__half2*)&halves);
    factors[0] = twice(f.x * 0x1p118f), factors[1] = twice(f.y * 0x1p118f);
}
__device__ __forceinline__ uint32_t e8m0_factor(uint32_t code) { return min(code + 104u, 254u) * 0x00800080u; }
__device__ __forceinline__ uint32_t int4_zero(uint32_t zeros, int row) {
    return (zeros >> 4 * row & 15u) * 0x00010001u | 0x43004300u;
}
__device__ __forceinline__ uint4 reordered(uint4 v) {     // 8 values of x: 0 4 1 5 2 6 3 7
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
}

// A lane's sums [R][NT][4] of 16 R rows of the weights from n0 on and 8 NT rows of x from m0 on.
template <int FMT, class S>
__device__ __forceinline__ void write(const Problem& p, const float* sum, int n0, int m0, int lane) {
    const int t = lane & 3, g = lane >> 2;
#pragma unroll
    for (int j = 0; j < 2 * S::R; ++j) {
        const int n = n0 + j * 8 + g;
        if (n >= p.N) continue;
        float factor = 1.f, bias = 0.f;
        if constexpr (FMT == NVFP4) factor = 256.f / p.global[p.global_per_row ? n : 0];
        if constexpr (FMT == MXFP4) factor = 0x1p22f;
        if (p.bias) bias = p.bias_fp32 ? ((const float*)p.bias)[n] : __bfloat162float(((const __nv_bfloat16*)p.bias)[n]);
#pragma unroll
        for (int nt = 0; nt < S::NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int m = m0 + nt * 8 + t * 2 + c;
                if (m >= p.M) continue;
                const float y = fmaf(sum[((j >> 1) * S::NT + nt) * 4 + (j & 1) * 2 + c], factor, bias);
                if (p.y_fp32) ((float*)p.y)[(size_t)m * p.N + n] = y;
                else ((__nv_bfloat16*)p.y)[(size_t)m * p.N + n] = __float2bfloat16(y);
            }
    }
}
