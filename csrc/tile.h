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

// Products of bfloat16 take subnormals for zero, whatever the processor's mode. So do pieces, of which the last is
// 2^-16 of a number.
template <class E>
inline constexpr bool always_flushes = sizeof(typename E::Element) == 2;

// One side of a product: `stride` elements between rows of A or panels of B, `plane` between pieces.
template <class C>
struct Side {
  const C* data;
  int64_t stride, plane = 0;
  Side from(int64_t offset) const { return {data + offset, stride, plane}; }
};

// C += A * B (`first`: C = A * B), where step 0 of k is number `at` of all steps whose products C will hold. The sum is
// cut at multiples of `Cut`: long sums of floats lose digits, and where a sum is cut decides its last ones. So its bits
// depend on the numbers of its steps alone; steps of zeros may be left out anywhere.
template <class E, int64_t Cut>
inline void add_product(Side<typename E::Element> a, Side<typename E::Element> b, float* c, int64_t ldc, int64_t m,
                        int64_t n, int64_t at, int64_t k, Ahead* ahead = nullptr, bool first = false) {
  for (int64_t from = 0, to; from < k; from = to) {
    to = min(k, round_down(at + from, Cut) + Cut - at);
    E::product(a.from(from), b.from(from * panel), c, ldc, m, n, to - from, !first || from > 0, ahead);
  }
}

// C = A * B, with the sum over depth cut too: where all numbers have one sign, a long one loses digits.
template <class E>
inline void cut_product(Side<typename E::Element> a, Side<typename E::Element> b, float* c, int64_t ldc, int64_t m,
                        int64_t n, int64_t k, Ahead* ahead = nullptr) {
  for (int64_t from = 0; from < k; from += E::depth_cut)
    E::product(a.from(from), b.from(from * panel), c, ldc, m, n, min(E::depth_cut, k - from), from > 0, ahead);
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
  static constexpr float value_error = 0x1p-22f;  // that `settle` allows a weighted value
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
  static constexpr int64_t step = 1;
  static constexpr bool sums_rows = false;  // no product is cheaper than summing rounded weights as they are made
  // Where sums over keys, and those of gradients, are cut. That of many elements of 8 bits errs less than one of them.
  static constexpr int64_t cut = sizeof(C) == 4 ? 128 : 256, gradient_cut = sizeof(C) == 4 ? 48 : 192;
  static constexpr int64_t depth_cut = sizeof(C) == 4 ? 32 : max_dim;

  static constexpr int64_t pause = 16;  // steps of depth
  // About how many pauses a product has, of any two of its sizes and depth.
  static int64_t pauses(int64_t m, int64_t n, int64_t k) {
    return m * n * k / (int64_t{tile_rows} * tile_panels * panel * pause * pair);
  }

  struct Session {};

  // Each element of C is one chain of multiply-adds from 0 on, whatever the tile it is computed in.
  // While memory is `Fetched`, some lines of it are asked for after each few steps.
  template <int M, int NP, bool Add, bool Fetched>
  [[gnu::always_inline]] static inline void micro(const C* a, int64_t lda, const C* b, int64_t bs, float* c,
                                                  int64_t ldc, int64_t k, Ahead* ahead) {
    constexpr int nv = NP * per_panel;
    Vec acc[M][nv];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < nv; ++j) acc[i][j] = zero();
    for (int64_t s = 0; s < k;) {
      const int64_t end = Fetched ? min(k, s + pause * pair) : k;
      for (; s < end; s += pair) {
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
      if constexpr (Fetched) ahead->pause();
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < nv; ++j) {
        float* to = c + i * ldc + j * Vec::width;
        store(to, Add ? load(to) + acc[i][j] : acc[i][j]);
      }
  }

  // Products of 16 rows, packed in a panel as B is, with the columns of a panel, each row with its own: the diagonal of
  // their `cut_product`, bit for bit.
  static void diagonal(const C* a, const C* b, float* to, int64_t k) {
    for (int64_t lane = 0; lane < panel; lane += Vec::width)
      for (int64_t from = 0; from < k; from += depth_cut) {
        Vec sum = zero();
        for (int64_t s = from; s < min(k, from + depth_cut); s += pair)
          sum = Step<C>::multiply_add(Step<C>::line(a + s * panel + lane * pair),
                                      Step<C>::line(b + s * panel + lane * pair), sum);
        store(to + lane, from > 0 ? load(to + lane) + sum : sum);
      }
  }

  // `add`: the sums of this product, each from 0 on, are added to C.
  static void product(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool add,
                      Ahead* ahead = nullptr) {
    ahead != nullptr && ahead->wants() ? product_by<true>(a, b, c, ldc, m, n, k, add, ahead)
                                       : product_by<false>(a, b, c, ldc, m, n, k, add, ahead);
  }
  template <bool Fetched>
  static void product_by(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool add,
                         Ahead* ahead) {
    add ? product_of<true, Fetched>(a, b, c, ldc, m, n, k, ahead)
        : product_of<false, Fetched>(a, b, c, ldc, m, n, k, ahead);
  }

  template <bool Add, bool Fetched>
  [[gnu::noinline]] static void product_of(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
                                           Ahead* ahead) {
    const int64_t whole = m - m % tile_rows, n2 = round_down(n, tile_panels * panel);
    for (int64_t j = 0; j < n2; j += tile_panels * panel)
      column<tile_rows, tile_panels, Add, Fetched>(a, b, c, ldc, 0, whole, j, k, ahead);
    if (n2 < n) column<tile_rows, 1, Add, Fetched>(a, b, c, ldc, 0, whole, n2, k, ahead);
    if (whole < m) few_rows<Add, Fetched>(a, b, c, ldc, whole, m, n, k, ahead);
  }

  // What is left of the rows: in tiles that are wider the fewer rows they have.
  template <bool Add, bool Fetched>
  [[gnu::noinline]] static void few_rows(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t m, int64_t n,
                                         int64_t k, Ahead* ahead) {
    if constexpr (tile_rows > 8)
      if (m - i >= 8) some_rows<8, tile_panels, Add, Fetched>(a, b, c, ldc, i, n, k, ahead), i += 8;
    if constexpr (tile_rows > 4)
      if (m - i >= 4) some_rows<4, tile_panels, Add, Fetched>(a, b, c, ldc, i, n, k, ahead), i += 4;
    if (m - i >= 2) some_rows<2, 2 * tile_panels, Add, Fetched>(a, b, c, ldc, i, n, k, ahead), i += 2;
    if (m - i >= 1) some_rows<1, 4 * tile_panels, Add, Fetched>(a, b, c, ldc, i, n, k, ahead);
  }
  template <int M, int NP, bool Add, bool Fetched>
  static void some_rows(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t n, int64_t k, Ahead* ahead) {
    int64_t j = 0;
    for (; j + NP * panel <= n; j += NP * panel) column<M, NP, Add, Fetched>(a, b, c, ldc, i, i + M, j, k, ahead);
    for (; j < n; j += panel) column<M, 1, Add, Fetched>(a, b, c, ldc, i, i + M, j, k, ahead);
  }

  // Rows [i, m), whole tiles of them, of NP panels from column j on.
  template <int M, int NP, bool Add, bool Fetched>
  [[gnu::always_inline]] static inline void column(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t i, int64_t m,
                                                   int64_t j, int64_t k, Ahead* ahead) {
    for (; i < m; i += M)
      micro<M, NP, Add, Fetched>(a.data + i * a.stride, a.stride, b.data + j / panel * b.stride, b.stride,
                                 c + i * ldc + j, ldc, k, ahead);
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

}  // namespace attnspan::ATTNSPAN_ISA
