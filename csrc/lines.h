// Where the rows of keys and values of one head lie: one after the other, or on pages of a pool.
#pragma once

#include <cstring>

#include "ahead.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T>
struct Lines {
  const T* data;
  int64_t stride;
  const int32_t* table = nullptr;   // of the pages, or null
  int64_t page = 0, page_rows = 0;  // elements from one to the next, and rows of each
  int64_t rows = 0;                 // of all pages of the table

  const T* at(int64_t i) const {
    if (table == nullptr) return data + i * stride;
    return at(walk(i));
  }

  // A row's place on the pages, moved on without another division.
  struct Walk {
    int64_t number, within;
    void move(int64_t rows, int64_t page_rows) {
      for (within += rows; within >= page_rows; within -= page_rows) ++number;
    }
  };
  Walk walk(int64_t i) const { return {i / page_rows, i % page_rows}; }
  const T* at(const Walk& w) const { return data + table[w.number] * page + w.within * stride; }

  // How many of the `most` rows from row i on lie one after the other.
  int64_t run(int64_t i, int64_t most) const {
    if (table == nullptr) return most;
    int64_t n = page_rows - i % page_rows, number = i / page_rows;
    for (; n < most && table[number] + 1 == table[number + 1] && page == page_rows * stride; ++number) n += page_rows;
    return min(n, most);
  }

  // Calls use(first row, their number, their address) for each run of rows [from, to).
  template <class Use>
  void each_run(int64_t from, int64_t to, const Use& use) const {
    for (int64_t n = 0; from < to; from += n) n = run(from, to - from), use(from, n, at(from));
  }

  void copy(int64_t i, int64_t count, int64_t dim, T* to) const {
    each_run(i, i + count, [&](int64_t first, int64_t n, const T* from) {
      for (int64_t r = 0; r < n; ++r)
        std::memcpy(to + (first - i + r) * dim, from + r * stride, static_cast<size_t>(dim) * sizeof(T));
    });
  }

  // The `count` rows from row i on as they lie, or copied one after the other if they are in pieces.
  struct Place {
    const T* data;
    int64_t stride;
  };
  Place together(int64_t i, int64_t count, int64_t dim, T* copies) const {
    if (count == 0) return {data, stride};
    if (run(i, count) == count) return {at(i), stride};
    copy(i, count, dim, copies);
    return {copies, dim};
  }
};

// Those of key head hk.
template <class T>
inline Lines<T> lines_of(const Problem& a, const Tensor& x, int64_t b, int64_t hk) {
  if (a.pages.table == nullptr) return {at<T>(x, b, hk, 0), x.row};
  return {at<T>(x, 0, hk, 0), x.row, a.pages.row(b), x.batch, a.pages.length, a.k_len};
}

// Keys and values of one head.
template <class T>
struct KeyValues {
  Lines<T> k, v;
  int64_t dim, v_dim;
  KeyValues(const Problem& a, int64_t b, int64_t hk)
      : k(lines_of<T>(a, a.k, b, hk)), v(lines_of<T>(a, a.v, b, hk)), dim(a.head_dim), v_dim(a.v_dim) {}
  const T* key(int64_t j) const { return k.at(j); }
  const T* value(int64_t j) const { return v.at(j); }
};

// Asks for rows that are read soon.
template <class T>
inline void read_ahead(Ahead& ahead, const Lines<T>& x, int64_t first, int64_t rows, int64_t dim) {
  constexpr int64_t size = sizeof(T);
  x.each_run(first, first + rows,
             [&](int64_t, int64_t n, const T* from) { ahead.read(from, x.stride * size, n, dim * size); });
}

}  // namespace attnspan::ATTNSPAN_ISA
