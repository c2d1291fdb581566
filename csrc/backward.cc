// Backward: five products for each visible tile (Dao 2023, FlashAttention-2, algorithm 2). Compiled once per
// instruction-set level.
//
// Scores are held transposed, keys x queries, so that dK and dV take their probabilities as they lie and dQ^T takes
// them packed. A unit of work is a share of one key head's key blocks: it owns its rows of dK and dV. Its dQ is
// complete where the head is one share; otherwise each share keeps a dQ of its own and a last loop adds them in a fixed
// order. No atomics: same threads, same bits.
#include <cassert>

#include "attention.h"
#include "bias_tiles.h"
#include "columns.h"
#include "exact.h"
#include "kernels.h"
#include "pack.h"
#include "parts.h"
#include "rows.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T, class E>
class Backward {
  using C = typename E::Element;
  using Pack = PackerFor<T, E>;
  static constexpr int64_t strip = E::strip, pair = E::pair, pieces = E::pieces,
                           block_step = strip % key_step == 0 ? strip : 96, most_block = 384,
                           most_strips = most_block / strip;
  static_assert(block_step % strip == 0 && block_step % key_step == 0);

 public:
  static constexpr Blocks blocks_allowed = {{block_step, most_block}, {block_step, most_block}, true};

  Backward(const BackwardArgs& args, int threads)
      : a(args),
        block(args.config.block_k ? args.config.block_k
                                  : least(192, round_up(most(1, most(args.q_len, args.k_len)), block_step))),
        panels(block / panel),
        ld_scores(block + 16),
        ld_weights(sizeof(C) == 4 ? ld_scores : block + 32),
        depth(round_up(a.head_dim, E::depth)),
        v_depth(round_up(a.v_dim, E::depth)),
        cols(round_up(a.head_dim, panel)),
        v_cols(round_up(a.v_dim, panel)),
        dim_rows(round_up(a.head_dim, E::rows)),
        q_blocks((a.q_len + block - 1) / block),
        k_blocks((a.k_len + block - 1) / block),
        queries(q_blocks * block),
        chunks(choose_chunks(a, block, 2 * (depth + v_depth) * pieces * static_cast<int64_t>(sizeof(C)))),
        packed(chunks.query_blocks * block),
        column_panel((packed + 2) * panel),
        head_dq(q_blocks * dim_rows * block),
        key_plane(packed * depth),
        v_key_plane(packed * v_depth),
        dim_plane(cols / panel * column_panel),
        v_dim_plane(v_cols / panel * column_panel),
        k_plane(block * depth),
        v_plane(block * v_depth),
        k_column_plane(dim_rows * block),
        weight_plane(strip * ld_weights),
        tile_plane(block * block),
        changes(a.options.change_weights()),
        drops(a.options.dropout.on()),
        rounds(choose_rounds()),
        shares(choose_shares(threads)),
        bias_size(BiasTiles::partial_size(a)) {}

  Scratch scratch() const {
    Carver shared, own;
    lay_out_shared(shared);
    lay_out(own);
    return {shared.used(), own.used()};
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) {
    Carver carver(shared);
    const Partial partial = lay_out_shared(carver);
    if (a.options.bias.kind == BiasKind::dense && a.dbias.data != nullptr) clear_dense_gradient(parallel);
    const int64_t batch = a.batch / rounds.batch, heads = a.kv_heads / rounds.heads;
    for (int64_t round = 0; round < rounds.batch * rounds.heads; ++round)
      parallel(batch * heads * shares, [&](int64_t item, int thread) {
        const FlushSubnormals flush;
        Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
        const Own own = lay_out(carver);
        E::begin();
        unit(round / rounds.heads * batch + item / shares / heads, round % rounds.heads * heads + item / shares % heads,
             item % shares, own, partial);
        E::end();
      });
    if (shares > 1)
      parallel(a.batch * a.q_heads * q_blocks,
               [&](int64_t item, int) { reduce(item / q_blocks, item % q_blocks, partial.dq); });
    if (bias_size > 0) parallel(a.q_heads, [&](int64_t h, int) { reduce_bias(h, partial.bias); });
    if (a.dsinks != nullptr) reduce_sinks(partial.sinks);
  }

 private:
  struct Own {              // one thread's scratch
    C *q_keys, *dout_keys;  // one query head packed four ways; the names are pack.h's
    C *q_dims, *dout_dims;
    float *lse, *lse_rest;  // in units of log2: the whole number nearest to it, and the rest
    float* delta;
    double* whole_lse;
    float* base;  // of each query's biases, see `HeadBias::base_of`
    bool* exact;  // are the query's weights taken in double, off the tiles?
    Columns mask;
    Hull* block_hulls;     // of each query block: most of them see nothing of a key block
    float* dq;             // transposed: [query block][dim][query]
    float *dk, *dv;        // accumulators of a key block, or of the share's if several query heads add to them
    C *k, *v, *k_columns;  // one key block
    float *scores, *dp;    // one strip
    C *p, *ds;
    C* ds_keys;   // one tile, packed for dQ
    float* bias;  // of one strip, then the gradient of its exponents
    BiasTiles::Room bias_room;
    uint32_t* kept;      // of one tile, for each 32 keys and each query: which weights dropout keeps
    RandomPair* random;  // of each query
  };

  // What shares of a head sum on their own.
  struct Partial {
    float *dq, *bias, *sinks;
  };

  Partial lay_out_shared(Carver& carver) const {
    Partial p;
    p.dq = carver.take<float>(partial_dq());
    p.bias = carver.take<float>(a.batch * a.q_heads * shares * bias_size);
    p.sinks = carver.take<float>(a.dsinks == nullptr ? 0 : a.batch * a.q_heads);
    return p;
  }

  // One query head of a call with options.
  struct Changes {
    BiasTiles bias;
    Softcap cap;
    float kept_weight;
    bool deep = false;  // does a row's bias have a base?
  };
  // What a head has large.
  struct Large {
    int64_t biases = 0, exact = 0;  // rows with a base; rows with scores that floats in tiles do not serve
  };

  Own lay_out(Carver& carver) const {
    Own o;
    o.q_keys = carver.take<C>(pieces * key_plane);
    o.dout_keys = carver.take<C>(pieces * v_key_plane);
    o.q_dims = carver.take<C>(pieces * dim_plane);
    o.dout_dims = carver.take<C>(pieces * v_dim_plane);
    o.lse = carver.take<float>(queries);
    o.lse_rest = carver.take<float>(queries);
    o.delta = carver.take<float>(queries);
    o.whole_lse = carver.take<double>(queries);
    o.base = carver.take<float>(queries);
    o.exact = carver.take<bool>(queries);
    o.mask = Columns::lay_out(carver, queries, a.runs);
    o.block_hulls = carver.take<Hull>(q_blocks);
    o.dq = carver.take<float>(shares == 1 ? head_dq : 0);
    const int64_t held = a.group() == 1 ? 1 : (k_blocks + shares - 1) / shares;
    o.dk = carver.take<float>(held * block * cols);
    o.dv = carver.take<float>(held * block * v_cols);
    o.k = carver.take<C>(pieces * k_plane);
    o.v = carver.take<C>(pieces * v_plane);
    o.k_columns = carver.take<C>(pieces * k_column_plane);
    o.scores = carver.take<float>(strip * ld_scores);
    o.dp = carver.take<float>(strip * ld_scores);
    o.p = sizeof(C) == 4 ? reinterpret_cast<C*>(o.scores) : carver.take<C>(pieces * weight_plane);
    o.ds = sizeof(C) == 4 ? reinterpret_cast<C*>(o.dp) : carver.take<C>(pieces * weight_plane);
    o.ds_keys = carver.take<C>(pieces * tile_plane);
    o.bias = carver.take<float>(a.options.bias.kind == BiasKind::none ? 0 : strip * ld_scores);
    o.bias_room = BiasTiles::lay_out(carver, a, queries);
    o.kept = carver.take<uint32_t>(drops ? block / 32 * block : 0);
    o.random = carver.take<RandomPair>(drops ? queries : 0);
    return o;
  }

  // Units that run together must not add to the same gradient of a dense bias: where batch rows or heads share one,
  // they take turns. (Shares of a head own their keys.)
  struct Rounds {
    int64_t batch, heads;
  };
  Rounds choose_rounds() const {
    const Bias& bias = a.options.bias;
    if (bias.kind != BiasKind::dense || a.dbias.data == nullptr) return {1, 1};
    return {bias.batches == 1 ? a.batch : 1, bias.heads == 1 ? a.kv_heads : 1};
  }

  void clear_dense_gradient(const Parallel& parallel) const {
    const Bias& bias = a.options.bias;
    parallel(bias.batches * bias.heads * bias.rows, [&](int64_t row, int) {
      std::memset(a.dbias.data + row * a.k_len, 0, static_cast<size_t>(a.k_len) * sizeof(float));
    });
  }

  // Enough shares of each head to keep the threads nine tenths busy, as far as 2 GiB of partial dQ go.
  int64_t choose_shares(int threads) const {
    constexpr int64_t budget = int64_t{1} << 31;
    const int64_t bytes =
        most(1, a.batch * a.q_heads * (head_dq + BiasTiles::partial_size(a)) * static_cast<int64_t>(sizeof(float)));
    const int64_t heads = a.batch * a.kv_heads / (rounds.batch * rounds.heads),
                  limit = most(1, least(least(k_blocks, 16), budget / bytes));
    for (int64_t n = 1; n <= limit; ++n) {
      const int64_t units = heads * n, rounds = (units + threads - 1) / threads;
      if (units * 10 >= rounds * threads * 9) return n;
    }
    return limit;
  }
  int64_t partial_dq() const { return shares == 1 ? 0 : a.batch * a.q_heads * shares * head_dq; }

  // The largest magnitude of a head's scaled scores, which decides how its softcap is computed.
  float largest_score(int64_t b, int64_t h) const { return largest_of_head(b, h, std::fabs(a.scale)); }
  float largest_of_head(int64_t b, int64_t h, float factor) const {
    return largest_product(largest_norm(at<T>(a.q, b, h, 0), a.q.row, a.q_len, a.head_dim),
                           largest_norm(at<T>(a.k, b, h / a.group(), 0), a.k.row, a.k_len, a.head_dim), factor);
  }

  Changes changes_of(int64_t b, int64_t h, int64_t share, const Own& o, const Partial& partial) const {
    float* sums = partial.bias == nullptr ? nullptr : partial.bias + ((b * a.q_heads + h) * shares + share) * bias_size;
    return {BiasTiles(a, b, h, queries, o.bias_room, sums),
            a.options.softcap > 0.0f ? Softcap::make<T>(a.options.softcap, a.scale, largest_score(b, h)) : Softcap{},
            kept_weight_of(a)};
  }

  void unit(int64_t b, int64_t hk, int64_t share, const Own& o, const Partial& partial) const {
    const bool finite_kv = finite(at<T>(a.k, b, hk, 0), a.k.row, a.k_len, a.head_dim) &&
                           finite(at<T>(a.v, b, hk, 0), a.v.row, a.k_len, a.v_dim);
    for (int64_t g = 0; g < a.group(); ++g) {
      const int64_t h = hk * a.group() + g;
      const Large large = prepare(b, h, o);
      const bool numbers = finite_kv && finite(at<T>(a.q, b, h, 0), a.q.row, a.q_len, a.head_dim) &&
                           finite(at<T>(a.dout, b, h, 0), a.dout.row, a.q_len, a.v_dim);
      const bool tiles =
          a.q_len >= few_rows && numbers && (large.exact == 0 || (large.exact < a.q_len && within_tiles(b, h)));
      if (large.exact > 0 && a.wide_lse == nullptr) find_exact_lse(b, h, o);
      float* dq = shares == 1 ? o.dq : partial.dq + ((b * a.q_heads + h) * shares + share) * head_dq;
      Changes change = changes_of(b, h, share, o, partial);
      change.deep = large.biases > 0;
      if (a.dsinks != nullptr && share == 0) partial.sinks[b * a.q_heads + h] = sink_gradient(h, o);
      BlockSpan seen;
      int64_t chunk = -1;
      std::memset(dq, 0, static_cast<size_t>(head_dq) * sizeof(float));
      for (int64_t kb = share, held = 0; kb < k_blocks; kb += shares, ++held) {
        const int64_t slot = a.group() == 1 ? 0 : held;
        float *dk = o.dk + slot * block * cols, *dv = o.dv + slot * block * v_cols;
        if (g == 0) {
          std::memset(dk, 0, static_cast<size_t>(block * cols) * sizeof(float));
          std::memset(dv, 0, static_cast<size_t>(block * v_cols) * sizeof(float));
        }
        if (tiles && kb / chunks.key_blocks != chunk) {
          chunk = kb / chunks.key_blocks;
          seen = pack_queries(b, h, chunk, o);
        }
        if (tiles) key_block(b, hk, kb, seen, o, change, dq, dk, dv);
        // Not looked for in vain: of packed documents, a pass over all rows costs as much as a key block's few
        // products.
        for (int64_t i = 0; i < a.q_len && !(tiles && large.exact == 0); ++i)
          if (!tiles || o.exact[i]) row_of_key_block(b, h, kb, i, numbers, o, change, dq, dk, dv);
        if (g + 1 == a.group()) write_key_block(b, hk, kb, dk, dv);
      }
      change.bias.finish();
      if (shares == 1)
        for (int64_t qb = 0; qb < q_blocks; ++qb) write_dq(b, h, qb, dq + qb * dim_rows * block, 1, 0);
    }
  }

  // Of one head's sink: its weight in each row has a value of 0.
  float sink_gradient(int64_t h, const Own& o) const {
    const auto sink = static_cast<double>(a.options.sinks[h]);
    double sum = 0.0;
    for (int64_t i = 0; i < a.q_len; ++i)
      if (o.whole_lse[i] != -HUGE_VAL) sum -= std::exp(sink - o.whole_lse[i]) * static_cast<double>(o.delta[i]);
    return static_cast<float>(sum);
  }

  Large prepare(int64_t b, int64_t h, const Own& o) const {
    const T* dout = at<T>(a.dout, b, h, 0);
    const int64_t row = (b * a.q_heads + h) * a.q_len;
    const HeadBias bias(a, b, h);
    const bool any_base = may_cancel(b, h);
    Large large;
    for (int64_t i = 0; i < a.q_len; ++i) {
      prepare_lse(b, h, i, bias, any_base, o);
      large.biases += o.base[i] != 0.0f, large.exact += o.exact[i];
      o.delta[i] = product_of_rows(dout + i * a.dout.row, at<T>(a.out, b, h, i)) - (a.dlse ? a.dlse[row + i] : 0.0f);
    }
    for (int64_t i = a.q_len; i < queries; ++i) o.lse[i] = o.lse_rest[i] = o.delta[i] = o.base[i] = 0.0f;
    o.mask.fill(a.bounds.slice(b, h), a.q_len);
    if (drops) {
      const uint64_t seed = seed_of_head(a, b, h);
      for (int64_t i = 0; i < queries; ++i) o.random[i] = i < a.q_len ? random_of_row(a, seed, b, i) : RandomPair{};
    }
    for (int64_t qb = 0; qb < q_blocks; ++qb)
      o.block_hulls[qb] =
          hull_of(a.bounds.slice(b, h) + qb * block * a.runs * 2, least(block, a.q_len - qb * block), a.runs);
    return large;
  }

  // May biases cancel scores, so that a small lse says nothing of the sizes of either? To find the base of a dense
  // bias, a pass over it, is worth it only then; the others look for theirs in no time.
  bool may_cancel(int64_t b, int64_t h) const {
    if (a.options.bias.kind != BiasKind::dense) return true;
    const float cap = a.options.softcap;
    return !((cap > 0.0f && cap <= HeadBias::most_plain_bias) ||
             static_cast<double>(largest_score(b, h)) <= most_lse_of_tiles - 2 * HeadBias::most_plain_bias);
  }

  // The lse of a row, less the base of its biases. A float of a large one has lost what the row's weights differ by:
  // it is computed anew, but for that of a whole, whose other keys are elsewhere.
  void prepare_lse(int64_t b, int64_t h, int64_t i, const HeadBias& bias, bool any_base, const Own& o) const {
    const int64_t row = (b * a.q_heads + h) * a.q_len + i;
    const bool part = a.wide_lse != nullptr;
    const double given = part ? a.wide_lse[row] : static_cast<double>(a.lse[row]);
    const bool sees = given != -HUGE_VAL, look = any_base || std::fabs(given) > HeadBias::most_plain_bias;
    o.base[i] = sees && look ? bias.base_of(i, a.bounds.slice(b, h) + i * a.runs * 2) : 0.0f;
    const double base = bias.value_of_base(o.base[i]);
    double lse = given - base;
    const auto anew = [&] { return lse_of_row(b, h, i, RowOptions::make<T>(a, b, h, i, 1.0f)); };
    if (!part && base != 0.0 && std::fabs(given) > most_lse_of_tiles) lse = anew();
    o.exact[i] = sees && std::fabs(lse) > most_lse_of_tiles;
    if (o.exact[i] && part) {
      o.exact[i] = !(lse - anew() > 200.0);  // else all weight is elsewhere
      lse = !o.exact[i] ? HUGE_VAL : std::fabs(lse) > most_lse_of_parts ? NAN : lse;
    }
    o.whole_lse[i] = lse + base;
    // On the tiles, the weights of rows that see nothing and of those that are worked on by themselves are 2^-infinity.
    const double exponent = lse * 1.44269504088896340736;
    o.lse[i] = !sees || o.exact[i] ? infinity : static_cast<float>(std::nearbyint(exponent));
    o.lse_rest[i] = std::isfinite(o.lse[i]) ? static_cast<float>(exponent - static_cast<double>(o.lse[i])) : 0.0f;
  }
  // Forward's own scores are out of reach of a call that has a part of the row's keys: beyond this size its weights
  // would be wrong by more than a hundredth, and are NaN.
  static constexpr double most_lse_of_parts = 65536.0;

  // Are exponents of exact rows finite in tiles too, where their weights become 0?
  bool within_tiles(int64_t b, int64_t h) const {
    constexpr float most = 0x1p100f;
    const float product = largest_of_head(b, h, 1.0f);
    if (!(product <= most && product * std::fabs(a.scale) <= most)) return false;
    if (a.options.bias.kind != BiasKind::distance) return true;  // others are below 64, or less their largest
    const DistanceTable table = HeadBias(a, b, h).table_of_head();
    return *std::max_element(table.values, table.values + table.size()) <= most;
  }

  double lse_of_row(int64_t b, int64_t h, int64_t i, const RowOptions& options) const {
    const int64_t hk = h / a.group();
    const int32_t* spans = a.bounds.slice(b, h) + i * a.runs * 2;
    alignas(64) float query[max_dim];
    widen(at<T>(a.q, b, h, i), query, a.head_dim);
    LogSum sum;
    if (a.options.sinks != nullptr) sum.add(static_cast<double>(a.options.sinks[h]) - options.base());
    for (int64_t r = 0; r < a.runs; ++r)
      for (int64_t j = spans[2 * r]; j < spans[2 * r + 1]; ++j)
        sum.add(static_cast<double>(options.exponent(j, dot(query, at<T>(a.k, b, hk, j), a.head_dim) * a.scale)));
    return sum.value();
  }

  void find_exact_lse(int64_t b, int64_t h, const Own& o) const {
    for (int64_t i = 0; i < a.q_len; ++i)
      if (o.exact[i]) o.whole_lse[i] = ExactRow<T>(a, b, h, i).lse();
  }

  // The queries that see a chunk of keys.
  BlockSpan pack_queries(int64_t b, int64_t h, int64_t chunk, const Own& o) const {
    const int64_t step = chunks.key_blocks * block;
    const BlockSpan seen = blocks_that_see(o.block_hulls, q_blocks, chunk * step, (chunk + 1) * step);
    const int64_t first = seen.begin * block, count = (seen.end - seen.begin) * block, valid = a.q_len - first;
    if (count == 0) return seen;
    const T *q = at<T>(a.q, b, h, first), *dout = at<T>(a.dout, b, h, first);
    Pack::keys(q, a.q.row, valid, a.head_dim, {o.q_keys, key_plane}, depth * panel, 0, count, depth);
    Pack::keys(dout, a.dout.row, valid, a.v_dim, {o.dout_keys, v_key_plane}, v_depth * panel, 0, count, v_depth);
    Pack::dims(q, a.q.row, valid, a.head_dim, {o.q_dims, dim_plane}, column_panel, 0, count, cols);
    Pack::dims(dout, a.dout.row, valid, a.v_dim, {o.dout_dims, v_dim_plane}, column_panel, 0, count, v_cols);
    return seen;
  }

  float product_of_rows(const T* x, const T* y) const {
    Vec sum = zero();
    for (int64_t d = 0; d < a.v_dim; d += Vec::width)
      sum = fma(load_upto(x + d, a.v_dim - d), load_upto(y + d, a.v_dim - d), sum);
    return reduce_add(sum);
  }

  void key_block(int64_t b, int64_t hk, int64_t kb, BlockSpan seen, const Own& o, const Changes& change, float* dq,
                 float* dk, float* dv) const {
    const int64_t first = kb * block, keys = least(block, a.k_len - first), used = (keys + strip - 1) / strip;
    const T *k = at<T>(a.k, b, hk, first), *v = at<T>(a.v, b, hk, first);
    Pack::rows(k, a.k.row, keys, a.head_dim, {o.k, k_plane}, depth, used * strip, false);
    Pack::rows(v, a.v.row, keys, a.v_dim, {o.v, v_plane}, v_depth, used * strip, false);
    Pack::columns(k, a.k.row, keys, a.head_dim, {o.k_columns, k_column_plane}, block, dim_rows);
    for (int64_t qb = seen.begin; qb < seen.end; ++qb) {
      if (o.block_hulls[qb].lo >= first + keys || o.block_hulls[qb].hi <= first) continue;
      Range range[most_strips];
      Range all{panels, 0};
      for (int64_t s = 0; s < used; ++s) {
        range[s] = seen_panels(o.mask, qb, first + s * strip);
        all.include(range[s]);
      }
      if (all.begin >= all.end) continue;
      if (drops) draw(b, qb, all, first, keys, o);
      for (int64_t s = 0; s < used; ++s) {
        hide_outside(o.ds_keys, s, all, range[s]);
        if (range[s].begin < range[s].end)
          strip_of_keys(o, change, qb, seen.begin, first, s, range[s], dk + s * strip * cols, dv + s * strip * v_cols);
      }
      add_dq(o, range, used, all, dq + qb * dim_rows * block);
    }
  }

  struct Range {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
    void include(Range other) {
      if (other.begin >= other.end) return;
      begin = least(begin, other.begin), end = most(end, other.end);
    }
  };

  // Which weights of a tile dropout keeps.
  void draw(int64_t b, int64_t qb, Range seen, int64_t first, int64_t keys, const Own& o) const {
    for (int64_t j = 0; j < keys; j += 32)
      for (int64_t i = seen.begin * panel; i < seen.end * panel; ++i)
        o.kept[j / 32 * block + i] = kept_of_32(a, o.random[qb * block + i], b, first + j);
  }

  // Panels of a query block that see a strip of keys, as pairs: products want multiples of 32 queries.
  Range seen_panels(const Columns& mask, int64_t qb, int64_t key) const {
    Range r{panels, 0};
    for (int64_t p = 0; p < panels; ++p)
      if (mask.touches(qb * panels + p, key, key + strip)) r.include({p & ~int64_t{1}, (p & ~int64_t{1}) + 2});
    return r;
  }

  // dS of a tile, packed with keys as depth: [query panel][key / pair][query][key % pair].
  C* packed_line(C* ds_keys, int64_t p, int64_t key) const { return ds_keys + p * block * panel + key * panel; }

  void hide_outside(C* ds_keys, int64_t s, Range all, Range seen) const {
    for (int64_t p = all.begin; p < all.end; ++p)
      if (p < seen.begin || p >= seen.end)
        for (int64_t piece = 0; piece < pieces; ++piece)
          std::memset(packed_line(ds_keys, p, s * strip) + piece * tile_plane, 0, strip * panel * sizeof(C));
  }

  void strip_of_keys(const Own& o, const Changes& change, int64_t qb, int64_t base, int64_t first, int64_t s,
                     Range seen, float* dk, float* dv) const {
    const int64_t p0 = qb * panels + seen.begin, at = p0 - base * panels, n = seen.size() * panel;
    E::product({o.k + s * strip * depth, depth, k_plane}, {o.q_keys + at * depth * panel, depth * panel, key_plane},
               o.scores, ld_scores, strip, n, depth, false);
    E::product({o.v + s * strip * v_depth, v_depth, v_plane},
               {o.dout_keys + at * v_depth * panel, v_depth * panel, v_key_plane}, o.dp, ld_scores, strip, n, v_depth,
               false);
    const bool less = change.deep || a.options.bias.kind == BiasKind::dense;
    const Tile bias{o.bias, ld_scores, first + s * strip, strip, p0 * panel, n, less ? o.base : nullptr};
    if (a.options.softcap > 0.0f)
      for (int64_t j = 0; j < strip; ++j) change.cap.apply(o.scores + j * ld_scores, n);
    if (change.bias.present()) change.bias.fill(bias);
    const auto all_weights = [&](const auto& with) {
      for (int64_t p = 0; p < seen.size(); p += 2)
        if (covers(o.mask, p0 + p, first + s * strip))
          weights<false>(o, with, p0 + p, p, seen.begin + p, first, s);
        else
          weights<true>(o, with, p0 + p, p, seen.begin + p, first, s);
    };
    changes ? all_weights(change) : all_weights(None{});
    if (change.bias.present() && change.bias.wants_gradient()) change.bias.record(bias);
    E::product({o.p, ld_weights, weight_plane}, {o.dout_dims + at * panel * panel, column_panel, v_dim_plane}, dv,
               v_cols, strip, v_cols, n, true);
    E::product({o.ds, ld_weights, weight_plane}, {o.q_dims + at * panel * panel, column_panel, dim_plane}, dk, cols,
               strip, cols, n, true);
  }
  struct None {};  // no options

  static bool covers(const Columns& mask, int64_t p, int64_t key) {
    return mask.covers(p, key, key + strip) && mask.covers(p + 1, key, key + strip);
  }

  // P = 2^(S - lse) and dS = P * (dP - delta) for a strip of keys and two panels of queries: panels `query` and the
  // next of the head, at panel `from` of the strip's arrays, at panel `to` of the packed tile.
  template <bool Masked, class Change>
  void weights(const Own& o, const Change& change, int64_t query, int64_t from, int64_t to, int64_t first,
               int64_t s) const {
    const Vec c = set(a.options.softcap > 0.0f ? 1.0f : a.scale * log2_e);  // capped scores have their units
    for (int64_t lane = 0; lane < panel; lane += Vec::width) {
      Queries at[2];
      for (int64_t side = 0; side < 2; ++side) {
        const int64_t q = (query + side) * panel + lane;
        at[side] = {q, load(o.lse + q), load(o.lse_rest + q), load(o.delta + q)};
      }
      for (int64_t j = 0; j < strip; j += pair) {
        Vec p[2], ds[2][pair];
        for (int64_t i = 0; i < pair; ++i) {
          const int64_t group = (j + i) * ld_weights + from * panel;
          for (int64_t side = 0; side < 2; ++side) {
            const int64_t score = (j + i) * ld_scores + (from + side) * panel + lane;
            const Queries& x = at[side];
            Mask seen{};
            if constexpr (Masked) seen = o.mask.see(first + s * strip + j + i, x.index);
            if constexpr (std::is_same_v<Change, None>) {
              p[side] = exp2_shifted<typename E::Exponential>(fma(load(o.scores + score), c, zero() - x.rest), x.lse);
              ds[side][i] = p[side] * (load(o.dp + score) - x.delta);
            } else {
              const int64_t tile_query = (to + side) * panel + lane;
              p[side] =
                  changed_weight(o, change, c, score, s * strip + j + i, tile_query, x, seen, Masked, &ds[side][i]);
            }
            if constexpr (Masked) {
              p[side] = select(seen, p[side], zero());
              ds[side][i] = select(seen, ds[side][i], zero());
            }
          }
          E::store_group(o.p + group, lane, weight_plane, p[0], p[1]);
          E::store_group(o.ds + group, lane, weight_plane, ds[0][i], ds[1][i]);
        }
        for (int64_t side = 0; side < 2; ++side)
          E::store_line(packed_line(o.ds_keys, to + side, s * strip + j) + lane * pair, tile_plane, ds[side]);
      }
    }
  }

  struct Queries;

  // The same with options, for 16 queries and key `key` of the tile: returns what V's gradient takes, gives what those
  // of Q and K take, and leaves the gradient of the exponent where the bias was.
  Vec changed_weight(const Own& o, const Changes& change, Vec c, int64_t score, int64_t key, int64_t query,
                     const Queries& x, Mask seen, bool masked, Vec* ds) const {
    const Vec product = load(o.scores + score);
    Vec exponent = product * c;
    if (change.bias.present()) exponent = exponent + load(o.bias + score);
    // Not -infinity, of which the exponential's two steps would make NaN; and no weight is above 1, however the scores
    // were rounded.
    exponent = vmax(set(-0x1.fffffep127f), exponent - x.rest);
    exponent = zero() - vmax(zero() - x.lse - set(1.0f), zero() - exponent);
    const Vec p = exp2_shifted<typename E::Exponential>(exponent, x.lse);
    Vec kept = p, dp = load(o.dp + score);
    if (drops) {
      const Ints bits = load_ints(reinterpret_cast<const int32_t*>(o.kept) + key / 32 * block + query);
      const Mask keep = share_bits(bits, set_ints(uint32_t{1} << (key % 32)));
      kept = select(keep, p * set(change.kept_weight), zero());
      dp = select(keep, dp * set(change.kept_weight), zero());
    }
    Vec gradient = p * (dp - x.delta);
    if (change.bias.present() && change.bias.wants_gradient())
      store(o.bias + score, masked ? select(seen, gradient, zero()) : gradient);
    if (a.options.softcap > 0.0f) gradient = gradient * change.cap.derivative(product);
    *ds = gradient;
    return kept;
  }
  struct Queries {
    int64_t index;
    Vec lse, rest, delta;
  };

  // dQ^T += K^T dS^T, two query panels at a time over the strips that they see.
  void add_dq(const Own& o, const Range* range, int64_t used, Range all, float* dq) const {
    for (int64_t p = all.begin; p < all.end; p += 2) {
      int64_t begin = used, end = 0;
      for (int64_t s = 0; s < used; ++s)
        if (range[s].begin <= p && p < range[s].end) begin = least(begin, s), end = s + 1;
      if (begin < end)
        E::product({o.k_columns + begin * strip, block, k_column_plane},
                   {packed_line(o.ds_keys, p, begin * strip), block * panel, tile_plane}, dq + p * panel, block,
                   dim_rows, 2 * panel, (end - begin) * strip, true);
    }
  }

  // Row i and the keys of a block, straight from the arrays. On top of tiles, whose weights for the row are 0.
  void row_of_key_block(int64_t b, int64_t h, int64_t kb, int64_t i, bool numbers, const Own& o, const Changes& change,
                        float* dq, float* dk, float* dv) const {
    const int64_t hk = h / a.group(), first = kb * block, last = least(first + block, a.k_len);
    const int32_t* spans = a.bounds.slice(b, h) + i * a.runs * 2;
    if (const Hull seen = hull_of(spans, 1, a.runs); seen.lo >= last || seen.hi <= first) return;
    const KeyValues<T> x{at<T>(a.k, b, hk, 0), at<T>(a.v, b, hk, 0), a.k.row, a.v.row, a.head_dim, a.v_dim};
    const bool recorded = change.bias.present() && change.bias.wants_gradient();
    alignas(64) float row[max_dim] = {};
    const double lse = o.whole_lse[i];
    const auto by = [&](const auto& weigh) {
      const auto record = [&](int64_t j, float ds) {
        if (recorded) change.bias.record(i, j, ds);
      };
      backward_row(at<T>(a.q, b, h, i), x, at<T>(a.dout, b, h, i), spans, a.runs, first, last, a.scale, o.delta[i],
                   numbers, weigh, record, row, dk, cols, dv, v_cols);
    };
    if (o.exact[i]) {
      const ExactRow<T> exact(a, b, h, i);
      by([&](int64_t j, float) { return exact.weigh(j, lse); });
    } else if (changes) {
      const RowOptions options = RowOptions::make<T>(a, b, h, i, 1.0f);
      const auto own = static_cast<float>(lse - options.base());
      by([&](int64_t j, float score) { return options.weigh(j, score, own); });
    } else {
      by([&, own = static_cast<float>(lse)](int64_t, float score) {
        return PairWeight{std::exp(score - own), 1.0f, 1.0f};
      });
    }
    float* column = dq + i / block * dim_rows * block + i % block;
    for (int64_t d = 0; d < a.head_dim; ++d) column[d * block] += row[d];
  }

  void write_key_block(int64_t b, int64_t hk, int64_t kb, const float* dk, const float* dv) const {
    for (int64_t j = 0; j < least(block, a.k_len - kb * block); ++j) {
      write_row<T>(dk + j * cols, a.scale, a.dk, b, hk, kb * block + j, a.head_dim);
      write_row<T>(dv + j * v_cols, 1.0f, a.dv, b, hk, kb * block + j, a.v_dim);
    }
  }

  // Adds `count` transposed blocks, `stride` floats apart, and writes their rows of dQ.
  void write_dq(int64_t b, int64_t h, int64_t qb, const float* dq, int64_t count, int64_t stride) const {
    Block x;
    alignas(64) float rows[panel][max_dim];
    for (int64_t i = 0; i < least(block, a.q_len - qb * block); i += panel) {
      for (int64_t d = 0; d < a.head_dim; d += 16) {
        for (int64_t r = 0; r < 16; ++r)
          for (int64_t lane = 0; lane < panel; lane += Vec::width) {
            Vec sum = zero();
            if (d + r < dim_rows)
              for (int64_t n = 0; n < count; ++n) sum = sum + load(dq + n * stride + (d + r) * block + i + lane);
            store(reinterpret_cast<float*>(x.unit[r]) + lane, sum);
          }
        transpose(x);
        for (int64_t r = 0; r < panel; ++r) std::memcpy(rows[r] + d, x.unit[r], 64);
      }
      for (int64_t r = 0; r < least(panel, a.q_len - qb * block - i); ++r)
        write_row<T>(rows[r], a.scale, a.dq, b, h, qb * block + i + r, a.head_dim);
    }
  }

  void reduce(int64_t head, int64_t qb, const float* partial) const {
    write_dq(head / a.q_heads, head % a.q_heads, qb, partial + head * shares * head_dq + qb * dim_rows * block, shares,
             head_dq);
  }

  // Adds what shares and batch rows have of the gradient of one head's bias.
  void reduce_bias(int64_t h, const float* partial) const {
    const bool reversed = a.options.bias.kind == BiasKind::distance;
    for (int64_t b = 0; b < a.batch; ++b) {
      float* to = a.dbias.data + b * a.dbias.batch + h * a.dbias.head;
      for (int64_t n = 0; n < bias_size; ++n) {
        double sum = 0.0;
        for (int64_t s = 0; s < shares; ++s)
          sum += static_cast<double>(
              partial[((b * a.q_heads + h) * shares + s) * bias_size + (reversed ? bias_size - 1 - n : n)]);
        to[n] = static_cast<float>(sum) + (b > 0 && a.dbias.batch == 0 ? to[n] : 0.0f);
      }
    }
  }

  void reduce_sinks(const float* partial) const {
    for (int64_t h = 0; h < a.q_heads; ++h) {
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b) sum += static_cast<double>(partial[b * a.q_heads + h]);
      a.dsinks[h] = static_cast<float>(sum);
    }
  }

  const BackwardArgs& a;
  const int64_t block, panels, ld_scores, ld_weights, depth, v_depth, cols, v_cols, dim_rows, q_blocks, k_blocks,
      queries;
  const Chunks chunks;
  const int64_t packed, column_panel, head_dq, key_plane, v_key_plane, dim_plane, v_dim_plane, k_plane, v_plane,
      k_column_plane, weight_plane, tile_plane;
  const bool changes, drops;
  const Rounds rounds;
  const int64_t shares, bias_size;
};

template <class T, class E>
Kernels::BackwardPair backward_pair() {
  return {Backward<T, E>::blocks_allowed,
          [](const BackwardArgs& args, int threads) { return Backward<T, E>(args, threads).scratch(); },
          [](const BackwardArgs& args, const Parallel& parallel, char* shared, char* own, size_t bytes) {
            Backward<T, E>(args, parallel.threads).run(parallel, shared, own, bytes);
          }};
}

Kernels::BackwardPair backward_kernels(Dtype dtype) {
#if defined(ATTNSPAN_AMX_FP16)
  // Probabilities of long rows are below float16's normal numbers, and gradients may be beyond them: split ones serve.
  return static_cast<void>(dtype), Kernels::BackwardPair{};
#elif defined(__AMX_BF16__)
  switch (dtype) {
    case Dtype::bf16:
      return backward_pair<bf16, AmxEngine<bf16, 1> >();
    case Dtype::f16:
      return backward_pair<f16, AmxEngine<bf16, 2> >();
    default:
      return backward_pair<float, AmxEngine<bf16, 3> >();
  }
#elif defined(__AVX512BF16__)
  return dtype == Dtype::bf16 ? backward_pair<bf16, VectorEngine<bf16> >() : Kernels::BackwardPair{};
#else
  switch (dtype) {
    case Dtype::bf16:
      return backward_pair<bf16, VectorEngine<float> >();
    case Dtype::f16:
      return backward_pair<f16, VectorEngine<float> >();
    default:
      return backward_pair<float, VectorEngine<float> >();
  }
#endif
}

}  // namespace attnspan::ATTNSPAN_ISA
