// Register-tile products C (+)= A * B, the inner loop of everything.
//
//   A  row-major, m x k elements, any row stride
//   B  packed in panels of 16 columns: element (k, n) of a panel lies at [k / pair][n][k % pair]
//   C  row-major float, any row stride
//
// `pair` is how many consecutive k one instruction consumes: 1 for float, 2 for bfloat16 dot products. An engine states
// the multiples that m, n and k must have (`rows`, `cols`, `depth`); callers pad with zeros.
//
// What is computed for an element of C depends on its row of A, its column of B and the order of k alone: never on the
// rows and columns next to it.
//
// An engine may hold each element in several pieces whose sum it is, one plane of elements for each (`pieces`). A
// `Session` is alive while a thread uses the engine.
#pragma once

#include <type_traits>

#include "ahead.h"
#include "attention.h"
#include "simd.h"

namespace attnspan::ATTNSPAN_ISA {

inline constexpr int64_t panel = 16;  // columns in a packed panel: one 64-byte line for each step of k

inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline constexpr int64_t round_down(int64_t n, int64_t multiple) { return n / multiple * multiple; }
// Not those of std: an inline function outside of this level's namespace may be linked into another level.
inline constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// So many keys of a sequence are summed by themselves, from its first one on: a thread that decodes takes some of these
// sums, and they are added in one order.
inline constexpr int64_t key_sums = 1024;

// One side of a product: `stride` elements between rows of A or panels of B, `plane` between pieces.
template <class C>
struct Side {
  const C* data;
  int64_t stride, plane = 0;
  Side from(int64_t offset) const { return {data + offset, stride, plane}; }
};

// C += A * B, where step 0 of k is number `at` of all steps whose products C will hold. The sum is cut at multiples of
// `Cut`: long sums of floats lose digits, and where a sum is cut decides its last ones. So its bits depend on the
// numbers of its steps alone; steps of zeros may be left out anywhere.
template <class E, int64_t Cut>
inline void add_product(Side<typename E::Element> a, Side<typename E::Element> b, float* c, int64_t ldc, int64_t m,
                        int64_t n, int64_t at, int64_t k, Ahead* ahead = nullptr) {
  for (int64_t from = 0, to; from < k; from = to) {
    to = min(k, round_down(at + from, Cut) + Cut - at);
    E::product(a.from(from), b.from(from * panel), c, ldc, m, n, to - from, true, ahead);
  }
}

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
  using Exponential = C;
  static constexpr int pieces = 1;
  static constexpr bool wide_exponents = true;  // are exponentials of 2^-40 .. 2^40 elements?
  static constexpr float exponent_offset = 0.0f;
  static constexpr bool interleaved = false;
  static constexpr int pair = Step<C>::pair;
  static constexpr int per_panel = 16 / Vec::width;  // vectors in a panel's line
#if defined(__AVX512F__)
  static constexpr int tile_rows = 12, tile_panels = 2;
#elif defined(__AVX2__)
  static constexpr int tile_rows = 6, tile_panels = 1;
#else
  static constexpr int tile_rows = 4, tile_panels = 1;
#endif
  static constexpr int64_t rows = 1, cols = 16, depth = pair;
  static constexpr int64_t strip = 24;      // rows of a softmax strip
  static constexpr int64_t seen_step = 16;  // columns of a strip of scores, for plain calls
  static constexpr bool overlaps = false;   // products use the units that exponentials need
  // Where sums over keys, and those of gradients, are cut. That of many elements of 8 bits errs less than one of them.
  static constexpr int64_t cut = sizeof(C) == 4 ? 128 : 256, gradient_cut = sizeof(C) == 4 ? 96 : 192;

  struct Session {};

  // Each element of C is one chain of multiply-adds from 0 on, whatever the tile it is computed in.
  template <int M, int NP, bool Add, Fetch F>
  [[gnu::always_inline]] static inline void micro(const C* a, int64_t lda, const C* b, int64_t bs, float* c,
                                                  int64_t ldc, int64_t k, Ahead* ahead) {
    constexpr int nv = NP * per_panel;
    Vec acc[M][nv];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < nv; ++j) acc[i][j] = zero();
    for (int64_t s = 0; s < k; s += pair) {
      if constexpr (F == Fetch::steps) ahead->line();
      typename Step<C>::Line line[nv];
#pragma GCC unroll 16
      for (int j = 0; j < nv; ++j)
        line[j] = Step<C>::line(b + (j / per_panel) * bs + s * panel + (j % per_panel) * Vec::width * pair);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const auto x = Step<C>::broadcast(a + i * lda + s);
#pragma GCC unroll 16
        for (int j = 0; j < nv; ++j) acc[i][j] = Step<C>::multiply_add(x, line[j], acc[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < nv; ++j) {
        float* to = c + i * ldc + j * Vec::width;
        store(to, Add ? load(to) + acc[i][j] : acc[i][j]);
      }
    if constexpr (F != Fetch::nothing) ahead->end_tile();
  }

  // `add`: the sums of this product, each from 0 on, are added to C.
  static void product(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool add,
                      Ahead* ahead = nullptr) {
    switch (ahead == nullptr ? Fetch::nothing : ahead->when()) {
      case Fetch::nothing:
        return product_by<Fetch::nothing>(a, b, c, ldc, m, n, k, add, ahead);
      case Fetch::tiles:
        return product_by<Fetch::tiles>(a, b, c, ldc, m, n, k, add, ahead);
      case Fetch::steps:
        return product_by<Fetch::steps>(a, b, c, ldc, m, n, k, add, ahead);
    }
  }
  template <Fetch F>
  static void product_by(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool add,
                         Ahead* ahead) {
    add ? product_of<true, F>(a, b, c, ldc, m, n, k, ahead) : product_of<false, F>(a, b, c, ldc, m, n, k, ahead);
  }

  template <bool Add, Fetch F>
  [[gnu::noinline]] static void product_of(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
                                           Ahead* ahead) {
    const int64_t whole = m - m % tile_rows, n2 = round_down(n, tile_panels * panel);
    for (int64_t j = 0; j < n2; j += tile_panels * panel)
      column<tile_rows, tile_panels, Add, F>(a, b, c, ldc, 0, whole, j, k, ahead);
    if (n2 < n) column<tile_rows, 1, Add, F>(a, b, c, ldc, 0, whole, n2, k, ahead);
    if (whole < m) few_rows<Add, F>(a, b, c, ldc, whole, m, n, k, ahead);
  }

  // What is left of the rows: in tiles that are wider the fewer rows they have.
  template <bool Add, Fetch F>
  [[gnu::noinline]] static void few_rows(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t m, int64_t n,
                                         int64_t k, Ahead* ahead) {
    if constexpr (tile_rows > 8)
      if (m - i >= 8) some_rows<8, tile_panels, Add, F>(a, b, c, ldc, i, n, k, ahead), i += 8;
    if constexpr (tile_rows > 4)
      if (m - i >= 4) some_rows<4, tile_panels, Add, F>(a, b, c, ldc, i, n, k, ahead), i += 4;
    if (m - i >= 2) some_rows<2, 2 * tile_panels, Add, F>(a, b, c, ldc, i, n, k, ahead), i += 2;
    if (m - i >= 1) some_rows<1, 4 * tile_panels, Add, F>(a, b, c, ldc, i, n, k, ahead);
  }
  template <int M, int NP, bool Add, Fetch F>
  static void some_rows(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t n, int64_t k, Ahead* ahead) {
    int64_t j = 0;
    for (; j + NP * panel <= n; j += NP * panel) column<M, NP, Add, F>(a, b, c, ldc, i, i + M, j, k, ahead);
    for (; j < n; j += panel) column<M, 1, Add, F>(a, b, c, ldc, i, i + M, j, k, ahead);
  }

  // Rows [i, m), whole tiles of them, of NP panels from column j on.
  template <int M, int NP, bool Add, Fetch F>
  [[gnu::always_inline]] static inline void column(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t m,
                                                   int64_t j, int64_t k, Ahead* ahead) {
    for (; i < m; i += M)
      micro<M, NP, Add, F>(a.data + i * a.stride, a.stride, b.data + j / panel * b.stride, b.stride, c + i * ldc + j,
                           ldc, k, ahead);
  }

  // Columns [lane, lane + width) and [16 + lane, 16 + lane + width) of a group of 32 in a row of A.
  static void store_group(C* group, int64_t lane, int64_t, Vec x, Vec y) {
    if constexpr (Vec::width == panel) {
      store_two(group, x, y);
    } else {
      store(group + lane, x);
      store(group + panel + lane, y);
    }
  }

  // A line of B: one step of depth for `width` columns.
  static void store_line(C* line, int64_t, const Vec (&x)[pair]) { store_step(line, x); }
};

#if defined(__AMX_BF16__)

// Four accumulators of 16 x 16 (tiles 0 1 / 2 3) and two operands of each side (4 5, 6 7).
//
// With one piece an element is a bfloat16. With two or three it is the exact sum of so many bfloat16 numbers: float16
// takes two, float32 three of 8 bits each. A product then takes three or six products of pieces; those that are left
// out are below 2^-16 and 2^-24 of the whole (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations", section 3).
//
// Processors with float16 tiles take float16 as it is.
template <class C, int Pieces>
struct AmxEngine {
  using Element = C;
  using Exponential = std::conditional_t<Pieces == 1, C, float>;
  static constexpr int pair = 2, pieces = Pieces;
  static constexpr bool wide_exponents = !std::is_same_v<C, f16>;
  // Probabilities are held 2^15 times their size relative to the row's maximum: float16 has few numbers below 1.
  static constexpr float exponent_offset = wide_exponents ? 0.0f : 15.0f;
  static constexpr int64_t rows = 16, cols = 16, depth = 32, strip = 32, seen_step = 32;
  static constexpr bool overlaps = true;
  // As for vectors; but tiles of one piece go on with the sums that they load, however products are cut.
  static constexpr int64_t cut = Pieces == 1 ? key_sums : 128, gradient_cut = Pieces == 1 ? 192 : 96;
  // Rows of A made of split vectors hold columns (i, 16 + i) of 32 side by side: two instructions instead of a shuffle.
  static constexpr bool interleaved = Pieces > 1;

  // The processor's tiles are configured while it lives.
  class Session {
   public:
    Session() {
      struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      static const Config config;
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  [[gnu::noinline]] static void product(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
                                        bool add, Ahead* = nullptr) {
    asm volatile("" : : : "memory");  // GCC's tile loads do not say that they read memory
    if constexpr (Pieces == 1)
      if (!add && m == 32 && n > 32) return short_product(a.data, a.stride, b.data, b.stride, c, ldc, n, k);
    for (int64_t j = 0; j < n; j += 32) {
      const Side<C> bj = b.from(j / panel * b.stride);
      const bool n2 = n - j >= 32;
      for (int64_t i = 0; i < m; i += 32) {
        const Side<C> ai = a.from(i * a.stride);
        float* cij = c + i * ldc + j;
        if (m - i >= 32)
          n2 ? block<true, true>(ai, bj, cij, ldc, k, add) : block<true, false>(ai, bj, cij, ldc, k, add);
        else
          n2 ? block<false, true>(ai, bj, cij, ldc, k, add) : block<false, false>(ai, bj, cij, ldc, k, add);
      }
    }
  }

  // Products of one operand of 16 rows, over and over: what the tiles can do at best.
  static void repeat(const C* operand, int64_t rounds) {
    zero_sums();
    _tile_loadd(4, operand, 64);
    _tile_loadd(5, operand, 64);
    _tile_loadd(6, operand, 64);
    _tile_loadd(7, operand, 64);
    for (int64_t i = 0; i < rounds; ++i) multiply_loaded<true, true>();
  }

  // Columns [0, 16) and [16, 32) of a group of 32 in a row of A.
  static void store_group(C* group, int64_t, int64_t plane, Vec x, Vec y) {
    if constexpr (Pieces == 1)
      store_two(group, x, y);
    else
      store_pieces(group, plane, x, y);
  }

  // A line of B: one step of depth, two rows of 16 columns.
  static void store_line(C* line, int64_t plane, const Vec (&x)[2]) {
    if constexpr (Pieces == 1)
      store_step(line, x);
    else
      store_pieces(line, plane, x[0], x[1]);
  }

 private:
  template <bool M2, bool N2>
  static void block(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t k, bool add) {
    if constexpr (Pieces == 1) {
      add ? load_sums<M2, N2>(c, ldc) : zero_sums();
      multiply<M2, N2>(a.data, a.stride, b.data, b.stride, k);
      store_sums<M2, N2>(c, ldc);
      return;
    }
    // Small products first, and sums from zero: their rounding then weighs less than that of one long float sum.
    zero_sums();
    multiply_small<M2, N2>(a, b, k, !add);
    multiply<M2, N2>(a.data, a.stride, b.data, b.stride, k);
    if (!add) return store_sums<M2, N2>(c, ldc);
    alignas(64) float sums[32 * 32];
    store_sums<M2, N2>(sums, 32);
    for (int i = 0; i < (M2 ? 32 : 16); ++i)
      for (int j = 0; j < (N2 ? 32 : 16); j += 16)
        store(c + i * ldc + j, load(c + i * ldc + j) + load(sums + i * 32 + j));
  }

  // sum += a * b. By its bytes, because compilers learned of float16 tiles late.
  template <int sum, int a, int b>
  static void multiply_add() {
    constexpr int prefix = std::is_same_v<C, f16> ? 3 : 2;
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((~b & 15) << 3 | prefix), "i"(0xc0 | sum << 3 | a));
  }

  static void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  template <bool M2, bool N2>
  static void load_sums(const float* c, int64_t ldc) {
    _tile_loadd(0, c, ldc * 4);
    if constexpr (N2) _tile_loadd(1, c + 16, ldc * 4);
    if constexpr (M2) _tile_loadd(2, c + 16 * ldc, ldc * 4);
    if constexpr (M2 && N2) _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
  }
  template <bool M2, bool N2>
  static void store_sums(float* c, int64_t ldc) {
    _tile_stored(0, c, ldc * 4);
    if constexpr (N2) _tile_stored(1, c + 16, ldc * 4);
    if constexpr (M2) _tile_stored(2, c + 16 * ldc, ldc * 4);
    if constexpr (M2 && N2) _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
  }

  template <bool M2>
  static void load_a(Side<C> a, int piece, int64_t s) {
    const C* p = a.data + piece * a.plane + s;
    _tile_loadd(4, p, a.stride * 2);
    if constexpr (M2) _tile_loadd(5, p + 16 * a.stride, a.stride * 2);
  }
  template <bool N2>
  static void load_b(Side<C> b, int piece, int64_t s) {
    const C* p = b.data + piece * b.plane + s * panel;
    _tile_loadd(6, p, 64);
    if constexpr (N2) _tile_loadd(7, p + b.stride, 64);
  }
  template <bool M2, bool N2>
  static void multiply_loaded() {
    multiply_add<0, 4, 6>();
    if constexpr (N2) multiply_add<1, 4, 7>();
    if constexpr (M2) multiply_add<2, 5, 6>();
    if constexpr (M2 && N2) multiply_add<3, 5, 7>();
  }

  // All products but that of the first pieces, in an order in which each shares a side with the one before. Scores
  // (`all`) are exponents, where an error is absolute: float16 keeps its fourth product for them.
  template <bool M2, bool N2>
  static void multiply_small(Side<C> a, Side<C> b, int64_t k, bool all) {
    for (int64_t s = 0; s < k; s += 32) {
      if constexpr (Pieces == 3) {
        load_a<M2>(a, 2, s), load_b<N2>(b, 0, s), multiply_loaded<M2, N2>();
        load_a<M2>(a, 1, s), multiply_loaded<M2, N2>();
        load_b<N2>(b, 1, s), multiply_loaded<M2, N2>();
        load_a<M2>(a, 0, s), multiply_loaded<M2, N2>();
        load_b<N2>(b, 2, s), multiply_loaded<M2, N2>();
      } else {
        load_a<M2>(a, 1, s);
        if (all) load_b<N2>(b, 1, s), multiply_loaded<M2, N2>();
        load_b<N2>(b, 0, s), multiply_loaded<M2, N2>();
        load_a<M2>(a, 0, s), load_b<N2>(b, 1, s), multiply_loaded<M2, N2>();
      }
    }
  }

  template <bool M2, bool N2>
  static void multiply(const C* a, int64_t lda, const C* b, int64_t bs, int64_t k) {
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(4, a + s, lda * 2);
      _tile_loadd(6, b + s * panel, 64);
      multiply_add<0, 4, 6>();
      if constexpr (N2) {
        _tile_loadd(7, b + bs + s * panel, 64);
        multiply_add<1, 4, 7>();
      }
      if constexpr (M2) {
        _tile_loadd(5, a + 16 * lda + s, lda * 2);
        multiply_add<2, 5, 6>();
      }
      if constexpr (M2 && N2) multiply_add<3, 5, 7>();
    }
  }

  // The pieces of x in the lower halves of 16 words and those of y in the upper ones, a plane for each piece.
  static void store_pieces(C* p, int64_t plane, Vec x, Vec y) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int i = 0; i < Pieces; ++i) {
      const __m512i a = _mm512_castps_si512(x.v), b = _mm512_and_si512(_mm512_castps_si512(y.v), upper);
      _mm512_storeu_si512(p + i * plane, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
      if (i + 1 == Pieces) break;
      x.v = _mm512_sub_ps(x.v, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
      y.v = _mm512_sub_ps(y.v, _mm512_castsi512_ps(b));
    }
  }

  // 32 rows times one panel, in either of two pairs of accumulators (tile numbers must be literals).
  static void multiply_even(const C* a, int64_t lda, const C* b, int64_t k) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(6, b + s * panel, 64);
      _tile_loadd(4, a + s, lda * 2);
      multiply_add<0, 4, 6>();
      _tile_loadd(5, a + 16 * lda + s, lda * 2);
      multiply_add<1, 5, 6>();
    }
  }
  static void store_even(float* c, int64_t ldc) {
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16 * ldc, ldc * 4);
  }
  static void multiply_odd(const C* a, int64_t lda, const C* b, int64_t k) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < k; s += 32) {
      _tile_loadd(7, b + s * panel, 64);
      _tile_loadd(4, a + s, lda * 2);
      multiply_add<2, 4, 7>();
      _tile_loadd(5, a + 16 * lda + s, lda * 2);
      multiply_add<3, 5, 7>();
    }
  }
  static void store_odd(float* c, int64_t ldc) {
    _tile_stored(2, c, ldc * 4);
    _tile_stored(3, c + 16 * ldc, ldc * 4);
  }

  // A short product (k = head_dim) spends as long storing as multiplying: one pair of accumulators is stored while the
  // other works.
  static void short_product(const C* a, int64_t lda, const C* b, int64_t bs, float* c, int64_t ldc, int64_t n,
                            int64_t k) {
    multiply_even(a, lda, b, k);
    for (int64_t j = 0; j < n; j += 32) {
      if (j + 16 < n) multiply_odd(a, lda, b + (j + 16) / panel * bs, k);
      store_even(c + j, ldc);
      if (j + 32 < n) multiply_even(a, lda, b + (j + 32) / panel * bs, k);
      if (j + 16 < n) store_odd(c + j + 16, ldc);
    }
  }
};

#endif

// Calls make<T, E>() with the engine that this level has for a dtype. Nothing, `{}`, where it has none that is better
// than what the level below has.
template <class Pair, class Make>
Pair with_engine(Dtype dtype, const Make& make) {
  switch (dtype) {
#if defined(ATTNSPAN_AMX_FP16)
    case Dtype::f16:
      return make.template operator()<f16, AmxEngine<f16, 1> >();
    default:
      return {};
#elif defined(__AMX_BF16__)
    case Dtype::bf16:
      return make.template operator()<bf16, AmxEngine<bf16, 1> >();
    case Dtype::f16:
      return make.template operator()<f16, AmxEngine<bf16, 2> >();
    default:
      return make.template operator()<float, AmxEngine<bf16, 3> >();
#elif defined(__AVX512BF16__)
    case Dtype::bf16:
      return make.template operator()<bf16, VectorEngine<bf16> >();
    default:
      return {};
#else
    case Dtype::bf16:
      return make.template operator()<bf16, VectorEngine<float> >();
    case Dtype::f16:
      return make.template operator()<f16, VectorEngine<float> >();
    default:
      return make.template operator()<float, VectorEngine<float> >();
#endif
  }
}

}  // namespace attnspan::ATTNSPAN_ISA
