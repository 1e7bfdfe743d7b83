// Rows of activations on a CPU with AVX2: rotated where that is asked for (rotation.py), and rounded to 8-bit integers with
// one scale a row, in one pass over a row that stays in the cache. Bits are those of plain torch: the same sums in the same
// order, nothing fused.
#include <vector>

#include "../rows.h"

struct Problem {
    const float* x;      // [M, K]
    float* rotated;      // [M, K], or null
    int8_t* codes;       // [M, K], or null
    float* scale;        // [M], with codes
    int M, K, width, threads;
};

constexpr int FEW = 4;   // rows that do not pay for waking threads

static void row(const Problem& p, int m) {
    static thread_local std::vector<float> own;  // a rotated row that nobody asked for
    const float* x = p.x + (int64_t)m * p.K;
    if (p.width > 1) {
        float* y = p.rotated + (int64_t)m * p.K;
        if (!p.rotated) {
            if ((int)own.size() < p.K) own.resize(p.K);
            y = own.data();
        }
        rotate(x, y, p.K, p.width);
        x = y;
    }
    if (p.codes) encode(x, p.codes + (int64_t)m * p.K, p.scale + m, p.K);
}

extern "C" void avx2_rows(const Problem* p, Parallel parallel) {
    share(parallel, p->threads, p->M, FEW, [p](int m) { row(*p, m); });
}
