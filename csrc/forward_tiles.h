// Forward on tiles: the online softmax of a block of query rows over packed keys and values. It depends on the engine
// alone: dtypes that share an engine share this code.
#pragma once

#include <algorithm>

#include "mask.h"
#include "parts.h"
#include "scores.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

// The largest squared norms of keys and of values. Not finite if an element is not; a norm beyond all floats counts as
// infinite: such values are left to the exact rows.
struct Norms {
  float k = 0.0f, v = 0.0f;
  void include(Norms other) { k = larger_or_nan(k, other.k), v = larger_or_nan(v, other.v); }
};

template <class E>
class ForwardTiles {
 protected:
  using C = typename E::Element;
  static constexpr int64_t pack_keys = 512, pack_steps = pack_keys / key_step, most_strips = 16;
  static constexpr int64_t most_keys = E::overlaps ? 256 : 1024;  // of a key block
  static constexpr int64_t weight_stride = most_keys + 32;
  static constexpr int64_t half = E::overlaps ? E::strip : E::strip / 2;
  // Probabilities overwrite the scores of their row, unless these are a step of a key block: both stay in L1.
  static constexpr bool in_place = E::pieces == 1 && !E::overlaps;

  ForwardTiles(const ForwardArgs& args, int threads)
      : a(args),
        block_rows(a.config.block_q ? a.config.block_q : (E::overlaps ? strips_of(a, threads) : 4) * E::strip),
        block_keys(a.config.block_k ? a.config.block_k : 256),
        step_keys(E::overlaps ? 64 : block_keys),
        depth(round_up(a.head_dim, E::depth)),
        v_cols(round_up(a.v_dim, panel)),
        near_keys(keys_at_once()),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        plan(a, block_rows, (depth + v_cols) * E::pieces * static_cast<int64_t>(sizeof(C)), threads) {}

  // Keys are read from a distant cache once for each block of rows: many rows, if that leaves all threads enough
  // blocks.
  static int64_t strips_of(const ForwardArgs& a, int threads) {
    const int64_t most = max(a.head_dim, a.v_dim) > 128 ? 8 : most_strips;
    return a.batch * a.q_heads * a.q_len >= 4 * threads * most * E::strip ? most : 4;
  }

  // As many keys as stay in the second cache, a part of `key_sums`.
  int64_t keys_at_once() const {
    constexpr int64_t cached = int64_t{1} << 20;
    int64_t keys = key_sums;
    while (E::overlaps && keys > block_keys &&
           keys * (depth + v_cols) * E::pieces * static_cast<int64_t>(sizeof(C)) > cached)
      keys /= 2;
    return keys;
  }

  // Elements of a range of packed keys. One more step keeps panels of values off powers of two.
  int64_t packs() const { return (plan.places + pack_keys - 1) / pack_keys; }
  int64_t k_panel() const { return depth * panel; }
  int64_t v_panel() const { return (plan.places + 2) * panel; }
  int64_t k_plane() const { return plan.places / panel * k_panel(); }
  int64_t v_plane() const { return v_cols / panel * v_panel(); }
  int64_t q_plane() const { return block_rows * depth; }
  // Rows of scores are off powers of two as well: fewer cache conflicts.
  int64_t lds() const { return E::overlaps ? step_keys : block_keys + 16; }
  int64_t ldp() const {
    if constexpr (E::overlaps) return weight_stride;
    return in_place ? lds() * 4 / static_cast<int64_t>(sizeof(C)) : block_keys + 32;
  }
  int64_t p_plane() const { return E::strip * ldp(); }
  int64_t kept_words() const { return block_keys / 32; }

  // Room for `slots` packed ranges of keys: one for each thread, or all heads.
  struct Shared {
    C *k, *v;
    Norms* norms;
  };
  Shared lay_out_shared(Carver& carver, int64_t slots) const {
    Shared s;
    s.k = carver.take<C>(slots * E::pieces * k_plane());
    s.v = carver.take<C>(slots * E::pieces * v_plane());
    s.norms = carver.take<Norms>(slots * packs() * pack_steps);
    return s;
  }

  // Keys and values of one head that are packed from a place on; norms are those of each step of keys.
  struct Packed {
    int64_t b, hk, place;
    C *k, *v;
    Norms* norms;
  };
  Packed packed_in(const Shared& s, int64_t slot, int64_t b, int64_t hk, int64_t place) const {
    return {b,
            hk,
            place,
            s.k + slot * E::pieces * k_plane(),
            s.v + slot * E::pieces * v_plane(),
            s.norms + slot * packs() * pack_steps};
  }

  struct Own {  // one thread's scratch
    C *q, *p;
    float* scores[2];
    float *out, *maximum, *sums;
    float *whole, *whole_maximum, *whole_sums;  // of all keys but the last `key_sums`
    uint32_t* kept;                             // of dropout: a bit for each key of a block, row after row of a strip
    RandomPair* random;                         // of each row
    float* base;                                // of each row's biases
  };
  Own lay_out(Carver& carver) const {
    Own o;
    o.q = carver.take<C>(E::pieces * q_plane());
    o.p = carver.take<C>(in_place ? 0 : E::pieces * p_plane());
    for (int i = 0; i < (E::overlaps ? 2 : 1); ++i) o.scores[i] = carver.take<float>(E::strip * lds());
    for (float** x : {&o.out, &o.whole}) *x = carver.take<float>(block_rows * v_cols);
    for (float** x : {&o.maximum, &o.whole_maximum}) *x = carver.take<float>(block_rows);
    for (float** x : {&o.sums, &o.whole_sums}) *x = carver.take<float>(block_rows * sum_lanes);
    o.kept = carver.take<uint32_t>(drops ? E::strip * kept_words() : 0);
    o.random = carver.take<RandomPair>(drops ? block_rows : 0);
    o.base = carver.take<float>(block_rows);
    return o;
  }

  // A block of query rows of one sequence, and what they see.
  struct Rows {
    int64_t first, count, strips;
    int64_t origin, place;  // the sequence's first key, and where it is packed
    const int32_t* spans;
    Hull hull[most_strips], all;  // of each strip
    int64_t padded() const { return strips * E::strip; }
  };
  Rows rows_of(int64_t b, int64_t h, const QueryBlock& block) const {
    const Sequence& s = plan.sequences[block.sequence];
    const int32_t* spans = a.bounds.slice(b, h) + block.row * a.runs * 2;
    Rows rows{block.row, block.rows, (block.rows + E::strip - 1) / E::strip, s.key, s.place, spans, {}, {}};
    for (int64_t t = 0; t < rows.strips; ++t) {
      rows.hull[t] = hull_of(spans + t * E::strip * a.runs * 2, min(E::strip, rows.count - t * E::strip), a.runs);
      rows.all.include(rows.hull[t]);
    }
    return rows;
  }

  // About how many pauses there are while a block of rows is worked on, if the rows see half of what the block sees.
  int64_t pauses_of(const QueryBlock& block) const {
    return E::pauses(block.rows, block.places.size() / 2, depth + v_cols);
  }

  // What the steps of keys hold that a block of rows sees, wherever they are packed: how rows are shared out over
  // threads must not change how they are computed.
  Norms norms_of(const Packed& packed, const Range& places) const {
    Norms all;
    for (int64_t i = (places.begin - packed.place) / key_step; i < (places.end - packed.place) / key_step; ++i)
      all.include(packed.norms[i]);
    return all;
  }

  // Weighted values, maxima and sums of a block of rows of head h, whose queries are packed in `o.q`. What
  // is `ahead` is fetched meanwhile.
  [[gnu::noinline]] void attend(const Packed& packed, int64_t h, const Rows& rows, float q_norm, Norms norm,
                                Ahead& ahead, const Own& o) const {
    for (int64_t i = 0; i < rows.padded(); ++i) o.maximum[i] = o.whole_maximum[i] = -infinity;
    const float c = magnitude_of(a.scale), product = largest_product(q_norm, norm.k, c);
    Head head{.keys = packed, .rows = rows, .ahead = ahead, .c = c};
    if (changes) head.scoring = Scores(a, packed.b, h, c, product / log2_e);
    for (int64_t i = 0; changes && i < rows.padded(); ++i)
      o.base[i] = i < rows.count ? head.scoring.base_of(rows.first + i, rows.spans + i * a.runs * 2) : 0.0f;
    if (E::wide_exponents) {
      const float capped = a.options.softcap * log2_e;
      const float exponent = a.options.softcap > 0.0f && !(product < capped) ? capped : product;
      const BiasRange bias = range_of_bias(head.scoring);
      head.slack = moderate(norm.v) ? 8.0f : 0.0f;
      head.bounded = within_range(exponent + bias.spread, norm.v) && start_at_ceilings(head, bias.top, o);
    }
    head.plain = !changes && !drops && product < 0x1p17f;
    if (drops) {
      const uint64_t seed = seed_of_head(a, packed.b, h);
      for (int64_t i = 0; i < rows.count; ++i) o.random[i] = random_of_row(a, seed, packed.b, rows.first + i);
    }
    if constexpr (E::overlaps)
      attend_by_strips(head, o);
    else
      attend_by_blocks(head, o);
  }

  const ForwardArgs& a;
  const int64_t block_rows, block_keys, step_keys, depth, v_cols, near_keys;
  const bool changes, drops;
  const ForwardPlan plan;

 private:
  // A block of rows of one head, and how its exponents are found.
  struct Head {
    const Packed& keys;
    const Rows& rows;
    Ahead& ahead;
    float c;             // turns products into exponents
    float slack = 0.0f;  // see `raise_maxima`, and `Weigh` for `bounded`
    bool bounded = false, plain = false;
    Scores scoring{};
  };

  void attend_by_blocks(const Head& head, const Own& o) const {
    const Rows& rows = head.rows;
    const int64_t all = rows.padded();
    clear(0, all, true, o);
    int64_t sum = 0, sums = 0;
    for (Job job = next_job(head, {first_key(rows), 0, 0, {}}); job.valid(rows); job = next_job(head, job)) {
      if (const int64_t now = (job.key - rows.origin) / key_sums; sums == 0 || now != sum) {
        if (sums > 0) add_whole(0, rows.count, sums == 1, o.whole, o.whole_sums, o), clear(0, all, true, o);
        sum = now, ++sums;
      }
      scores(head, o, job, o.scores[0]);
      weigh(head, o, job, o.scores[0], 0);
      values(head, o, job, false);
    }
    if (sums > 1) add_whole(0, rows.count, false, o.out, o.sums, o);
  }

  // Strip by strip for some keys: an engine with a matrix unit is fast where all that a strip needs is near.
  void attend_by_strips(const Head& head, const Own& o) const {
    const Rows& rows = head.rows;
    int64_t sum_of[most_strips];  // the sum that a strip is at
    bool more[most_strips] = {};  // has it had others?
    std::fill_n(sum_of, most_strips, -1);
    Job job = next_job(head, {first_key(rows), 0, 0, {}});
    if (job.valid(rows)) scores(head, o, part_of(rows, job, 0), o.scores[0]);
    for (int side = 0; job.valid(rows);) {
      const int64_t strip = job.row / E::strip, sum = (job.key - rows.origin) / key_sums;
      const bool first = sum_of[strip] != sum;
      if (first) {
        if (sum_of[strip] >= 0) {
          add_whole(job.row, job.rows, !more[strip], o.whole, o.whole_sums, o);
          more[strip] = true;
        }
        clear(job.row, E::strip, E::pieces > 1, o);
        sum_of[strip] = sum;
      }
      const Job next = next_job(head, job);
      weights_in_steps(head, o, job, next, side);
      values(head, o, job, first && E::pieces == 1);
      job = next;
    }
    for (int64_t row = 0; row < rows.count; row += E::strip)
      if (more[row / E::strip]) add_whole(row, min(E::strip, rows.count - row), false, o.out, o.sums, o);
  }

  void clear(int64_t row, int64_t rows, bool out, const Own& o) const {
    if (out) std::memset(o.out + row * v_cols, 0, static_cast<size_t>(rows * v_cols) * sizeof(float));
    std::memset(o.sums + row * sum_lanes, 0, static_cast<size_t>(rows * sum_lanes) * sizeof(float));
  }

  // The sum of some keys and of all before them (`first`: there are none) goes to `out` and `sums`.
  void add_whole(int64_t row, int64_t rows, bool first, float* out, float* sums, const Own& o) const {
    const auto add = [](float* to, const float* x, const float* y, int64_t n, float factor) {
      for (int64_t j = 0; j < n; j += Vec::width) store(to + j, load(x + j) * set(factor) + load(y + j));
    };
    for (int64_t i = row; i < row + rows; ++i) {
      const float before = first ? -infinity : o.whole_maximum[i];
      const float factor = before == -infinity ? 0.0f : power_of_two(before - o.maximum[i]);
      o.whole_maximum[i] = o.maximum[i];
      const int64_t at = i * v_cols, lanes = i * sum_lanes;
      if (factor == 0.0f) {
        std::memmove(out + at, o.out + at, static_cast<size_t>(v_cols) * sizeof(float));
        std::memmove(sums + lanes, o.sums + lanes, static_cast<size_t>(sum_lanes) * sizeof(float));
        continue;
      }
      add(out + at, o.whole + at, o.out + at, v_cols, factor);
      add(sums + lanes, o.whole_sums + lanes, o.sums + lanes, sum_lanes, factor);
    }
  }

  // Key blocks start where sums are cut, so that no sum is cut elsewhere.
  int64_t first_key(const Rows& rows) const { return rows.origin + round_down(rows.all.lo - rows.origin, E::cut); }
  int64_t end_of_block(const Rows& rows, int64_t key) const {
    return min(key + block_keys, rows.origin + round_down(key - rows.origin, near_keys) + near_keys);
  }
  // What is packed of a key.
  int64_t place_of(const Head& head, int64_t key) const {
    return key - head.rows.origin + head.rows.place - head.keys.place;
  }

  // Rows of a strip with what they see of one key block.
  struct Job {
    int64_t key, row, rows;
    Seen seen;
    bool valid(const Rows& rows) const { return key < rows.all.hi; }
    int64_t size() const { return seen.hi - seen.lo; }
    bool whole() const { return rows == E::strip && size() == E::step; }
  };

  // The one after `job`: strips innermost, so that they share the key block while it is in cache. Strips that see only
  // some of it are worked on in halves, which see less each.
  Job next_job(const Head& head, Job job) const {
    const Rows& rows = head.rows;
    if constexpr (E::overlaps) return next_of_strip(rows, job);
    for (job.row += job.rows; job.valid(rows); job.key = end_of_block(rows, job.key), job.row = 0)
      for (; job.row < rows.count; job.row += job.rows) {
        const int64_t strip = job.row / E::strip, begin = strip * E::strip;
        if (job.row == begin) {
          job.rows = min(E::strip, rows.count - begin);
          job.seen = look_at(rows, job, rows.hull[strip]);
          if (job.seen.full || half == E::strip || job.rows <= half) {
            if (job.size() > 0) return job;
            continue;
          }
          if (job.size() == 0) continue;
        }
        job.rows = min(half - (job.row - begin) % half, rows.count - job.row);
        job.seen = look_at(rows, job, hull_of(rows.spans + job.row * a.runs * 2, job.rows, a.runs));
        if (job.size() > 0) return job;
      }
    return job;
  }
  // With some keys innermost: what a strip sums up stays in the nearest cache, the keys in the next one.
  Job next_of_strip(const Rows& rows, Job job) const {
    while (job.valid(rows)) {
      const int64_t begin = rows.origin + round_down(job.key - rows.origin, near_keys), end = begin + near_keys;
      if (job.rows > 0) job.key = end_of_block(rows, job.key);
      if (job.key >= min(end, rows.all.hi)) {
        job.row += E::strip, job.key = max(begin, first_key(rows));
        if (job.row >= rows.count) job.row = 0, job.key = end;
        if (!job.valid(rows)) break;
      }
      job.rows = min(E::strip, rows.count - job.row);
      job.seen = look_at(rows, job, rows.hull[job.row / E::strip]);
      if (job.size() > 0) return job;
    }
    return job;
  }
  Seen look_at(const Rows& rows, const Job& job, const Hull& hull) const {
    return look(rows.spans + job.row * a.runs * 2, job.rows, a.runs, hull, job.key, end_of_block(rows, job.key),
                rows.origin, changes || drops ? key_step : E::seen_step);
  }

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
  bool start_at_ceilings(const Head& head, float top, const Own& o) const {
    for (int64_t i = 0; i < head.rows.padded(); ++i) {
      const float ceiling = changes && i < head.rows.count ? ceiling_of_row(head, top, i, o.base[i]) : top;
      if (!(std::fabs(ceiling) <= 0x1p20f)) {
        for (int64_t n = 0; n < i; ++n) o.maximum[n] = -infinity;
        return false;
      }
      o.maximum[i] = std::ceil(ceiling);
    }
    return true;
  }
  float ceiling_of_row(const Head& head, float top, int64_t i, float base) const {
    if (base != 0.0f) return 0.0f;  // it is taken away already
    const int32_t* spans = head.rows.spans + i * a.runs * 2;
    switch (a.options.bias.kind) {
      case BiasKind::alibi:
      case BiasKind::signed_alibi:
        return head.scoring.largest_of_slope(head.rows.first + i, spans);
      case BiasKind::dense:
        return !sees_any(spans, a.runs) ? 0.0f : head.scoring.largest_of_dense(head.rows.first + i, spans);
      default:
        return top;
    }
  }

  // The step of a job's keys that begins at number `from`.
  Job part_of(const Rows& rows, Job job, int64_t from) const {
    job.seen.lo += from;
    job.seen.hi = min(job.seen.lo + step_keys, job.seen.hi);
    const Hull& hull = rows.hull[job.row / E::strip];
    if (a.runs == 1) job.seen.full = hull.all_lo <= job.seen.lo && hull.all_hi >= job.seen.hi;
    return job;
  }

  Side<C> queries_of(const Job& job, const Own& o) const { return {o.q + job.row * depth, depth, q_plane()}; }
  Side<C> keys_of(const Head& head, const Job& job) const {
    return {head.keys.k + place_of(head, job.seen.lo) / panel * k_panel(), k_panel(), k_plane()};
  }
  void scores(const Head& head, const Own& o, const Job& job, float* to) const {
    E::product(queries_of(job, o), keys_of(head, job), to, lds(), round_up(job.rows, E::rows), job.size(), depth, false,
               &head.ahead);
  }

  // An engine with a matrix unit computes the scores of the next step of keys, or of the next job, while those of this
  // one become weights.
  void weights_in_steps(const Head& head, const Own& o, const Job& job, const Job& next, int& side) const {
    for (int64_t from = 0; from < job.size(); from += step_keys, side = 1 - side) {
      const Job now = part_of(head.rows, job, from), then = from + step_keys < job.size()
                                                                ? part_of(head.rows, job, from + step_keys)
                                                                : part_of(head.rows, next, 0);
      float* const next_scores = o.scores[1 - side];
      if (!(then.valid(head.rows) && then.whole() && now.whole() && now.seen.full && head.plain &&
            whole_step(head, o, now, from, side, then))) {
        if (then.valid(head.rows)) scores(head, o, then, next_scores);
        weigh(head, o, now, o.scores[side], from);
      }
      for (int64_t i = 1; head.ahead.wants() && i < now.rows; i += 2) head.ahead.pause();
    }
  }

  // Computes the weights of `job` and, interleaved with them, the scores of `then`. Returns false if no code was
  // compiled for this head dim.
  bool whole_step(const Head& head, const Own& o, const Job& job, int64_t from, int side, const Job& then) const {
    const auto by = [&]<bool Bounded>() {
      const typename E::template Rows<Bounded, weight_stride> rows{o.scores[side],
                                                                   weights_in(o) + from,
                                                                   p_plane(),
                                                                   set(head.c),
                                                                   head.slack,
                                                                   {o.maximum + job.row, o.sums + job.row * sum_lanes},
                                                                   o.out + job.row * v_cols,
                                                                   v_cols,
                                                                   from};
      const Side<C> q = queries_of(then, o), k = keys_of(head, then);
      switch (depth / E::depth) {
        case 1:
          return step_of<1>(rows, q, k, o.scores[1 - side]);
        case 2:
          return step_of<2>(rows, q, k, o.scores[1 - side]);
        case 3:
          return step_of<3>(rows, q, k, o.scores[1 - side]);
        case 4:
          return step_of<4>(rows, q, k, o.scores[1 - side]);
        case 8:
          return step_of<8>(rows, q, k, o.scores[1 - side]);
        default:
          return false;
      }
    };
    return head.bounded ? by.template operator()<true>() : by.template operator()<false>();
  }
  template <int Depths, class Rows>
  [[gnu::noinline]] static bool step_of(Rows rows, Side<C> q, Side<C> k, float* to) {
    E::template step_beside<Depths>(q, k, to, rows);
    return true;
  }

  // Adds the product of a job's weights with its values, or begins with it.
  void values(const Head& head, const Own& o, const Job& job, bool first) const {
    add_product<E, E::cut>(
        {weights_in(o), ldp(), p_plane()}, {head.keys.v + place_of(head, job.seen.lo) * panel, v_panel(), v_plane()},
        o.out + job.row * v_cols, v_cols, round_up(job.rows, E::rows), v_cols, job.seen.lo - head.rows.origin,
        min(job.size(), round_up(job.seen.end - job.seen.lo, E::depth)), &head.ahead, first);
    sum_rounded<E>(weights_in(o), ldp(), o.sums + job.row * sum_lanes, job.rows, job.size(), drops);
  }
  C* weights_in(const Own& o) const { return in_place ? reinterpret_cast<C*>(o.scores[0]) : o.p; }

  void weigh(const Head& head, const Own& o, const Job& job, float* ready, int64_t before) const {
    const Weigh<E> all{ready,
                       lds(),
                       weights_in(o) + before,
                       ldp(),
                       p_plane(),
                       job.rows,
                       job.size(),
                       a.options.change_scores() ? 1.0f : head.c,
                       head.slack,
                       Running{o.maximum + job.row, o.sums + job.row * sum_lanes},
                       o.out + job.row * v_cols,
                       v_cols,
                       before};
    const uint32_t* kept = drops ? o.kept : nullptr;
    Vec tops[4] = {set(-infinity), set(-infinity), set(-infinity), set(-infinity)}, *told = nullptr;
    const auto prepare = [&](int64_t i) { ready_rows(head, o, job, ready, i, told); };
    const auto by = [&](const auto& strip) {
      using S = std::remove_cvref_t<decltype(strip)>;
      S::fused || head.bounded ? all.template strip<true>(strip) : all.template strip<false>(strip);
    };
    if (!a.options.change_scores()) return by(Strip{prepare, kept, kept_words()});
    // Where no maximum is looked for, products become exponents as they become weights.
    if (head.bounded && (job.seen.full || head.scoring.fuses_hidden()) &&
        head.scoring.fuse(
            head.rows.first + job.row, job.rows, job.seen.lo, job.size(), o.base + job.row,
            [&]<class Make>(const Make& make) { by(FusedStrip<Make>{prepare, make, kept, kept_words()}); }))
      return;
    told = tops;
    by(Strip{prepare, kept, kept_words(), job.seen.full ? tops : nullptr});
  }

  // Rows [i, i + 4) of a job's strip: scores become exponents where `tops` is told of their maxima (null: they do so
  // later), dropout decides, and what a row may not see is hidden.
  void ready_rows(const Head& head, const Own& o, const Job& job, float* ready, int64_t i, Vec* tops) const {
    const int64_t end = min(i + 4, job.rows), first = head.rows.first + job.row;
    for (int64_t r = i; r < end; ++r) {
      if (tops != nullptr)
        tops[r - i] =
            head.scoring.exponents(ready + r * lds(), job.size(), first + r, job.seen.lo, o.base[job.row + r]);
      if (drops)
        for (int64_t j = 0; j < job.size(); j += 32)
          o.kept[r * kept_words() + j / 32] = kept_of_32(a, o.random[job.row + r], head.keys.b, job.seen.lo + j);
      if (!job.seen.full)
        hide(ready + r * lds(), job.seen.lo, job.size(), head.rows.spans + (job.row + r) * a.runs * 2, a.runs);
    }
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
