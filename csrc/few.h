// Forward for few query rows over many keys (decoding): a read of K and V, which should take as long as that read.
//
// Rows of all query heads that share a key head are worked on together, so that each key is fetched once. Many keys are
// cut into chunks, by the problem's shape and mask alone. Each chunk leaves sums relative to its own maximum, and a
// last loop merges them in a fixed order. Threads take shares of consecutive chunks where heads alone do not keep them
// busy: how many threads there are does not change a bit.
#pragma once

#include "exact.h"
#include "pack.h"
#include "parts.h"
#include "row_options.h"

namespace attnspan::ATTNSPAN_ISA {

inline bool few_queries(const Problem& a) { return a.q_len <= 16; }

// What depends on the engine alone: how keys are cut into chunks, scratch, and the tiles of a block of keys.
template <class E>
class FewTiles {
 protected:
  using C = typename E::Element;
  static constexpr int64_t block = 64;  // keys packed at once: they stay in L1
  static constexpr int64_t lds = block + 16, ldp = block + 32, kept_words = block / 32, p_plane = E::strip * ldp;
  static constexpr int64_t tile_rows = 16;  // with fewer rows, packing costs more than tiles save

  FewTiles(const ForwardArgs& args, int threads)
      : a(args),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        heads(a.batch * a.kv_heads),
        rows(a.group() * a.q_len),
        depth(round_up(a.head_dim, E::depth)),
        v_cols(round_up(a.v_dim, panel)),
        reach(longest_reach()),
        chunk(choose_chunk()),
        chunks((reach + chunk - 1) / chunk + 1),
        shares(choose_shares(heads, min(min(reach / (4 * row_keys), chunks), 4 * threads), threads)) {}

  int64_t padded_rows() const { return round_up(rows, E::strip); }
  int64_t q_plane() const { return padded_rows() * depth; }
  int64_t k_plane() const { return block * depth; }
  int64_t v_plane() const { return v_cols * block; }

  struct Own {
    float* query;  // rows, widened
    C *q, *k, *v, *p;
    float *scores, *out, *maximum, *sums;
    RowOptions* options;  // of each row, null for a plain call
    uint32_t* kept;       // of dropout: a bit for each key of a block, row after row of a strip
  };
  Own lay_out(Carver& carver) const {
    Own o;
    o.query = carver.take<float>(rows * max_dim);
    o.q = carver.take<C>(E::pieces * q_plane());
    o.k = carver.take<C>(E::pieces * k_plane());
    o.v = carver.take<C>(E::pieces * v_plane());
    o.p = carver.take<C>(E::pieces * p_plane);
    o.scores = carver.take<float>(E::strip * lds);
    o.out = carver.take<float>(padded_rows() * v_cols);
    o.maximum = carver.take<float>(padded_rows());
    o.sums = carver.take<float>(padded_rows() * Vec::width);
    o.options = changes ? carver.take<RowOptions>(rows) : nullptr;
    o.kept = carver.take<uint32_t>(drops ? E::strip * kept_words : 0);
    return o;
  }

  // Of all heads: the chunks that hold what its rows see, and what each chunk leaves for each row.
  struct Shared {
    Range* seen;
    float* records;
  };
  int64_t record() const { return v_cols + panel; }  // weighted values, their maximum and their sum
  Shared lay_out_shared(Carver& carver) const {
    Range* seen = carver.take<Range>(heads);
    return {seen, carver.take<float>(heads * chunks * rows * record())};
  }
  float* records_of(const Shared& all, int64_t head) const { return all.records + head * chunks * rows * record(); }

  // Row m of a key head is query m % q_len of its query head m / q_len.
  struct Row {
    int64_t h, i;
    const int32_t* spans;
  };
  Row row_of(int64_t head, int64_t m) const {
    const int64_t b = head / a.kv_heads, h = head % a.kv_heads * a.group() + m / a.q_len, i = m % a.q_len;
    return {h, i, a.bounds.slice(b, h) + i * a.runs * 2};
  }

  Hull hull_of_head(int64_t head) const {
    Hull hull;
    for (int64_t m = 0; m < rows; ++m) hull.include(hull_of(row_of(head, m).spans, 1, a.runs));
    return hull;
  }
  Range chunks_of(const Hull& hull) const {
    return hull.lo >= hull.hi ? Range{0, 0} : Range{hull.lo / chunk, (hull.hi + chunk - 1) / chunk};
  }

  bool see_all(int64_t head, int64_t m, int64_t count, int64_t from, int64_t to) const {
    for (int64_t i = m; i < m + count; ++i) {
      const int32_t* spans = row_of(head, i).spans;
      bool all = false;
      for (int64_t r = 0; r < a.runs; ++r) all |= spans[2 * r] <= from && spans[2 * r + 1] >= to;
      if (!all) return false;
    }
    return true;
  }

  void clear(const Own& o) const {
    std::memset(o.out, 0, static_cast<size_t>(padded_rows() * v_cols) * sizeof(float));
    for (int64_t m = 0; m < padded_rows(); ++m) {
      o.maximum[m] = -infinity;
      store(o.sums + m * Vec::width, zero());
    }
  }

  void write_records(const Own& o, bool tiles, float* to) const {
    for (int64_t m = 0; m < rows; ++m, to += record()) {
      std::memcpy(to, o.out + m * v_cols, static_cast<size_t>(v_cols) * sizeof(float));
      to[v_cols] = o.maximum[m] - (tiles ? E::exponent_offset : 0.0f);
      to[v_cols + 1] = reduce_add(load(o.sums + m * Vec::width));
    }
  }

  // Scores of a strip of rows and of n packed keys from `key` on; those from `last` on are padding.
  [[gnu::noinline]] void score_strip(int64_t head, int64_t from, int64_t key, int64_t n, int64_t last,
                                     const Own& o) const {
    const int64_t count = min(E::strip, rows - from);
    E::product({o.q + from * depth, depth, q_plane()}, {o.k, depth * panel, k_plane()}, o.scores, lds,
               round_up(count, E::rows), n, depth, false);
    for (int64_t m = 0; m < count; ++m) {
      float* scores = o.scores + m * lds;
      if (changes) {
        const RowOptions& row = o.options[from + m];
        row.exponents(scores, n, key, 1.0f);
        for (int64_t j = 0; drops && j < n; j += 32) o.kept[m * kept_words + j / 32] = row.kept_of(key + j);
      }
      hide(scores, key, n, row_of(head, from + m).spans, a.runs);
      for (int64_t j = max(0, last - key); j < n; ++j) scores[j] = -infinity;
    }
  }

  // Softmax of these scores, and product with V.
  [[gnu::noinline]] void add_strip(int64_t from, int64_t n, const Own& o) const {
    const int64_t count = min(E::strip, rows - from);
    const float c = a.options.change_scores() ? 1.0f : magnitude_of(a.scale);
    const auto nothing = [](int64_t) {};
    const Running run{o.maximum + from, o.sums + from * Vec::width};
    softmax_strip<E, false>(o.scores, lds, o.p, ldp, p_plane, round_up(count, 4), n, c, 0.0f, run,
                            o.out + from * v_cols, v_cols, Strip{nothing, drops ? o.kept : nullptr, kept_words},
                            nothing);
    E::product({o.p, ldp, p_plane}, {o.v, block * panel, v_plane()}, o.out + from * v_cols, v_cols,
               round_up(count, E::rows), v_cols, n, true);
  }

  const ForwardArgs& a;
  const bool changes, drops;
  const int64_t heads, rows, depth, v_cols, reach, chunk, chunks, shares;

 private:
  // The most keys from the first to the last that a head's rows see.
  int64_t longest_reach() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < a.bounds.batches; ++b)
      for (int64_t hk = 0; hk < (a.bounds.heads == 1 ? 1 : a.kv_heads); ++hk) {
        const Hull hull = hull_of_head(b * a.kv_heads + hk);
        longest = max(longest, hull.hi - hull.lo);
      }
    return longest;
  }

  // Keys of a chunk, whole blocks of them: the same on any number of threads, because what is summed with what decides
  // the last bits. Small enough to keep many threads busy, with few heads as with many, and large enough that merging
  // is cheap: a row of a chunk leaves about as much as four keys take, and tiles are soon done with a chunk.
  int64_t choose_chunk() const {
    constexpr int64_t least_cut = 16 * row_keys, most_chunks = 256;
    if (reach < least_cut) return round_up(max(1, a.k_len), row_keys);
    const int64_t least_chunk = max((rows >= tile_rows ? 8 : 4) * row_keys, 4 * rows),
                  of_a_head = max(1, most_chunks / max(1, heads));
    return round_up(max(least_chunk, (reach + of_a_head - 1) / of_a_head), row_keys);
  }
};

template <class T, class E>
class FewQueries : FewTiles<E> {
  using Tiles = FewTiles<E>;
  using Pack = PackerFor<T, E>;
  using Tiles::a, Tiles::block, Tiles::changes, Tiles::chunk, Tiles::depth, Tiles::heads, Tiles::rows, Tiles::shares,
      Tiles::v_cols;
  using typename Tiles::Own, typename Tiles::Row, typename Tiles::Shared;

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
    const Shared all = this->lay_out_shared(carver);
    parallel(heads * shares, [&](int64_t item, int thread) {
      const FlushSubnormals flush;
      Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
      share_of_keys(item / shares, item % shares, this->lay_out(carver), all);
    });
    // A thread takes several rows at once: scheduling one costs more than merging it.
    const int64_t together = max(1, 64 / this->chunks), parts = (rows + together - 1) / together;
    parallel(heads * parts, [&](int64_t item, int) {
      const int64_t head = item / parts, first = item % parts * together;
      for (int64_t m = first; m < min(first + together, rows); ++m)
        merge(head, m, all.seen[head], this->records_of(all, head));
    });
  }

 private:
  void share_of_keys(int64_t head, int64_t share, const Own& o, const Shared& all) const {
    const Hull hull = this->hull_of_head(head);
    const Range seen = this->chunks_of(hull);
    const int64_t begin = seen.begin + seen.size() * share / shares,
                  end = seen.begin + seen.size() * (share + 1) / shares;
    if (share == 0) all.seen[head] = seen;
    if (begin == end) return;
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads;
    const KeyValues<T> x{at<T>(a.k, b, hk, 0), at<T>(a.v, b, hk, 0), a.k.row, a.v.row, a.head_dim, a.v_dim};
    if (changes)
      for (int64_t m = 0; m < rows; ++m)
        o.options[m] = RowOptions(a, b, this->row_of(head, m).h, this->row_of(head, m).i, magnitude_of(a.scale));
    const bool try_tiles = rows >= Tiles::tile_rows && finite_queries(head);
    if (try_tiles) pack_queries(head, o);
    const int64_t fetched = min(hull.hi, end * chunk);
    bool widened = false;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = max(round_down(hull.lo, key_step), n * chunk), last = min(hull.hi, (n + 1) * chunk);
      this->clear(o);
      const bool tiles = try_tiles && by_blocks(head, x, first, last, fetched, o);
      if (!tiles) {
        if (try_tiles) this->clear(o);
        if (!widened) widen_queries(head, o);
        widened = true;
        by_rows(head, x, first, last, fetched, o);
      }
      this->write_records(o, tiles, this->records_of(all, head) + (n - seen.begin) * rows * this->record());
    }
  }

  bool finite_queries(int64_t head) const {
    for (int64_t m = 0; m < rows; ++m) {
      const Row row = this->row_of(head, m);
      if (!finite(at<T>(a.q, head / a.kv_heads, row.h, row.i), 0, 1, a.head_dim)) return false;
    }
    return true;
  }

  void widen_queries(int64_t head, const Own& o) const {
    for (int64_t m = 0; m < rows; ++m) {
      const Row row = this->row_of(head, m);
      prepare_query(at<T>(a.q, head / a.kv_heads, row.h, row.i), a.head_dim, a.scale, o.query + m * max_dim);
    }
  }

  // Straight from the arrays, a block of keys for one group of rows after the other; the first group fetches the next
  // block meanwhile, up to key `fetched`.
  void by_rows(int64_t head, const KeyValues<T>& x, int64_t first, int64_t last, int64_t fetched, const Own& o) const {
    for (int64_t at = first; at < last; at += row_keys) {
      const int64_t to = min(at + row_keys, last), ahead = max(0, min(row_keys, fetched - to));
      for (int64_t m = 0; m < rows;)
        if (m + 4 <= rows && this->see_all(head, m, 4, at, to))
          group<4>(m, x, at, to, m == 0 ? ahead : 0, o), m += 4;
        else if (this->see_all(head, m, 1, at, to))
          group<1>(m, x, at, to, m == 0 ? ahead : 0, o), m += 1;
        else
          spans_of_row(head, m, x, at, to, o), m += 1;
    }
  }

  template <int R>
  void group(int64_t m, const KeyValues<T>& x, int64_t from, int64_t to, int64_t ahead, const Own& o) const {
    RowSums sums[R];
    for (int r = 0; r < R; ++r) sums[r] = {o.maximum[m + r], o.sums[(m + r) * Vec::width], o.out + (m + r) * v_cols};
    add_keys<R>(o.query + m * max_dim, x, from, to - from, ahead, magnitude_of(a.scale),
                changes ? o.options + m : nullptr, sums);
    for (int r = 0; r < R; ++r) {
      o.maximum[m + r] = sums[r].top;
      o.sums[(m + r) * Vec::width] = sums[r].total;
    }
  }

  void spans_of_row(int64_t head, int64_t m, const KeyValues<T>& x, int64_t from, int64_t to, const Own& o) const {
    const int32_t* spans = this->row_of(head, m).spans;
    for (int64_t r = 0; r < a.runs; ++r) {
      const int64_t lo = max(spans[2 * r], from), hi = min(spans[2 * r + 1], to);
      if (lo < hi) group<1>(m, x, lo, hi, 0, o);
    }
  }

  void pack_queries(int64_t head, const Own& o) const {
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads, plane = this->q_plane();
    for (int64_t g = 0; g < a.group(); ++g)
      Pack::rows(at<T>(a.q, b, hk * a.group() + g, 0), a.q.row, a.q_len, a.scale == 0.0f ? 0 : a.head_dim,
                 {o.q + g * a.q_len * depth, plane}, depth, a.q_len, a.scale < 0.0f);
    for (int piece = 0; piece < E::pieces; ++piece)
      std::memset(o.q + piece * plane + rows * depth, 0,
                  static_cast<size_t>((this->padded_rows() - rows) * depth) * sizeof(*o.q));
  }

  // As the tiles of many queries, but each block is packed right before it is used, and what follows is fetched
  // meanwhile, up to key `fetched`. False where a number is not finite.
  bool by_blocks(int64_t head, const KeyValues<T>& x, int64_t first, int64_t last, int64_t fetched,
                 const Own& o) const {
    [[maybe_unused]] const typename E::Session session;
    for (int64_t key = first; key < last; key += block) {
      const int64_t valid = min(block, last - key), n = round_up(valid, key_step);
      if (!finite(x.key(key), x.k_stride, valid, x.dim) || !finite(x.value(key), x.v_stride, valid, x.v_dim))
        return false;
      Pack::keys(x.key(key), x.k_stride, valid, x.dim, {o.k, this->k_plane()}, depth * panel, 0, n, depth);
      Pack::dims(x.value(key), x.v_stride, valid, x.v_dim, {o.v, this->v_plane()}, block * panel, 0, n, v_cols);
      for (int64_t from = 0; from < rows; from += E::strip) {
        const int64_t next = key + block, end = from == 0 ? min(next + block, fetched) : 0;
        for (int64_t j = next; j < end; ++j) prefetch_row(x.key(j), x.dim);
        this->score_strip(head, from, key, n, last, o);
        for (int64_t j = next; j < end; ++j) prefetch_row(x.value(j), x.v_dim);
        this->add_strip(from, n, o);
      }
    }
    return true;
  }

  void merge(int64_t head, int64_t m, Range seen, const float* records) const {
    const Row row = this->row_of(head, m);
    const int64_t b = head / a.kv_heads;
    const auto record_of = [&](int64_t n) { return records + ((n - seen.begin) * rows + m) * this->record(); };
    float top = -infinity;
    for (int64_t n = seen.begin; n < seen.end; ++n) top = larger_or_nan(top, record_of(n)[v_cols]);
    alignas(64) float out[max_dim] = {};
    float total = 0.0f;
    for (int64_t n = seen.begin; n < seen.end; ++n) {
      const float* from = record_of(n);
      if (from[v_cols] == -infinity && from[v_cols + 1] == 0.0f) continue;  // saw no key
      const float factor = from[v_cols] == top ? 1.0f : std::exp2(from[v_cols] - top);
      total += factor * from[v_cols + 1];
      const Vec f = set(factor);
      for (int64_t d = 0; d < v_cols; d += Vec::width) store(out + d, fma(f, load(from + d), load(out + d)));
    }
    const bool sees = sees_any(row.spans, a.runs);
    if (!sees) std::memset(out, 0, sizeof out);  // whatever the bias of hidden keys was
    const double base = changes ? RowOptions(a, b, row.h, row.i, 1.0f).base() : 0.0;
    RowEnd end = end_of_row(top, sees ? total : 0.0f, sink_of(a, row.h), kept_weight_of(a), base);
    if (sees && is_lost<T>(a, b, row.h, row.i, end.lse, base))
      end = {1.0f, ExactRow<T>(a, b, row.h, row.i).forward(out)};
    write_row<T>(out, end.factor, a.out, b, row.h, row.i, a.v_dim);
    write_lse(a, b, row.h, row.i, end.lse);
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
