// Biases and their gradients as the backward pass meets them: by tiles of keys x queries, queries innermost.
#pragma once

#include <cassert>

#include "head_bias.h"
#include "pack.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

// data[j * ld + i] belongs to key `key` + j and query `query` + i. `queries` is a multiple of 16; both may reach beyond
// the arrays, where values mean nothing and gradients are 0.
struct Tile {
  float* data;
  int64_t ld, key, keys, query, queries;
  const float* base;  // of each query of the head, see `HeadBias::base_of`; null where all are 0, but for dense biases
  float* row(int64_t j) const { return data + j * ld; }
};

// The bias of one query head. Distances are from key to query here: ascending along a row of a tile.
class BiasTiles {
 public:
  // Room for one head, by thread.
  struct Room {
    int32_t* q_index;      // of all queries, padded
    uint8_t* consecutive;  // for each 16 of them: does each follow the one before?
    float* table;          // a distance table, reversed
    double* slope_sum;     // gradient of a slope
  };

  static Room lay_out(Carver& carver, const Problem& a, int64_t queries) {
    const BiasKind kind = a.options.bias.kind;
    const bool positional = kind != BiasKind::none && kind != BiasKind::dense;
    Room room;
    room.q_index = carver.take<int32_t>(positional ? queries : 0);
    room.consecutive = carver.take<uint8_t>(positional ? queries / panel : 0);
    room.table = carver.take<float>(kind == BiasKind::distance ? 2 * a.options.bias.reach + 1 : 0);
    room.slope_sum = carver.take<double>(1);
    return room;
  }

  // Floats of the gradient that each share of a head sums on its own; a dense bias has none, shares own their keys.
  static int64_t partial_size(const BackwardArgs& a) {
    if (a.dbias.data == nullptr) return 0;
    const BiasKind kind = a.options.bias.kind;
    return kind == BiasKind::distance ? 2 * a.options.bias.reach + 1 : kind == BiasKind::dense ? 0 : 1;
  }

  // Units that run together must not add to the same gradient of a dense bias: where batch rows or heads share one,
  // they take turns. (Shares of a head own their keys.)
  struct Rounds {
    int64_t batch, heads;
  };
  static Rounds rounds_of(const BackwardArgs& a) {
    const Bias& bias = a.options.bias;
    if (bias.kind != BiasKind::dense || a.dbias.data == nullptr) return {1, 1};
    return {bias.batches == 1 ? a.batch : 1, bias.heads == 1 ? a.kv_heads : 1};
  }

  static void clear_dense_gradient(const BackwardArgs& a, const Parallel& parallel) {
    const Bias& bias = a.options.bias;
    if (bias.kind != BiasKind::dense || a.dbias.data == nullptr) return;
    parallel(bias.batches * bias.heads * bias.rows, [&](int64_t row, int) {
      std::memset(a.dbias.data + row * a.k_len, 0, static_cast<size_t>(a.k_len) * sizeof(float));
    });
  }

  // Adds what shares and batch rows have of the gradient of each head's bias.
  static void reduce_gradient(const BackwardArgs& a, const Parallel& parallel, int64_t shares, const float* partial) {
    const int64_t size = partial_size(a);
    const bool reversed = a.options.bias.kind == BiasKind::distance;
    if (size == 0) return;
    parallel(a.q_heads, [&](int64_t h, int) {
      for (int64_t b = 0; b < a.batch; ++b) {
        const float* from = partial + (b * a.q_heads + h) * shares * size;
        float* to = a.dbias.data + b * a.dbias.batch + h * a.dbias.head;
        for (int64_t n = 0; n < size; ++n) {
          double sum = 0.0;
          for (int64_t s = 0; s < shares; ++s)
            sum += static_cast<double>(from[s * size + (reversed ? size - 1 - n : n)]);
          to[n] = static_cast<float>(sum) + (b > 0 && a.dbias.batch == 0 ? to[n] : 0.0f);
        }
      }
    });
  }

  // `partial` is null where no gradient is wanted.
  BiasTiles(const BackwardArgs& args, int64_t b, int64_t h, int64_t queries, const Room& room, float* partial)
      : a_(args), b_(b), h_(h), kind_(args.options.bias.kind), room_(room), partial_(partial), bias_(args, b, h) {
    for (int64_t i = 0; i < partial_size(a_); ++i) partial_[i] = 0.0f;
    *room.slope_sum = 0.0;
    if (kind_ == BiasKind::none || kind_ == BiasKind::dense) return;
    for (int64_t i = 0; i < queries; ++i)
      room.q_index[i] = i < a_.q_len ? query_index(a_, b, i) : i > 0 ? room.q_index[i - 1] : 0;
    for (int64_t p = 0; p < queries / panel; ++p) {
      room.consecutive[p] = 1;
      for (int64_t i = p * panel + 1; i < (p + 1) * panel; ++i)
        if (room.q_index[i] - int64_t{room.q_index[i - 1]} != 1) room.consecutive[p] = 0;
    }
    if (kind_ != BiasKind::distance) return;
    const DistanceTable table = bias_.table_of_head();
    std::reverse_copy(table.values, table.values + table.size(), room.table);
  }

  bool present() const { return kind_ != BiasKind::none; }
  bool wants_gradient() const { return a_.dbias.data != nullptr; }

  // What the numbers of `fill` are multiplied by to be biases in units of log2. As in the forward pass, that happens in
  // the addition to the scores, so that weights have its bits.
  float factor() const {
    return kind_ == BiasKind::alibi || kind_ == BiasKind::signed_alibi ? -bias_.slope_of_head() * log2_e : log2_e;
  }

  // The biases of a tile, or their distances, less those of the base.
  void fill(const Tile& t) const {
    if (kind_ == BiasKind::dense) return fill_dense(t);
    if (t.base == nullptr) return fill_by_distance(t, [](Vec x, int64_t) { return x; });
    const Vec side = set(kind_ == BiasKind::signed_alibi ? 1.0f : -1.0f);  // distances have the other sign here
    fill_by_distance(t, [&](Vec x, int64_t query) { return fma(side, load(t.base + query), x); });
  }

  // Adds the gradients of the exponents of a tile to that of the bias.
  void record(const Tile& t) const {
    if (kind_ == BiasKind::dense) return record_dense(t);
    if (kind_ == BiasKind::distance) return record_table(t);
    for_each_row(t, [&](int64_t j, int64_t key) {
      Vec sum = zero();
      for (int64_t i = 0; i < t.queries; i += Vec::width) {
        const Vec d = distance(t.query + i, key);
        sum = fma(load(t.row(j) + i), kind_ == BiasKind::alibi ? magnitude(d) : d, sum);
      }
      *room_.slope_sum -= static_cast<double>(reduce_add(sum));
    });
  }

  // One pair, off the tiles.
  void record(int64_t i, int64_t j, float ds) const {
    const int64_t d = bias_.key_index(j) - query_index(a_, b_, i);
    if (kind_ == BiasKind::dense)
      dense_gradient(i)[j] += ds;
    else if (kind_ == BiasKind::distance)
      partial_[reversed().clamp(-d)] += ds;
    else
      *room_.slope_sum += static_cast<double>(ds) * static_cast<double>(kind_ == BiasKind::alibi && d > 0 ? -d : d);
  }

  // After all tiles of the head.
  void finish() const {
    if (wants_gradient() && (kind_ == BiasKind::alibi || kind_ == BiasKind::signed_alibi))
      partial_[0] = static_cast<float>(*room_.slope_sum);
  }

 private:
  template <class Less>
  void fill_by_distance(const Tile& t, const Less& less) const {
    for_each_row(t, [&](int64_t j, int64_t key) {
      for (int64_t i = 0; i < t.queries; i += Vec::width) {
        const int64_t query = t.query + i;
        const Vec x = kind_ == BiasKind::distance ? from_table(query, key) : distance(query, key);
        store(t.row(j) + i, less(kind_ == BiasKind::alibi ? magnitude(x) : x, query));
      }
    });
  }

  template <class Row>
  void for_each_row(const Tile& t, const Row& row) const {
    for (int64_t j = 0; j < t.keys; ++j) row(j, t.key + j < a_.k_len ? bias_.key_index(t.key + j) : 0);
  }

  DistanceTable reversed() const { return {room_.table, a_.options.bias.reach}; }

  // Query indices from position `query` on, less the key's.
  Vec distance(int64_t query, int64_t key) const {
    return to_floats(load_ints(room_.q_index + query) + set_ints(static_cast<uint32_t>(-key)));
  }
  Vec from_table(int64_t query, int64_t key) const {
    const int32_t* q = room_.q_index + query;
    if (room_.consecutive[query / panel]) return reversed().ascending(q[0] - key);
    float lanes[Vec::width];
    for (int n = 0; n < Vec::width; ++n) lanes[n] = reversed().at(q[n] - key);
    return load(lanes);
  }

  void record_table(const Tile& t) const {
    const DistanceTable table = reversed();
    Vec below = zero(), above = zero();  // what lies beyond the table's ends
    for_each_row(t, [&](int64_t j, int64_t key) {
      for (int64_t i = 0; i < t.queries; i += Vec::width) {
        const int32_t* q = room_.q_index + t.query + i;
        const float* ds = t.row(j) + i;
        const int64_t at = q[0] - key + table.reach;
        const bool consecutive = room_.consecutive[(t.query + i) / panel];
        if (consecutive && at + Vec::width <= 1)
          below = below + load(ds);
        else if (consecutive && at >= 2 * table.reach)
          above = above + load(ds);
        else if (consecutive && at >= 0 && at + Vec::width <= table.size())
          store(partial_ + at, load(partial_ + at) + load(ds));
        else
          for (int n = 0; n < Vec::width; ++n) partial_[table.clamp(q[n] - key)] += ds[n];
      }
    });
    partial_[0] += reduce_add(below);
    partial_[2 * table.reach] += reduce_add(above);
  }

  void fill_dense(const Tile& t) const {
    if (a_.options.bias.row == 0) {  // one row for all queries
      float values[64] = {};
      assert(t.keys <= 64);
      bias_.dense_row(0, t.key, max(0, min(t.keys, a_.k_len - t.key)), values);
      for (int64_t j = 0; j < t.keys; ++j)
        for (int64_t i = 0; i < t.queries; i += Vec::width)
          store(t.row(j) + i, set(values[j]) - load(t.base + t.query + i));
      return;
    }
    Block x;
    for (int64_t j = 0; j < t.keys; j += 16) {
      const int64_t keys = max(0, min(16, a_.k_len - t.key - j));
      for (int64_t i = 0; i < t.queries; i += 16) {
        std::memset(x.unit, 0, sizeof x.unit);
        for (int64_t r = 0; r < max(0, min(16, a_.q_len - t.query - i)); ++r) {
          alignas(64) float line[16] = {};
          bias_.dense_row(t.query + i + r, t.key + j, keys, line);
          x.set(r, line);
        }
        transpose(x);
        for (int64_t r = 0; r < min(16, t.keys - j); ++r) {
          alignas(64) float line[16];
          x.get(r, line);
          for (int64_t lane = 0; lane < 16; lane += Vec::width)
            store(t.row(j + r) + i + lane, load(line + lane) - load(t.base + t.query + i + lane));
        }
      }
    }
  }

  float* dense_gradient(int64_t query) const {
    const BiasGradient& to = a_.dbias;
    return to.data + b_ * to.batch + h_ * to.head + query * to.row;
  }

  void record_dense(const Tile& t) const {
    if (a_.options.bias.rows == 1) return record_keys(t);
    const bool shared = a_.dbias.batch == 0 || a_.dbias.head == 0;  // with other heads: their gradients are there
    Block x;
    for (int64_t j = 0; j < t.keys; j += 16) {
      const int64_t keys = min(min(16, t.keys - j), a_.k_len - t.key - j);
      for (int64_t i = 0; i < t.queries; i += 16) {
        for (int64_t r = 0; r < 16; ++r) {
          if (r < t.keys - j)
            x.set(r, t.row(j + r) + i);
          else
            std::memset(x.unit[r], 0, 64);
        }
        transpose(x);
        for (int64_t r = 0; r < min(16, a_.q_len - t.query - i); ++r) {
          alignas(64) float line[16];
          x.get(r, line);
          add_row(line, keys, shared, dense_gradient(t.query + i + r) + t.key + j);
        }
      }
    }
  }
  static void add_row(const float* ds, int64_t n, bool shared, float* to) {
    if (n == 16 && !shared)
      std::memcpy(to, ds, 64);
    else if (n == 16)
      for (int64_t lane = 0; lane < 16; lane += Vec::width) store(to + lane, load(to + lane) + load(ds + lane));
    else
      for (int64_t lane = 0; lane < n; ++lane) to[lane] += ds[lane];
  }

  // One row for all queries.
  void record_keys(const Tile& t) const {
    float* to = dense_gradient(0) + t.key;
    for (int64_t j = 0; j < min(t.keys, a_.k_len - t.key); ++j) {
      Vec sum = zero();
      for (int64_t i = 0; i < t.queries; i += Vec::width) sum = sum + load(t.row(j) + i);
      to[j] += reduce_add(sum);
    }
  }

  const BackwardArgs& a_;
  const int64_t b_, h_;
  const BiasKind kind_;
  const Room room_;
  float* const partial_;
  const HeadBias bias_;
};

}  // namespace attnspan::ATTNSPAN_ISA
