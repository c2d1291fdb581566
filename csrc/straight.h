// The two products of a few query rows with keys and values as they lie in memory: packing them would cost more
// than so few rows save. Element for element the same sums as an engine's products of packed blocks.
#pragma once

#include "pack.h"
#include "rows.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T, class E>
struct Straight {
#if defined(__AVX512F__) && !defined(__AMX_BF16__)  // tiles sum in an order of their own
  using C = typename E::Element;
  using Pack = Packer<T, C>;
  using Line = typename Step<C>::Line;
  static constexpr int64_t pair = E::pair, together = 4, most_rows = 2 * together;
  static constexpr int64_t ahead = 64;  // keys, which are fetched meanwhile: line after line, or no hardware helps

  // Whole lines only.
  static bool serves(int64_t rows, int64_t dim, int64_t v_dim) {
    return rows <= most_rows && dim % (16 * pair) == 0 && v_dim % 16 == 0;
  }

  // Scores of `rows` rows of A and n keys, n a multiple of 16: the first `valid` are there.
  static void scores(const C* q, int64_t ldq, const T* k, int64_t stride, int64_t dim, int64_t rows, int64_t n,
                     int64_t valid, float* s, int64_t lds) {
    for (int64_t m = 0; m < rows; m += together)
      with_rows(min(rows - m, together),
                [&](auto count) { scores_of<count>(q + m * ldq, ldq, k, stride, dim, n, valid, s + m * lds, lds); });
  }
  // Adds weights times values, in one sum.
  static void values(const C* p, int64_t ldp, const T* v, int64_t stride, int64_t dim, int64_t rows, int64_t valid,
                     float* out, int64_t ldo) {
    for (int64_t m = 0; m < rows; m += together)
      with_rows(min(rows - m, together), [&](auto count) {
        const C* weights = p + m * ldp;
        float* to = out + m * ldo;
        int64_t d = 0;
        if constexpr (count <= 2)
          for (; d + 128 <= dim; d += 128) values_of<count, 8>(weights, ldp, v + d, stride, valid, to + d, ldo);
        for (; d + 64 <= dim; d += 64) values_of<count, 4>(weights, ldp, v + d, stride, valid, to + d, ldo);
        for (; d < dim; d += 16) values_of<count, 1>(weights, ldp, v + d, stride, valid, to + d, ldo);
      });
  }

 private:
  template <class Use>
  static void with_rows(int64_t rows, const Use& use) {
    if (rows == 1) use(std::integral_constant<int, 1>{});
    if (rows == 2) use(std::integral_constant<int, 2>{});
    if (rows == 3) use(std::integral_constant<int, 3>{});
    if (rows == 4) use(std::integral_constant<int, 4>{});
  }
  static Line as_line(__m512i x) {
    if constexpr (pair == 1)
      return {_mm512_castsi512_ps(x)};
    else
      return reinterpret_cast<Line>(x);
  }

  template <int R>
  [[gnu::noinline]] static void scores_of(const C* q, int64_t ldq, const T* k, int64_t stride, int64_t dim, int64_t n,
                                          int64_t valid, float* s, int64_t lds) {
    for (int64_t j = 0; j < n; j += 16) {
      Vec sum[R];
      for (auto& x : sum) x = zero();
      const T* fetched = k + (j + ahead) * stride;
      int64_t left = dim;  // elements of its row
      for (int64_t d = 0; d < dim; d += 16 * pair) {
        __m512i r[16];
        for (int64_t i = 0; i < 16; ++i) {
          const T* key = k + min(j + i, max(valid - 1, 0)) * stride + d;
          r[i] = Pack::whole_line(key);
          __builtin_prefetch(fetched, 0, 2);
          fetched += 16 * pair, left -= 16 * pair;
          if (left == 0) left = dim, fetched += stride - dim;
        }
        transpose(r);
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i)
          for (int m = 0; m < R; ++m)
            sum[m] = Step<C>::multiply_add(Step<C>::broadcast(q + m * ldq + d + i * pair), as_line(r[i]), sum[m]);
      }
      for (int m = 0; m < R; ++m) store(s + m * lds + j, sum[m]);
    }
  }

  template <int R, int N>
  [[gnu::noinline]] static void values_of(const C* p, int64_t ldp, const T* v, int64_t stride, int64_t valid,
                                          float* out, int64_t ldo) {
    Vec sum[R][N];
    for (auto& row : sum)
      for (auto& x : row) x = zero();
    for (int64_t j = 0; j < valid; j += pair) {
      const T* value = v + j * stride;
      const int64_t next = j + 1 < valid ? stride : 0;  // the weight of one that is not there is 0
      Line line[N];
      for (int n = 0; n < N; ++n) {
        line[n] = as_line(Pack::whole_step(value + 16 * n, next));
        for (int i = 0; i < pair; ++i) __builtin_prefetch(value + 16 * n + (ahead + i) * stride, 0, 2);
      }
      for (int m = 0; m < R; ++m)
        for (int n = 0; n < N; ++n)
          sum[m][n] = Step<C>::multiply_add(Step<C>::broadcast(p + m * ldp + j), line[n], sum[m][n]);
    }
    for (int m = 0; m < R; ++m)
      for (int n = 0; n < N; ++n) {
        float* to = out + m * ldo + 16 * n;
        store(to, load(to) + sum[m][n]);
      }
  }
#else
  static bool serves(int64_t, int64_t, int64_t) { return false; }
  template <class... Any>
  static void scores(const Any&...) {}
  template <class... Any>
  static void values(const Any&...) {}
#endif
};

}  // namespace attnspan::ATTNSPAN_ISA
