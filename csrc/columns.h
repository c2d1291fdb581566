// The mask as the backward pass needs it: by query columns, sixteen at a time.
#pragma once

#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

// One head's spans with the queries innermost (lo and hi apart, `stride` queries for each run), and hulls for each
// panel of 16 queries. Queries beyond q_len see nothing.
struct Columns {
  struct PanelHull {
    int32_t lo, hi, all_lo, all_hi;  // as Hull, for one run
  };
  int32_t *lo, *hi;
  PanelHull* hulls;  // [panel][run]
  int64_t stride, runs;

  static Columns lay_out(Carver& carver, int64_t queries, int64_t runs) {
    Columns c{};
    c.stride = queries, c.runs = runs;
    c.lo = carver.take<int32_t>(queries * runs);
    c.hi = carver.take<int32_t>(queries * runs);
    c.hulls = carver.take<PanelHull>(queries / panel * runs);
    return c;
  }

  void fill(const int32_t* spans, int64_t rows) const {
    for (int64_t r = 0; r < runs; ++r)
      for (int64_t i = 0; i < stride; ++i) {
        lo[r * stride + i] = i < rows ? spans[(i * runs + r) * 2] : 0;
        hi[r * stride + i] = i < rows ? spans[(i * runs + r) * 2 + 1] : 0;
      }
    for (int64_t p = 0; p < stride / panel; ++p)
      for (int64_t r = 0; r < runs; ++r) {
        PanelHull h{INT32_MAX, 0, 0, INT32_MAX};
        for (int64_t i = r * stride + p * panel; i < r * stride + (p + 1) * panel; ++i) {
          h.all_lo = lo[i] > h.all_lo ? lo[i] : h.all_lo;
          h.all_hi = hi[i] < h.all_hi ? hi[i] : h.all_hi;
          if (lo[i] >= hi[i]) continue;
          h.lo = lo[i] < h.lo ? lo[i] : h.lo;
          h.hi = hi[i] > h.hi ? hi[i] : h.hi;
        }
        hulls[p * runs + r] = h;
      }
  }

  // May some query of the panel see a key in [first, last)? (No false negatives.)
  bool touches(int64_t p, int64_t first, int64_t last) const {
    for (int64_t r = 0; r < runs; ++r)
      if (const PanelHull& h = hulls[p * runs + r]; h.lo < last && h.hi > first) return true;
    return false;
  }

  // One past the last key that some query of `count` panels sees.
  int64_t end_of(int64_t p, int64_t count) const {
    int64_t end = 0;
    for (int64_t i = p * runs; i < (p + count) * runs; ++i) end = max(end, hulls[i].hi);
    return end;
  }

  // Does every query of the panel see every key in [first, last)? (No false positives.)
  bool covers(int64_t p, int64_t first, int64_t last) const {
    for (int64_t r = 0; r < runs; ++r)
      if (const PanelHull& h = hulls[p * runs + r]; h.all_lo <= first && h.all_hi >= last) return true;
    return false;
  }

  // Which of the `Vec::width` queries from `query` on see the key.
  Mask see(int64_t key, int64_t query) const {
    Mask m = none();
    for (int64_t r = 0; r < runs; ++r)
      m = either(m, between(static_cast<int32_t>(key), lo + r * stride + query, hi + r * stride + query));
    return m;
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
