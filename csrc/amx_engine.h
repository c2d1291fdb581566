// Products by the processor's matrix tiles (AMX).
#pragma once

#include "tile.h"

#if defined(__AMX_BF16__)

#if defined(ATTNSPAN_EMULATED_TILES)
#include "../tests/native/emulated_tiles.h"
#else
#include "amx.h"
#endif

namespace attnspan::ATTNSPAN_ISA {

template <class E, bool Bounded, int64_t Cols, int64_t Ldp>
struct PlainRows;

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
  // The relative error that `settle` allows a weighted value. Products of small pieces are left out, so that values of
  // several pieces err more. Two pieces are for float16, which rounds by 2^-12 itself.
  static constexpr float value_error = Pieces == 1 ? 0x1p-22f : Pieces == 2 ? 0x1p-13f : 0x1p-21f;
  static constexpr bool wide_exponents = !std::is_same_v<C, f16>;
  // Probabilities are held 2^15 times their size relative to the row's maximum: float16 has few numbers below 1.
  static constexpr float exponent_offset = wide_exponents ? 0.0f : 15.0f;
  static constexpr int64_t rows = 16, cols = 16, depth = 32, strip = 32, seen_step = 32;
  static constexpr bool overlaps = true;
  // As for vectors; but tiles of one piece go on with the sums that they load, however products are cut.
  static constexpr int64_t cut = Pieces == 1 ? key_sums : 128, gradient_cut = Pieces == 1 ? 192 : 96,
                           depth_cut = max_dim;
  // Rounded weights are summed by tiles, see `add_row_sums`: vectors would take a sixth of the softmax for it.
  static constexpr bool sums_rows = Pieces == 1;

  // Products do not pause: the softmax of the forward pass does, twice for each four rows.
  static int64_t pauses(int64_t rows, int64_t, int64_t) { return rows / 2; }

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
      load_tile_config(&config);
    }
    ~Session() { release_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // `Turned`: pieces are multiplied in the order of the product of B^T and A^T, so that each sum has its bits.
  template <bool Turned = false>
  [[gnu::noinline]] static void product(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
                                        bool add, Ahead* = nullptr) {
    asm volatile("" : : : "memory");  // tile loads do not say that they read memory
    if constexpr (Pieces == 1)
      if (!add && m == 32 && n > 32) return short_product(a.data, a.stride, b.data, b.stride, c, ldc, n, k);
    for (int64_t j = 0; j < n; j += 32) {
      const Side<C> bj = b.from(j / panel * b.stride);
      const bool n2 = n - j >= 32;
      for (int64_t i = 0; i < m; i += 32) {
        const Side<C> ai = a.from(i * a.stride);
        float* cij = c + i * ldc + j;
        if (m - i >= 32)
          n2 ? block<true, true, Turned>(ai, bj, cij, ldc, k, add)
             : block<true, false, Turned>(ai, bj, cij, ldc, k, add);
        else
          n2 ? block<false, true, Turned>(ai, bj, cij, ldc, k, add)
             : block<false, false, Turned>(ai, bj, cij, ldc, k, add);
      }
    }
  }

  // C = A * B for 32 rows of A and `step` columns, with 32 calls of rows() spread between the instructions: they run on
  // other parts of the processor. The bits are those of `product`. The processor could hardly take in instructions fast
  // enough if what they need were not known as this is compiled. None begins while a tile is stored, and a sum that is
  // stored right away is waited for: rows come first.
  static constexpr int64_t step = 64;
  template <bool Bounded, int64_t Ldp>
  using Rows = PlainRows<AmxEngine, Bounded, step, Ldp>;
  template <int Depths, class Rows>
  [[gnu::always_inline]] static void step_beside(Side<C> a, Side<C> b, float* c, Rows& rows) {
    constexpr int passes = Pieces == 1 ? 1 : 2, slots = 2 * Depths * passes;  // of a panel, which has 8 rows
    constexpr int64_t a_bytes = Depths * depth * 2, c_bytes = step * 4;
    const auto some_rows = [&](int slot) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int n = (slot + 1) * 8 / slots - slot * 8 / slots; n > 0; --n) rows();
    };
    asm volatile("" : : : "memory");  // tile loads do not say that they read memory
#pragma GCC unroll 1
    for (int64_t j = 0; j < step; j += panel, c += panel, b.data += b.stride) {
#pragma GCC unroll 16
      for (int slot = 0; slot < slots; slot += 2) {
        const int64_t s = slot / 2 % Depths * depth;
        const bool main = slot >= slots - 2 * Depths;
        if (slot == 0) {
          if (j > 0) store_tile<0>(c - panel, c_bytes);
          clear_tile<0>();
          if constexpr (Pieces > 1) {
            if (j > 0) store_tile<2>(c - panel + 16 * step, c_bytes);
            clear_tile<2>();
          }
        }
        if (main) {
          stream_tile<6>(b.data + s * panel, 64);
          load_tile<4>(a.data + s, a_bytes);
          multiply_tiles<C, 0, 4, 6>();
        } else {
          small_begin(a, b, s);
        }
        some_rows(slot);
        if (Pieces == 1 && slot == 0) {
          if (j > 0) store_tile<2>(c - panel + 16 * step, c_bytes);
          clear_tile<2>();
        }
        if (main) {
          load_tile<5>(a.data + 16 * Depths * depth + s, a_bytes);
          multiply_tiles<C, 2, 5, 6>();
        } else {
          small_end(a, b, s);
        }
        some_rows(slot + 1);
      }
    }
    store_tile<0>(c - panel, c_bytes);
    store_tile<2>(c - panel + 16 * step, c_bytes);
  }

  // Adds the sum of each of m rows of A to the first of `panel` lanes, which are `stride` floats from one row to the
  // next.
  [[gnu::noinline]] static void add_row_sums(const C* a, int64_t lda, float* lanes, int64_t stride, int64_t m,
                                             int64_t k) {
    asm volatile("" : : : "memory");
    load_tile<6>(ones().data, 64);
    for (int64_t i = 0; i < m; i += 16, lanes += 16 * stride, a += 16 * lda) {
      load_tile<0>(lanes, stride * 4);
      for (int64_t s = 0; s < k; s += depth) {
        load_tile<4>(a + s, lda * 2);
        multiply_tiles<C, 0, 4, 6>();
      }
      store_tile<0>(lanes, stride * 4);
    }
  }

  // Products of one operand of 16 rows, over and over: what the tiles can do at best.
  static void repeat(const C* operand, int64_t rounds) {
    zero_sums();
    load_tile<4>(operand, 64);
    load_tile<5>(operand, 64);
    load_tile<6>(operand, 64);
    load_tile<7>(operand, 64);
    for (int64_t i = 0; i < rounds; ++i) multiply_loaded<true, true>();
  }

  // Columns [0, 16) and [16, 32) of a group of 32 in a row of A. Split, columns (i, 16 + i) lie side by side: two
  // instructions instead of a shuffle.
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
  template <bool M2, bool N2, bool Turned>
  static void block(Side<C> a, Side<C> b, float* c, int64_t ldc, int64_t k, bool add) {
    if constexpr (Pieces == 1) {
      add ? load_sums<M2, N2>(c, ldc) : zero_sums();
      multiply<M2, N2>(a.data, a.stride, b.data, b.stride, k);
      store_sums<M2, N2>(c, ldc);
      return;
    }
    // Small products first, and sums from zero: their rounding then weighs less than that of one long float sum.
    zero_sums();
    multiply_small<M2, N2, Turned>(a, b, k, !add);
    multiply<M2, N2>(a.data, a.stride, b.data, b.stride, k);
    if (!add) return store_sums<M2, N2>(c, ldc);
    alignas(64) float sums[32 * 32];
    store_sums<M2, N2>(sums, 32);
    for (int i = 0; i < (M2 ? 32 : 16); ++i)
      for (int j = 0; j < (N2 ? 32 : 16); j += 16)
        store(c + i * ldc + j, load(c + i * ldc + j) + load(sums + i * 32 + j));
  }

  static void zero_sums() {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  }
  template <bool M2, bool N2>
  static void load_sums(const float* c, int64_t ldc) {
    load_tile<0>(c, ldc * 4);
    if constexpr (N2) load_tile<1>(c + 16, ldc * 4);
    if constexpr (M2) load_tile<2>(c + 16 * ldc, ldc * 4);
    if constexpr (M2 && N2) load_tile<3>(c + 16 * ldc + 16, ldc * 4);
  }
  template <bool M2, bool N2>
  static void store_sums(float* c, int64_t ldc) {
    store_tile<0>(c, ldc * 4);
    if constexpr (N2) store_tile<1>(c + 16, ldc * 4);
    if constexpr (M2) store_tile<2>(c + 16 * ldc, ldc * 4);
    if constexpr (M2 && N2) store_tile<3>(c + 16 * ldc + 16, ldc * 4);
  }

  template <bool M2>
  static void load_a(Side<C> a, int piece, int64_t s) {
    const C* p = a.data + piece * a.plane + s;
    load_tile<4>(p, a.stride * 2);
    if constexpr (M2) load_tile<5>(p + 16 * a.stride, a.stride * 2);
  }
  template <bool N2>
  static void load_b(Side<C> b, int piece, int64_t s) {
    const C* p = b.data + piece * b.plane + s * panel;
    stream_tile<6>(p, 64);
    if constexpr (N2) stream_tile<7>(p + b.stride, 64);
  }
  template <bool M2, bool N2>
  static void multiply_loaded() {
    multiply_tiles<C, 0, 4, 6>();
    if constexpr (N2) multiply_tiles<C, 1, 4, 7>();
    if constexpr (M2) multiply_tiles<C, 2, 5, 6>();
    if constexpr (M2 && N2) multiply_tiles<C, 3, 5, 7>();
  }

  // All products but that of the first pieces, in an order in which each shares a side with the one before. Scores
  // (`all`) are exponents, where an error is absolute: float16 keeps its fourth product for them.
  template <bool M2, bool N2, bool Turned>
  static void multiply_small(Side<C> a, Side<C> b, int64_t k, bool all) {
    for (int64_t s = 0; s < k; s += 32) {
      const auto first = [&](int piece) { Turned ? load_b<N2>(b, piece, s) : load_a<M2>(a, piece, s); };
      const auto second = [&](int piece) { Turned ? load_a<M2>(a, piece, s) : load_b<N2>(b, piece, s); };
      if constexpr (Pieces == 3) {
        first(2), second(0), multiply_loaded<M2, N2>();
        first(1), multiply_loaded<M2, N2>();
        second(1), multiply_loaded<M2, N2>();
        first(0), multiply_loaded<M2, N2>();
        second(2), multiply_loaded<M2, N2>();
      } else {
        first(1);
        if (all) second(1), multiply_loaded<M2, N2>();
        second(0), multiply_loaded<M2, N2>();
        first(0), second(1), multiply_loaded<M2, N2>();
      }
    }
  }

  template <bool M2, bool N2>
  static void multiply(const C* a, int64_t lda, const C* b, int64_t bs, int64_t k) {
    for (int64_t s = 0; s < k; s += 32) {
      load_tile<4>(a + s, lda * 2);
      stream_tile<6>(b + s * panel, 64);
      multiply_tiles<C, 0, 4, 6>();
      if constexpr (N2) {
        stream_tile<7>(b + bs + s * panel, 64);
        multiply_tiles<C, 1, 4, 7>();
      }
      if constexpr (M2) {
        load_tile<5>(a + 16 * lda + s, lda * 2);
        multiply_tiles<C, 2, 5, 6>();
      }
      if constexpr (M2 && N2) multiply_tiles<C, 3, 5, 7>();
    }
  }

  // The pieces of x in the lower halves of 16 words and those of y in the upper ones, a plane for each piece.
  static void store_pieces(C* p, int64_t plane, Vec x, Vec y) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int i = 0; i < Pieces; ++i) {
      const __m512i a = _mm512_castps_si512(x.v), b = _mm512_castps_si512(y.v);
      _mm512_storeu_si512(p + i * plane, _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, upper, 0xf8));
      if (i + 1 == Pieces) break;
      x.v = _mm512_sub_ps(x.v, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
      y.v = _mm512_sub_ps(y.v, _mm512_castsi512_ps(_mm512_and_si512(b, upper)));
    }
  }

  // What `multiply_small` does for one step of depth, in two halves.
  [[gnu::always_inline]] static void small_begin(Side<C> a, Side<C> b, int64_t s) {
    if constexpr (Pieces > 1) {
      load_a<true>(a, Pieces - 1, s), load_b<false>(b, Pieces == 3 ? 0 : 1, s), multiply_loaded<true, false>();
      Pieces == 3 ? load_a<true>(a, 1, s) : load_b<false>(b, 0, s), multiply_loaded<true, false>();
    }
  }
  [[gnu::always_inline]] static void small_end(Side<C> a, Side<C> b, int64_t s) {
    if constexpr (Pieces > 1) {
      if constexpr (Pieces == 3) load_b<false>(b, 1, s), multiply_loaded<true, false>();
      load_a<true>(a, 0, s);
      if constexpr (Pieces == 3) multiply_loaded<true, false>();
      load_b<false>(b, Pieces - 1, s), multiply_loaded<true, false>();
    }
  }

  // A panel whose first column is 1.
  struct Ones {
    alignas(64) C data[depth * panel] = {};
    constexpr Ones() {
      for (int64_t i = 0; i < depth / pair; ++i)
        for (int64_t j = 0; j < pair; ++j) data[i * panel * pair + j] = {std::is_same_v<C, f16> ? 0x3c00 : 0x3f80};
    }
  };
  static const Ones& ones() {
    static constexpr Ones panel_of_ones;
    return panel_of_ones;
  }

  // 32 rows times one panel, in one of two pairs of accumulators.
  template <int Pair>
  static void multiply_panel(const C* a, int64_t lda, const C* b, int64_t k) {
    clear_tile<2 * Pair>();
    clear_tile<2 * Pair + 1>();
    for (int64_t s = 0; s < k; s += 32) {
      stream_tile<6 + Pair>(b + s * panel, 64);
      load_tile<4>(a + s, lda * 2);
      multiply_tiles<C, 2 * Pair, 4, 6 + Pair>();
      load_tile<5>(a + 16 * lda + s, lda * 2);
      multiply_tiles<C, 2 * Pair + 1, 5, 6 + Pair>();
    }
  }
  template <int Pair>
  static void store_panel(float* c, int64_t ldc) {
    store_tile<2 * Pair>(c, ldc * 4);
    store_tile<2 * Pair + 1>(c + 16 * ldc, ldc * 4);
  }

  // A short product (k = head_dim) spends as long storing as multiplying: one pair of accumulators is stored while the
  // other works.
  static void short_product(const C* a, int64_t lda, const C* b, int64_t bs, float* c, int64_t ldc, int64_t n,
                            int64_t k) {
    multiply_panel<0>(a, lda, b, k);
    for (int64_t j = 0; j < n; j += 32) {
      if (j + 16 < n) multiply_panel<1>(a, lda, b + (j + 16) / panel * bs, k);
      store_panel<0>(c + j, ldc);
      if (j + 32 < n) multiply_panel<0>(a, lda, b + (j + 32) / panel * bs, k);
      if (j + 16 < n) store_panel<1>(c + j + 16, ldc);
    }
  }
};

}  // namespace attnspan::ATTNSPAN_ISA

#endif
