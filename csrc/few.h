// Forward for few query rows over many keys (decoding): a read of K and V, which should take as long as that read.
//
// Rows of all query heads that share a key head are worked on together, so that each key is fetched once. Many keys are
// cut into chunks, by the problem's shape and mask alone. Each chunk leaves sums relative to its own maximum, and a
// last loop merges them in a fixed order. Threads take shares of consecutive chunks where heads alone do not keep them
// busy: how many threads there are does not change a bit.
#pragma once

#include "attention.h"
#include "exact.h"
#include "pack.h"
#include "rows.h"
#include "scores.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T, class E>
class FewQueries {
  using C = typename E::Element;
  using Pack = PackerFor<T, E>;
  static constexpr int64_t most_queries = 16, block = 64;  // keys packed at once: they stay in L1
  static constexpr int64_t lds = block + 16, ldp = block + 32, kept_words = block / 32;
  static constexpr int64_t tile_rows = 16;  // with fewer rows, packing costs more than tiles save

 public:
  FewQueries(const ForwardArgs& args, int threads)
      : a(args),
        rows(a.group() * a.q_len),
        padded_rows(round_up(rows, E::strip)),
        depth(round_up(a.head_dim, E::depth)),
        v_cols(round_up(a.v_dim, panel)),
        q_plane(padded_rows * depth),
        k_plane(block * depth),
        v_plane(v_cols * block),
        p_plane(E::strip * ldp),
        reach(longest_reach()),
        chunk(choose_chunk()),
        chunks((reach + chunk - 1) / chunk + 1),
        shares(choose_shares(threads)),
        record(v_cols + panel),
        changes(args.options.change_weights()),
        drops(args.options.dropout.on()) {}

  static bool takes(const ForwardArgs& a) { return a.q_len <= most_queries; }

  Scratch scratch() const {
    Carver shared, own;
    lay_out_shared(shared);
    lay_out(own);
    return {shared.used(), own.used()};
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) const {
    Carver carver(shared);
    const Shared all = lay_out_shared(carver);
    parallel(heads() * shares, [&](int64_t item, int thread) {
      const FlushSubnormals flush;
      Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
      const int64_t head = item / shares;
      share_of_keys(head, item % shares, lay_out(carver), all);
    });
    // A thread takes several rows at once: scheduling one costs more than merging it.
    const int64_t together = most(1, 64 / chunks), parts = (rows + together - 1) / together;
    parallel(heads() * parts, [&](int64_t item, int) {
      const int64_t head = item / parts, first = item % parts * together;
      for (int64_t m = first; m < least(first + together, rows); ++m)
        merge(head, m, all.seen[head], records_of(all, head));
    });
  }

 private:
  struct Own {
    float* query;  // rows, widened
    C *q, *k, *v, *p;
    float *scores, *out, *maximum, *sums;
    RowOptions* options;  // of each row
    uint32_t* kept;       // of dropout: a bit for each key of a block, row after row of a strip
  };

  // Of all heads: the chunks that hold what its rows see, and what each chunk leaves for each row.
  struct ChunkRange {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
  };
  struct Shared {
    ChunkRange* seen;
    float* records;
  };
  Shared lay_out_shared(Carver& carver) const {
    ChunkRange* seen = carver.take<ChunkRange>(heads());
    return {seen, carver.take<float>(heads() * chunks * rows * record)};
  }
  float* records_of(const Shared& all, int64_t head) const { return all.records + head * chunks * rows * record; }

  // Row m of a key head is query m % q_len of its query head m / q_len.
  struct Row {
    int64_t h, i;
    const int32_t* spans;
  };
  Row row_of(int64_t head, int64_t m) const {
    const int64_t b = head / a.kv_heads, h = head % a.kv_heads * a.group() + m / a.q_len, i = m % a.q_len;
    return {h, i, a.bounds.slice(b, h) + i * a.runs * 2};
  }

  int64_t heads() const { return a.batch * a.kv_heads; }

  Own lay_out(Carver& carver) const {
    Own o;
    o.query = carver.take<float>(rows * max_dim);
    o.q = carver.take<C>(E::pieces * q_plane);
    o.k = carver.take<C>(E::pieces * k_plane);
    o.v = carver.take<C>(E::pieces * v_plane);
    o.p = carver.take<C>(E::pieces * p_plane);
    o.scores = carver.take<float>(E::strip * lds);
    o.out = carver.take<float>(padded_rows * v_cols);
    o.maximum = carver.take<float>(padded_rows);
    o.sums = carver.take<float>(padded_rows * Vec::width);
    o.options = carver.take<RowOptions>(changes ? rows : 0);
    o.kept = carver.take<uint32_t>(drops ? E::strip * kept_words : 0);
    return o;
  }

  // The most keys from the first to the last that a head's rows see.
  int64_t longest_reach() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < a.bounds.batches; ++b)
      for (int64_t hk = 0; hk < (a.bounds.heads == 1 ? 1 : a.kv_heads); ++hk) {
        const Hull hull = hull_of_head(b * a.kv_heads + hk);
        longest = most(longest, hull.hi - hull.lo);
      }
    return longest;
  }

  // Keys of a chunk, whole blocks of them: the same on any number of threads, because what is summed with what decides
  // the last bits. Small enough to keep many threads busy, with few heads as with many, and large enough that merging
  // is cheap: a row of a chunk leaves about as much as four keys take, and tiles are soon done with a chunk.
  int64_t choose_chunk() const {
    constexpr int64_t least_cut = 16 * row_keys, most_chunks = 256;
    if (reach < least_cut) return round_up(most(1, a.k_len), row_keys);
    const int64_t least_chunk = most((rows >= tile_rows ? 8 : 4) * row_keys, 4 * rows),
                  of_a_head = most(1, most_chunks / most(1, heads()));
    return round_up(most(least_chunk, (reach + of_a_head - 1) / of_a_head), row_keys);
  }

  // Enough shares of each head to keep the threads nine tenths busy, of a few blocks each.
  int64_t choose_shares(int threads) const {
    const int64_t limit = most(1, least(least(reach / (4 * row_keys), chunks), 4 * threads));
    for (int64_t n = 1; n <= limit; ++n) {
      const int64_t units = heads() * n, rounds = (units + threads - 1) / threads;
      if (units * 10 >= rounds * threads * 9) return n;
    }
    return limit;
  }

  Hull hull_of_head(int64_t head) const {
    Hull hull;
    for (int64_t m = 0; m < rows; ++m) hull.include(hull_of(row_of(head, m).spans, 1, a.runs));
    return hull;
  }

  ChunkRange chunks_of(const Hull& hull) const {
    return hull.lo >= hull.hi ? ChunkRange{0, 0} : ChunkRange{hull.lo / chunk, (hull.hi + chunk - 1) / chunk};
  }

  void share_of_keys(int64_t head, int64_t share, const Own& o, const Shared& all) const {
    const Hull hull = hull_of_head(head);
    const ChunkRange seen = chunks_of(hull);
    const int64_t begin = seen.begin + seen.size() * share / shares,
                  end = seen.begin + seen.size() * (share + 1) / shares;
    if (share == 0) all.seen[head] = seen;
    if (begin == end) return;
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads;
    const KeyValues<T> x{at<T>(a.k, b, hk, 0), at<T>(a.v, b, hk, 0), a.k.row, a.v.row, a.head_dim, a.v_dim};
    if (changes)
      for (int64_t m = 0; m < rows; ++m)
        o.options[m] = RowOptions::make<T>(a, b, row_of(head, m).h, row_of(head, m).i, magnitude_of(a.scale));
    const bool try_tiles = rows >= tile_rows && finite_queries(head);
    if (try_tiles) pack_queries(head, o);
    const int64_t fetched = least(hull.hi, end * chunk);
    bool widened = false;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = most(round_down(hull.lo, key_step), n * chunk), last = least(hull.hi, (n + 1) * chunk);
      const bool tiles = try_tiles && by_blocks(head, x, first, last, fetched, o);
      if (!tiles) {
        if (!widened) widen_queries(head, o);
        widened = true;
        by_rows(head, x, first, last, fetched, o);
      }
      write_records(o, tiles, records_of(all, head) + (n - seen.begin) * rows * record);
    }
  }

  void clear(const Own& o) const {
    std::memset(o.out, 0, static_cast<size_t>(padded_rows * v_cols) * sizeof(float));
    for (int64_t m = 0; m < padded_rows; ++m) {
      o.maximum[m] = -infinity;
      store(o.sums + m * Vec::width, zero());
    }
  }

  void write_records(const Own& o, bool tiles, float* to) const {
    for (int64_t m = 0; m < rows; ++m, to += record) {
      std::memcpy(to, o.out + m * v_cols, static_cast<size_t>(v_cols) * sizeof(float));
      to[v_cols] = o.maximum[m] - (tiles ? E::exponent_offset : 0.0f);
      to[v_cols + 1] = reduce_add(load(o.sums + m * Vec::width));
    }
  }

  bool finite_queries(int64_t head) const {
    for (int64_t m = 0; m < rows; ++m) {
      const Row row = row_of(head, m);
      if (!finite(at<T>(a.q, head / a.kv_heads, row.h, row.i), 0, 1, a.head_dim)) return false;
    }
    return true;
  }

  void widen_queries(int64_t head, const Own& o) const {
    for (int64_t m = 0; m < rows; ++m) {
      const Row row = row_of(head, m);
      prepare_query(at<T>(a.q, head / a.kv_heads, row.h, row.i), a.head_dim, a.scale, o.query + m * max_dim);
    }
  }

  // Straight from the arrays, a block of keys for one group of rows after the other; the first group fetches the next
  // block meanwhile, up to key `fetched`.
  void by_rows(int64_t head, const KeyValues<T>& x, int64_t first, int64_t last, int64_t fetched, const Own& o) const {
    const float c = magnitude_of(a.scale);
    clear(o);
    for (int64_t at = first; at < last; at += row_keys) {
      const int64_t to = least(at + row_keys, last), ahead = most(0, least(row_keys, fetched - to));
      for (int64_t m = 0; m < rows;)
        if (m + 4 <= rows && see_all(head, m, 4, at, to))
          group<4>(m, x, at, to, m == 0 ? ahead : 0, c, o), m += 4;
        else if (see_all(head, m, 1, at, to))
          group<1>(m, x, at, to, m == 0 ? ahead : 0, c, o), m += 1;
        else
          spans_of_row(head, m, x, at, to, c, o), m += 1;
    }
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

  template <int R>
  void group(int64_t m, const KeyValues<T>& x, int64_t from, int64_t to, int64_t ahead, float c, const Own& o) const {
    RowSums sums[R];
    for (int r = 0; r < R; ++r) sums[r] = {o.maximum[m + r], o.sums[(m + r) * Vec::width], o.out + (m + r) * v_cols};
    if (changes)
      add_keys<R>(o.query + m * max_dim, x, from, to - from, ahead, c, RowsWithOptions{o.options + m}, sums);
    else
      add_keys<R>(o.query + m * max_dim, x, from, to - from, ahead, c, PlainRows{}, sums);
    for (int r = 0; r < R; ++r) {
      o.maximum[m + r] = sums[r].top;
      o.sums[(m + r) * Vec::width] = sums[r].total;
    }
  }

  void spans_of_row(int64_t head, int64_t m, const KeyValues<T>& x, int64_t from, int64_t to, float c,
                    const Own& o) const {
    const int32_t* spans = row_of(head, m).spans;
    for (int64_t r = 0; r < a.runs; ++r) {
      const int64_t lo = most(spans[2 * r], from), hi = least(spans[2 * r + 1], to);
      if (lo < hi) group<1>(m, x, lo, hi, 0, c, o);
    }
  }

  void pack_queries(int64_t head, const Own& o) const {
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads;
    for (int64_t g = 0; g < a.group(); ++g)
      Pack::rows(at<T>(a.q, b, hk * a.group() + g, 0), a.q.row, a.q_len, a.scale == 0.0f ? 0 : a.head_dim,
                 {o.q + g * a.q_len * depth, q_plane}, depth, a.q_len, a.scale < 0.0f);
    for (int piece = 0; piece < E::pieces; ++piece)
      std::memset(o.q + piece * q_plane + rows * depth, 0,
                  static_cast<size_t>((padded_rows - rows) * depth) * sizeof(C));
  }

  // As the tiles of many queries, but each block is packed right before it is used. False where a number is not finite.
  bool by_blocks(int64_t head, const KeyValues<T>& x, int64_t first, int64_t last, int64_t fetched,
                 const Own& o) const {
    const float c = magnitude_of(a.scale);
    clear(o);
    E::begin();
    for (int64_t key = first; key < last; key += block) {
      const int64_t valid = least(block, last - key), n = round_up(valid, key_step);
      if (!finite(x.key(key), x.k_stride, valid, x.dim) || !finite(x.value(key), x.v_stride, valid, x.v_dim)) {
        E::end();
        return false;
      }
      Pack::keys(x.key(key), x.k_stride, valid, x.dim, {o.k, k_plane}, depth * panel, 0, n, depth);
      Pack::dims(x.value(key), x.v_stride, valid, x.v_dim, {o.v, v_plane}, block * panel, 0, n, v_cols);
      for (int64_t at = 0; at < rows; at += E::strip) strip(head, at, x, key, n, last, fetched, c, o);
    }
    E::end();
    return true;
  }

  void strip(int64_t head, int64_t from, const KeyValues<T>& x, int64_t key, int64_t n, int64_t last, int64_t fetched,
             float c, const Own& o) const {
    const int64_t count = least(E::strip, rows - from), next_end = from == 0 ? least(key + 2 * block, fetched) : 0;
    for (int64_t j = key + block; j < next_end; ++j) prefetch_row(x.key(j), x.dim);
    E::product({o.q + from * depth, depth, q_plane}, {o.k, depth * panel, k_plane}, o.scores, lds,
               round_up(count, E::rows), n, depth, false);
    for (int64_t m = 0; m < count; ++m) {
      if (changes) ready_row(o, from, m, key, n);
      hide(o.scores + m * lds, key, n, row_of(head, from + m).spans, a.runs);
      for (int64_t j = most(0, last - key); j < n; ++j) o.scores[m * lds + j] = -infinity;
    }
    for (int64_t j = key + block; j < next_end; ++j) prefetch_row(x.value(j), x.v_dim);
    const Running run{o.maximum + from, o.sums + from * Vec::width};
    const auto softmax = [&](const auto& strip) {
      softmax_strip<E, false>(o.scores, lds, o.p, ldp, p_plane, round_up(count, 4), n,
                              a.options.change_scores() ? 1.0f : c, 0.0f, run, o.out + from * v_cols, v_cols, strip,
                              [] {});
    };
    const auto ready = [](int64_t) {};
    if (drops)
      softmax(ChangedStrip<decltype(ready)>{ready, o.kept, kept_words});
    else
      softmax(PlainStrip{});
    E::product({o.p, ldp, p_plane}, {o.v, block * panel, v_plane}, o.out + from * v_cols, v_cols,
               round_up(count, E::rows), v_cols, n, true);
  }

  // Row `from` + m of a strip with options: scores become exponents, and dropout decides.
  void ready_row(const Own& o, int64_t from, int64_t m, int64_t key, int64_t n) const {
    const RowOptions& row = o.options[from + m];
    row.exponents(o.scores + m * lds, n, key, 1.0f);
    if (drops)
      for (int64_t j = 0; j < n; j += 32) o.kept[m * kept_words + j / 32] = row.kept_of(key + j);
  }

  void merge(int64_t head, int64_t m, ChunkRange seen, const float* records) const {
    const Row row = row_of(head, m);
    const int64_t b = head / a.kv_heads;
    const auto record_of = [&](int64_t n) { return records + ((n - seen.begin) * rows + m) * record; };
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
    const double base = changes ? RowOptions::make<T>(a, b, row.h, row.i, 1.0f).base() : 0.0;
    RowEnd end = end_of_row(top, sees ? total : 0.0f, sink_of(a, row.h), kept_weight_of(a), base);
    if (sees && is_lost<T>(a, b, row.h, row.i, end.lse, base))
      end = {1.0f, ExactRow<T>(a, b, row.h, row.i).forward(out)};
    write_row<T>(out, end.factor, a.out, b, row.h, row.i, a.v_dim);
    write_lse(a, b, row.h, row.i, end.lse);
  }

  const ForwardArgs& a;
  const int64_t rows, padded_rows, depth, v_cols, q_plane, k_plane, v_plane, p_plane, reach, chunk, chunks, shares,
      record;
  const bool changes, drops;
};

}  // namespace attnspan::ATTNSPAN_ISA
