// Memory that is wanted soon, fetched line by line while something else is computed. Where each row has few products,
// of short documents or for few queries, they take no longer than their memory. A core waits for few lines at a time,
// those of nearer caches among them: lines are asked for a few at a time.
#pragma once

#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {

class Ahead {
 public:
  Ahead() = default;
  // While there are about so many pauses in what is computed.
  explicit Ahead(int64_t pauses) : pauses_(pauses < 1 ? 1 : pauses) {}
  bool wants() const { return count_ > 0; }

  // Up to 20 ranges, others are left out: of rows that are read, or written, of so many bytes; `stride` bytes from one
  // to the next.
  void read(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, false); }
  void write(const void* first, int64_t stride, int64_t rows, int64_t bytes) { add(first, stride, rows, bytes, true); }

  // One range after the other, each as it lies: hardware that fetches on its own then helps.
  [[gnu::always_inline]] void pause() {
    for (int64_t left = share_; left > 0; --left) {
      if (now_.write)
        __builtin_prefetch(line_, 1);
      else
        __builtin_prefetch(line_, 0, 2);  // it is not for the nearest cache, which is in use
      line_ += 64;
      if (line_ < end_) continue;
      if (--now_.rows > 0)
        line_ = now_.row += now_.stride, end_ = line_ + now_.bytes;
      else if (!next())
        return;
    }
  }

 private:
  struct Range {
    const char* row;
    int64_t stride, rows, bytes;
    bool write;
  };
  void add(const void* first, int64_t stride, int64_t rows, int64_t bytes, bool write) {
    if (pauses_ == 0 || rows <= 0 || bytes <= 0 || count_ == most) return;
    ranges_[count_++] = {static_cast<const char*>(first), stride, rows, bytes, write};
    all_ += rows * ((bytes + 63) / 64), share_ = (all_ + pauses_ - 1) / pauses_;
    if (count_ == 1) next();
  }
  [[gnu::noinline, gnu::cold]] bool next() {
    if (at_ == count_) return count_ = at_ = 0, all_ = share_ = 0, false;
    now_ = ranges_[at_++], line_ = now_.row, end_ = line_ + now_.bytes;
    return true;
  }

  static constexpr int most = 20;
  int64_t pauses_ = 0;
  int64_t all_ = 0, share_ = 0;  // lines
  int count_ = 0, at_ = 0;
  const char *line_ = nullptr, *end_ = nullptr;
  Range now_{};
  Range ranges_[most];
};

}  // namespace attnspan::ATTNSPAN_ISA
