// Register-tile products C (+)= A * B, the inner loop of everything.
//
//   A  row-major, m x k elements, any row stride
//   B  packed in panels of 16 columns: element (k, n) of a panel lies at [k / pair][n][k % pair]
//   C  row-major float, any row stride
//
// `pair` is how many consecutive k one instruction consumes: 1 for float, 2 for bfloat16 dot products. An engine states
// the multiples that m, n and k must have (`rows`, `cols`, `depth`); callers pad with zeros.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace attnspan::ATTNSPAN_ISA {

inline constexpr int64_t panel = 16;  // columns in a packed panel: one 64-byte line for each step of k

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t round_down(int64_t n, int64_t multiple) { return n / multiple * multiple; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Multiply-add of one broadcast step of A with vectors of B, for each compute type.
template <class C>
struct Step;

template <>
struct Step<float> {
  static constexpr int pair = 1;
  using Line = Vec;
  static Line line(const float* p) { return load(p); }
  static Line broadcast(const float* p) { return set(*p); }
  static Vec multiply_add(Line a, Line b, Vec c) { return fma(a, b, c); }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
  static constexpr int pair = 2;
  using Line = __m512bh;
  static Line line(const bf16* p) { return reinterpret_cast<Line>(_mm512_loadu_si512(p)); }
  static Line broadcast(const bf16* p) {
    int32_t two;
    std::memcpy(&two, p, 4);
    return reinterpret_cast<Line>(_mm512_set1_epi32(two));
  }
  static Vec multiply_add(Line a, Line b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#endif

template <class C>
struct VectorEngine {
  using Element = C;
  static constexpr int pair = Step<C>::pair;
  static constexpr int per_panel = 16 / Vec::width;  // vectors in a panel's line
#if defined(__AVX512F__)
  static constexpr int tile_rows = 12, tile_panels = 2;
#elif defined(__AVX2__)
  static constexpr int tile_rows = 6, tile_panels = 1;
#else
  static constexpr int tile_rows = 4, tile_panels = 1;
#endif
  static constexpr int64_t rows = 12, cols = 16, depth = pair;
  static constexpr int64_t strip = 24;     // rows of a softmax strip
  static constexpr bool overlaps = false;  // products use the units that exponentials need

  static void begin() {}
  static void end() {}

  template <int NP>
  static void micro(const C* a, int64_t lda, const C* b, int64_t bs, float* c, int64_t ldc, int64_t k, bool add) {
    constexpr int nv = NP * per_panel;
    Vec acc[tile_rows][nv];
#pragma GCC unroll 16
    for (int i = 0; i < tile_rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < nv; ++j) acc[i][j] = add ? load(c + i * ldc + j * Vec::width) : zero();
    for (int64_t s = 0; s < k; s += pair) {
      typename Step<C>::Line line[nv];
#pragma GCC unroll 8
      for (int j = 0; j < nv; ++j)
        line[j] = Step<C>::line(b + (j / per_panel) * bs + s * panel + (j % per_panel) * Vec::width * pair);
#pragma GCC unroll 16
      for (int i = 0; i < tile_rows; ++i) {
        const auto x = Step<C>::broadcast(a + i * lda + s);
#pragma GCC unroll 8
        for (int j = 0; j < nv; ++j) acc[i][j] = Step<C>::multiply_add(x, line[j], acc[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < tile_rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < nv; ++j) store(c + i * ldc + j * Vec::width, acc[i][j]);
  }

  // `bs`: elements from one panel to the next.
  static void product(const C* a, int64_t lda, const C* b, int64_t bs, float* c, int64_t ldc, int64_t m, int64_t n,
                      int64_t k, bool add) {
    int64_t j = 0;
    for (; j + tile_panels * panel <= n; j += tile_panels * panel)
      for (int64_t i = 0; i < m; i += tile_rows)
        micro<tile_panels>(a + i * lda, lda, b + j / panel * bs, bs, c + i * ldc + j, ldc, k, add);
    if constexpr (tile_panels > 1)
      if (j < n)
        for (int64_t i = 0; i < m; i += tile_rows)
          micro<1>(a + i * lda, lda, b + j / panel * bs, bs, c + i * ldc + j, ldc, k, add);
  }
};

#if defined(__AMX_BF16__)

// Matrix tiles of 16 rows by 64 bytes; four accumulators, two operands of each side.
struct AmxEngine {
  using Element = bf16;
  static constexpr int pair = 2;
  static constexpr int64_t rows = 16, cols = 16, depth = 32, strip = 32;
  static constexpr bool overlaps = true;

  static void begin() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Config config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  template <bool M2, bool N2>
  static void block(const bf16* a, int64_t lda, const bf16* b, int64_t bs, float* c, int64_t ldc, int64_t k, bool add) {
    const int64_t row = ldc * 4, row_a = lda * 2;
    float* c1 = c + 16 * ldc;
    if (add) {
      _tile_loadd(0, c, row);
      if constexpr (N2) _tile_loadd(1, c + 16, row);
      if constexpr (M2) _tile_loadd(2, c1, row);
      if constexpr (M2 && N2) _tile_loadd(3, c1 + 16, row);
    } else {
      _tile_zero(0);
      if constexpr (N2) _tile_zero(1);
      if constexpr (M2) _tile_zero(2);
      if constexpr (M2 && N2) _tile_zero(3);
    }
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(4, a + s, row_a);
      _tile_loadd(6, b + s * panel, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N2) {
        _tile_loadd(7, b + bs + s * panel, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (M2) {
        _tile_loadd(5, a + 16 * lda + s, row_a);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (M2 && N2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    if constexpr (N2) _tile_stored(1, c + 16, row);
    if constexpr (M2) _tile_stored(2, c1, row);
    if constexpr (M2 && N2) _tile_stored(3, c1 + 16, row);
  }

  // 32 rows times one panel, in either of two pairs of accumulators (tile numbers must be literals).
  static void multiply_even(const bf16* a, int64_t lda, const bf16* b, int64_t k) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(6, b + s * panel, 64);
      _tile_loadd(4, a + s, lda * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a + 16 * lda + s, lda * 2);
      _tile_dpbf16ps(1, 5, 6);
    }
  }
  static void store_even(float* c, int64_t ldc) {
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16 * ldc, ldc * 4);
  }
  static void multiply_odd(const bf16* a, int64_t lda, const bf16* b, int64_t k) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(7, b + s * panel, 64);
      _tile_loadd(4, a + s, lda * 2);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, a + 16 * lda + s, lda * 2);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static void store_odd(float* c, int64_t ldc) {
    _tile_stored(2, c, ldc * 4);
    _tile_stored(3, c + 16 * ldc, ldc * 4);
  }

  // A short product (k = head_dim) spends as long storing as multiplying: one pair of accumulators is stored while the
  // other works.
  static void short_product(const bf16* a, int64_t lda, const bf16* b, int64_t bs, float* c, int64_t ldc, int64_t n,
                            int64_t k) {
    multiply_even(a, lda, b, k);
    for (int64_t j = 0; j < n; j += 32) {
      if (j + 16 < n) multiply_odd(a, lda, b + (j + 16) / panel * bs, k);
      store_even(c + j, ldc);
      if (j + 32 < n) multiply_even(a, lda, b + (j + 32) / panel * bs, k);
      if (j + 16 < n) store_odd(c + j + 16, ldc);
    }
  }

  static void product(const bf16* a, int64_t lda, const bf16* b, int64_t bs, float* c, int64_t ldc, int64_t m,
                      int64_t n, int64_t k, bool add) {
    if (!add && m == 32 && n > 32) return short_product(a, lda, b, bs, c, ldc, n, k);
    for (int64_t j = 0; j < n; j += 32) {
      const bf16* bj = b + j / panel * bs;
      const bool n2 = n - j >= 32;
      for (int64_t i = 0; i < m; i += 32) {
        const bf16* ai = a + i * lda;
        float* cij = c + i * ldc + j;
        if (m - i >= 32)
          n2 ? block<true, true>(ai, lda, bj, bs, cij, ldc, k, add)
             : block<true, false>(ai, lda, bj, bs, cij, ldc, k, add);
        else
          n2 ? block<false, true>(ai, lda, bj, bs, cij, ldc, k, add)
             : block<false, false>(ai, lda, bj, bs, cij, ldc, k, add);
      }
    }
  }
};

#endif

}  // namespace attnspan::ATTNSPAN_ISA
