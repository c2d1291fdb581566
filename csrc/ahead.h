// Memory that is wanted soon, fetched a few rows at a time while something else is computed. Short documents have few
// products for each row, beside which waiting for memory is long; and a core waits for few lines at a time, so that
// they are asked for between the tiles of products.
#pragma once

#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {

class Ahead {
 public:
  // What is added is fetched in `steps` steps.
  explicit Ahead(int64_t steps = 1) : steps_(steps < 1 ? 1 : steps) {}

  // Rows that are read, or written, of so many bytes; `stride` bytes from one to the next.
  void read(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, false); }
  void write(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, true); }

  [[gnu::noinline]] void step() {
    for (int i = 0; i < count_; ++i) {
      Range& x = ranges_[i];
      for (int64_t n = x.rows < x.each ? x.rows : x.each; n > 0; --n, --x.rows, x.row += x.stride)
        for (int64_t at = 0; at < x.bytes; at += 64) {
          if (x.write)
            __builtin_prefetch(x.row + at, 1);
          else
            __builtin_prefetch(x.row + at, 0, 2);  // it is not for the nearest cache, which is in use
        }
    }
  }

 private:
  struct Range {
    const char* row;
    int64_t stride, rows, bytes, each;
    bool write;
  };
  void add(const void* first, int64_t stride, int64_t rows, int64_t bytes, bool write) {
    if (rows > 0 && count_ < most)
      ranges_[count_++] = {static_cast<const char*>(first), stride, rows, bytes, (rows + steps_ - 1) / steps_, write};
  }

  static constexpr int most = 4;
  int64_t steps_;
  int count_ = 0;
  Range ranges_[most];
};

}  // namespace attnspan::ATTNSPAN_ISA
