// y = x W^T + bias in float32 on a CPU with AVX2 or AVX-512, with one order of a sum for every batch, thread and CPU.
//
// Lane j of 16 adds up x[k] w[k] over k = j, j + 16, j + 32, ..., one fused multiply-add after the other from 0 on, as
// if zeros followed behind K. Then lanes j and j + 8 are added, of those j and j + 4, j and j + 2, j and j + 1, and the
// bias last, which is 0 where there is none. The sides of an addition may change places: no bit of a number changes.
//
// Rows of x and of w are read where they lie. A tile of w stays in the first cache while the rows of a block of x,
// which stays in the second, are multiplied with it, a few at a time; the next tile is fetched meanwhile.
//
// W may be stored in fewer bytes that stand for the same floats: bfloat16, or 32 whole numbers q of a byte or of 4 bits
// with their scale s, q s, or with a minimum m, q s + m of two roundings. Then each tile is decoded before it is
// multiplied.
//
// Where K is small, nearly all of that time goes to adding up the lanes of a sum. Then a vector holds one lane of many
// columns instead (`across`): no shuffle is needed to add the lanes of all of them. The order is the same, so each bit
// is.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../avx2.h"

#define WIDE __attribute__((target("avx512f")))

enum Kind { FLOATS, BFLOAT16, BLOCKS, NIBBLES };

struct Problem {
    const float* x;         // rows of K, x_stride apart
    const float* w;         // rows of K, w_stride apart; of another kind bytes, w_stride of them a row
    const float* bias;      // [N], or null
    float* y;               // [M, N]
    int64_t x_stride, w_stride;
    int M, N, K, wide, across, kind, threads;
};

constexpr int LANES = 16;
constexpr int GROUP = 32;           // whole numbers with one scale; K is a multiple of it
constexpr int64_t BLOCK = 1 << 16;  // numbers of a block of x, which stays in the second cache
constexpr int64_t LONGEST = 256;    // rows of it
constexpr int64_t PANEL = 1 << 18;  // numbers of the rows of w that all blocks meet, one after the other
constexpr int64_t TASK = 1 << 18;   // products that pay for waking a thread
constexpr int64_t TASKS = 8;        // of a thread, where there are products enough
constexpr int DEEPEST = 4 * LANES;  // K that `across` takes
constexpr int NEAR = 1 << 12;       // numbers of the columns of w that stay in the first cache there
constexpr int64_t SHORTEST = 128;   // rows of a block there, which pay for turning w

// Rows that are fetched into the cache while others are multiplied.
struct Ahead {
    const float* const* rows;
    int count;
};

static INLINE void fetch(const Ahead& ahead, int k) {
    for (int i = 0; i < ahead.count; ++i) _mm_prefetch((const char*)(ahead.rows[i] + k), _MM_HINT_T0);
}

// -- compact rows -----------------------------------------------------------------------------------------------------

// A group of whole numbers in a row of BLOCKS or NIBBLES, whose scales follow all numbers. Byte i of NIBBLES has number i
// in its low half and number i + 16 in its high half.
struct Group {
    const __m128i* codes;
    float scale, low;

    Group(int kind, const float* row, int k, int K) {
        const char* bytes = (const char*)row;
        const bool half = kind == NIBBLES;
        const char* scales = bytes + (half ? K / 2 + k / GROUP * 2 * sizeof(float) : K + k / GROUP * sizeof(float));
        codes = (const __m128i*)(bytes + (half ? k / 2 : k));
        memcpy(&scale, scales, sizeof(float));
        low = 0;
        if (half) memcpy(&low, scales + sizeof(float), sizeof(float));
    }
};

// -- AVX2 -------------------------------------------------------------------------------------------------------------

// Lanes j and j + 4 of two vectors, added: those of a, then those of b.
static INLINE __m256 add_fours(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
}

// Of every four lanes j and j + 2.
static INLINE __m256 add_twos(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}

// Of every two lanes both.
static INLINE __m256 add_ones(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

struct Avx2 {
    static constexpr int ROWS = 2, COLUMNS = 3;     // whose sums fit in the registers
    static constexpr bool DECODES = false;

    // out = the floats of a compact row.
    template <int KIND> static void decode(const float* row, int K, float* out) {
        for (int k = 0; k < K; k += 8) {
            __m256 numbers;
            if constexpr (KIND == BFLOAT16) {
                const __m128i bits = _mm_loadu_si128((const __m128i*)((const uint16_t*)row + k));
                numbers = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
            } else {
                const int within = k % GROUP;
                const Group group(KIND, row, k - within, K);
                const char* codes = (const char*)group.codes + within % (KIND == NIBBLES ? LANES : GROUP);
                const __m128i bytes = _mm_loadl_epi64((const __m128i*)codes);
                if constexpr (KIND == BLOCKS) {
                    numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
                } else {
                    const __m128i half = within < LANES ? bytes : _mm_srli_epi16(bytes, 4);
                    const __m128i four = _mm_and_si128(half, _mm_set1_epi8(15));
                    numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(four));
                }
                numbers = _mm256_mul_ps(numbers, _mm256_set1_ps(group.scale));
                if constexpr (KIND == NIBBLES) numbers = _mm256_add_ps(numbers, _mm256_set1_ps(group.low));
            }
            _mm256_storeu_ps(out + k, numbers);
        }
    }

    // sums += lanes k .. k + 15; of those, the ones in `mask` unless they are WHOLE.
    template <int R, bool WHOLE>
    static INLINE void step(const float* const* x, const float* const* w, int k, const __m256i* mask, __m256* sums) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const auto load = [&](const float* at) LAMBDA {
                return WHOLE ? _mm256_loadu_ps(at + k + 8 * h) : _mm256_maskload_ps(at + k + 8 * h, mask[h]);
            };
            __m256 a[R];
            for (int r = 0; r < R; ++r) a[r] = load(x[r]);
#pragma GCC unroll 3
            for (int c = 0; c < COLUMNS; ++c) {
                __m256 b = load(w[c]);
                asm("" : "+x"(b));  // stays in a register: the compiler would load it again for each row
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                    __m256& sum = sums[(r * COLUMNS + c) * 2 + h];
                    sum = _mm256_fmadd_ps(a[r], b, sum);
                }
            }
        }
    }

    // out = R rows of x times a tile of w, plus the bias; all have COLUMNS numbers a row.
    template <int R>
    static void multiply(const float* x, int64_t stride, const float* const* tile, int K, Ahead ahead,
                         const float* bias, float* out) {
        const float *rows[R], *w[COLUMNS];
        for (int r = 0; r < R; ++r) rows[r] = x + r * stride;
        for (int c = 0; c < COLUMNS; ++c) w[c] = tile[c];
        __m256 sums[16];
        for (auto& sum : sums) sum = _mm256_setzero_ps();
        int k = 0;
        for (; k + LANES <= K; k += LANES) {
            fetch(ahead, k);
            step<R, true>(rows, w, k, nullptr, sums);
        }
        if (k < K) {
            int live[LANES];
            for (int i = 0; i < LANES; ++i) live[i] = k + i < K ? -1 : 0;
            const __m256i mask[2] = {_mm256_loadu_si256((__m256i*)live), _mm256_loadu_si256((__m256i*)(live + 8))};
            fetch(ahead, k);
            step<R, false>(rows, w, k, mask, sums);
        }
        __m256 v[4];
        for (int i = 0; i < 4; ++i) {
            const __m256* at = sums + 2 * i;
            v[i] = add_fours(_mm256_add_ps(at[0], at[1]), _mm256_add_ps(at[8], at[9]));
        }
        const __m256 sum = add_ones(add_twos(v[0], v[1]), add_twos(v[2], v[3]));
        _mm256_storeu_ps(out, _mm256_add_ps(sum, _mm256_loadu_ps(bias)));
    }

    // -- across: w is turned, TILE columns side by side

    static constexpr int TILE = 8, PAIR = 2;

    // sums = lanes J, J + WIDTH, J + 2 WIDTH, ... of R rows, added up: the two halves, one after the other, so that few
    // sums wait in registers.
    template <int R, int STEPS, int J, int WIDTH>
    static INLINE void add_up(const float* const* x, const float* w, __m256* sums) {
        if constexpr (WIDTH < LANES) {
            __m256 more[R];
            add_up<R, STEPS, J, 2 * WIDTH>(x, w, sums);
            add_up<R, STEPS, J + WIDTH, 2 * WIDTH>(x, w, more);
            for (int r = 0; r < R; ++r) {
                sums[r] = _mm256_add_ps(sums[r], more[r]);
                asm("" : "+x"(sums[r]));    // here: the compiler would add all of them last, from memory
            }
        } else {
            for (int r = 0; r < R; ++r) sums[r] = _mm256_setzero_ps();
#pragma GCC unroll 4
            for (int k = J; k < STEPS * LANES; k += LANES) {
                __m256 b = _mm256_load_ps(w + k * TILE);
                asm("" : "+x"(b));  // as in `step`
                for (int r = 0; r < R; ++r) sums[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(x[r] + k), b, sums[r]);
            }
        }
    }

    // y = R rows of x times some tiles of w, plus the bias. All have STEPS * LANES numbers a row.
    template <int R, int STEPS>
    static void multiply_across(const float* const* x, const float* w, const float* bias, int tiles, float* y,
                                int64_t y_stride) {
        for (int t = 0; t < tiles; ++t, w += STEPS * LANES * TILE, bias += TILE, y += TILE) {
            __m256 sums[R];
            add_up<R, STEPS, 0, 1>(x, w, sums);
            const __m256 b = _mm256_loadu_ps(bias);
            for (int r = 0; r < R; ++r) _mm256_storeu_ps(y + r * y_stride, _mm256_add_ps(sums[r], b));
        }
    }
};

// -- AVX-512 ----------------------------------------------------------------------------------------------------------

static INLINE WIDE __m512 add_eights(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

// Of two numbers in each of a and b: the fours of a's first, of its second, then those of b.
static INLINE WIDE __m512 add_fours(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

static INLINE WIDE __m512 add_twos(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}

static INLINE WIDE __m512 add_ones(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// The lanes of each of 16 vectors.
static INLINE WIDE __m512 add_lanes_of_16(const __m512* v) {
    __m512 fours[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) fours[i] = add_fours(add_eights(v[i], v[i + 4]), add_eights(v[i + 8], v[i + 12]));
    return add_ones(add_twos(fours[0], fours[1]), add_twos(fours[2], fours[3]));
}

// The lanes of each of 8, in the first 8 lanes.
static INLINE WIDE __m512 add_lanes_of_8(const __m512* v) {
    const __m512 even = add_fours(add_eights(v[0], v[4]), add_eights(v[1], v[5]));
    const __m512 odd = add_fours(add_eights(v[2], v[6]), add_eights(v[3], v[7]));
    const __m512 twos = add_twos(even, odd);
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(order, add_ones(twos, twos));
}

struct Avx512 {
    static constexpr int ROWS = 4, COLUMNS = 6;
    static constexpr bool DECODES = true;           // one row is multiplied with w as it is stored

    // Numbers k .. k + 31 of a compact row.
    template <int KIND> static INLINE WIDE void decode(const float* row, int k, int K, __m512* numbers) {
        if constexpr (KIND == BFLOAT16) {
            for (int h = 0; h < 2; ++h) {
                const __m256i bits = _mm256_loadu_si256((const __m256i*)((const uint16_t*)row + k + 16 * h));
                numbers[h] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
            }
            return;
        }
        const Group group(KIND, row, k, K);
        const __m512 scale = _mm512_set1_ps(group.scale);
        if constexpr (KIND == BLOCKS) {
            for (int h = 0; h < 2; ++h) {
                const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(group.codes + h));
                numbers[h] = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale);
            }
        } else {    // looked up among the 16 numbers that there are, by the low four bits of a lane
            const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512 levels = _mm512_add_ps(_mm512_mul_ps(codes, scale), _mm512_set1_ps(group.low));
            const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(group.codes));
            numbers[0] = _mm512_permutexvar_ps(pairs, levels);
            numbers[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), levels);
        }
    }

    template <int KIND> static WIDE void decode(const float* row, int K, float* out) {
        for (int k = 0; k < K; k += GROUP) {
            __m512 numbers[2];
            decode<KIND>(row, k, K, numbers);
            for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + k + 16 * h, numbers[h]);
        }
    }

    // One row of x times a tile of compact rows of w.
    template <int KIND>
    static WIDE void multiply_stored(const float* x, const float* const* tile, int K, const float* bias, float* out) {
        __m512 sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sums[i] = _mm512_setzero_ps();
        for (int k = 0; k < K; k += GROUP) {
            const __m512 a[2] = {_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + 16)};
#pragma GCC unroll 6
            for (int c = 0; c < COLUMNS; ++c) {
                __m512 b[2];
                decode<KIND>(tile[c], k, K, b);
                for (int h = 0; h < 2; ++h) sums[c] = _mm512_fmadd_ps(a[h], b[h], sums[c]);
            }
        }
        _mm256_storeu_ps(out, _mm256_add_ps(_mm512_castps512_ps256(add_lanes_of_8(sums)), _mm256_loadu_ps(bias)));
    }

    template <int R, bool WHOLE>
    static INLINE WIDE void step(const float* const* x, const float* const* w, int k, __mmask16 mask, __m512* sums) {
        const auto load = [&](const float* at) LAMBDA WIDE {
            return WHOLE ? _mm512_loadu_ps(at + k) : _mm512_maskz_loadu_ps(mask, at + k);
        };
        __m512 a[R];
        for (int r = 0; r < R; ++r) a[r] = load(x[r]);
#pragma GCC unroll 6
        for (int c = 0; c < COLUMNS; ++c) {
            const __m512 b = load(w[c]);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[r * COLUMNS + c] = _mm512_fmadd_ps(a[r], b, sums[r * COLUMNS + c]);
        }
    }

    template <int R>
    static WIDE void multiply(const float* x, int64_t stride, const float* const* tile, int K, Ahead ahead,
                              const float* bias, float* out) {
        const float *rows[R], *w[COLUMNS];
        for (int r = 0; r < R; ++r) rows[r] = x + r * stride;
        for (int c = 0; c < COLUMNS; ++c) w[c] = tile[c];
        __m512 sums[24];
#pragma GCC unroll 24
        for (int i = 0; i < 24; ++i) sums[i] = _mm512_setzero_ps();
        int k = 0;
        for (; k + LANES <= K; k += LANES) {
            fetch(ahead, k);
            step<R, true>(rows, w, k, 0, sums);
        }
        if (k < K) {
            fetch(ahead, k);
            step<R, false>(rows, w, k, (__mmask16)((1u << (K - k)) - 1), sums);
        }
        if constexpr (R > 1) _mm512_storeu_ps(out, _mm512_add_ps(add_lanes_of_16(sums), _mm512_loadu_ps(bias)));
        if constexpr (R == 1 || R > 2) {
            constexpr int first = R == 1 ? 0 : 16;
            const __m256 sum = _mm512_castps512_ps256(add_lanes_of_8(sums + first));
            _mm256_storeu_ps(out + first, _mm256_add_ps(sum, _mm256_loadu_ps(bias + first)));
        }
    }

    // Two vectors of columns, so that a number of x that is loaded is used twice, as one of w is by two rows.
    static constexpr int TILE = 32, PAIR = 2;

    template <int R, int STEPS, int J, int WIDTH>
    static INLINE WIDE void add_up(const float* const* x, const float* w, __m512* sums) {
        if constexpr (WIDTH < LANES) {
            __m512 more[2 * R];
            add_up<R, STEPS, J, 2 * WIDTH>(x, w, sums);
            add_up<R, STEPS, J + WIDTH, 2 * WIDTH>(x, w, more);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * R; ++i) {
                sums[i] = _mm512_add_ps(sums[i], more[i]);
                asm("" : "+v"(sums[i]));
            }
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < 2 * R; ++i) sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int k = J; k < STEPS * LANES; k += LANES) {
                __m512 b[2] = {_mm512_load_ps(w + k * TILE), _mm512_load_ps(w + k * TILE + 16)};
                asm("" : "+v"(b[0]), "+v"(b[1]));
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                    __m512 a = _mm512_set1_ps(x[r][k]);
                    asm("" : "+v"(a));
                    for (int c = 0; c < 2; ++c) sums[2 * r + c] = _mm512_fmadd_ps(a, b[c], sums[2 * r + c]);
                }
            }
        }
    }

    template <int R, int STEPS>
    static WIDE void multiply_across(const float* const* x, const float* w, const float* bias, int tiles, float* y,
                                     int64_t y_stride) {
        for (int t = 0; t < tiles; ++t, w += STEPS * LANES * TILE, bias += TILE, y += TILE) {
            __m512 sums[2 * R];
            add_up<R, STEPS, 0, 1>(x, w, sums);
            for (int c = 0; c < 2; ++c) {
                const __m512 b = _mm512_loadu_ps(bias + 16 * c);
                for (int r = 0; r < R; ++r)
                    _mm512_storeu_ps(y + r * y_stride + 16 * c, _mm512_add_ps(sums[2 * r + c], b));
            }
        }
    }
};

// -- tasks ------------------------------------------------------------------------------------------------------------

template <class Call> static INLINE void with_constant(int count, Call call) {
    switch (count) {
        case 1: return call(std::integral_constant<int, 1>());
        case 2: return call(std::integral_constant<int, 2>());
        case 3: return call(std::integral_constant<int, 3>());
        default: return call(std::integral_constant<int, 4>());
    }
}

template <class Call> static INLINE void with_kind(int kind, Call call) {
    switch (kind) {
        case BFLOAT16: return call(std::integral_constant<int, BFLOAT16>());
        case BLOCKS: return call(std::integral_constant<int, BLOCKS>());
        default: return call(std::integral_constant<int, NIBBLES>());
    }
}

// Row n of w, whose stride is one of bytes where it is compact.
static INLINE const float* row_of(const Problem& p, int n) {
    return p.kind == FLOATS ? p.w + n * p.w_stride : (const float*)((const char*)p.w + n * p.w_stride);
}

// The floats of row n of w, in `room` where they have to be decoded.
template <class Set> static INLINE const float* floats(const Problem& p, int n, float* room) {
    if (p.kind == FLOATS) return row_of(p, n);
    with_kind(p.kind, [&](auto KIND) LAMBDA { Set::template decode<KIND()>(row_of(p, n), p.K, room); });
    return room;
}

// Rows m .. m + rows - 1 of x times a tile of w, of which `columns` from n on are asked for; `ahead` is the next tile.
template <class Set>
static void multiply_tile(const Problem& p, int m, int rows, int n, int columns, const Ahead& ahead) {
    constexpr int C = Set::COLUMNS;
    static thread_local std::vector<float> room;
    const bool stored = Set::DECODES && p.kind != FLOATS && rows == 1;
    if (p.kind != FLOATS && room.size() < (size_t)C * p.K) room.resize((size_t)C * p.K);
    const float* w[C];
    float bias[Set::ROWS * C + 8] = {}, out[Set::ROWS * C + 8];     // whole vectors
    for (int c = 0; c < C; ++c) {
        const int at = n + least(c, columns - 1);                   // the last row again where there is none
        w[c] = stored ? row_of(p, at) : floats<Set>(p, at, room.data() + c * (int64_t)p.K);
        for (int r = 0; r < Set::ROWS; ++r) bias[r * C + c] = p.bias ? p.bias[at] : 0;
    }
    if constexpr (Set::DECODES) {
        if (stored) {
            const float* x = p.x + m * p.x_stride;
            with_kind(p.kind, [&](auto KIND) LAMBDA { Set::template multiply_stored<KIND()>(x, w, p.K, bias, out); });
            memcpy(p.y + m * (int64_t)p.N + n, out, sizeof(float) * columns);
            return;
        }
    }
    const int groups = (rows + Set::ROWS - 1) / Set::ROWS, few = rows / groups, more = rows % groups;
    const int each = (ahead.count + groups - 1) / groups;
    const float* x = p.x + m * p.x_stride;
    float* y = p.y + m * (int64_t)p.N + n;
    for (int g = 0; g < groups; ++g) {
        const int count = few + (g < more), fetched = least(g * each, ahead.count);
        const Ahead part{ahead.rows + fetched, least(each, ahead.count - fetched)};
        with_constant(count, [&](auto R) LAMBDA {
            if constexpr (R() <= Set::ROWS) Set::template multiply<R()>(x, p.x_stride, w, p.K, part, bias, out);
        });
        x += count * p.x_stride;
        for (int r = 0; r < count; ++r, y += p.N) {
            if (columns == C) memcpy(y, out + r * C, sizeof(float) * C);    // a size that the compiler knows
            else memcpy(y, out + r * C, sizeof(float) * columns);
        }
    }
}

template <class Set> static void multiply_panel(const Problem& p, int m, int rows, int n, int end) {
    constexpr int C = Set::COLUMNS;
    for (; n < end; n += C) {
        const float* next[C];
        const int left = p.kind == FLOATS ? std::max(0, least(C, end - n - C)) : 0;
        for (int i = 0; i < left; ++i) next[i] = p.w + (n + C + i) * p.w_stride;
        multiply_tile<Set>(p, m, rows, n, least(C, end - n), {next, left});
    }
}

// A task is a block of x and a panel of w.
template <class Set> static void multiply(const Problem& p, Parallel parallel) {
    constexpr int R = Set::ROWS, C = Set::COLUMNS;
    const int64_t M = p.M, N = p.N, K = p.K, groups = (M + R - 1) / R, tiles = (N + C - 1) / C;
    const int64_t blocks = std::min(std::max(M * K / BLOCK, M / LONGEST) + 1, groups);
    const int64_t tasks = std::min(M * N * K / TASK, p.threads * TASKS);
    const int64_t panels = std::min(std::max(N * K / PANEL, tasks / blocks) + 1, tiles);
    share(parallel, p.threads, (int)(blocks * panels), 1, [&](int i) {
        const int64_t block = i % blocks, panel = i / blocks;
        const int64_t m = groups * block / blocks * R, last = std::min(M, groups * (block + 1) / blocks * R);
        const int64_t n = tiles * panel / panels * C, end = std::min(N, tiles * (panel + 1) / panels * C);
        multiply_panel<Set>(p, (int)m, (int)(last - m), (int)n, (int)end);
    });
}

// -- tasks across -----------------------------------------------------------------------------------------------------

// out[k][n] = in[n][k], 8 of each, of which `mask` has the k that there are unless all are; the rest is 0. The rows of
// `out` are `stride` apart.
template <bool WHOLE>
static INLINE void turn(const float* const* in, const __m128i* mask, float* out, int stride) {
    __m256 v[8], twos[8];
    for (int i = 0; i < 8; ++i) {               // four k of rows i and i + 4; of the k behind them in the second half
        const int row = i % 4, h = i / 4;
        const auto load = [&](const float* at) LAMBDA {
            return WHOLE ? _mm_loadu_ps(at + 4 * h) : _mm_maskload_ps(at + 4 * h, mask[h]);
        };
        v[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(load(in[row])), load(in[row + 4]), 1);
    }
    for (int i = 0; i < 8; i += 2) {
        twos[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        twos[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 4 + i % 2;
        _mm256_store_ps(out + 2 * i * stride, _mm256_shuffle_ps(twos[first], twos[first + 2], 0x44));
        _mm256_store_ps(out + (2 * i + 1) * stride, _mm256_shuffle_ps(twos[first], twos[first + 2], 0xee));
    }
}

// Columns n .. n + 7 of the transpose of w, the last one again where there is none; zeros behind K, up to `deep`.
static void turn_columns(const Problem& p, int n, int deep, float* out, int stride) {
    const float* in[8];
    for (int i = 0; i < 8; ++i) in[i] = p.w + least(n + i, p.N - 1) * p.w_stride;
    for (int k = 0; k < deep; k += 8, out += 8 * stride) {
        if (k + 8 <= p.K) {
            turn<true>(in, nullptr, out, stride);
        } else {
            const __m128i left = _mm_set1_epi32(p.K - k), four = _mm_setr_epi32(0, 1, 2, 3);
            const __m128i mask[2] = {_mm_cmpgt_epi32(left, four),
                                     _mm_cmpgt_epi32(left, _mm_add_epi32(four, _mm_set1_epi32(4)))};
            turn<false>(in, mask, out, stride);
        }
        for (auto& row : in) row += 8;
    }
}

// Rows m .. last - 1 of x times columns n .. end - 1.
template <class Set, int STEPS> static void multiply_across(const Problem& p, int m, int last, int n, int end) {
    constexpr int T = Set::TILE, R = Set::PAIR, DEEP = STEPS * LANES;
    alignas(64) float w[NEAR], bias[NEAR / DEEP] = {};
    float padded[R * DEEP] = {}, out[R * T];
    const int tiles = (end - n) / T, left = (end - n) % T;
    for (int i = 0; i < end - n; i += T)
        for (int c = 0; c < T; c += 8) turn_columns(p, n + i + c, DEEP, w + i * DEEP + c, T);
    if (p.bias) memcpy(bias, p.bias + n, sizeof(float) * (end - n));
    for (int count; m < last; m += count) {
        count = least(R, last - m);
        const float* x[R];
        for (int r = 0; r < count; ++r) {
            x[r] = p.x + (m + r) * p.x_stride;
            if (p.K == DEEP) continue;
            memcpy(padded + r * DEEP, x[r], sizeof(float) * p.K);
            x[r] = padded + r * DEEP;
        }
        const auto run = [&](int first, int number, float* y, int64_t stride) LAMBDA {
            const float *at = w + first * T * DEEP, *b = bias + first * T;
            if (count == R) Set::template multiply_across<R, STEPS>(x, at, b, number, y, stride);
            else Set::template multiply_across<1, STEPS>(x, at, b, number, y, stride);
        };
        float* y = p.y + m * (int64_t)p.N + n;
        run(0, tiles, y, p.N);
        if (!left) continue;
        run(tiles, 1, out, T);
        for (int r = 0; r < count; ++r) memcpy(y + r * (int64_t)p.N + tiles * T, out + r * T, sizeof(float) * left);
    }
}

// A task is a block of x and a panel of w, which is turned for it.
template <class Set, int STEPS> static void multiply_across(const Problem& p, Parallel parallel) {
    constexpr int R = Set::PAIR, T = Set::TILE, most = NEAR / (STEPS * LANES * T);
    const int64_t M = p.M, N = p.N, groups = (M + R - 1) / R, tiles = (N + T - 1) / T;
    const int64_t tasks = std::min(M * N * (STEPS + 1) * LANES / TASK, p.threads * TASKS);     // adding is work, too
    const int64_t fewest = (tiles + most - 1) / most;
    const int64_t blocks = std::max<int64_t>(1, std::min(tasks / fewest, M / SHORTEST));
    const int64_t panels = std::min(std::max(fewest, tasks / blocks), tiles);
    share(parallel, p.threads, (int)(blocks * panels), 1, [&](int i) {
        const int64_t block = i % blocks, panel = i / blocks;
        const int64_t m = groups * block / blocks * R, last = std::min(M, groups * (block + 1) / blocks * R);
        const int64_t n = tiles * panel / panels * T, end = std::min(N, tiles * (panel + 1) / panels * T);
        multiply_across<Set, STEPS>(p, (int)m, (int)last, (int)n, (int)end);
    });
}

template <class Set> static void run(const Problem& p, Parallel parallel) {
    if (!p.across || p.K > DEEPEST) return multiply<Set>(p, parallel);
    with_constant((p.K + LANES - 1) / LANES, [&](auto STEPS) LAMBDA { multiply_across<Set, STEPS()>(p, parallel); });
}

extern "C" void ordered_product(const Problem* p, Parallel parallel) {
    if (p->wide) run<Avx512>(*p, parallel);
    else run<Avx2>(*p, parallel);
}
