// Forward: online softmax over key blocks for a block of query rows. Compiled once per instruction-set level.
//
// 1. K and V of each head are packed once (they are read by every query block of the head).
// 2. A query block of one head is worked on in strips of rows. A strip touches only keys that some row of
// it may see.
#include <cassert>

#include "attention.h"
#include "exact.h"
#include "few.h"
#include "kernels.h"
#include "pack.h"
#include "parts.h"
#include "rows.h"
#include "scores.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T, class E>
class Forward {
  using C = typename E::Element;
  using Pack = PackerFor<T, E>;
  static constexpr int64_t pack_keys = 512, most_strips = 16, element = sizeof(C);
  static constexpr int64_t pack_steps = pack_keys / key_step;
  static constexpr bool in_place = E::pieces == 1;  // probabilities overwrite the scores of their row: both stay in L1

 public:
  static constexpr Blocks blocks_allowed = {{E::strip, most_strips * E::strip}, {64, 1024}, false};

  Forward(const ForwardArgs& args, int threads)
      : a(args),
        block_rows(args.config.block_q ? args.config.block_q : 4 * E::strip),
        block_keys(args.config.block_k ? args.config.block_k : 256),
        lds(block_keys + 16),  // off powers of two: fewer cache conflicts
        ldp(in_place ? lds * 4 / static_cast<int64_t>(sizeof(C)) : block_keys + 32),
        depth(round_up(a.head_dim, E::depth)),
        v_cols(round_up(a.v_dim, panel)),
        parts(FewQueries<T, E>::takes(a)
                  ? Parts{false, a.q_len, 1, key_step}
                  : choose_parts(a, block_rows, (depth + v_cols) * E::pieces * element, threads)),
        keys(parts.keys),
        k_panel(depth * panel),
        v_panel((keys + 2) * panel),
        k_plane(keys / panel * k_panel),
        v_plane(v_cols / panel * v_panel),
        q_plane(block_rows * depth),
        p_plane(E::strip * ldp),
        k_head(E::pieces * k_plane),
        v_head(E::pieces * v_plane),
        packs((keys + pack_keys - 1) / pack_keys),
        blocks((a.q_len + block_rows - 1) / block_rows),
        slots(parts.local ? threads : a.batch * a.kv_heads),
        few(args, threads),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        plain_ends(!drops && a.options.sinks == nullptr && a.options.bias.kind == BiasKind::none),
        kept_words(block_keys / 32) {}

  Scratch scratch() {
    if (few.takes(a)) return few.scratch();
    Carver shared, own;
    lay_out_shared(shared);
    lay_out_thread(own);
    return {shared.used(), own.used()};
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) {
    if (few.takes(a)) return few.run(parallel, shared, per_thread, thread_bytes);
    Carver carver(shared);
    lay_out_shared(carver);
    const auto own = [&](int thread) {
      Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
      return lay_out_thread(carver);
    };
    // Later rows of a causal mask cost more: they come first.
    if (parts.local)
      return parallel(a.batch * a.kv_heads * parts.count, [&](int64_t item, int thread) {
        const FlushSubnormals flush;
        part_of_head(item / parts.count, parts.count - 1 - item % parts.count, thread, own(thread));
      });
    parallel(slots * packs, [&](int64_t item, int) {
      pack({item / packs / a.kv_heads, item / packs % a.kv_heads, 0, item / packs}, item % packs, keys);
    });
    parallel(a.batch * a.q_heads * blocks, [&](int64_t item, int thread) {
      const FlushSubnormals flush;
      const int64_t head = item / blocks, b = head / a.q_heads, h = head % a.q_heads, hk = h / a.group();
      query_block(b, h, (blocks - 1 - item % blocks) * block_rows, {b, hk, 0, b * a.kv_heads + hk}, own(thread));
    });
  }

 private:
  struct Strip {
    C *q, *p;
    float* scores[2];
    float *out, *maximum, *sums;
    uint32_t* kept;      // of dropout: a bit for each key of a block, row after row of a strip
    RandomPair* random;  // of each row
    float* base;         // of each row's biases
  };

  // Packed keys and values of one head, from key `base` on.
  struct Packed {
    int64_t b, hk, base, slot;
  };

  void part_of_head(int64_t head, int64_t part, int slot, const Strip& s) {
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads, first = part * parts.rows,
                  last = least(first + parts.rows, a.q_len);
    const KeyRange range = range_of_rows(a, b, hk, first, last);
    assert(range.size() <= keys && "the slot has room for what the part sees");
    const Packed packed{b, hk, range.lo, slot};
    for (int64_t i = 0; i < packs; ++i) pack(packed, i, range.size());
    for (int64_t g = 0; g < a.group(); ++g)
      for (int64_t row = last - 1 - (last - 1 - first) % block_rows; row >= first; row -= block_rows)
        query_block(b, hk * a.group() + g, row, packed, s);
  }

  // Room for `slots` packed ranges of keys: one for each thread, or all heads.
  void lay_out_shared(Carver& carver) {
    packed_k = carver.take<C>(slots * k_head);
    packed_v = carver.take<C>(slots * v_head);
    all_norms = carver.take<Norms>(slots * packs * pack_steps);
  }
  Strip lay_out_thread(Carver& carver) const {
    Strip s;
    s.q = carver.take<C>(E::pieces * q_plane);
    s.p = carver.take<C>(in_place ? 0 : E::pieces * p_plane);
    for (auto& scores : s.scores) scores = carver.take<float>(E::strip * lds);
    s.out = carver.take<float>(block_rows * v_cols);
    s.maximum = carver.take<float>(block_rows);
    s.sums = carver.take<float>(block_rows * Vec::width);
    s.kept = carver.take<uint32_t>(drops ? E::strip * kept_words : 0);
    s.random = carver.take<RandomPair>(drops ? block_rows : 0);
    s.base = carver.take<float>(block_rows);
    return s;
  }

  const T* q_row(int64_t b, int64_t h, int64_t i) const { return at<T>(a.q, b, h, i); }

  // The largest squared norms of keys and of values. Not finite if an element is not; a norm beyond all floats is taken
  // for infinite: such values are left to the exact rows.
  struct Norms {
    float k = 0.0f, v = 0.0f;
    void include(Norms other) { k = larger_or_nan(k, other.k), v = larger_or_nan(v, other.v); }
    // 0 * inf would reach rows that may not see the key, and pieces of an infinite number are no numbers.
    bool finite() const { return std::isfinite(v) && (E::pieces == 1 || std::isfinite(k)); }
  };

  // Of the steps of keys that a block of rows sees, wherever they are packed: how rows are shared out over threads must
  // not change how they are computed.
  Norms norms_of(const Packed& packed, const KeyRange& seen) const {
    Norms all;
    const Norms* of_slot = all_norms + packed.slot * packs * pack_steps;
    for (int64_t i = (seen.lo - packed.base) / key_step; i < (seen.hi - packed.base) / key_step; ++i)
      all.include(of_slot[i]);
    return all;
  }

  // The i-th pack of keys, of the first `size` of the range.
  void pack(const Packed& to, int64_t part, int64_t size) {
    const int64_t slot = to.slot, end = least((part + 1) * pack_keys, size), valid_keys = a.k_len - to.base;
    const T *k = at<T>(a.k, to.b, to.hk, to.base), *v = at<T>(a.v, to.b, to.hk, to.base);
    // A few rows at a time, so that what looks at them and what copies them find them in L1.
    for (int64_t i = part * pack_keys, count; i < end; i += count) {
      count = least(64, end - i);
      const int64_t valid = most(0, least(count, valid_keys - i));
      for (int64_t j = 0; j < count; j += key_step) {
        const int64_t own = most(0, least(key_step, valid - j));
        all_norms[slot * packs * pack_steps + (i + j) / key_step] = {
            largest_norm(k + (i + j) * a.k.row, a.k.row, own, a.head_dim),
            largest_norm(v + (i + j) * a.v.row, a.v.row, own, a.v_dim)};
      }
      Pack::keys(k, a.k.row, valid_keys, a.head_dim, {packed_k + slot * k_head, k_plane}, k_panel, i, count, depth);
      Pack::dims(v, a.v.row, valid_keys, a.v_dim, {packed_v + slot * v_head, v_plane}, v_panel, i, count, v_cols);
    }
  }

  void row(int64_t b, int64_t h, int64_t i) const {
    const int64_t hk = h / a.group();
    const KeyValues<T> x{at<T>(a.k, b, hk, 0), at<T>(a.v, b, hk, 0), a.k.row, a.v.row, a.head_dim, a.v_dim};
    const auto by = [&](const auto& rows, double base) {
      alignas(64) float sum_v[max_dim] = {};
      const RowEnd end = forward_row(q_row(b, h, i), x, a.bounds.slice(b, h) + i * a.runs * 2, a.runs, a.scale, rows,
                                     sink_of(a, h), kept_weight_of(a), base, sum_v);
      if (is_lost<T>(a, b, h, i, end.lse, base)) return exact_row(b, h, i);
      write_row<T>(sum_v, end.factor, a.out, b, h, i, a.v_dim);
      write_lse(a, b, h, i, end.lse);
    };
    if (changes) {
      const RowOptions options = RowOptions::make<T>(a, b, h, i, magnitude_of(a.scale));
      by(RowsWithOptions{&options}, options.base());
    } else {
      by(PlainRows{}, 0.0);
    }
  }

  [[gnu::noinline, gnu::cold]] void exact_row(int64_t b, int64_t h, int64_t i) const {
    alignas(64) float out[max_dim] = {};
    const double lse = ExactRow<T>(a, b, h, i).forward(out);
    write_row<T>(out, 1.0f, a.out, b, h, i, a.v_dim);
    write_lse(a, b, h, i, lse);
  }

  // A block of query rows and what they see.
  struct Rows {
    int64_t first, count, strips;
    const int32_t* spans;
    Hull hull[most_strips], all;  // of each strip
  };
  Rows rows_from(int64_t b, int64_t h, int64_t first) const {
    const int64_t count = least(block_rows, a.q_len - first);
    Rows rows{first, count, (count + E::strip - 1) / E::strip, a.bounds.slice(b, h) + first * a.runs * 2, {}, {}};
    for (int64_t t = 0; t < rows.strips; ++t) {
      rows.hull[t] = hull_of(rows.spans + t * E::strip * a.runs * 2, least(E::strip, count - t * E::strip), a.runs);
      rows.all.include(rows.hull[t]);
    }
    return rows;
  }

  void query_block(int64_t b, int64_t h, int64_t first, const Packed& packed, const Strip& s) const {
    const Rows rows = rows_from(b, h, first);
    const float q_norm = largest_norm(q_row(b, h, first), a.q.row, rows.count, a.head_dim);
    const Norms norms = norms_of(packed, key_range(rows.all));
    if (norms.finite() && (E::pieces == 1 || std::isfinite(q_norm))) {
      E::begin();
      block(b, h, rows, packed, q_norm, norms, s);
      E::end();
    } else {
      for (int64_t i = first; i < first + rows.count; ++i) row(b, h, i);
    }
  }

  void block(int64_t b, int64_t h, const Rows& given, const Packed& packed, float q_norm, Norms norm,
             const Strip& s) const {
    const auto& [first, rows, strips, spans, hull, all] = given;
    // A negative scale is carried by -q, so that the larger score is the likelier key; scale 0 by q = 0.
    const float c = magnitude_of(a.scale);
    Pack::rows(q_row(b, h, first), a.q.row, rows, a.scale == 0.0f ? 0 : a.head_dim, {s.q, q_plane}, depth,
               strips * E::strip, a.scale < 0.0f);
    for (int64_t i = 0; i < block_rows; ++i) {
      s.maximum[i] = -infinity;
      store(s.sums + i * Vec::width, zero());
    }
    for (int64_t i = 0; i < strips * E::strip * v_cols; i += Vec::width) store(s.out + i, zero());

    const float product = largest_product(q_norm, norm.k, c);
    const Scores scoring = changes ? Scores::make<T>(a, b, h, c, product / log2_e) : Scores{};
    const float exponent = a.options.softcap > 0.0f ? least_of(product, a.options.softcap * log2_e) : product;
    for (int64_t i = 0; changes && i < block_rows; ++i)
      s.base[i] = i < rows ? scoring.base_of(first + i, spans + i * a.runs * 2) : 0.0f;
    const BiasRange bias = range_of_bias(scoring);
    const bool bounded = E::wide_exponents && within_range(exponent + bias.spread, norm.v) &&
                         start_at_ceilings(scoring, bias.top, first, rows, spans, s);
    if (drops) {
      const uint64_t seed = seed_of_head(a, b, h);
      for (int64_t i = 0; i < rows; ++i) s.random[i] = random_of_row(a, seed, b, first + i);
    }
    const Head head{b,       first,  packed.slot, packed.base, rows,
                    spans,   hull,   all,         c,           E::wide_exponents && moderate(norm.v) ? 8.0f : 0.0f,
                    bounded, scoring};
    Job job = next_job(head, {round_down(all.lo, key_step), -1, {}});
    if (E::overlaps && job.valid(all)) scores(head, s, job, s.scores[0], 0, block_keys);
    for (int side = 0; job.valid(all); side = E::overlaps ? 1 - side : 0) {
      const Job next = next_job(head, job);
      if (!E::overlaps) scores(head, s, job, s.scores[0], 0, block_keys);
      values(head, s, job, s.scores[side], next, s.scores[1 - side]);
      job = next;
    }
    for (int64_t i = 0; i < rows; ++i) finish(b, h, first + i, s, i, spans + i * a.runs * 2);
  }

  static float least_of(float x, float y) { return x < y ? x : y; }

  // Bounds what a bias adds, in units of log2: values are within `spread` below `top`.
  struct BiasRange {
    float top, spread;
  };
  BiasRange range_of_bias(const Scores& scoring) const {
    if (a.options.bias.kind != BiasKind::distance) return {0.0f, 0.0f};  // looked at row by row
    const DistanceTable table = scoring.table_of_head();
    const auto [low, high] = std::minmax_element(table.values, table.values + table.size());
    return {*high * log2_e, (*high - *low) * log2_e};
  }

  // Sets each row's maximum to what its bias is at most, so that it need not be found; false where that is not known.
  bool start_at_ceilings(const Scores& scoring, float top, int64_t first, int64_t rows, const int32_t* spans,
                         const Strip& s) const {
    for (int64_t i = 0; i < block_rows; ++i) {
      const float ceiling =
          changes && i < rows ? ceiling_of_row(scoring, top, first + i, spans + i * a.runs * 2, s.base[i]) : top;
      if (!(std::fabs(ceiling) <= 0x1p20f)) {
        for (int64_t n = 0; n < i; ++n) s.maximum[n] = -infinity;
        return false;
      }
      s.maximum[i] = ceiling;
    }
    return true;
  }
  float ceiling_of_row(const Scores& scoring, float top, int64_t i, const int32_t* spans, float base) const {
    if (base != 0.0f) return 0.0f;  // it is taken away already
    switch (a.options.bias.kind) {
      case BiasKind::alibi:
      case BiasKind::signed_alibi:
        return scoring.largest_of_slope(i, spans);
      case BiasKind::dense:
        return !sees_any(spans, a.runs) ? 0.0f : scoring.largest_of_dense(i, spans);
      default:
        return top;
    }
  }

  // A block of query rows of one head.
  struct Head {
    int64_t b, first, slot, base, rows;
    const int32_t* spans;
    const Hull* hull;
    const Hull& all;
    float c, slack;
    bool bounded;
    const Scores& scoring;
    int64_t strip_rows(int64_t t) const { return least(E::strip, rows - t * E::strip); }
  };

  // One strip of query rows with what it sees of one key block.
  struct Job {
    int64_t key, strip;
    Seen seen;
    bool valid(const Hull& all) const { return key < all.hi; }
  };

  // The one after `job`: strips innermost, so that they share the key block while it is in cache.
  Job next_job(const Head& head, Job job) const {
    const int64_t strips = (head.rows + E::strip - 1) / E::strip;
    for (++job.strip; job.valid(head.all); job.key += block_keys, job.strip = 0)
      for (; job.strip < strips; ++job.strip) {
        const int32_t* spans = head.spans + job.strip * E::strip * a.runs * 2;
        job.seen = look(spans, head.strip_rows(job.strip), a.runs, head.hull[job.strip], job.key,
                        least(job.key + block_keys, head.base + keys));
        if (job.seen.lo < job.seen.hi) return job;
      }
    return job;
  }

  // Scores of a job's keys [from, to), counted from the first that it sees.
  void scores(const Head& head, const Strip& s, const Job& job, float* to_scores, int64_t from, int64_t to) const {
    to = least(to, job.seen.hi - job.seen.lo);
    if (from >= to) return;
    const C* k = packed_k + head.slot * k_head + (job.seen.lo - head.base + from) / panel * k_panel;
    E::product({s.q + job.strip * E::strip * depth, depth, q_plane}, {k, k_panel, k_plane}, to_scores + from, lds,
               round_up(head.strip_rows(job.strip), E::rows), to - from, depth, false);
  }

  // Softmax and product with V of one job, whose scores are ready. An engine with a matrix unit computes the scores of
  // the next one meanwhile, a few columns after each few rows of exponentials: the two run on different parts of the
  // processor.
  void values(const Head& head, const Strip& s, const Job& job, float* ready, const Job& next, float* ahead) const {
    const int64_t step = round_up(block_keys / (E::strip / 4), panel);  // columns for each four rows
    const bool prepare = E::overlaps && next.valid(head.all);
    int64_t done = 0;
    const auto between = [&] {
      if (prepare) scores(head, s, next, ahead, done, done + step);
      done += step;
    };
    if (changes) {
      changed_softmax(head, s, job, ready, between);
    } else {
      hide_unseen(head, job, ready, 0, head.strip_rows(job.strip));
      softmax(head, s, job, ready, PlainStrip{}, between);
    }
    if (prepare) scores(head, s, next, ahead, done, block_keys);
    const int64_t at = job.strip * E::strip;
    E::product({weights_in(s, ready), ldp, p_plane},
               {packed_v + head.slot * v_head + (job.seen.lo - head.base) * panel, v_panel, v_plane},
               s.out + at * v_cols, v_cols, round_up(head.strip_rows(job.strip), E::rows), v_cols,
               job.seen.hi - job.seen.lo, true);
  }

  template <class Between>
  void changed_softmax(const Head& head, const Strip& s, const Job& job, float* ready, const Between& between) const {
    const uint32_t* kept = drops ? s.kept : nullptr;
    const auto late = [&](int64_t i) { ready_rows(head, s, job, ready, i, nullptr); };
    // Where no maximum is looked for, products become exponents as they become weights.
    if (head.bounded && a.options.change_scores() && (job.seen.full || head.scoring.fuses_hidden()) &&
        head.scoring.template fuse<E>(head.first + job.strip * E::strip, head.strip_rows(job.strip), job.seen.lo,
                                      job.seen.hi - job.seen.lo, s.base + job.strip * E::strip, [&](const auto& make) {
                                        softmax(head, s, job, ready, FusedStrip{late, make, kept, kept_words}, between);
                                      }))
      return;
    Vec tops[4] = {set(-infinity), set(-infinity), set(-infinity), set(-infinity)};
    const auto first = [&](int64_t i) { ready_rows(head, s, job, ready, i, tops); };
    const bool known = a.options.change_scores() && job.seen.full;
    softmax(head, s, job, ready, ChangedStrip{first, kept, kept_words, known ? tops : nullptr}, between);
  }

  C* weights_in(const Strip& s, float* ready) const { return in_place ? reinterpret_cast<C*>(ready) : s.p; }

  template <class Change, class Between>
  void softmax(const Head& head, const Strip& s, const Job& job, float* ready, const Change& change,
               const Between& between) const {
    const int64_t at = job.strip * E::strip;
    const Running run{s.maximum + at, s.sums + at * Vec::width};
    const auto run_strip = Change::fused || head.bounded ? &softmax_strip<E, true, Change, Between>
                                                         : &softmax_strip<E, false, Change, Between>;
    run_strip(ready, lds, weights_in(s, ready), ldp, p_plane, round_up(head.strip_rows(job.strip), 4),
              job.seen.hi - job.seen.lo, a.options.change_scores() ? 1.0f : head.c, head.slack, run,
              s.out + at * v_cols, v_cols, change, between);
  }

  // Hides what rows [from, to) of a job's strip may not see.
  void hide_unseen(const Head& head, const Job& job, float* ready, int64_t from, int64_t to) const {
    if (job.seen.full) return;
    for (int64_t i = from; i < to; ++i)
      hide(ready + i * lds, job.seen.lo, job.seen.hi - job.seen.lo,
           head.spans + (job.strip * E::strip + i) * a.runs * 2, a.runs);
  }

  // Rows [i, i + 4) of a job's strip with options: scores become exponents, of whose maxima `tops` is told (null: they
  // do so later), and dropout decides.
  void ready_rows(const Head& head, const Strip& s, const Job& job, float* ready, int64_t i, Vec* tops) const {
    const int64_t end = least(i + 4, head.strip_rows(job.strip)), n = job.seen.hi - job.seen.lo,
                  at = job.strip * E::strip;
    for (int64_t r = i; r < end; ++r) {
      if (a.options.change_scores() && tops != nullptr)
        tops[r - i] = head.scoring.exponents(ready + r * lds, n, head.first + at + r, job.seen.lo, s.base[at + r]);
      if (drops)
        for (int64_t j = 0; j < n; j += 32)
          s.kept[r * kept_words + j / 32] = kept_of_32(a, s.random[at + r], head.b, job.seen.lo + j);
    }
    hide_unseen(head, job, ready, i, end);
  }

  void finish(int64_t b, int64_t h, int64_t i, const Strip& s, int64_t r, const int32_t* spans) const {
    const bool sees = sees_any(spans, a.runs);
    const float sum = sees ? reduce_add(load(s.sums + r * Vec::width)) : 0.0f;
    const float maximum = s.maximum[r] - E::exponent_offset;
    const double base = changes ? Scores::value_of_base(a, b, h, s.base[r]) : 0.0;
    const RowEnd end =
        plain_ends ? end_of_row(maximum, sum) : end_of_row(maximum, sum, sink_of(a, h), kept_weight_of(a), base);
    if (sees && is_lost<T>(a, b, h, i, end.lse, base)) return exact_row(b, h, i);
    if (!sees) std::memset(s.out + r * v_cols, 0, static_cast<size_t>(v_cols) * sizeof(float));
    write_row<T>(s.out + r * v_cols, end.factor, a.out, b, h, i, a.v_dim);
    write_lse(a, b, h, i, end.lse);
  }

  const ForwardArgs& a;
  const int64_t block_rows, block_keys, lds, ldp, depth, v_cols;
  const Parts parts;
  const int64_t keys, k_panel, v_panel, k_plane, v_plane, q_plane, p_plane, k_head, v_head, packs, blocks, slots;
  const FewQueries<T, E> few;
  const bool changes, drops, plain_ends;
  const int64_t kept_words;
  C *packed_k = nullptr, *packed_v = nullptr;
  Norms* all_norms = nullptr;
};

template <class T, class E>
Kernels::ForwardPair forward_pair() {
  return {Forward<T, E>::blocks_allowed,
          [](const ForwardArgs& args, int threads) { return Forward<T, E>(args, threads).scratch(); },
          [](const ForwardArgs& args, const Parallel& parallel, char* shared, char* own, size_t bytes) {
            Forward<T, E>(args, parallel.threads).run(parallel, shared, own, bytes);
          }};
}

Kernels::ForwardPair forward_kernels(Dtype dtype) {
#if defined(ATTNSPAN_AMX_FP16)
  return dtype == Dtype::f16 ? forward_pair<f16, AmxEngine<f16, 1> >() : Kernels::ForwardPair{};
#elif defined(__AMX_BF16__)
  switch (dtype) {
    case Dtype::bf16:
      return forward_pair<bf16, AmxEngine<bf16, 1> >();
    case Dtype::f16:
      return forward_pair<f16, AmxEngine<bf16, 2> >();
    default:
      return forward_pair<float, AmxEngine<bf16, 3> >();
  }
#elif defined(__AVX512BF16__)
  return dtype == Dtype::bf16 ? forward_pair<bf16, VectorEngine<bf16> >() : Kernels::ForwardPair{};
#else
  switch (dtype) {
    case Dtype::bf16:
      return forward_pair<bf16, VectorEngine<float> >();
    case Dtype::f16:
      return forward_pair<f16, VectorEngine<float> >();
    default:
      return forward_pair<float, VectorEngine<float> >();
  }
#endif
}

}  // namespace attnspan::ATTNSPAN_ISA
