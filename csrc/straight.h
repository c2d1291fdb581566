// The two products of a few query rows with keys and values as they lie in memory: packing them would cost more than so
// few rows save. Element for element the same sums as an engine's products of packed blocks.
#pragma once

#include <bit>

#include "pack.h"
#include "rows.h"

namespace attnspan::ATTNSPAN_ISA {

// `ldp` and `ldq`: elements from one row of weights, and of those of A that there is room for, to the next.
template <class T, class E, int64_t ldp, int64_t ldq>
struct Straight {
#if !defined(__AMX_BF16__)  // tiles sum in an order of their own
  using C = typename E::Element;
  using Pack = Packer<T, C>;
  using Line = typename Step<C>::Line;
  static constexpr int64_t pair = E::pair, line = 64 / sizeof(T);
  static constexpr int64_t width = Vec::width, together = width == 16 ? 16 : 8;  // rows whose sums registers hold
  static constexpr int64_t ahead = 64;  // keys, which are fetched meanwhile: line after line, or no hardware helps

  // Whole lines only. More rows are packed, which costs them little.
  static bool serves(int64_t rows, int64_t dim, int64_t v_dim) {
    return rows <= (width > 4 ? 4 * together : together) && dim % line == 0 && v_dim % width == 0;
  }

  // Scores of at most `together` rows of A and n keys: `valid`, rounded up to a multiple of key_step. There is room for
  // these rows, and for the last keys with zeros after them.
  static void scores(const C* q, int64_t stride_of_q, const T* k, int64_t stride, int64_t dim, int64_t rows, int64_t n,
                     int64_t valid, float* s, int64_t lds, C* rows_of_q, T* rest) {
    for (int64_t m = 0; m < rows; ++m)
      std::memcpy(rows_of_q + m * ldq, q + m * stride_of_q, static_cast<size_t>(dim) * sizeof(C));
    const int64_t whole = round_down(valid, width);
    if (whole < n) std::memset(rest, 0, static_cast<size_t>((n - whole) * dim) * sizeof(T));
    for (int64_t i = whole; i < valid; ++i)
      std::memcpy(rest + (i - whole) * dim, k + i * stride, static_cast<size_t>(dim) * sizeof(T));
    in_groups(rows, [&](auto count, int64_t m) {
      scores_of<count>(rows_of_q + m * ldq, k, stride, dim, whole, s + m * lds, lds);
      if (whole < n) scores_of<count>(rows_of_q + m * ldq, rest, dim, dim, n - whole, s + m * lds + whole, lds);
    });
  }
  // Adds weights times values, in one sum.
  static void values(const C* p, const T* v, int64_t stride, int64_t dim, int64_t rows, int64_t valid, float* out,
                     int64_t ldo) {
    in_groups(rows, [&](auto count, int64_t m) {
      constexpr int64_t wide = max(1, min(8, together / std::bit_ceil(uint64_t{count})));  // vectors of a tile
      const C* weights = p + m * ldp;
      float* to = out + m * ldo;
      int64_t d = 0;
      for (; d + width * wide <= dim; d += width * wide)
        values_of<count, wide>(weights, v + d, stride, valid, to + d, ldo);
      for (; d < dim; d += width) values_of<count, 1>(weights, v + d, stride, valid, to + d, ldo);
    });
  }

 private:
  // 16, 8, 4, 3, 2 and 1 of at most `together` rows.
  template <int R = together, class Use>
  static void in_groups(int64_t rows, const Use& use, int64_t m = 0) {
    if (rows - m >= R) use(std::integral_constant<int, R>{}, m), m += R;
    if constexpr (R > 1) in_groups<R == 4 ? 3 : R == 3 ? 2 : R / 2>(rows, use, m);
  }
  static Line as_line(Vec x) {
    if constexpr (pair == 1)
      return x;
    else
      return reinterpret_cast<Line>(x.v);
  }

  template <int R>
  [[gnu::noinline]] static void scores_of(const C* q, const T* k, int64_t stride, int64_t dim, int64_t n, float* s,
                                          int64_t lds) {
    for (int64_t j = 0; j < n; j += width) {
      Vec sum[R];
#pragma GCC unroll 16
      for (auto& x : sum) x = zero();
      const T* fetched = k + (j + ahead) * stride;
      int64_t left = dim;  // elements of its row
      for (int64_t d = 0; d < dim; d += Pack::in_block) {
#pragma GCC unroll 4
        for (int i = 0; i < width / 4; ++i) {  // 16 bytes of each row
          __builtin_prefetch(fetched, 0, 2);
          fetched += line, left -= line;
          if (left == 0) left = dim, fetched += stride - dim;
        }
        Pack::steps(k + j * stride + d, stride, [&](int i, Vec keys) {
#pragma GCC unroll 16
          for (int m = 0; m < R; ++m)
            sum[m] = Step<C>::multiply_add(Step<C>::broadcast(q + m * ldq + d + i * pair), as_line(keys), sum[m]);
        });
      }
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) store(s + m * lds + j, sum[m]);
    }
  }

  template <int R, int64_t N>
  [[gnu::noinline]] static void values_of(const C* p, const T* v, int64_t stride, int64_t valid, float* out,
                                          int64_t ldo) {
    Vec sum[R][N];
#pragma GCC unroll 16
    for (auto& row : sum)
#pragma GCC unroll 16
      for (auto& x : row) x = zero();
    for (int64_t j = 0; j < valid; j += pair) {
      const T* value = v + j * stride;
      const int64_t next = j + 1 < valid ? stride : 0;  // the weight of one that is not there is 0
      Line line[N];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        line[n] = as_line(Pack::whole_step(value + width * n, next));
        for (int i = 0; i < pair; ++i) __builtin_prefetch(value + width * n + (ahead + i) * stride, 0, 2);
      }
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
          sum[m][n] = Step<C>::multiply_add(Step<C>::broadcast(p + m * ldp + j), line[n], sum[m][n]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        float* to = out + m * ldo + width * n;
        store(to, load(to) + sum[m][n]);
      }
  }
#else
  static constexpr int64_t together = 1;
  static bool serves(int64_t, int64_t, int64_t) { return false; }
  template <class... Any>
  static void scores(const Any&...) {}
  template <class... Any>
  static void values(const Any&...) {}
#endif
};

}  // namespace attnspan::ATTNSPAN_ISA
