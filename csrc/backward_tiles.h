// Backward on tiles: the five products of a block of keys and the blocks of queries that see it. It depends on the
// engine alone: dtypes that share an engine share this code.
//
// Scores are held transposed, keys x queries, so that dK and dV take their probabilities as they lie and dQ^T takes
// them packed.
#pragma once

#include "bias_tiles.h"
#include "columns.h"
#include "parts.h"
#include "softcap.h"

namespace attnspan::ATTNSPAN_ISA {

template <class E>
class BackwardTiles {
 protected:
  using C = typename E::Element;
  static constexpr int64_t strip = E::strip, pair = E::pair, pieces = E::pieces,
                           block_step = strip % key_step == 0 ? strip : 96, most_block = 384,
                           most_strips = most_block / strip;
  static_assert(block_step % strip == 0 && block_step % key_step == 0);
  static constexpr bool rounds_once = std::is_same_v<C, bf16> && pieces == 1;  // see `store_both_ways`

  BackwardTiles(const BackwardArgs& args, int threads)
      : a(args),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        block(a.config.block_k ? a.config.block_k : min(192, round_up(max(1, max(a.q_len, a.k_len)), block_step))),
        depth(round_up(a.head_dim, E::depth)),
        v_depth(round_up(a.v_dim, E::depth)),
        cols(round_up(a.head_dim, panel)),
        v_cols(round_up(a.v_dim, panel)),
        dim_rows(round_up(a.head_dim, E::rows)),
        q_blocks((a.q_len + block - 1) / block),
        k_blocks((a.k_len + block - 1) / block),
        chunks(choose_chunks(a, block, 2 * (depth + v_depth) * pieces * static_cast<int64_t>(sizeof(C)))),
        groups(max(1, (k_blocks + blocks_of_group() - 1) / blocks_of_group())),
        reach(groups == 1 ? q_blocks : BlockHulls(a, block).widest(a.k_len, blocks_of_group() * block)),
        rounds(BiasTiles::rounds_of(a)),
        shares(shares_of_head(threads)) {}

  // So many key blocks add to one dQ. Those of all groups are then added in order: how many threads work on them, and
  // which group each takes, changes no bit.
  int64_t blocks_of_group() const { return max(1, 768 / block); }
  Range key_blocks_of(int64_t group) const {
    return {group * blocks_of_group(), min((group + 1) * blocks_of_group(), k_blocks)};
  }
  int64_t panels() const { return block / panel; }
  // Panels of queries whose scores are in work at once: matrix units store them, which is slow but for the nearest
  // cache. Options look at whole rows.
  int64_t together() const { return E::overlaps && !changes ? 4 : panels(); }
  int64_t ld_scores() const { return E::overlaps && !changes ? 4 * panel : block + 16; }
  int64_t ld_weights() const { return sizeof(C) == 4 ? ld_scores() : block + 32; }
  int64_t queries() const { return q_blocks * block; }
  int64_t packed() const { return chunks.query_blocks * block; }  // queries that are packed at once, at most
  int64_t column_panel() const { return (packed() + 2) * panel; }
  int64_t block_dq() const { return dim_rows * block; }
  int64_t group_dq() const { return reach * block_dq(); }
  int64_t head_dq() const { return q_blocks * block_dq(); }
  Range queries_of_group(const Hull* block_hulls, int64_t group) const {
    const Range keys = key_blocks_of(group);
    return groups == 1 ? Range{0, q_blocks}
                       : blocks_that_see(block_hulls, q_blocks, keys.begin * block, keys.end * block);
  }
  int64_t key_plane() const { return packed() * depth; }
  int64_t v_key_plane() const { return packed() * v_depth; }
  int64_t dim_plane() const { return cols / panel * column_panel(); }
  int64_t v_dim_plane() const { return v_cols / panel * column_panel(); }
  int64_t k_plane() const { return block * depth; }
  int64_t v_plane() const { return block * v_depth; }
  int64_t k_column_plane() const { return dim_rows * block; }
  int64_t weight_plane() const { return strip * ld_weights(); }
  int64_t tile_plane() const { return block * block; }

  struct Own {              // one thread's scratch
    C *q_keys, *dout_keys;  // one query head packed four ways; the names are pack.h's
    C *q_dims, *dout_dims;
    float *lse, *lse_rest;  // in units of log2: the whole number nearest to it, and 2^-rest
    float* delta;
    double* whole_lse;
    float* base;  // of each query's biases, see `HeadBias::base_of`
    bool* exact;  // are the query's weights taken in double, off the tiles?
    Columns mask;
    Hull* block_hulls;     // of each query block: most of them see nothing of a key block
    float *dq, *whole_dq;  // of a group and of the head, transposed: [query block][dim][query]
    float *dk, *dv;        // accumulators of a key block, or of the share's if several query heads add to them
    C *k, *v, *k_columns;  // one key block
    float *scores, *dp;    // one strip
    C *p, *ds;
    C* ds_keys;     // one tile, packed for dQ
    float* bias;    // of one strip, then the gradient of its exponents
    float* slopes;  // of one strip's softcap
    BiasTiles::Room bias_room;
    uint32_t* kept;      // of one tile, for each 32 keys and each query: which weights dropout keeps
    RandomPair* random;  // of each query
    Ahead* ahead;        // what is wanted next, or null
  };
  Own lay_out(Carver& carver) const {
    Own o;
    o.q_keys = carver.take<C>(pieces * key_plane());
    o.dout_keys = carver.take<C>(pieces * v_key_plane());
    o.q_dims = carver.take<C>(pieces * dim_plane());
    o.dout_dims = carver.take<C>(pieces * v_dim_plane());
    for (float** x : {&o.lse, &o.lse_rest, &o.delta, &o.base}) *x = carver.take<float>(queries());
    o.whole_lse = carver.take<double>(queries());
    o.exact = carver.take<bool>(queries());
    o.mask = Columns::lay_out(carver, queries(), a.runs);
    o.block_hulls = carver.take<Hull>(q_blocks);
    o.dq = carver.take<float>(shares == 1 ? group_dq() : 0);
    o.whole_dq = carver.take<float>(shares == 1 && groups > 1 ? head_dq() : 0);
    const int64_t held = a.group() == 1 ? 1 : (groups + shares - 1) / shares * blocks_of_group();
    o.dk = carver.take<float>(held * block * cols);
    o.dv = carver.take<float>(held * block * v_cols);
    o.k = carver.take<C>(pieces * k_plane());
    o.v = carver.take<C>(pieces * v_plane());
    o.k_columns = carver.take<C>(pieces * k_column_plane());
    for (float** x : {&o.scores, &o.dp}) *x = carver.take<float>(strip * ld_scores());
    o.p = sizeof(C) == 4 ? reinterpret_cast<C*>(o.scores) : carver.take<C>(pieces * weight_plane());
    o.ds = sizeof(C) == 4 ? reinterpret_cast<C*>(o.dp) : carver.take<C>(pieces * weight_plane());
    o.ds_keys = carver.take<C>(pieces * tile_plane());
    o.bias = carver.take<float>(a.options.bias.kind == BiasKind::none ? 0 : strip * ld_scores());
    o.slopes = carver.take<float>(a.options.softcap > 0.0f ? strip * ld_scores() : 0);
    o.bias_room = BiasTiles::lay_out(carver, a, queries());
    o.kept = carver.take<uint32_t>(drops ? block / 32 * block : 0);
    o.random = carver.take<RandomPair>(drops ? queries() : 0);
    o.ahead = nullptr;
    return o;
  }

  // What shares of a head sum on their own.
  struct Partial {
    float *dq, *bias, *sinks;
    Range* rows;  // the query blocks of each group's dQ
    bool* small;  // do products of the head vanish where subnormals do?
  };
  Partial lay_out_shared(Carver& carver) const {
    Partial p;
    const int64_t dqs = shares == 1 ? 0 : a.batch * a.q_heads * groups;
    p.dq = carver.take<float>(dqs * group_dq()), p.rows = carver.take<Range>(dqs);
    p.small = carver.take<bool>(a.batch * a.q_heads);
    p.bias = carver.take<float>(a.batch * a.q_heads * shares * BiasTiles::partial_size(a));
    p.sinks = carver.take<float>(a.dsinks == nullptr ? 0 : a.batch * a.q_heads);
    return p;
  }

  // One query head: what its options change, and where its gradients are summed.
  struct Head {
    int64_t b, h;
    BiasTiles bias;
    Softcap cap;
    float kept_weight;
    bool deep;  // does a row's bias have a base?
    bool far;   // is a row's lse beyond what `exp2_near` takes?
    float* dq;  // of the group's query blocks
    Range rows;
  };
  float* dq_of(const Head& head, int64_t query_block) const {
    return head.dq + (query_block - head.rows.begin) * block_dq();
  }

  // A block of keys from `first` on, packed, and its accumulators.
  struct KeyBlock {
    int64_t first, keys;
    float *dk, *dv;
    int64_t strips() const { return (keys + strip - 1) / strip; }
  };

  // Adds the gradients of a key block and of the packed query blocks [seen.begin, seen.end) that see it.
  [[gnu::noinline]] void add_tiles(const Own& o, const Head& head, const KeyBlock& block_of_keys, Range seen) const {
    const auto [first, keys, dk, dv] = block_of_keys;
    const int64_t used = block_of_keys.strips();
    const float factor = head.bias.present() ? head.bias.factor() : 0.0f;
    for (int64_t qb = seen.begin; qb < seen.end; ++qb) {
      if (o.block_hulls[qb].lo >= first + keys || o.block_hulls[qb].hi <= first) continue;
      Range exact[most_strips], range[most_strips];
      Range all;
      for (int64_t s = 0; s < used; ++s) {
        exact[s] = seen_panels(o.mask, qb, first + s * strip), range[s] = in_pairs(exact[s]);
        all.include(range[s]);
      }
      if (all.size() == 0) continue;
      if (drops) draw(head.b, qb, all, first, keys, o);
      for (int64_t s = 0; s < used; ++s) {
        hide_outside(o.ds_keys, s, all, range[s]);
        if (range[s].size() > 0)
          add_strip({o, head, qb, (qb - seen.begin) * panels() + exact[s].begin, first, s * strip,
                     keys_of(block_of_keys, s, s + 1), range[s], exact[s], factor},
                    dk + s * strip * cols, dv + s * strip * v_cols);
      }
      add_dq(o, block_of_keys, qb, range, all, dq_of(head, qb));
    }
  }

  const BackwardArgs& a;
  const bool changes, drops;
  const int64_t block, depth, v_depth, cols, v_cols, dim_rows, q_blocks, k_blocks;
  const Chunks chunks;
  const int64_t groups, reach;  // of keys; the most query blocks that see one
  const BiasTiles::Rounds rounds;
  const int64_t shares;

 private:
  // Enough shares of each head's groups of keys to keep the threads busy, if all dQ of groups fit in 2 GiB.
  int64_t shares_of_head(int threads) const {
    constexpr int64_t budget = int64_t{1} << 31;
    const int64_t floats = a.batch * a.q_heads * (group_dq() + BiasTiles::partial_size(a)) * groups;
    const int64_t most = floats * static_cast<int64_t>(sizeof(float)) <= budget ? groups : 1;
    return choose_shares(a.batch * a.kv_heads / (rounds.batch * rounds.heads), min(most, 16), threads);
  }

  // Which weights of a tile dropout keeps.
  void draw(int64_t b, int64_t qb, Range seen, int64_t first, int64_t keys, const Own& o) const {
    for (int64_t j = 0; j < keys; j += 32)
      for (int64_t i = seen.begin * panel; i < seen.end * panel; ++i)
        o.kept[j / 32 * block + i] = kept_of_32(a, o.random[qb * block + i], b, first + j);
  }

  // Panels of a query block that see a strip of keys, in whole steps of the engine.
  Range seen_panels(const Columns& mask, int64_t qb, int64_t key) const {
    Range r;
    for (int64_t p = 0; p < panels(); ++p)
      if (mask.touches(qb * panels() + p, key, key + strip)) r.include({p, p + 1});
    return E::depth > panel ? in_pairs(r) : r;
  }
  static Range in_pairs(Range panels) {
    return panels.size() > 0 ? Range{round_down(panels.begin, 2), round_up(panels.end, 2)} : panels;
  }

  // dS of a tile, packed with keys as depth: [query panel][key / pair][query][key % pair].
  C* packed_line(C* ds_keys, int64_t p, int64_t key) const { return ds_keys + p * block * panel + key * panel; }

  void hide_outside(C* ds_keys, int64_t s, Range all, Range seen) const {
    for (int64_t p = all.begin; p < all.end; ++p)
      if (p < seen.begin || p >= seen.end)
        for (int64_t piece = 0; piece < pieces; ++piece)
          std::memset(packed_line(ds_keys, p, s * strip) + piece * tile_plane(), 0, strip * panel * sizeof(C));
  }

  // A strip of keys, from `key` of the key block that starts at key `first`, and the panels of a query block that see
  // it, as pairs and exactly. The first of the latter is panel `at` of the packed queries.
  struct KeyStrip {
    const Own& own;
    const Head& head;
    int64_t query_block, at, first, key, keys;  // whole steps of the engine, at most a strip
    Range seen, exact;
    float bias_factor = 0.0f;
  };

  // Keys of a key block from strip `begin` to strip `end`.
  static int64_t keys_of(const KeyBlock& keys, int64_t begin, int64_t end) {
    return E::rows > 1 ? (end - begin) * strip : min((end - begin) * strip, round_up(keys.keys, pair) - begin * strip);
  }

  void add_strip(const KeyStrip& s, float* dk, float* dv) const {
    const Own& o = s.own;
    const int64_t p0 = s.query_block * panels() + s.seen.begin, n = s.seen.size() * panel;
    // Columns of a pair that no query sees are not computed: the mask hides whatever is there.
    const int64_t from = (s.exact.begin - s.seen.begin) * panel, seen = s.exact.size() * panel;
    const bool changed = changes || s.head.far, less = s.head.deep || a.options.bias.kind == BiasKind::dense;
    const Tile bias{o.bias, ld_scores(), s.first + s.key, s.keys, p0 * panel, n, less ? o.base : nullptr};
    for (int64_t first = 0; first < s.seen.size(); first += together()) {
      const int64_t last = min(s.seen.size(), first + together());
      scores_of(s, from, first * panel, max(from, first * panel), min(from + seen, last * panel));
      if (a.options.softcap > 0.0f)
        for (int64_t j = 0; j < s.keys; ++j)
          s.head.cap.apply(o.scores + j * ld_scores(), n, o.slopes + j * ld_scores());
      if (s.head.bias.present()) s.head.bias.fill(bias);
      for (int64_t p = first; p < last; p += 2)
        if (covers(o.mask, p0 + p, s.first + s.key))
          changed ? weights<false, true>(s, first, p) : weights<false, false>(s, first, p);
        else
          changed ? weights<true, true>(s, first, p) : weights<true, false>(s, first, p);
    }
    if (s.head.bias.present() && s.head.bias.wants_gradient()) s.head.bias.record(bias);
    add_product<E, E::gradient_cut>({o.p + from, ld_weights(), weight_plane()},
                                    {o.dout_dims + s.at * panel * panel, column_panel(), v_dim_plane()}, dv, v_cols,
                                    s.keys, v_cols, p0 * panel + from, seen, o.ahead);
    add_product<E, E::gradient_cut>({o.ds + from, ld_weights(), weight_plane()},
                                    {o.q_dims + s.at * panel * panel, column_panel(), dim_plane()}, dk, cols, s.keys,
                                    cols, p0 * panel + from, seen, o.ahead);
  }

  // Scores, and products of dout with values, of columns [begin, end) of a strip, of which `from` is the first one that
  // is seen, and `origin` that with which the arrays begin.
  void scores_of(const KeyStrip& s, int64_t from, int64_t origin, int64_t begin, int64_t end) const {
    const Own& o = s.own;
    const int64_t at = s.at * panel + begin - from, n = end - begin;
    if (n <= 0) return;
    const Side<C> k{o.k + s.key * depth, depth, k_plane()}, q{o.q_keys + at * depth, depth * panel, key_plane()};
    float* const scores = o.scores + begin - origin;
    if constexpr (pieces > 1)
      E::template product<true>(k, q, scores, ld_scores(), s.keys, n, depth, false);
    else
      E::product(k, q, scores, ld_scores(), s.keys, n, depth, false, o.ahead);
    cut_product<E>({o.v + s.key * v_depth, v_depth, v_plane()},
                   {o.dout_keys + at * v_depth, v_depth * panel, v_key_plane()}, o.dp + begin - origin, ld_scores(),
                   s.keys, n, v_depth, o.ahead);
  }

  static bool covers(const Columns& mask, int64_t p, int64_t key) {
    return mask.covers(p, key, key + strip) && mask.covers(p + 1, key, key + strip);
  }

  // A vector of queries.
  struct Queries {
    int64_t index;
    Vec lse, rest, delta;
  };

  // P = 2^(S - lse) and dS = P * (dP - delta) for a strip of keys and two panels of queries, from panel p of the strip
  // on, where scores begin with panel `first`. `Masked`: they see only some of the keys. `Changed`: the call has
  // options, or rows that are far.
  template <bool Masked, bool Changed>
  void weights(const KeyStrip& s, int64_t first, int64_t p) const {
    const Own& o = s.own;
    const int64_t to = s.seen.begin + p, query = s.query_block * panels() + to;
    const Vec c = set(a.options.softcap > 0.0f ? 1.0f : a.scale * log2_e);  // capped scores have their units
    for (int64_t lane = 0; lane < panel; lane += Vec::width) {
      Queries at[2];
      for (int64_t side = 0; side < 2; ++side) {
        const int64_t q = (query + side) * panel + lane;
        at[side] = {q, load(o.lse + q), load(o.lse_rest + q), load(o.delta + q)};
      }
      for (int64_t j = 0; j < s.keys; j += pair) {
        Vec weight[2], ds[2][pair];
        for (int64_t i = 0; i < pair; ++i) {
          const int64_t group = (j + i) * ld_weights() + p * panel;
          for (int64_t side = 0; side < 2; ++side) {
            const int64_t score = (j + i) * ld_scores() + (p - first + side) * panel + lane;
            const Queries& x = at[side];
            Mask seen{};
            if constexpr (Masked) seen = o.mask.see(s.first + s.key + j + i, x.index);
            if constexpr (Changed) {
              const Place place{score, s.key + j + i, (to + side) * panel + lane};
              weight[side] = changed_weight<Masked>(s, place, c, x, seen, &ds[side][i]);
            } else {
              // As the forward pass does it, bit for bit but for the factor of the row: weights of a row have a sum of
              // 1, however large its scores are, and out is the sum that they make.
              weight[side] = exp2_near<typename E::Exponential>(load(o.scores + score) * c, x.lse) * x.rest;
              ds[side][i] = weight[side] * (load(o.dp + score) - x.delta);
            }
            if constexpr (Masked) {
              weight[side] = select(seen, weight[side], zero());
              ds[side][i] = select(seen, ds[side][i], zero());
            }
          }
          E::store_group(o.p + group, lane, weight_plane(), weight[0], weight[1]);
          if constexpr (!rounds_once) E::store_group(o.ds + group, lane, weight_plane(), ds[0][i], ds[1][i]);
        }
        C* const lines[2] = {packed_line(o.ds_keys, to, s.key + j) + lane * pair,
                             packed_line(o.ds_keys, to + 1, s.key + j) + lane * pair};
        if constexpr (rounds_once) {
          C* const rows = o.ds + j * ld_weights() + p * panel;
          store_both_ways(rows, rows + ld_weights(), lines, ds);
        } else {
          for (int64_t side = 0; side < 2; ++side) E::store_line(lines[side], tile_plane(), ds[side]);
        }
      }
    }
  }

  // Where a key and a vector of queries stand: in the strip's arrays of scores, and in the tile.
  struct Place {
    int64_t score, key, query;
  };

  // The weight of a call with options, as V's gradient takes it. `ds` gets what those of Q and K take, and the gradient
  // of the exponent is left where the bias was.
  template <bool Masked>
  Vec changed_weight(const KeyStrip& s, const Place& at, Vec c, const Queries& x, Mask seen, Vec* ds) const {
    const Own& o = s.own;
    const Head& head = s.head;
    Vec exponent = load(o.scores + at.score) * c;
    if (head.bias.present()) exponent = fma(load(o.bias + at.score), set(s.bias_factor), exponent);
    // Not -infinity, of which the exponential's two steps would make NaN; and no weight is above 1, however the scores
    // were rounded.
    exponent = vmax(set(-0x1.fffffep127f), exponent);
    exponent = zero() - vmax(zero() - x.lse - set(1.0f), zero() - exponent);
    const Vec p = exp2_shifted<typename E::Exponential>(exponent, x.lse) * x.rest;
    Vec kept = p, dp = load(o.dp + at.score);
    if (drops) {
      const Ints bits = load_ints(reinterpret_cast<const int32_t*>(o.kept) + at.key / 32 * block + at.query);
      const Mask keep = share_bits(bits, set_ints(uint32_t{1} << (at.key % 32)));
      kept = select(keep, p * set(head.kept_weight), zero());
      dp = select(keep, dp * set(head.kept_weight), zero());
    }
    Vec gradient = p * (dp - x.delta);
    if (head.bias.present() && head.bias.wants_gradient())
      store(o.bias + at.score, Masked ? select(seen, gradient, zero()) : gradient);
    if (a.options.softcap > 0.0f) gradient = gradient * load(o.slopes + at.score);
    *ds = gradient;
    return kept;
  }

  // dQ^T += K^T dS^T, two query panels at a time over the keys of the strips that they see.
  void add_dq(const Own& o, const KeyBlock& keys, int64_t qb, const Range* range, Range all, float* dq) const {
    const int64_t used = keys.strips();
    for (int64_t p = all.begin; p < all.end; p += 2) {
      int64_t begin = used, end = 0;
      for (int64_t s = 0; s < used; ++s)
        if (range[s].begin <= p && p < range[s].end) begin = min(begin, s), end = s + 1;
      if (begin >= end) continue;
      const int64_t from = begin * strip, seen = o.mask.end_of(qb * panels() + p, 2) - keys.first - from;
      add_product<E, E::gradient_cut>(
          {o.k_columns + from, block, k_column_plane()}, {packed_line(o.ds_keys, p, from), block * panel, tile_plane()},
          dq + p * panel, block, dim_rows, 2 * panel, from, min(keys_of(keys, begin, end), round_up(seen, E::depth)));
    }
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
