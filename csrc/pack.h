// Packing: from (row, dim) arrays of any row stride and type into the forms that products read.
//
//   rows     A: row-major, element type C
//   columns  A of the transposed array: row-major dims x rows
//   keys     B with the array's rows as columns n and its dims as depth k   (scores: Q * K^T)
//   dims     B with the array's dims as columns n and its rows as depth k   (values: P * V)
//
// Everything beyond the valid rows and dims is zero.
#pragma once

#include <type_traits>

#include "lines.h"
#include "transpose.h"

namespace attnspan::ATTNSPAN_ISA {

// A line of 64 bytes, or the beginning of one. (A copy of unknown length is a call that costs more than the copy.)
inline void copy_line(void* to, const void* from, int64_t bytes) {
  if (bytes >= 64)
    std::memcpy(to, from, 64);
  else
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Where the first plane of elements begins, and how far it is to the next.
template <class C>
struct Target {
  C* data;
  int64_t plane = 0;
};

// For engines of one piece: one plane.
template <class T, class C>
struct Packer {
  static constexpr bool same = sizeof(C) == 2;  // halves stay what they are; everything else becomes float
  static constexpr int64_t pair = same ? 2 : 1;
  static_assert(!same || sizeof(T) == 2);

  // `n` consecutive elements (at most 16 * pair) as one line of 16 units.
  static void line(const T* p, int64_t n, uint32_t* unit) {
    n = max(0, min(n, 16 * pair));
    if constexpr (same) {
      if (n < 32) std::memset(unit, 0, 64);
      copy_line(unit, p, n * 2);
    } else {
      float* x = reinterpret_cast<float*>(unit);
      int64_t j = 0;
      for (; j + Vec::width <= n; j += Vec::width) store(x + j, load(p + j));
      if (j < n) store(x + j, load_part(p + j, n - j)), j += Vec::width;
      for (; j < 16; j += Vec::width) store(x + j, zero());
    }
  }

  // Columns of `pair` consecutive rows as one vector.
  static Vec whole_step(const T* p, [[maybe_unused]] int64_t stride) {
    if constexpr (!same) return load(p);
#if defined(__AVX512F__)
    else {
      const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + stride)));
      return {_mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)))};
    }
#endif
  }

  // The first `in_block` dims of Vec::width rows as steps of depth: use(n, line), with n from 0 on.
  static constexpr int64_t in_unit = 4 / sizeof(T), in_block = 4 * in_unit;
  template <class Use>
  [[gnu::always_inline]] static void steps(const T* p, int64_t stride, const Use& use) {
    Vec unit[4];
    load_units(p, stride * static_cast<int64_t>(sizeof(T)), unit);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)
      if constexpr (same || in_unit == 1) {
        use(n, unit[n]);
      } else {
        use(2 * n, halves<T, 0>(unit[n]));
        use(2 * n + 1, halves<T, 1>(unit[n]));
      }
  }

  // The same 16 dims of `pair` consecutive rows, interleaved: one step of depth.
  static void step(const T* p, int64_t stride, int64_t rows, int64_t n, uint32_t* unit) {
    if constexpr (!same) {
      if (rows > 0)
        line(p, n, unit);
      else
        std::memset(unit, 0, 64);
    } else {
      n = max(0, min(n, 16));
#if defined(__AVX512F__)
      if (n == 16 && rows >= 2) {
        store(reinterpret_cast<float*>(unit), whole_step(p, stride));
        return;
      }
#endif
      std::memset(unit, 0, 64);
      for (int64_t j = 0; j < n; ++j) {
        const uint32_t even = rows > 0 ? p[j].bits : 0, odd = rows > 1 ? p[stride + j].bits : 0;
        unit[j] = even | odd << 16;
      }
    }
  }

  [[gnu::noinline]] static void rows(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> a, int64_t lda,
                                     int64_t padded_rows, bool negate) {
    for (int64_t i = 0; i < padded_rows; ++i)
      for (int64_t d = 0; d < lda; d += 16 * pair) {
        if (same && !negate && i < rows && dim - d >= 16 * pair) {
          std::memcpy(a.data + i * lda + d, p + i * stride + d, 64);
          continue;
        }
        alignas(64) uint32_t unit[16];
        line(i < rows ? p + i * stride + d : p, i < rows ? dim - d : 0, unit);
        const uint32_t flip = same ? 0x80008000u : 0x80000000u;
        if (negate)
          for (auto& u : unit) u ^= flip;
        copy_line(a.data + i * lda + d, unit, (lda - d) * static_cast<int64_t>(sizeof(C)));
      }
  }

  // dims x rows; `padded_rows` a multiple of 16 * pair.
  [[gnu::noinline]] static void columns(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> a, int64_t lda,
                                        int64_t padded_rows, int64_t padded_dim) {
    for (int64_t i = 0; i < padded_rows; i += 16 * pair) {
      int64_t d = 0;
      for (; i + 16 * pair <= rows && d + in_block <= min(dim, padded_dim); d += in_block)
        few_columns(p + i * stride + d, stride, a.data + d * lda + i, lda);
      for (; d < padded_dim; d += 16) {
        Block x;
        for (int64_t s = 0; s < 16; ++s)
          step(p + (i + s * pair) * stride + d, stride, rows - i - s * pair, dim - d, x.unit[s]);
        transpose(x);
        const int64_t valid = min(16, padded_dim - d);
        for (int64_t r = 0; r < valid; ++r) std::memcpy(a.data + (d + r) * lda + i, x.unit[r], 64);
      }
    }
  }
  struct Evens {
    alignas(64) uint16_t index[32] = {};
    constexpr Evens() {
      for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(2 * i);
    }
  };
  // A line each of the first `in_block` dims.
  static void few_columns(const T* p, int64_t stride, C* a, int64_t lda) {
    if constexpr (pair == 1)
      for (int64_t r = 0; r < panel; r += Vec::width)
        steps(p + r * stride, stride, [&](int n, Vec column) { store(a + n * lda + r, column); });
#if defined(__AVX512F__)
    else {
      static constexpr Evens even;
      const __m512i first = _mm512_load_si512(even.index), second = _mm512_add_epi16(first, _mm512_set1_epi16(1));
      Vec x[4], y[4];
      load_units(p, 2 * stride, x), load_units(p + 16 * stride, 2 * stride, y);
      for (int64_t n = 0; n < 4; ++n) {
        const __m512i low = _mm512_castps_si512(x[n].v), high = _mm512_castps_si512(y[n].v);
        _mm512_storeu_si512(a + 2 * n * lda, _mm512_permutex2var_epi16(low, first, high));
        _mm512_storeu_si512(a + (2 * n + 1) * lda, _mm512_permutex2var_epi16(low, second, high));
      }
    }
#endif
  }

  // Rows [first, first + count) of the array, count a multiple of 16; `bs` elements between panels.
  [[gnu::noinline]] static void keys(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> b, int64_t bs,
                                     int64_t first, int64_t count, int64_t depth) {
    for (int64_t i = first; i < first + count; i += panel) {
      C* const to = b.data + i / panel * bs;
      int64_t d = 0;
      for (; i + panel <= rows && d + in_block <= min(dim, depth); d += in_block)
        for (int64_t r = 0; r < panel; r += Vec::width)
          steps(p + (i + r) * stride + d, stride, [to = to + d * panel, r](int n, Vec line) {
            store(reinterpret_cast<float*>(to + n * panel * pair) + r, line);
          });
      for (; d < depth; d += 16 * pair) {
        Block x;
        for (int64_t r = 0; r < 16; ++r)
          line(i + r < rows ? p + (i + r) * stride + d : p, i + r < rows ? dim - d : 0, x.unit[r]);
        transpose(x);
        for (int64_t line = 0; line < min(16, (depth - d) / pair); ++line)
          std::memcpy(to + d * panel + line * 16 * pair, x.unit[line], 64);
      }
    }
  }

  [[gnu::noinline]] static void dims(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> b, int64_t bs,
                                     int64_t first, int64_t count, int64_t padded_dim) {
    alignas(64) uint32_t unit[16];
    for (int64_t i = first; i < first + count; i += pair) {
      int64_t d = 0;
      if (i + pair <= rows) d = whole_dims(p + i * stride, stride, min(dim, padded_dim), b.data + i * panel, bs);
      for (; d < padded_dim; d += panel) {
        step(p + i * stride + d, stride, rows - i, dim - d, unit);
        std::memcpy(b.data + d / panel * bs + i * panel, unit, 64);
      }
    }
  }
  // Packs the whole panels among `dim` dims of `pair` rows, and returns how many dims these have.
#if defined(__AVX512F__)
  static int64_t whole_dims(const T* p, [[maybe_unused]] int64_t stride, int64_t dim, C* to, int64_t bs) {
    int64_t d = 0;
    if constexpr (same) {
      static constexpr Sides sides;
      const __m512i low = _mm512_load_si512(sides.index), high = _mm512_load_si512(sides.index + 32);
      for (; d + 32 <= dim; d += 32, to += 2 * bs) {
        const __m512i even = _mm512_loadu_si512(p + d), odd = _mm512_loadu_si512(p + stride + d);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_storeu_si512(to + bs, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
    for (; d + panel <= dim; d += panel, to += bs) store(reinterpret_cast<float*>(to), whole_step(p + d, stride));
    return d;
  }
#else
  static int64_t whole_dims(const T*, int64_t, int64_t, C*, int64_t) { return 0; }
#endif
  // Elements of two rows by turns, of their first halves and of their second ones.
  struct Sides {
    alignas(64) uint16_t index[64] = {};
    constexpr Sides() {
      for (int i = 0; i < 64; ++i) index[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    }
  };
};

#if defined(__AMX_BF16__)
// For engines whose elements are sums of pieces: a plane for each. Depth is in the order of `store_group`, columns (i,
// 16 + i) of 32 side by side, for both sides of a product of `rows` and `keys`, or of weights and `dims`.
template <class T, class E>
struct SplitPacker {
  using C = typename E::Element;
  using Plane = Packer<bf16, bf16>;

  static void rows(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> a, int64_t lda, int64_t padded_rows,
                   bool negate) {
    for (int64_t i = 0; i < padded_rows; ++i)
      split_row(p + i * stride, i < rows ? dim : 0, negate, a.data + i * lda, a.plane, lda);
  }

  // Depth is the rows here, in their own order.
  static void columns(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> a, int64_t lda,
                      int64_t padded_rows, int64_t padded_dim) {
    for (int64_t i = 0; i < padded_rows; i += chunk) {
      const Pieces x(p + i * stride, stride, rows - i, dim, padded_dim);
      for (int n = 0; n < E::pieces; ++n) x.columns(n, a.data + n * a.plane + i, lda, padded_dim);
    }
  }

  static void keys(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> b, int64_t bs, int64_t first,
                   int64_t count, int64_t depth) {
    for (int64_t i = first; i < first + count; i += chunk) {
      const Pieces x(p + i * stride, stride, rows - i, dim, depth);
      for (int n = 0; n < E::pieces; ++n)
        Plane::keys(x.plane(n), Pieces::width, chunk, depth, {b.data + n * b.plane + i / panel * bs}, bs, 0,
                    min(chunk, first + count - i), depth);
    }
  }

  // Rows in the order of `store_group`: `first` is a multiple of 32.
  static void dims(const T* p, int64_t stride, int64_t rows, int64_t dim, Target<C> b, int64_t bs, int64_t first,
                   int64_t count, int64_t padded_dim) {
    for (int64_t i = first; i < first + count; i += chunk)
      for (int64_t r = i; r < i + half; ++r) {
        const T *x = p + r * stride, *y = x + half * stride;
        C* to = b.data + (2 * r - i) * panel;
        const int64_t of_x = r < rows ? dim : 0, of_y = r + half < rows ? dim : 0;
        int64_t d = 0;
        for (; d + panel <= min(of_y, padded_dim); d += panel, to += bs)
          E::store_line(to, b.plane, {load(x + d), load(y + d)});
        for (; d < padded_dim; d += panel, to += bs)
          E::store_line(to, b.plane, {load_some(x + d, of_x - d), load_some(y + d, of_y - d)});
      }
  }

 private:
  static constexpr int64_t chunk = 32, half = chunk / 2;

  static Vec load_some(const T* p, int64_t n) { return n >= Vec::width ? load(p) : n > 0 ? load_part(p, n) : zero(); }

  // `n` elements, and zeros up to `padded`, a multiple of 32.
  static void split_row(const T* p, int64_t n, bool negate, C* to, int64_t plane, int64_t padded) {
    int64_t d = 0;
    for (; !negate && d + 32 <= n; d += 32) E::store_group(to + d, 0, plane, load(p + d), load(p + d + 16));
    for (; d < padded; d += 32) {
      Vec x = load_some(p + d, n - d), y = load_some(p + d + 16, n - d - 16);
      if (negate) x = zero() - x, y = zero() - y;
      E::store_group(to + d, 0, plane, x, y);
    }
  }

  // The planes of 32 rows, beyond whose valid part everything is zero.
  struct Pieces {
    static constexpr int64_t width = max_dim + 32;
    alignas(64) C x[E::pieces][chunk * width];
    Pieces(const T* p, int64_t stride, int64_t rows, int64_t dim, int64_t padded) {
      for (int64_t r = 0; r < chunk; ++r)
        split_row(r < rows ? p + r * stride : p, r < rows ? dim : 0, false, x[0] + r * width, chunk * width,
                  round_up(padded, 32));
    }
    const C* plane(int n) const { return x[n]; }
    void columns(int n, C* a, int64_t lda, int64_t padded_dim) const {
      const __m512i low = _mm512_set1_epi32(0xffff);
      Block first, second;  // dims d and 16 + d
      for (int64_t d = 0; d < padded_dim; d += 32) {
        for (int64_t s = 0; s < 16; ++s) {
          const C* row = x[n] + 2 * s * width + d;
          const __m512i even = _mm512_loadu_si512(row), odd = _mm512_loadu_si512(row + width);
          _mm512_store_si512(first.unit[s], _mm512_or_si512(_mm512_and_si512(even, low), _mm512_slli_epi32(odd, 16)));
          _mm512_store_si512(second.unit[s],
                             _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_andnot_si512(low, odd)));
        }
        transpose(first), transpose(second);
        for (int64_t r = 0; r < min(32, padded_dim - d); ++r)
          std::memcpy(a + (d + r) * lda, (r < 16 ? first : second).unit[r % 16], 64);
      }
    }
  };
};
#else
template <class T, class E>
struct SplitPacker;
#endif

template <class T, class E>
using PackerFor = std::conditional_t<E::pieces == 1, Packer<T, typename E::Element>, SplitPacker<T, E> >;

// Is every element finite? (x * 0 is NaN exactly where x is not.)
template <class T>
[[gnu::noinline]] inline bool finite(const T* p, int64_t stride, int64_t rows, int64_t dim) {
  Vec a = zero(), b = zero();
  for (int64_t i = 0; i < rows; ++i) {
    const T* x = p + i * stride;
    int64_t d = 0;
    for (; d + 2 * Vec::width <= dim; d += 2 * Vec::width) {
      a = fma(load(x + d), zero(), a);
      b = fma(load(x + d + Vec::width), zero(), b);
    }
    for (; d < dim; d += Vec::width) a = fma(load_part(x + d, min(dim - d, Vec::width)), zero(), a);
  }
  return reduce_add(a + b) == 0.0f;
}

// Given sums of squares of arrays that are multiplied with each other, may what counts of their products be subnormal?
// Not in tiles that flush then, nor while this thread does.
template <class... Squares>
inline bool may_vanish(Squares... squares) {
  return ((squares < 1.0f ? static_cast<double>(squares) : 1.0) * ...) < 0x1p-100;
}

inline float larger_or_nan(float x, float y) { return y > x || y != y ? y : x; }

template <class T>
inline Vec squares(const T* p, int64_t dim) {
  Vec sum = zero();
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bf16>) {
    Vec other = zero();
    for (; dim >= 2 * Vec::width; dim -= 2 * Vec::width, p += 2 * Vec::width) {
      const Vec two = load(reinterpret_cast<const float*>(p));
      const Vec x = halves<bf16, 0>(two), y = halves<bf16, 1>(two);
      sum = fma(x, x, sum), other = fma(y, y, other);
    }
    sum = sum + other;
  }
#endif
  for (int64_t d = 0; d < dim; d += Vec::width) {
    const Vec x = dim - d >= Vec::width ? load(p + d) : load_part(p + d, dim - d);
    sum = fma(x, x, sum);
  }
  return sum;
}

// A squared norm as `may_vanish` takes it: 1 for an array of zeros, which makes no product smaller.
template <class T>
inline float sized(float squares, const T* p, int64_t stride, int64_t rows, int64_t dim) {
  if (squares != 0.0f) return squares;
  unsigned char any = 0;
  for (int64_t i = 0; i < rows && any == 0; ++i) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(p + i * stride);
    for (int64_t j = 0; j < dim * static_cast<int64_t>(sizeof(T)); ++j)
      any = static_cast<unsigned char>(any | bytes[j]);
  }
  return any == 0 ? 1.0f : 0.0f;
}

template <class T>
inline float sized(float squares, const Lines<T>& x, int64_t from, int64_t to, int64_t dim) {
  float found = squares != 0.0f ? squares : 1.0f;
  if (squares == 0.0f)
    x.each_run(from, to, [&](int64_t, int64_t n, const T* rows) {
      if (sized(0.0f, rows, x.stride, n, dim) == 0.0f) found = 0.0f;
    });
  return found;
}

// The sum of all squares, 1 for zeros, and whether all elements are finite.
struct Magnitude {
  float squares;
  bool finite;
};
template <class T>
inline Magnitude measure(const T* p, int64_t stride, int64_t rows, int64_t dim) {
  Vec sum = zero();
  for (int64_t i = 0; i < rows; ++i) sum = sum + squares(p + i * stride, dim);
  const float whole = reduce_add(sum);
  return {sized(whole, p, stride, rows, dim), std::isfinite(whole) || finite(p, stride, rows, dim)};
}

// The largest squared norm of the rows; not finite if an element is not.
template <class T>
[[gnu::noinline]] inline float largest_norm(const T* p, int64_t stride, int64_t rows, int64_t dim) {
  constexpr int64_t together = 16;
  Vec largest = zero(), all = zero();  // NaN where a norm is
  for (int64_t i = 0; i < rows; i += together) {
    alignas(64) float norms[together] = {};
    const int64_t count = min(together, rows - i);
    const T* x = p + i * stride;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4, x += 4 * stride)
      reduce_add4(squares(x, dim), squares(x + stride, dim), squares(x + 2 * stride, dim), squares(x + 3 * stride, dim),
                  norms + r);
    for (; r < count; ++r, x += stride) norms[r] = reduce_add(squares(x, dim));
    for (r = 0; r < together; r += Vec::width) {
      const Vec some = load(norms + r);
      largest = vmax(some, largest), all = all + some;
    }
  }
  const float sum = reduce_add(all);
  return sum != sum ? sum : reduce_max(largest);
}

}  // namespace attnspan::ATTNSPAN_ISA
