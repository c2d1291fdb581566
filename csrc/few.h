// Forward for few query rows over many keys (decoding): a read of K and V, which should take as long as that read.
//
// Rows of all query heads that share a key head are worked on together, so that each key is fetched once. The keys of a
// sequence are cut into the sums that `ForwardTiles` makes too. Each leaves a record relative to its own maximum, and a
// last loop adds the records in order: a row has the bits that it has among many rows, on any number of threads.
#pragma once

#include "exact.h"
#include "mask.h"
#include "pack.h"
#include "parts.h"
#include "row_options.h"
#include "straight.h"
#include "straight_tiles.h"

namespace attnspan::ATTNSPAN_ISA {

inline bool few_queries(const Problem& a) { return a.q_len <= 16; }

// What depends on the engine alone: how keys are cut into sums, scratch, and the tiles of a block of keys.
template <class E>
class FewTiles {
 protected:
  using C = typename E::Element;
  // Keys that are worked on at once. Packed, they stay in L1 and L2; on tiles, a slice of their values stays in L1.
  static constexpr int64_t block = E::overlaps ? 128 : min(E::cut, 256);
  static constexpr int64_t lds = block + 16, ldp = block + 32, ldq = max_dim + 64 / sizeof(C), kept_words = block / 32;
  static_assert(key_sums % block == 0 && (block == E::cut || E::pieces == 1), "sums are cut as in ForwardTiles");

  FewTiles(const ForwardArgs& args, int threads)
      : a(args),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        depth(round_up(a.head_dim, E::depth)),
        v_cols(round_up(a.v_dim, panel)),
        most_rows(a.group() * a.q_len),
        sequences(a) {
    int64_t most_sums = 1;
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t hk = 0; hk < a.kv_heads; ++hk) {
        const Range own = sequences.of(sequences.slice_of(b, hk));
        for (int64_t i = own.begin; i < own.end; ++i) {
          const Unit unit{b, hk, a.group() * sequences[i].rows, sequences[i], records};
          units.push_back(unit);
          records += unit.sums() * unit.rows, most_sums = max(most_sums, unit.sums());
        }
      }
    shares = choose_shares(static_cast<int64_t>(units.size()), min(most_sums, 4 * threads), threads);
  }

  // A sequence, with the rows of all query heads of a key head. Row m is query m % sequence.rows of one of the heads.
  struct Unit {
    int64_t b, hk, rows;
    Sequence sequence;
    int64_t record;  // its first one
    int64_t sums() const { return (sequence.keys + key_sums - 1) / key_sums; }
  };
  struct Row {
    int64_t h, i;
    const int32_t* spans;
  };
  Row row_of(const Unit& u, int64_t m) const {
    const int64_t h = u.hk * a.group() + m / u.sequence.rows, i = u.sequence.row + m % u.sequence.rows;
    return {h, i, a.bounds.slice(u.b, h) + i * a.runs * 2};
  }

  // About how many pauses there are in the products of a block of keys.
  int64_t pauses_of_block(int64_t rows) const { return E::pauses(rows, block, depth + v_cols); }
  int64_t padded_rows() const { return round_up(most_rows, E::strip); }
  // Rows whose scores and weights are held at once: on tiles all, for which each slice of values is packed once.
  int64_t rows_at_once() const { return E::overlaps ? padded_rows() : E::strip; }
  int64_t p_plane() const { return rows_at_once() * ldp; }
  int64_t q_plane() const { return padded_rows() * depth; }
  int64_t k_plane() const { return E::overlaps ? StraightRoom<E>::key_plane(depth) : block * depth; }
  int64_t v_plane() const { return E::overlaps ? StraightRoom<E>::value_plane(block) : v_cols * block; }

  struct Own {
    C *q, *k, *v, *p;
    C* q_lines;            // for `Straight`; panels for `StraightTiles`
    float *keys, *values;  // copies of those that lie in pieces
    float *scores, *out, *maximum, *sums;
    RowOptions* options;  // of each row, null for a plain call
    uint32_t* kept;       // of dropout: a bit for each key of a block, row after row of a strip
  };
  Own lay_out(Carver& carver) const {
    Own o;
    o.q = carver.take<C>(E::pieces * q_plane());
    o.q_lines = carver.take<C>(E::overlaps ? E::pieces * q_plane() : E::strip * ldq);
    const bool few = E::overlaps || a.pages.table == nullptr;  // rows are copied, of both in one place on tiles
    o.keys = carver.take<float>((few ? key_step : block) * (E::overlaps ? max(a.head_dim, a.v_dim) : a.head_dim));
    o.values = carver.take<float>(few ? 0 : block * a.v_dim);
    o.k = carver.take<C>(E::pieces * k_plane());
    o.v = carver.take<C>(E::pieces * v_plane());
    o.p = carver.take<C>(E::pieces * p_plane());
    o.scores = carver.take<float>(rows_at_once() * lds);
    o.out = carver.take<float>(padded_rows() * v_cols);
    o.maximum = carver.take<float>(padded_rows());
    o.sums = carver.take<float>(padded_rows() * sum_lanes);
    o.options = changes ? carver.take<RowOptions>(most_rows) : nullptr;
    o.kept = carver.take<uint32_t>(drops ? E::strip * kept_words : 0);
    return o;
  }

  // What a sum of keys leaves for each row: weighted values, lanes of their weights, and the maximum.
  int64_t record() const { return v_cols + sum_lanes + panel; }
  float* lay_out_shared(Carver& carver) const { return carver.take<float>(records * record()); }

  void clear(const Unit& u, const Own& o) const {
    std::memset(o.out, 0, static_cast<size_t>(round_up(u.rows, E::strip) * v_cols) * sizeof(float));
    std::memset(o.sums, 0, static_cast<size_t>(u.rows * sum_lanes) * sizeof(float));
    for (int64_t m = 0; m < u.rows; ++m) o.maximum[m] = -infinity;
  }

  void write_record(const Own& o, int64_t m, float* to) const {
    std::memcpy(to, o.out + m * v_cols, static_cast<size_t>(v_cols) * sizeof(float));
    std::memcpy(to + v_cols, o.sums + m * sum_lanes, static_cast<size_t>(sum_lanes) * sizeof(float));
    to[v_cols + sum_lanes] = o.maximum[m];
  }

  // What becomes of the products of a strip of rows and of n keys from `key` on.
  [[gnu::noinline]] void ready_strip(const Unit& u, int64_t from, int64_t count, int64_t key, int64_t n,
                                     const Own& o) const {
    float* const s = o.scores + (E::overlaps ? from * lds : 0);
    C* const p = o.p + (E::overlaps ? from * ldp : 0);
    for (int64_t m = 0; m < count; ++m) {
      float* scores = s + m * lds;
      if (changes) {
        const RowOptions& row = o.options[from + m];
        row.exponents(scores, n, key, 1.0f);
        for (int64_t j = 0; drops && j < n; j += 32) o.kept[m * kept_words + j / 32] = row.kept_of(key + j);
      }
      hide(scores, key, n, row_of(u, from + m).spans, a.runs);
    }
    const float c = a.options.change_scores() ? 1.0f : magnitude_of(a.scale);
    const auto nothing = [](int64_t) {};
    const Running run{o.maximum + from, o.sums + from * sum_lanes};
    const Weigh<E> all{s, lds, p, ldp, p_plane(), count, n, c, 0.0f, run, o.out + from * v_cols, v_cols, 0};
    const Strip strip{nothing, drops ? o.kept : nullptr, kept_words};
    all.template strip<false>(strip);
    sum_rounded<E>(p, ldp, run.sums, count, n, drops);
  }

  // A strip of rows and n packed keys from `key` on.
  void add_strip(const Unit& u, int64_t from, int64_t key, int64_t n, Ahead& ahead, const Own& o) const {
    const int64_t rows = round_up(min(E::strip, u.rows - from), E::rows);
    E::product({o.q + from * depth, depth, q_plane()}, {o.k, depth * panel, k_plane()}, o.scores, lds, rows, n, depth,
               false, &ahead);
    ready_strip(u, from, min(E::strip, u.rows - from), key, n, o);
    E::product({o.p, ldp, p_plane()}, {o.v, block * panel, v_plane()}, o.out + from * v_cols, v_cols, rows, v_cols, n,
               true, &ahead);
  }

  const ForwardArgs& a;
  const bool changes, drops;
  const int64_t depth, v_cols, most_rows;
  const Sequences sequences;
  std::vector<Unit> units{};
  int64_t records = 0, shares = 1;
};

template <class T, class E>
class FewQueries : FewTiles<E> {
  using Tiles = FewTiles<E>;
  using Pack = PackerFor<T, E>;
  using Tiles::a, Tiles::block, Tiles::changes, Tiles::depth, Tiles::shares, Tiles::units, Tiles::v_cols;
  using typename Tiles::Own, typename Tiles::Row, typename Tiles::Unit;

 public:
  FewQueries(const ForwardArgs& args, int threads) : Tiles(args, threads) {}

  Scratch scratch() const {
    Carver shared, own;
    this->lay_out_shared(shared);
    this->lay_out(own);
    return {shared.used(), own.used()};
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) const {
    Carver carver(shared);
    float* const records = this->lay_out_shared(carver);
    const auto count = static_cast<int64_t>(units.size());
    parallel(count * shares, [&](int64_t item, int thread) {
      const FlushSubnormals flush;
      Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
      share_of_keys(unit(item / shares), item % shares, this->lay_out(carver), records);
    });
    // A thread takes several rows at once: scheduling one costs more than merging it.
    const int64_t together = max(1, 64 * count / max(1, this->records)),
                  parts = (this->most_rows + together - 1) / together;
    parallel(count * parts, [&](int64_t item, int) {
      const Unit& u = unit(item / parts);
      const int64_t first = item % parts * together;
      for (int64_t m = first; m < min(first + together, u.rows); ++m) merge(u, m, records);
    });
  }

 private:
  const Unit& unit(int64_t i) const { return units[static_cast<size_t>(i)]; }

  void share_of_keys(const Unit& u, int64_t share, const Own& o, float* records) const {
    const int64_t begin = u.sums() * share / shares, end = u.sums() * (share + 1) / shares;
    if (begin == end) return;
    const KeyValues<T> x(a, u.b, u.hk);
    for (int64_t m = 0; changes && m < u.rows; ++m)
      o.options[m] = RowOptions(a, u.b, this->row_of(u, m).h, this->row_of(u, m).i, magnitude_of(a.scale));
    const FlushSubnormals flush(!keeps_subnormals(u));
    pack_queries(u, o);
    const int64_t last_key = u.sequence.key + u.sequence.keys;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = u.sequence.key + n * key_sums, last = min(first + key_sums, last_key);
      this->clear(u, o);
      if constexpr (E::overlaps)
        on_tiles(u, x, first, last, o);
      else
        by_blocks(u, x, first, last, o);
      float* to = records + (u.record + n * u.rows) * this->record();
      for (int64_t m = 0; m < u.rows; ++m, to += this->record()) {
        // 0 * inf may have come from a key that the row does not see, and products of small values may have vanished.
        const float* out = o.out + m * v_cols;
        const float size = reduce_add(squares(out, v_cols));
        const bool small = o.maximum[m] > -infinity && may_vanish(sized(size, x.v, first, last, a.v_dim));
        if (!finite(out, 0, 1, v_cols) || small || (always_flushes<E> && keeps_subnormals(u)))
          by_itself(u, x, m, first, last, o);
        this->write_record(o, m, to);
      }
    }
  }

  // Are the queries so large or so small that a subnormal key counts?
  bool keeps_subnormals(const Unit& u) const {
    float norm = 0.0f;
    for (int64_t g = 0; g < a.group(); ++g)
      norm = larger_or_nan(norm, largest_norm(at<T>(a.q, u.b, u.hk * a.group() + g, u.sequence.row), a.q.row,
                                              u.sequence.rows, a.head_dim));
    return may_vanish(norm) || std::sqrt(norm) * std::fabs(a.scale) > 0x1p90f;
  }

  // Row m straight from the arrays.
  void by_itself(const Unit& u, const KeyValues<T>& x, int64_t m, int64_t first, int64_t last, const Own& o) const {
    const FlushSubnormals flush(false);
    const Row row = this->row_of(u, m);
    alignas(64) float query[max_dim], out[max_dim] = {};
    const float c = prepare_query(at<T>(a.q, u.b, row.h, row.i), a.head_dim, a.scale, query);
    RowSums sums{.v = out};
    for (int64_t r = 0; r < a.runs; ++r)
      for (int64_t j = max(row.spans[2 * r], first), hi = min(row.spans[2 * r + 1], last); j < hi; j += row_keys)
        add_keys(query, x, j, min(row_keys, hi - j), c, changes ? o.options + m : nullptr, &sums);
    std::memcpy(o.out + m * v_cols, out, static_cast<size_t>(v_cols) * sizeof(float));
    std::memset(o.sums + m * sum_lanes, 0, static_cast<size_t>(sum_lanes) * sizeof(float));
    // The lane of the only weight; several have two, see `lone_lane`.
    const int64_t lane = (sums.key - u.sequence.key) & (weight_lanes - 1), other = (lane + 1) % weight_lanes;
    o.sums[m * sum_lanes + lane] = sums.weights > 1 ? 0.5f * sums.total : sums.total;
    o.sums[m * sum_lanes + other] = sums.weights > 1 ? 0.5f * sums.total : 0.0f;
    if constexpr (rounds_weights<E>) o.sums[m * sum_lanes + weight_lanes] = sums.total;
    o.maximum[m] = std::isnan(sums.total) ? sums.total : sums.top + E::exponent_offset;
  }

  void pack_queries(const Unit& u, const Own& o) const {
    const int64_t plane = this->q_plane(), rows = u.sequence.rows, padded = round_up(u.rows, E::strip);
    for (int64_t g = 0; g < a.group(); ++g)
      Pack::rows(at<T>(a.q, u.b, u.hk * a.group() + g, u.sequence.row), a.q.row, rows, a.scale == 0.0f ? 0 : a.head_dim,
                 {o.q + g * rows * depth, plane}, depth, rows, a.scale < 0.0f);
    for (int piece = 0; piece < E::pieces; ++piece)
      std::memset(o.q + piece * plane + u.rows * depth, 0,
                  static_cast<size_t>((padded - u.rows) * depth) * sizeof(*o.q));
    if constexpr (E::overlaps) StraightTiles<T, E>::queries({o.q, depth, plane}, padded, {o.q_lines, plane});
  }

  void on_tiles(const Unit& u, const KeyValues<T>& x, int64_t first, int64_t last, const Own& o) const {
    [[maybe_unused]] const typename E::Session session;
    for (int64_t key = first; key < last; key += block) {
      const int64_t valid = min(block, last - key), n = round_up(valid, key_step);
      const StraightTiles<T, E> few(x, key, valid, u.sequence.key + u.sequence.keys, reinterpret_cast<T*>(o.keys));
      few.scores({o.q_lines, depth * panel, this->q_plane()}, depth, u.rows, o.scores, this->lds, o.k);
      for (int64_t from = 0; from < u.rows; from += E::strip)
        this->ready_strip(u, from, min(E::strip, u.rows - from), key, n, o);
      few.values({o.p, this->ldp, this->p_plane()}, u.rows, block, o.out, v_cols, o.v);
    }
  }

  // As the tiles of many queries, but each block is packed right before it is used, if at all.
  void by_blocks(const Unit& u, const KeyValues<T>& x, int64_t first, int64_t last, const Own& o) const {
    using Few = Straight<T, E, Tiles::ldp, Tiles::ldq>;
    static_assert(Few::at_once <= E::strip, "a strip has room for rows that are worked on together");
    [[maybe_unused]] const typename E::Session session;
    const bool straight = Few::serves(u.rows, a.head_dim, a.v_dim);
    const int64_t end = u.sequence.key + u.sequence.keys;
    for (int64_t key = first; key < last; key += block) {
      const int64_t valid = min(block, last - key), n = round_up(valid, key_step);
      const int64_t left = max(0, min(block, end - key - block));
      if (straight) {
        Groups<T> k, v;
        k.find(x.k, key, valid, n, x.dim, true, reinterpret_cast<T*>(o.keys));
        v.find(x.v, key, valid, valid, x.v_dim, false, reinterpret_cast<T*>(o.values));
        Ahead ahead;  // keys that are copied are not read while they are multiplied: the next ones are fetched then
        if (Few::copies_keys(min(Few::at_once, u.rows))) {
          ahead = Ahead(E::pauses(min(Few::at_once, u.rows), n, x.dim));
          read_ahead(ahead, x.k, key + block, left, x.dim);
        }
        for (int64_t from = 0, rows; from < u.rows; from += rows) {
          rows = min(Few::at_once, u.rows - from);
          Few::scores(o.q + from * depth, depth, k, x.dim, rows, n, o.scores, this->lds, o.q_lines, o.k, ahead);
          this->ready_strip(u, from, rows, key, n, o);
          Few::values(o.p, v, x.v_dim, rows, valid, o.out + from * v_cols, v_cols);
        }
        continue;
      }
      pack_block(x, key, valid, n, o);
      Ahead ahead(this->pauses_of_block(u.rows));
      read_ahead(ahead, x.k, key + block, left, x.dim);
      read_ahead(ahead, x.v, key + block, left, x.v_dim);
      for (int64_t from = 0; from < u.rows; from += E::strip) this->add_strip(u, from, key, n, ahead, o);
    }
  }

  // In whole steps of keys: what lies in pieces of other sizes is copied first.
  void pack_block(const KeyValues<T>& x, int64_t key, int64_t valid, int64_t n, const Own& o) const {
    for (int64_t at = 0, count; at < n; at += count) {
      const int64_t left = valid - at, run = min(x.k.run(key + at, left), x.v.run(key + at, left));
      count = run == left ? n - at : max(key_step, round_down(run, key_step));
      const int64_t rows = min(count, left);
      const auto k = x.k.together(key + at, rows, x.dim, reinterpret_cast<T*>(o.keys)),
                 v = x.v.together(key + at, rows, x.v_dim, reinterpret_cast<T*>(o.values));
      Pack::keys(k.data, k.stride, rows, x.dim, {o.k + at * depth, this->k_plane()}, depth * panel, 0, count, depth);
      Pack::dims(v.data, v.stride, rows, x.v_dim, {o.v + at * panel, this->v_plane()}, block * panel, 0, count, v_cols);
    }
  }

  // Records are added as `ForwardTiles::add_whole` does.
  void merge(const Unit& u, int64_t m, const float* records) const {
    const Row row = this->row_of(u, m);
    alignas(64) float out[max_dim] = {}, sums[sum_lanes] = {};
    const auto record = [&](int64_t n) { return records + (u.record + n * u.rows + m) * this->record(); };
    float top = -infinity, size = 0.0f;
    for (int64_t n = 0; n < u.sums(); ++n) size = larger_or_nan(size, reduce_add(squares(record(n), v_cols)));
    const FlushSubnormals flush(!may_vanish(size));
    for (int64_t n = 0; n < u.sums(); ++n) {
      const float *from = record(n), *lanes = from + v_cols;
      const float maximum = from[v_cols + sum_lanes], now = larger_or_nan(top, maximum);
      if (now == -infinity) continue;  // saw no key
      const Vec old = set(top == -infinity ? 0.0f : power_of_two(top - now)),
                own = set(maximum == -infinity ? 0.0f : power_of_two(maximum - now));
      const auto add = [&](float* to, const float* x, int64_t count) {
        for (int64_t d = 0; d < count; d += Vec::width) store(to + d, fma(load(to + d), old, load(x + d) * own));
      };
      add(out, from, v_cols), add(sums, lanes, sum_lanes);
      top = now;
    }
    const bool sees = sees_any(row.spans, a.runs);
    if (!sees) std::memset(out, 0, sizeof out);  // whatever the bias of hidden keys was
    const double base = changes ? RowOptions(a, u.b, row.h, row.i, 1.0f).base() : 0.0;
    const float sum = sees ? whole_sum(sums) : 0.0f;
    RowEnd end = end_of_row(top - E::exponent_offset, sum, sink_of(a, row.h), kept_weight_of(a), base);
    end.factor *= correction_of<E>(sums, sum);
    if (sees && is_lost<T>(a, u.b, row.h, row.i, end.lse))
      end = {1.0f, ExactRow<T>(a, u.b, row.h, row.i).forward(out)};
    else if (const int lane = sees ? lane_to_settle<T, E>(a, sums, sum) : -1; lane >= 0)
      end.factor = settle<T>(a, u.b, row.h, row.i, u.sequence.key + lane, E::value_error, end.weight, end.factor, out);
    write_row<T>(out, end.factor, a.out, u.b, row.h, row.i, a.v_dim);
    write_lse(a, u.b, row.h, row.i, end.lse);
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
