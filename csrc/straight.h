// The two products of a few query rows with keys and values as they lie in memory: packing them would cost more than so
// few rows save. Element for element the same sums as an engine's products of packed blocks.
#pragma once

#include <bit>

#include "lines.h"
#include "pack.h"
#include "rows.h"

namespace attnspan::ATTNSPAN_ISA {

// Where keys or values lie, sixteen by sixteen: those of a block, and those after it, which are fetched meanwhile.
template <class T>
struct Groups {
  static constexpr int64_t size = 16, ahead = 64, most = 256 / size + ahead / size;
  const T* first[most];
  int64_t stride[most];
  typename Lines<T>::Place at(int64_t j) const {
    const int64_t g = j / size;
    return {first[g] + j % size * stride[g], stride[g]};
  }

  // Finds the groups of `count` rows from `row` on, of which `valid` exist. A group whose rows lie in several pieces is
  // copied. If `padded`, an incomplete group is copied too, with zeros behind its rows.
  void find(const Lines<T>& x, int64_t row, int64_t valid, int64_t count, int64_t dim, bool padded, T* copies) {
    const bool pages = x.table != nullptr;
    typename Lines<T>::Walk w = pages ? x.walk(row) : typename Lines<T>::Walk{};
    const auto place = [&](int64_t from) { return pages ? x.at(w) : x.at(from); };
    int64_t g = 0;
    for (; g * size < count; ++g) {
      const int64_t from = row + g * size, rows = max(0, min(size, valid - g * size));
      if ((rows == size || !padded) && (!pages || x.page_rows - w.within >= rows || x.run(from, rows) == rows)) {
        first[g] = place(from), stride[g] = x.stride;
      } else {
        x.copy(from, rows, dim, copies);
        std::memset(copies + rows * dim, 0, static_cast<size_t>((size - rows) * dim) * sizeof(T));
        first[g] = copies, stride[g] = dim, copies += size * dim;
      }
      if (pages) w.move(size, x.page_rows);
    }
    for (int64_t end = g + ahead / size; g < end; ++g) {
      const int64_t from = row + g * size;
      first[g] = !pages || from + size <= x.rows ? place(from) : first[0], stride[g] = x.stride;
      if (pages) w.move(size, x.page_rows);
    }
  }
};

// `ldp` and `ldq`: elements from one row of weights, and of those of A that there is room for, to the next.
template <class T, class E, int64_t ldp, int64_t ldq>
struct Straight {
  using C = typename E::Element;
  using Pack = Packer<T, C>;
  using Line = typename Step<C>::Line;
  static constexpr int64_t pair = E::pair, line = 64 / sizeof(T);
  static constexpr int64_t width = Vec::width, together = width == 16 ? 16 : 8;  // rows whose sums registers hold
  // With 16 registers of 8 floats, a tile of few rows and two vectors reads less of A for each product than one of 8
  // rows and one vector. Keys must be copied for it.
  static constexpr bool wide_tiles = width == 8;
  static constexpr int64_t at_once = wide_tiles ? E::strip : together;
  // 4 or 8 rows fill the tiles that need no copy.
  static bool copies_keys(int64_t rows) { return wide_tiles && rows > 4 && rows != 8; }
  static constexpr int64_t ahead = Groups<T>::ahead;  // line after line, or no hardware helps
  static constexpr int second_cache = 2;              // fetched into the first, keys take 1.1 to 1.7 times as long

  // Whole lines only. More rows are packed, which costs them little.
  static bool serves(int64_t rows, int64_t dim, int64_t v_dim) {
    return rows <= (width > 4 ? 4 * together : together) && dim % line == 0 && v_dim % width == 0;
  }

  // Scores of at most `at_once` rows of A and the keys of n / 16 groups. `rows_of_q` has room for these rows, and
  // `copy` for 16 keys.
  static void scores(const C* q, int64_t stride_of_q, const Groups<T>& k, int64_t dim, int64_t rows, int64_t n,
                     float* s, int64_t lds, C* rows_of_q, [[maybe_unused]] C* copy, [[maybe_unused]] Ahead& ahead) {
    if constexpr (wide_tiles)
      if (copies_keys(rows)) return scores_of_copies(q, stride_of_q, k, dim, rows, n, s, lds, copy, ahead);
    for (int64_t m = 0; m < rows; ++m)
      std::memcpy(rows_of_q + m * ldq, q + m * stride_of_q, static_cast<size_t>(dim) * sizeof(C));
    in_groups(rows, [&](auto count, int64_t m) { scores_of<count>(rows_of_q + m * ldq, k, dim, n, s + m * lds, lds); });
  }
  // Adds weights times values, in one sum.
  static void values(const C* p, const Groups<T>& v, int64_t dim, int64_t rows, int64_t valid, float* out,
                     int64_t ldo) {
    in_groups<wide_tiles ? 6 : together>(rows, [&](auto count, int64_t m) {
      constexpr int64_t vectors = count == 6 ? 2 : max(1, min(8, together / std::bit_ceil(uint64_t{count})));
      in_columns<count, vectors>(p + m * ldp, v, dim, valid, out + m * ldo, ldo);
    });
  }

 private:
  // Tiles of R rows, then of fewer: of 16, 8, 4, 3, 2 and 1, or of 6, 4, 3, 2 and 1.
  template <int R = together, class Use>
  static void in_groups(int64_t rows, const Use& use, int64_t m = 0) {
    for (; rows - m >= R; m += R) use(std::integral_constant<int, R>{}, m);
    if constexpr (R > 1) in_groups<R == 6 ? 4 : R == 4 ? 3 : R == 3 ? 2 : R / 2>(rows, use, m);
  }
  // Tiles of N vectors, then of fewer: a value that is read in one piece is fetched in one piece.
  template <int R, int64_t N>
  static void in_columns(const C* p, const Groups<T>& v, int64_t dim, int64_t valid, float* out, int64_t ldo,
                         int64_t d = 0) {
    for (; d + width * N <= dim; d += width * N) values_of<R, N>(p, v, d, valid, out + d, ldo);
    if constexpr (N > 1) in_columns<R, N / 2>(p, v, dim, valid, out, ldo, d);
  }
  static Line as_line(Vec x) {
    if constexpr (pair == 1)
      return x;
    else
      return reinterpret_cast<Line>(x.v);
  }

  // The keys that come `ahead` of some: their lines are asked for, 16 bytes of each row at a time.
  class Soon {
   public:
    Soon(const Groups<T>& groups, int64_t j, int64_t dim) : dim_(dim), left_(dim) {
      const auto [first, stride] = groups.at(j + ahead);
      at_ = first, gap_ = stride - dim;
    }
    [[gnu::always_inline]] void fetch() {
#pragma GCC unroll 4
      for (int i = 0; i < width / 4; ++i) {
        __builtin_prefetch(at_, 0, second_cache);
        at_ += line, left_ -= line;
        if (left_ == 0) left_ = dim_, at_ += gap_;
      }
    }

   private:
    const T* at_;
    int64_t dim_, left_, gap_;  // `left_` elements of its row
  };

  template <int R>
  [[gnu::noinline]] static void scores_of(const C* q, const Groups<T>& groups, int64_t dim, int64_t n, float* s,
                                          int64_t lds) {
    for (int64_t j = 0; j < n; j += width) {
      const auto [k, stride] = groups.at(j);
      Vec sum[R];
#pragma GCC unroll 16
      for (auto& x : sum) x = zero();
      Soon soon(groups, j, dim);
      for (int64_t d = 0; d < dim; d += Pack::in_block) {
        soon.fetch();
        Pack::steps(k + d, stride, [&](int i, Vec keys) {
#pragma GCC unroll 16
          for (int m = 0; m < R; ++m)
            sum[m] = Step<C>::multiply_add(Step<C>::broadcast(q + m * ldq + d + i * pair), as_line(keys), sum[m]);
        });
      }
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) store(s + m * lds + j, sum[m]);
    }
  }

  // Sixteen keys are copied as a panel of B, which stays in the nearest cache while all rows are multiplied with it.
  [[gnu::noinline]] static void scores_of_copies(const C* q, int64_t stride_of_q, const Groups<T>& groups, int64_t dim,
                                                 int64_t rows, int64_t n, float* s, int64_t lds, C* copy, Ahead& next) {
    for (int64_t j = 0; j < n; j += panel) {
      for (int64_t half = 0; half < panel; half += width) {
        const auto [k, stride] = groups.at(j + half);
        for (int64_t d = 0; d < dim; d += Pack::in_block)
          Pack::steps(k + d, stride, [&](int i, Vec keys) { store(copy + (d + i) * panel + half, keys); });
      }
      E::product({q, stride_of_q}, {copy, 0}, s + j, lds, rows, panel, dim, false, &next);
    }
  }

  template <int R, int64_t N>
  [[gnu::noinline]] static void values_of(const C* p, const Groups<T>& groups, int64_t d, int64_t valid, float* out,
                                          int64_t ldo) {
    Vec sum[R][N];
#pragma GCC unroll 16
    for (auto& row : sum)
#pragma GCC unroll 16
      for (auto& x : row) x = zero();
    for (int64_t first = 0; first < valid; first += Groups<T>::size) {
      const auto [v, stride] = groups.at(first);
      const auto [soon, step] = groups.at(first + ahead);
      const int64_t count = min(Groups<T>::size, valid - first);
      for (int64_t j = 0; j < count; j += pair) {
        const T* value = v + j * stride + d;
        const T* fetched = soon + j * step + d;
        const int64_t next = j + 1 < count ? stride : 0;  // the weight of one that is not there is 0
        Line line[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          line[n] = as_line(Pack::whole_step(value + width * n, next));
          for (int i = 0; i < pair; ++i) __builtin_prefetch(fetched + width * n + i * step, 0, second_cache);
        }
#pragma GCC unroll 16
        for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
          for (int n = 0; n < N; ++n)
            sum[m][n] = Step<C>::multiply_add(Step<C>::broadcast(p + m * ldp + first + j), line[n], sum[m][n]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        float* to = out + m * ldo + width * n;
        store(to, load(to) + sum[m][n]);
      }
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
