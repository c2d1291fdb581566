// What a call's integers were when they were checked. Other threads may write into the caller's arrays while the kernel
// runs, which holds no lock of theirs: what was checked is what is read, so none of them moves an access.
#pragma once

#include <cstdint>

#include "attention.h"

namespace attnspan {

// One read, which another thread's write may race with.
template <class T>
T read_once(const T& x) {
  return __atomic_load_n(&x, __ATOMIC_RELAXED);
}

template <class T>
void copy_once(const T* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = read_once(from[i]);
}

// Copies of a problem's bounds, indices, seeds and pages, in memory of the caller's.
class Snapshot {
 public:
  explicit Snapshot(const Problem& p)
      : slice_(p.q_len * p.runs * 2),
        bounds_(p.bounds.batches * p.bounds.heads * slice_),
        q_index_(size_of(p.options.q_index, p.batch, p.q_len)),
        k_index_(size_of(p.options.k_index, p.batch, p.k_len)),
        seeds_(!p.options.dropout.on()      ? 0
               : p.options.dropout.per_head ? p.batch * p.q_heads
                                            : 1),
        table_(p.pages.table == nullptr ? 0 : p.batch * (2 * p.pages.columns + 1)) {}

  size_t bytes() const {
    return static_cast<size_t>(seeds_) * sizeof(int64_t) +
           static_cast<size_t>(bounds_ + q_index_ + k_index_ + table_) * sizeof(int32_t);
  }

  // Makes `p` read the copies. Returns how many pairs of all heads are visible, or -1 and the first bad row.
  int64_t take(Problem& p, char* memory, BadRow* bad) const {
    auto* const seeds = reinterpret_cast<int64_t*>(memory);
    auto* const bounds = reinterpret_cast<int32_t*>(memory + static_cast<size_t>(seeds_) * sizeof(int64_t));
    const int64_t pairs = take_bounds(p, bounds, bad);
    if (pairs < 0) return pairs;
    if (seeds_ > 0) copy_once(p.options.dropout.seeds, seeds_, seeds), p.options.dropout.seeds = seeds;
    take_indices(p.options.q_index, q_index_, bounds + bounds_);
    take_indices(p.options.k_index, k_index_, bounds + bounds_ + q_index_);
    if (table_ > 0) take_pages(p, bounds + bounds_ + q_index_ + k_index_);
    return pairs;
  }

 private:
  static int64_t size_of(const Indices& x, int64_t batch, int64_t length) {
    return x.data == nullptr ? 0 : x.batch == 0 ? length : batch * length;
  }

  static void take_indices(Indices& x, int64_t size, int32_t* to) {
    if (x.data == nullptr) return;
    copy_once(x.data, size, to);
    x.data = to;
  }

  // Numbers that are no pages become 0. Behind the table is, for each batch row, how many such there are before each
  // page and in all.
  static void take_pages(Problem& p, int32_t* to) {
    Pages& pages = p.pages;
    const int32_t* const from = pages.table;
    int32_t* missing = to + p.batch * pages.columns;
    pages.table = to, pages.missing = missing;
    for (int64_t b = 0; b < p.batch; ++b, missing += pages.columns + 1) {
      missing[0] = 0;
      for (int64_t c = 0; c < pages.columns; ++c) {
        const int32_t number = read_once(from[b * pages.columns + c]);
        const bool there = number >= 0 && number < pages.pool;
        *to++ = there ? number : 0, missing[c + 1] = missing[c] + (there ? 0 : 1);
      }
    }
  }

  // Keys that a row sees, or -1 for illegal spans.
  static int64_t copy_row(const int32_t* from, int64_t runs, int64_t k_len, int32_t* to) {
    int64_t end = 0, visible = 0;
    for (int64_t r = 0; r < runs; ++r) {
      const int32_t lo = read_once(from[2 * r]), hi = read_once(from[2 * r + 1]);
      to[2 * r] = lo, to[2 * r + 1] = hi;
      if (lo < 0 || hi < lo || hi > k_len) return -1;
      if (lo == hi) continue;
      if (lo < end) return -1;
      end = hi;
      visible += hi - lo;
    }
    return visible;
  }

  int64_t take_bounds(Problem& p, int32_t* to, BadRow* bad) const {
    const Bounds given = p.bounds;
    p.bounds.data = to, p.bounds.head = given.heads == 1 ? 0 : slice_;
    p.bounds.batch = given.batches == 1 ? 0 : given.heads * slice_;
    int64_t pairs = 0;
    for (int64_t b = 0; b < given.batches; ++b)
      for (int64_t h = 0; h < given.heads; ++h) {
        const int32_t* from = given.slice(b, h);
        for (int64_t i = 0; i < p.q_len; ++i, from += p.runs * 2, to += p.runs * 2) {
          const int64_t visible = copy_row(from, p.runs, p.k_len, to);
          if (visible < 0) {
            *bad = {b, h, i};
            return -1;
          }
          pairs += visible;
        }
      }
    return pairs * (p.batch / given.batches) * (p.q_heads / given.heads);
  }

  const int64_t slice_, bounds_, q_index_, k_index_, seeds_, table_;
};

}  // namespace attnspan
