// Memory that is wanted soon, fetched line by line while something else is computed. Where each row has few products,
// of short documents or for few queries, they take no longer than their memory; and a core waits for few lines at a
// time.
#pragma once

#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {

// When products ask for memory: with each step, as is best where it takes longer than they do, or after each tile.
enum class Fetch { nothing, tiles, steps };

class Ahead {
 public:
  Ahead() = default;
  // For about so many tiles.
  Ahead(Fetch when, int64_t tiles) : when_(when), tiles_(tiles < 1 ? 1 : tiles) {}
  Fetch when() const { return left_ == 0 && line_ == end_ ? Fetch::nothing : when_; }

  // Rows that are read, or written, of so many bytes; `stride` bytes from one to the next.
  void read(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, false); }
  void write(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, true); }

  [[gnu::always_inline]] void line() {
    if (left_ > 0) fetch();
  }
  void end_tile() {
    while (left_ > 0) fetch();
    left_ = line_ == end_ ? 0 : share_;
  }

 private:
  struct Range {
    const char* row;
    int64_t stride, rows, bytes;
    bool write;
  };
  void add(const void* first, int64_t stride, int64_t rows, int64_t bytes, bool write) {
    if (when_ == Fetch::nothing || rows <= 0 || bytes <= 0 || count_ == most) return;
    const bool one = when_ == Fetch::steps && stride == bytes;
    ranges_[count_++] = {static_cast<const char*>(first), stride, one ? 1 : rows, one ? rows * bytes : bytes, write};
    all_ += rows * ((bytes + 63) / 64), left_ = share_ = (all_ + tiles_ - 1) / tiles_;
    if (line_ == end_) next();
  }

  [[gnu::always_inline]] void fetch() {
    if (write_)
      __builtin_prefetch(line_, 1);
    else
      __builtin_prefetch(line_, 0, 2);  // it is not for the nearest cache, which is in use
    line_ += 64, --left_;
    if (line_ >= end_) next();
  }

  // The next row: of each range in turn if there is time between tiles, else of one after the other, as hardware that
  // fetches on its own then helps.
  [[gnu::noinline]] void next() {
    for (int tried = 0; tried < count_; ++tried) {
      Range& x = ranges_[at_];
      if (when_ == Fetch::tiles || x.rows == 0) at_ = at_ + 1 < count_ ? at_ + 1 : 0;
      if (x.rows == 0) continue;
      line_ = x.row, end_ = x.row + x.bytes, write_ = x.write;
      x.row += x.stride, --x.rows;
      return;
    }
    line_ = end_, left_ = 0;
  }

  static constexpr int most = 20;
  const Fetch when_ = Fetch::nothing;
  const int64_t tiles_ = 1;
  int64_t all_ = 0, share_ = 0, left_ = 0;  // lines
  int count_ = 0, at_ = 0;
  const char *line_ = nullptr, *end_ = nullptr;
  bool write_ = false;
  Range ranges_[most];
};

}  // namespace attnspan::ATTNSPAN_ISA
