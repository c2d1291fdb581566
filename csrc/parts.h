// How work is shared out over threads.
//
// For the forward pass it is best to give a thread a part of the query rows whose keys, packed, fit in its own cache:
// it packs them itself, and finds them there. Rows that see a window or a document are cut into as many parts as that
// takes. Where parts see too much, all heads are packed first, and all threads work on one head after the other.
#pragma once

#include "sequences.h"

namespace attnspan::ATTNSPAN_ISA {

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

// Query rows of one sequence that are worked on together, and the places of the keys that they see.
struct QueryBlock {
  int64_t sequence, row, rows;
  Range places;
};

// The query blocks of each slice of the mask, and the parts of them that threads take.
class ForwardPlan {
 public:
  [[gnu::noinline]] ForwardPlan(const Problem& a, int64_t block_rows, int64_t bytes_of_a_key, int threads)
      : sequences(a) {
    slices_.reserve(static_cast<size_t>(sequences.slices()));
    for (int64_t s = 0; s < sequences.slices(); ++s) {
      const auto begin = static_cast<int64_t>(blocks_.size());
      for (int64_t i = sequences.of(s).begin; i < sequences.of(s).end; ++i) cut(a, s, i, block_rows);
      slices_.push_back({begin, static_cast<int64_t>(blocks_.size())});
      most_blocks_ = max(most_blocks_, slices_.back().size()), places = max(places, sequences.places(s));
    }
    parts = 1, step_ = most_blocks_, places = max(key_step, places);
    choose_parts(a, bytes_of_a_key, threads);
  }

  int64_t most_blocks() const { return most_blocks_; }  // of a slice
  // The blocks of a part of a batch row's key head.
  Range blocks_of(int64_t b, int64_t hk, int64_t part) const {
    const Range all = slices_[static_cast<size_t>(sequences.slice_of(b, hk))];
    return {min(all.begin + part * step_, all.end), min(all.begin + (part + 1) * step_, all.end)};
  }
  Range places_of(Range blocks) const {
    Range range;
    for (int64_t i = blocks.begin; i < blocks.end; ++i) range.include((*this)[i].places);
    return range;
  }
  // The last ones of some blocks that are of one sequence.
  Range last_sequence(Range blocks) const {
    Range own{blocks.end, blocks.end};
    while (own.begin > blocks.begin && (*this)[own.begin - 1].sequence == (*this)[blocks.end - 1].sequence) --own.begin;
    return own;
  }
  const QueryBlock& operator[](int64_t i) const { return blocks_[static_cast<size_t>(i)]; }

  const Sequences sequences;
  bool local = false;  // does each part pack its own keys?
  int64_t parts;       // of a head
  int64_t places = 0;  // the most that a part packs; without parts, a head

 private:
  void cut(const Problem& a, int64_t slice, int64_t sequence, int64_t block_rows) {
    const Sequence& s = sequences[sequence];
    for (int64_t row = s.row; row < s.row + s.rows; row += block_rows) {
      const int64_t rows = min(block_rows, s.row + s.rows - row);
      const Hull hull = hull_of_group(a, sequences.batch_of(slice), sequences.head_of(slice), row, rows);
      blocks_.push_back({sequence, row, rows, s.places_of(hull)});
    }
  }

  // Parts as large as still keep threads busy and caches small.
  void choose_parts(const Problem& a, int64_t bytes_of_a_key, int threads) {
    constexpr int64_t cached = int64_t{1} << 20;
    const int64_t heads = a.batch * a.kv_heads;
    for (int64_t step = most_blocks_; step >= 1; step = step == 1 ? 0 : (step + 1) / 2) {
      const int64_t count = (most_blocks_ + step - 1) / step;
      int64_t widest = 0, all = 0;
      for (const Range slice : slices_)
        for (int64_t i = slice.begin; i < slice.end; i += step) {
          const int64_t size = places_of({i, min(i + step, slice.end)}).size();
          widest = max(widest, size), all += size;
        }
      if (2 * all > 3 * sequences.slices() * max(places, a.q_len)) return;  // smaller parts would pack more keys twice
      if (busy(heads * count, threads) && widest * bytes_of_a_key <= cached) {
        local = true, step_ = step, parts = count, places = max(key_step, widest);
        return;
      }
    }
  }

  std::vector<QueryBlock> blocks_;
  std::vector<Range> slices_;
  int64_t most_blocks_ = 0, step_ = 0;
};

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

// What each query block sees, in each slice of the mask.
class BlockHulls {
 public:
  BlockHulls(const Problem& a, int64_t block)
      : slices(a.bounds.batches * a.bounds.heads),
        blocks_((a.q_len + block - 1) / block),
        hulls_(static_cast<size_t>(slices * blocks_)) {
    for (int64_t s = 0; s < slices; ++s)
      for (int64_t i = 0; i < blocks_; ++i)
        hulls_[static_cast<size_t>(s * blocks_ + i)] =
            hull_of(a.bounds.slice(s / a.bounds.heads, s % a.bounds.heads) + i * block * a.runs * 2,
                    min(block, a.q_len - i * block), a.runs);
  }
  Range that_see(int64_t slice, int64_t first, int64_t last) const {
    return blocks_that_see(hulls_.data() + slice * blocks_, blocks_, first, last);
  }
  // The most query blocks that see one of the ranges into which so many keys are cut.
  int64_t widest(int64_t k_len, int64_t keys) const {
    int64_t most = 1;
    for (int64_t s = 0; s < slices; ++s)
      for (int64_t k = 0; k < k_len; k += keys) most = max(most, that_see(s, k, k + keys).size());
    return most;
  }

  const int64_t slices;

 private:
  const int64_t blocks_;
  std::vector<Hull> hulls_;
};

[[gnu::noinline]] inline Chunks choose_chunks(const Problem& a, int64_t block, int64_t bytes_of_a_query) {
  constexpr int64_t cached = int64_t{5} << 18;
  const int64_t q_blocks = (a.q_len + block - 1) / block, k_blocks = (a.k_len + block - 1) / block;
  const Chunks whole{max(1, k_blocks), q_blocks};
  if (q_blocks * block * bytes_of_a_query <= cached) return whole;
  const BlockHulls hulls(a, block);
  for (const int64_t chunk : {16, 8, 4, 2}) {
    int64_t all = 0;
    for (int64_t s = 0; s < hulls.slices; ++s)
      for (int64_t k = 0; k < k_blocks; k += chunk) all += hulls.that_see(s, k * block, (k + chunk) * block).size();
    if (all > 2 * hulls.slices * q_blocks) return whole;  // queries would be packed more than twice
    if (const int64_t widest = hulls.widest(k_blocks * block, chunk * block);
        widest * block * bytes_of_a_query <= cached)
      return {chunk, widest};
  }
  return whole;
}

}  // namespace attnspan::ATTNSPAN_ISA
