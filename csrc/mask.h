// The mask, applied to the scores of one row. The backward pass has columns of queries: columns.h.
#pragma once

#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

// Scores of keys that a row may not see become -inf: everything outside the row's spans.
// `cols` keys from `first` on; spans are sorted and disjoint, an empty one may stand anywhere.
inline void hide(float* s, int64_t first, int64_t cols, const int32_t* spans, int64_t runs) {
  int64_t at = 0;
  for (int64_t r = 0; r < runs; ++r) {
    const int64_t lo = spans[2 * r] - first, hi = spans[2 * r + 1] - first;
    if (lo >= hi || hi <= at) continue;
    for (const int64_t end = min(lo, cols); at < end; ++at) s[at] = -infinity;
    at = max(at, hi);
    if (at >= cols) return;
  }
  for (; at < cols; ++at) s[at] = -infinity;
}

}  // namespace attnspan::ATTNSPAN_ISA
