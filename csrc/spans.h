// What the kernels ask of a mask: what a group of rows may see within a range of keys.
#pragma once

#include "attention.h"
#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

inline constexpr int64_t key_step = 32;  // ranges of a sequence's keys start and end at multiples of this

// A bump allocator over scratch memory; over a null base it only measures.
class Carver {
 public:
  explicit Carver(char* base = nullptr) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    const size_t from = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) & ~size_t{63};
    return base_ ? reinterpret_cast<T*>(base_ + from) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

template <class T>
inline T* at(const Tensor& x, int64_t b, int64_t h, int64_t i) {
  return static_cast<T*>(x.data) + b * x.batch + h * x.head + i * x.row;
}

// Keys that some row of a group sees lie in [lo, hi) (lo > hi: none); with one run, every row sees [all_lo, all_hi).
struct Hull {
  int64_t lo = INT64_MAX, hi = 0, all_lo = 0, all_hi = INT64_MAX;
  void include(const Hull& other) {
    lo = min(lo, other.lo);
    hi = max(hi, other.hi);
    all_lo = max(all_lo, other.all_lo);
    all_hi = min(all_hi, other.all_hi);
  }
};

inline Hull hull_of(const int32_t* spans, int64_t rows, int64_t runs) {
  Hull hull;
  for (int64_t i = 0; i < rows * runs; ++i) {
    const int64_t lo = spans[2 * i], hi = spans[2 * i + 1];
    hull.all_lo = max(hull.all_lo, lo);
    hull.all_hi = min(hull.all_hi, hi);
    if (lo < hi) {
      hull.lo = min(hull.lo, lo);
      hull.hi = max(hull.hi, hi);
    }
  }
  return hull;
}

// The part of a key range that a group of rows sees, from `origin` on in steps of keys, up to a multiple of `step`, and
// where it ends exactly; `full` if every row sees all of it.
struct Seen {
  int64_t lo, hi, end;
  bool full;
};

inline Seen look(const int32_t* spans, int64_t rows, int64_t runs, const Hull& hull, int64_t first, int64_t last,
                 int64_t origin, int64_t step) {
  int64_t lo = max(first, hull.lo), hi = min(last, hull.hi);
  if (lo >= hi) return {0, 0, 0, false};
  if (runs > 1) {  // the hull may have holes
    lo = last, hi = first;
    for (int64_t i = 0; i < rows * runs; ++i) {
      const int64_t l = max(spans[2 * i], first), h = min(spans[2 * i + 1], last);
      if (l < h) lo = min(lo, l), hi = max(hi, h);
    }
    if (lo >= hi) return {0, 0, 0, false};
  }
  const int64_t end = hi;
  lo = origin + round_down(lo - origin, key_step), hi = origin + round_up(hi - origin, step);
  bool full = runs == 1 && hull.all_lo <= lo && hull.all_hi >= hi;
  if (runs > 1) {
    full = true;
    for (int64_t i = 0; i < rows && full; ++i) {
      full = false;
      for (int64_t r = i * runs; r < (i + 1) * runs; ++r) full |= spans[2 * r] <= lo && spans[2 * r + 1] >= hi;
    }
  }
  return {lo, hi, end, full};
}

inline bool sees_any(const int32_t* spans, int64_t runs) {
  for (int64_t r = 0; r < runs; ++r)
    if (spans[2 * r] < spans[2 * r + 1]) return true;
  return false;
}

}  // namespace attnspan::ATTNSPAN_ISA
