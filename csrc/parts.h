// How work is shared out over threads.
//
// For the forward pass it is best to give a thread a part of the query rows whose keys, packed, fit in its own cache:
// it packs them itself, and finds them there. Rows that see a window or a document are cut into as many parts as that
// takes. Where parts see too much, all heads are packed first, and all threads work on one head after the other.
#pragma once

#include <vector>

#include "attention.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

// A range of keys or of key blocks; empty if begin == end.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  void include(Range other) {
    if (other.size() == 0) return;
    begin = size() == 0 ? other.begin : min(begin, other.begin), end = max(end, other.end);
  }
};

// What some rows see, in whole steps of keys.
inline Range key_range(const Hull& hull) {
  return hull.lo >= hull.hi ? Range{} : Range{round_down(hull.lo, key_step), round_up(hull.hi, key_step)};
}

// What query rows [first, last) of all query heads of one key head see.
inline Range range_of_rows(const Problem& a, int64_t b, int64_t hk, int64_t first, int64_t last) {
  Hull hull;
  const int64_t heads = a.bounds.heads == 1 ? 1 : a.group();
  for (int64_t g = 0; g < heads; ++g)
    hull.include(hull_of(a.bounds.slice(b, hk * a.group() + g) + first * a.runs * 2, last - first, a.runs));
  return key_range(hull);
}

// Do so many equal units of work keep the threads nine tenths busy?
inline bool busy(int64_t units, int threads) {
  const int64_t rounds = (units + threads - 1) / threads;
  return units * 10 >= rounds * threads * 9;
}

// Into how many shares each of `heads` is cut: as few as keep the threads busy, and at most `limit`.
inline int64_t choose_shares(int64_t heads, int64_t limit, int threads) {
  int64_t n = 1;
  while (n < limit && !busy(heads * n, threads)) ++n;
  return n;
}

struct Parts {
  bool local = false;   // does each part pack its own keys?
  int64_t rows, count;  // query rows of a part, parts of a head
  int64_t keys;         // most keys of a part
};

[[gnu::noinline]] inline Parts choose_parts(const Problem& a, int64_t block_rows, int64_t bytes_of_a_key, int threads) {
  constexpr int64_t cached = int64_t{1} << 20;
  // One slice for each set of rows that differs: of all query heads of a key head together, as they share its keys.
  const int64_t blocks = (a.q_len + block_rows - 1) / block_rows, slice_heads = a.bounds.heads == 1 ? 1 : a.kv_heads,
                slices = a.bounds.batches * slice_heads;
  std::vector<Range> ranges(static_cast<size_t>(slices * blocks));
  for (int64_t s = 0; s < slices; ++s)
    for (int64_t i = 0; i < blocks; ++i)
      ranges[static_cast<size_t>(s * blocks + i)] =
          range_of_rows(a, s / slice_heads, s % slice_heads, i * block_rows, min((i + 1) * block_rows, a.q_len));
  const int64_t heads = a.batch * a.kv_heads;
  for (int64_t step = blocks; step >= 1; step = step == 1 ? 0 : (step + 1) / 2) {
    const int64_t count = (blocks + step - 1) / step;
    int64_t widest = 0, all = 0;
    for (int64_t s = 0; s < slices; ++s)
      for (int64_t i = 0; i < blocks; i += step) {
        Range range;
        for (int64_t j = i; j < min(i + step, blocks); ++j) range.include(ranges[static_cast<size_t>(s * blocks + j)]);
        widest = max(widest, range.size()), all += range.size();
      }
    if (2 * all > 3 * slices * max(a.k_len, a.q_len)) break;  // smaller parts would only pack more keys twice
    if (busy(heads * count, threads) && widest * bytes_of_a_key <= cached)
      return {true, step * block_rows, count, max(key_step, widest)};
  }
  return {false, a.q_len, 1, round_up(a.k_len, key_step)};
}

// The backward pass walks over a head's keys in chunks of key blocks, and packs the queries that see a chunk right
// before it. Where queries see almost everything, there is one chunk, and all of them are packed once.
struct Chunks {
  int64_t key_blocks;    // of a chunk
  int64_t query_blocks;  // most query blocks that see a chunk, with all between
};

// The query blocks, given what each sees, from the first to the last that sees a key in [first, last).
inline Range blocks_that_see(const Hull* hulls, int64_t blocks, int64_t first, int64_t last) {
  Range range;
  for (int64_t i = 0; i < blocks; ++i)
    if (hulls[i].lo < last && hulls[i].hi > first) range.include({i, i + 1});
  return range;
}

[[gnu::noinline]] inline Chunks choose_chunks(const Problem& a, int64_t block, int64_t bytes_of_a_query) {
  constexpr int64_t cached = int64_t{5} << 18;
  const int64_t q_blocks = (a.q_len + block - 1) / block, k_blocks = (a.k_len + block - 1) / block;
  const Chunks whole{max(1, k_blocks), q_blocks};
  if (q_blocks * block * bytes_of_a_query <= cached) return whole;
  const int64_t slices = a.bounds.batches * a.bounds.heads;
  std::vector<Hull> hulls(static_cast<size_t>(slices * q_blocks));
  for (int64_t s = 0; s < slices; ++s)
    for (int64_t i = 0; i < q_blocks; ++i)
      hulls[static_cast<size_t>(s * q_blocks + i)] =
          hull_of(a.bounds.slice(s / a.bounds.heads, s % a.bounds.heads) + i * block * a.runs * 2,
                  min(block, a.q_len - i * block), a.runs);
  for (const int64_t chunk : {16, 8, 4, 2}) {
    int64_t widest = 0, all = 0;
    for (int64_t s = 0; s < slices; ++s)
      for (int64_t k = 0; k < k_blocks; k += chunk) {
        const Range range = blocks_that_see(hulls.data() + s * q_blocks, q_blocks, k * block, (k + chunk) * block);
        widest = max(widest, range.size()), all += range.size();
      }
    if (all > 2 * slices * q_blocks) return whole;  // queries would be packed more than twice
    if (widest * block * bytes_of_a_query <= cached) return {chunk, max(1, widest)};
  }
  return whole;
}

}  // namespace attnspan::ATTNSPAN_ISA
