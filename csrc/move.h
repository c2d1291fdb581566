// Rows of keys, values or gradients, gathered and scattered by index: what an exchange between ranks sends and
// receives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"

namespace attnspan {

// (planes, length, inner, heads, width) with a unit last stride; row i is row i % length of plane i / length.
struct RowArray {
  char* data;
  int64_t planes, length, inner, heads, width;
  int64_t plane, row, inner_stride, head;  // strides in elements
  int64_t rows() const { return planes * length; }
  int64_t at(int64_t i) const { return i / length * plane + i % length * row; }
};

// Which rows, in numbers of its own: the caller's may change after they were checked. None: all, in order.
struct RowIndex {
  std::vector<int32_t> rows;
  int64_t of(int64_t i) const { return rows.empty() ? i : rows[static_cast<size_t>(i)]; }
};

// Row from.of(i) of `source` is copied to row to.of(i) of `target`, or added to it (floats): `count` rows, each target
// once.
struct RowMove {
  RowArray target, source;
  RowIndex to, from;
  int64_t count, item_bytes;
  bool add;

  // The first i whose rows are not there, or -1.
  int64_t first_bad() const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = to.of(i), s = from.of(i);
      if (t < 0 || t >= target.rows() || s < 0 || s >= source.rows()) return i;
    }
    return -1;
  }

  void operator()(const Parallel& parallel) const {
    constexpr int64_t block = 128;
    parallel((count + block - 1) / block, [&](int64_t item, int) {
      for (int64_t i = item * block; i < std::min(count, (item + 1) * block); ++i) row(to.of(i), from.of(i));
    });
  }

  void row(int64_t t, int64_t s) const {
    for (int64_t n = 0; n < target.inner; ++n)
      for (int64_t h = 0; h < target.heads; ++h) {
        char* y = target.data + (target.at(t) + n * target.inner_stride + h * target.head) * item_bytes;
        const char* x = source.data + (source.at(s) + n * source.inner_stride + h * source.head) * item_bytes;
        if (!add) {
          std::memcpy(y, x, static_cast<size_t>(target.width * item_bytes));
          continue;
        }
        auto* sums = reinterpret_cast<float*>(y);
        const auto* terms = reinterpret_cast<const float*>(x);
        for (int64_t w = 0; w < target.width; ++w) sums[w] += terms[w];
      }
  }
};

}  // namespace attnspan
