// Sequences: query rows that share no key with the rows outside, such as the documents of a packed row.
//
// Each is laid out as if it were alone. Its rows are cut into blocks from its first row on, its keys from its first key
// on, wherever it lies: so a row has the same bits packed or alone, behind padding, and in chunks over a cache. Full
// and causal masks, windows and padding make one sequence of a call; where rows of several documents see a common key,
// they are one sequence too.
#pragma once

#include <vector>

#include "attention.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

// A range of keys, of rows, or of blocks of either; empty if begin == end.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  void include(Range other) {
    if (other.size() == 0) return;
    begin = size() == 0 ? other.begin : min(begin, other.begin), end = max(end, other.end);
  }
};

struct Sequence {
  int64_t row, rows;  // the first query row, and how many
  int64_t key, keys;  // from the first to the last key that one of them sees
  int64_t place = 0;  // where the keys are packed: one sequence behind the other, each from a multiple of key_step on
  int64_t places() const { return round_up(keys, key_step); }
  // Where the keys of a hull are packed, in whole steps.
  Range places_of(const Hull& hull) const {
    if (hull.lo >= hull.hi) return {};
    return {place + round_down(hull.lo - key, key_step), place + round_up(hull.hi - key, key_step)};
  }
};

// What query rows [first, first + rows) of all query heads of a key head see together.
inline Hull hull_of_group(const Problem& a, int64_t b, int64_t hk, int64_t first, int64_t rows) {
  Hull hull;
  const int64_t heads = a.bounds.heads == 1 ? 1 : a.group();
  for (int64_t g = 0; g < heads; ++g)
    hull.include(hull_of(a.bounds.slice(b, hk * a.group() + g) + first * a.runs * 2, rows, a.runs));
  return hull;
}

// The sequences of each batch row and key head, in the order of rows and of keys.
class Sequences {
 public:
  [[gnu::noinline]] explicit Sequences(const Problem& a)
      : slice_heads_(a.bounds.heads == 1 ? 1 : a.kv_heads), slices_(a.bounds.batches * slice_heads_) {
    parts_.reserve(static_cast<size_t>(slices_));
    for (int64_t s = 0; s < slices_; ++s) {
      const auto begin = static_cast<int64_t>(all_.size());
      find(a, s / slice_heads_, s % slice_heads_, begin);
      parts_.push_back({begin, static_cast<int64_t>(all_.size())});
    }
  }

  // Slices are what differs by its mask.
  int64_t slices() const { return slices_; }
  int64_t slice_of(int64_t b, int64_t hk) const {
    return slices_ == slice_heads_ ? hk % slice_heads_ : b * slice_heads_ + hk % slice_heads_;
  }
  int64_t batch_of(int64_t slice) const { return slice / slice_heads_; }
  int64_t head_of(int64_t slice) const { return slice % slice_heads_; }
  Range of(int64_t slice) const { return parts_[static_cast<size_t>(slice)]; }
  const Sequence& operator[](int64_t i) const { return all_[static_cast<size_t>(i)]; }

  // Places for the keys of a slice.
  int64_t places(int64_t slice) const {
    const Sequence& last = (*this)[of(slice).end - 1];
    return last.place + last.places();
  }

  // The sequence of a slice that has a place.
  int64_t at_place(int64_t slice, int64_t place) const {
    Range among = of(slice);
    while (among.size() > 1) {
      const int64_t middle = (among.begin + among.end) / 2;
      ((*this)[middle].place <= place ? among.begin : among.end) = middle;
    }
    return among.begin;
  }

 private:
  static int64_t end_of(const Sequence& s) { return s.keys == 0 ? 0 : s.key + s.keys; }

  // Rows that see nothing join the rows before them; in front of all others they are by themselves.
  void find(const Problem& a, int64_t b, int64_t hk, int64_t begin) {
    const auto count = [&] { return static_cast<int64_t>(all_.size()) - begin; };
    all_.push_back({0, 0, 0, 0});
    for (int64_t i = 0; i < a.q_len; ++i) {
      const Hull seen = hull_of_group(a, b, hk, i, 1);
      if (seen.lo >= seen.hi) {
        ++all_.back().rows;
        continue;
      }
      if (const Sequence& own = all_.back(); own.rows > 0 && (own.keys == 0 || seen.lo >= own.key + own.keys))
        all_.push_back({i, 0, 0, 0});
      // Where keys of earlier sequences are seen again, they are one.
      while (count() > 1 && all_.back().keys > 0 && seen.lo < end_of(all_.end()[-2])) {
        const Sequence last = all_.back();
        all_.pop_back();
        all_.back().rows += last.rows, all_.back().keys = last.key + last.keys - all_.back().key;
      }
      Sequence& own = all_.back();
      const int64_t end = own.keys == 0 ? seen.hi : max(own.key + own.keys, seen.hi);
      own.key = own.keys == 0 ? seen.lo : min(own.key, seen.lo);
      own.keys = end - own.key, ++own.rows;
    }
    for (auto i = static_cast<size_t>(begin) + 1; i < all_.size(); ++i)
      all_[i].place = all_[i - 1].place + all_[i - 1].places();
  }

  const int64_t slice_heads_, slices_;
  std::vector<Sequence> all_;
  std::vector<Range> parts_;
};

}  // namespace attnspan::ATTNSPAN_ISA
