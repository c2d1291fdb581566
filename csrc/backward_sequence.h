// The gradients of one sequence of a call, or of all of a call with options, as far as they depend on the dtype: lse,
// packing, results, and rows that tiles do not serve.
//
// A unit of work is a share of one key head's groups of key blocks: it owns its rows of dK and dV. Each group sums a dQ
// of its own, and these are added in order: no atomics.
#pragma once

#include "backward_tiles.h"
#include "exact.h"
#include "pack.h"
#include "row_options.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T, class E>
class Backward : BackwardTiles<E> {
  using Tiles = BackwardTiles<E>;
  using Pack = PackerFor<T, E>;
  using Tiles::a, Tiles::block, Tiles::changes, Tiles::chunks, Tiles::cols, Tiles::depth, Tiles::dim_rows, Tiles::drops,
      Tiles::k_blocks, Tiles::q_blocks, Tiles::groups, Tiles::rounds, Tiles::shares, Tiles::v_cols, Tiles::v_depth;
  using typename Tiles::Head, typename Tiles::KeyBlock, typename Tiles::Own, typename Tiles::Partial;

 public:
  static constexpr Blocks blocks_allowed = {
      {Tiles::block_step, Tiles::most_block}, {Tiles::block_step, Tiles::most_block}, true};

  Backward(const BackwardArgs& args, int threads) : Tiles(args, threads) {}

  Scratch scratch() const {
    Carver shared, own;
    this->lay_out_shared(shared);
    this->lay_out(own);
    return {shared.used(), own.used()};
  }

  // `ahead`, for one thread alone, is fetched meanwhile.
  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes,
           Ahead* ahead = nullptr) const {
    Carver carver(shared);
    const Partial partial = this->lay_out_shared(carver);
    BiasTiles::clear_dense_gradient(a, parallel);
    const int64_t batch = a.batch / rounds.batch, heads = a.kv_heads / rounds.heads;
    for (int64_t round = 0; round < rounds.batch * rounds.heads; ++round)
      parallel(batch * heads * shares, [&](int64_t item, int thread) {
        const FlushSubnormals flush;
        Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
        Own own = this->lay_out(carver);
        own.ahead = ahead;
        [[maybe_unused]] const typename E::Session session;
        unit(round / rounds.heads * batch + item / shares / heads, round % rounds.heads * heads + item / shares % heads,
             item % shares, own, partial);
      });
    if (shares > 1)
      parallel(a.batch * a.q_heads * q_blocks, [&](int64_t item, int) {
        const int64_t head = item / q_blocks, qb = item % q_blocks;
        const FlushSubnormals flush(!partial.small[head]);
        write_dq(head / a.q_heads, head % a.q_heads, qb, partial.dq + head * groups * this->group_dq(),
                 partial.rows + head * groups, groups);
      });
    BiasTiles::reduce_gradient(a, parallel, shares, partial.bias);
    for (int64_t h = 0; a.dsinks != nullptr && h < a.q_heads; ++h) {
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b) sum += static_cast<double>(partial.sinks[b * a.q_heads + h]);
      a.dsinks[h] = static_cast<float>(sum);
    }
  }

 private:
  void unit(int64_t b, int64_t hk, int64_t share, const Own& o, const Partial& partial) const {
    const Magnitude k = measure(at<T>(a.k, b, hk, 0), a.k.row, a.k_len, a.head_dim),
                    v = measure(at<T>(a.v, b, hk, 0), a.v.row, a.k_len, a.v_dim);
    for (int64_t g = 0; g < a.group(); ++g) {
      const int64_t h = hk * a.group() + g;
      const Magnitude q = measure(at<T>(a.q, b, h, 0), a.q.row, a.q_len, a.head_dim),
                      dout = measure(at<T>(a.dout, b, h, 0), a.dout.row, a.q_len, a.v_dim);
      const bool numbers = q.finite && k.finite && v.finite && dout.finite,
                 small = may_vanish(dout.squares, v.squares, std::fmin(q.squares, k.squares));
      const FlushSubnormals flush(!small);
      if (share == 0 && shares > 1) partial.small[b * a.q_heads + h] = small;  // else of one thread alone, which has it
      const Large large = prepare(b, h, o);
      const bool tiles = numbers && !(small && always_flushes<E>) &&
                         (large.exact == 0 || (large.exact < a.q_len && within_tiles(b, h)));
      if (large.exact > 0 && !a.part) find_exact_lse(b, h, o);
      // On the tiles, `find_delta` has them while queries are packed: a pass over out less.
      if (!tiles || a.dsinks != nullptr) find_deltas(b, h, o);
      if (a.dsinks != nullptr && share == 0) partial.sinks[b * a.q_heads + h] = sink_gradient(h, o);
      Head head = head_of(b, h, share, large, o, partial);
      Range seen;
      int64_t chunk = -1, held = 0;
      for (int64_t group = share; group < groups; group += shares) {
        head.rows = this->queries_of_group(o.block_hulls, group);
        if (shares > 1) {
          const int64_t n = (b * a.q_heads + h) * groups + group;
          head.dq = partial.dq + n * this->group_dq(), partial.rows[n] = head.rows;
        }
        clear_dq(head);
        const Range blocks = this->key_blocks_of(group);
        for (int64_t kb = blocks.begin; kb < blocks.end; ++kb, ++held) {
          const KeyBlock keys = key_block_of(kb, a.group() == 1 ? 0 : held, o);
          if (g == 0) {
            const auto rows = static_cast<size_t>(keys.strips() * E::strip) * sizeof(float);
            std::memset(keys.dk, 0, rows * static_cast<size_t>(cols));
            std::memset(keys.dv, 0, rows * static_cast<size_t>(v_cols));
          }
          if (tiles && kb / chunks.key_blocks != chunk) {
            chunk = kb / chunks.key_blocks;
            seen = pack_queries(b, h, chunk, o);
          }
          if (tiles) {
            pack_keys(b, hk, keys, o);
            this->add_tiles(o, head, keys, seen);
          }
          // Not looked for in vain: of packed documents, a pass over all rows costs as much as a key block's few
          // products.
          for (int64_t i = 0; i < a.q_len && !(tiles && large.exact == 0); ++i)
            if (!tiles || o.exact[i]) add_row(head, keys, i, numbers, o);
          if (g + 1 == a.group()) write_key_block(b, hk, keys);
        }
        if (shares == 1 && groups > 1) add_whole_dq(head, group == 0, o);
      }
      head.bias.finish();
      const Range all{0, q_blocks};
      for (int64_t qb = 0; shares == 1 && qb < q_blocks; ++qb)
        write_dq(b, h, qb, groups > 1 ? o.whole_dq : o.dq, &all, 1);
    }
  }

  // Of one block the queries that there are.
  void clear_dq(const Head& head) const {
    if (q_blocks > 1 || groups > 1) {
      std::memset(head.dq, 0, static_cast<size_t>(head.rows.size() * this->block_dq()) * sizeof(float));
      return;
    }
    const size_t used = static_cast<size_t>(round_up(a.q_len, 2 * panel)) * sizeof(float);
    for (int64_t d = 0; d < dim_rows; ++d) std::memset(head.dq + d * block, 0, used);
  }

  void add_whole_dq(const Head& head, bool first, const Own& o) const {
    if (first) std::memset(o.whole_dq, 0, static_cast<size_t>(this->head_dq()) * sizeof(float));
    float* const to = o.whole_dq + head.rows.begin * this->block_dq();
    for (int64_t j = 0; j < head.rows.size() * this->block_dq(); j += Vec::width)
      store(to + j, load(to + j) + load(head.dq + j));
  }

  // What a head has large: rows whose biases have a base, rows with scores that floats in tiles do not serve, and rows
  // beyond what `exp2_near` takes.
  struct Large {
    int64_t biases = 0, exact = 0, far = 0;
  };

  Head head_of(int64_t b, int64_t h, int64_t share, const Large& large, const Own& o, const Partial& partial) const {
    const int64_t part = (b * a.q_heads + h) * shares + share, size = BiasTiles::partial_size(a);
    Head head{b,
              h,
              BiasTiles(a, b, h, this->queries(), o.bias_room, size == 0 ? nullptr : partial.bias + part * size),
              {},
              kept_weight_of(a),
              large.biases > 0,
              large.far > 0,
              o.dq,
              {}};
    if (a.options.softcap > 0.0f) head.cap = Softcap::make(a.dtype, a.options.softcap, a.scale, largest_score(b, h));
    return head;
  }

  KeyBlock key_block_of(int64_t kb, int64_t slot, const Own& o) const {
    return {kb * block, min(block, a.k_len - kb * block), o.dk + slot * block * cols, o.dv + slot * block * v_cols};
  }

  // The largest magnitude of a head's scaled scores, which decides how its softcap is computed.
  float largest_score(int64_t b, int64_t h) const { return largest_of_head(b, h, std::fabs(a.scale)); }
  float largest_of_head(int64_t b, int64_t h, float factor) const {
    return largest_product(largest_norm(at<T>(a.q, b, h, 0), a.q.row, a.q_len, a.head_dim),
                           largest_norm(at<T>(a.k, b, h / a.group(), 0), a.k.row, a.k_len, a.head_dim), factor);
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
    const HeadBias bias(a, b, h);
    Large large;
    for (int64_t i = 0; i < a.q_len; ++i) {
      prepare_lse(b, h, i, bias, o);
      large.biases += o.base[i] != 0.0f, large.exact += o.exact[i];
      large.far += std::fabs(o.lse[i]) >= 0x1p17f && o.lse[i] < infinity;
    }
    for (int64_t i = a.q_len; i < this->queries(); ++i) o.lse[i] = o.lse_rest[i] = o.delta[i] = o.base[i] = 0.0f;
    o.mask.fill(a.bounds.slice(b, h), a.q_len);
    if (drops) {
      const uint64_t seed = seed_of_head(a, b, h);
      for (int64_t i = 0; i < this->queries(); ++i)
        o.random[i] = i < a.q_len ? random_of_row(a, seed, b, i) : RandomPair{};
    }
    for (int64_t qb = 0; qb < q_blocks; ++qb)
      o.block_hulls[qb] =
          hull_of(a.bounds.slice(b, h) + qb * block * a.runs * 2, min(block, a.q_len - qb * block), a.runs);
    return large;
  }

  double given_lse(int64_t row) const {
    if (a.wide_lse != nullptr) return a.wide_lse[row];
    return static_cast<double>(a.lse[row]) + (a.lse_low == nullptr ? 0.0 : static_cast<double>(a.lse_low[row]));
  }

  // The lse of a row, less the base of its biases.
  void prepare_lse(int64_t b, int64_t h, int64_t i, const HeadBias& bias, const Own& o) const {
    const double given = given_lse(a.lse_row(b, h) + i);
    const bool sees = given != -HUGE_VAL;
    o.base[i] = sees ? bias.base_of(i, a.bounds.slice(b, h) + i * a.runs * 2) : 0.0f;
    const double base = bias.value_of_base(o.base[i]);
    double lse = given - base;
    o.exact[i] = sees && std::fabs(lse) > most_lse_of_tiles;
    // A part of the keys has weights of 0 if all weight is in other parts. Otherwise the lse does not determine them.
    if (o.exact[i] && a.part) {
      o.exact[i] = !(lse - static_cast<double>(largest_score(b, h)) > 300.0);
      lse = o.exact[i] ? NAN : HUGE_VAL;
    }
    o.whole_lse[i] = lse + base;
    // On the tiles, the weights of rows that see nothing and of those that are worked on by themselves are 2^-infinity.
    const double exponent = lse * 1.44269504088896340736;
    o.lse[i] = !sees || o.exact[i] ? infinity : static_cast<float>(std::nearbyint(exponent));
    o.lse_rest[i] = std::isfinite(o.lse[i]) ? std::exp2(static_cast<float>(static_cast<double>(o.lse[i]) - exponent))
                    : std::isnan(o.lse[i])  ? o.lse[i]
                                            : 1.0f;
  }

  // Are exponents of exact rows finite in tiles too, where their weights become 0?
  bool within_tiles(int64_t b, int64_t h) const {
    constexpr float most = 0x1p100f;
    const float product = largest_of_head(b, h, 1.0f);
    if (!(product <= most && product * std::fabs(a.scale) <= most)) return false;
    if (a.options.bias.kind != BiasKind::distance) return true;  // others are below 64, or less their largest
    const DistanceTable table = HeadBias(a, b, h).table_of_head();
    return *std::max_element(table.values, table.values + table.size()) <= most;
  }

  void find_exact_lse(int64_t b, int64_t h, const Own& o) const {
    for (int64_t i = 0; i < a.q_len; ++i)
      if (o.exact[i]) o.whole_lse[i] = ExactRow<T>(a, b, h, i).lse();
  }

  // The queries that see a chunk of keys.
  Range pack_queries(int64_t b, int64_t h, int64_t chunk, const Own& o) const {
    const int64_t step = chunks.key_blocks * block, columns = this->column_panel();
    const Range seen = blocks_that_see(o.block_hulls, q_blocks, chunk * step, (chunk + 1) * step);
    const int64_t first = seen.begin * block, valid = a.q_len - first,
                  count = min(seen.size() * block, round_up(valid, 2 * panel));  // pairs of panels that are seen
    if (seen.size() == 0) return seen;
    const T *q = at<T>(a.q, b, h, first), *dout = at<T>(a.dout, b, h, first);
    Pack::keys(q, a.q.row, valid, a.head_dim, {o.q_keys, this->key_plane()}, depth * panel, 0, count, depth);
    Pack::keys(dout, a.dout.row, valid, a.v_dim, {o.dout_keys, this->v_key_plane()}, v_depth * panel, 0, count,
               v_depth);
    Pack::dims(q, a.q.row, valid, a.head_dim, {o.q_dims, this->dim_plane()}, columns, 0, count, cols);
    Pack::dims(dout, a.dout.row, valid, a.v_dim, {o.dout_dims, this->v_dim_plane()}, columns, 0, count, v_cols);
    for (int64_t i = 0; i < count; i += 2 * panel) find_delta(b, h, first + i, i / panel, o);
    return seen;
  }

  void find_deltas(int64_t b, int64_t h, const Own& o) const {
    const T *dout = at<T>(a.dout, b, h, 0), *out = at<T>(a.out, b, h, 0);
    const int64_t row = a.lse_row(b, h);
    for (int64_t i = 0; i < a.q_len; ++i)
      o.delta[i] = product_of_rows(dout + i * a.dout.row, out + i * a.out.row) - (a.dlse ? a.dlse[row + i] : 0.0f);
  }

  // The delta of two panels of packed queries from row `first` on, by the product that dP is taken by: where a row has
  // all its weight on one key, its out is that key's value, so dP - delta is exactly 0. V's place is free meanwhile.
  void find_delta(int64_t b, int64_t h, int64_t first, int64_t place, const Own& o) const {
    constexpr int64_t n = 2 * panel;
    const int64_t rows = min(n, a.q_len - first), row = a.lse_row(b, h) + first, size = v_depth * panel;
    if (rows <= 0) return;
    const T* out = at<T>(a.out, b, h, first);
    const auto* dout = o.dout_keys + place * size;
    float products[n];
    if constexpr (requires { &E::diagonal; }) {
      Pack::keys(out, a.out.row, rows, a.v_dim, {o.v, this->v_plane()}, size, 0, n, v_depth);
      for (int64_t p = 0; p < n / panel; ++p)
        E::diagonal(o.v + p * size, dout + p * size, products + p * panel, v_depth);
    } else {
      Pack::rows(out, a.out.row, rows, a.v_dim, {o.v, this->v_plane()}, v_depth, n, false);
      cut_product<E>({o.v, v_depth, this->v_plane()}, {dout, size, this->v_key_plane()}, o.dp, n, n, n, v_depth);
      for (int64_t i = 0; i < n; ++i) products[i] = o.dp[i * n + i];
    }
    for (int64_t i = 0; i < rows; ++i) o.delta[first + i] = products[i] - (a.dlse ? a.dlse[row + i] : 0.0f);
  }

  void pack_keys(int64_t b, int64_t hk, const KeyBlock& keys, const Own& o) const {
    const int64_t padded = keys.strips() * E::strip;
    const T *k = at<T>(a.k, b, hk, keys.first), *v = at<T>(a.v, b, hk, keys.first);
    Pack::rows(k, a.k.row, keys.keys, a.head_dim, {o.k, this->k_plane()}, depth, padded, false);
    Pack::rows(v, a.v.row, keys.keys, a.v_dim, {o.v, this->v_plane()}, v_depth, padded, false);
    Pack::columns(k, a.k.row, keys.keys, a.head_dim, {o.k_columns, this->k_column_plane()}, block,
                  min(block, round_up(padded, 32)), dim_rows);
  }

  float product_of_rows(const T* x, const T* y) const {
    Vec sum = zero();
    for (int64_t d = 0; d < a.v_dim; d += Vec::width)
      sum = fma(load_upto(x + d, a.v_dim - d), load_upto(y + d, a.v_dim - d), sum);
    return reduce_add(sum);
  }

  // Adds the gradients of row i and the keys of a block, straight from the arrays. On top of tiles, whose weights for
  // the row are 0.
  void add_row(const Head& head, const KeyBlock& keys, int64_t i, bool numbers, const Own& o) const {
    const int64_t b = head.b, h = head.h, hk = h / a.group(), last = keys.first + keys.keys;
    const int32_t* spans = a.bounds.slice(b, h) + i * a.runs * 2;
    if (const Hull seen = hull_of(spans, 1, a.runs); seen.lo >= last || seen.hi <= keys.first) return;
    const KeyValues<T> x(a, b, hk);
    const bool recorded = head.bias.present() && head.bias.wants_gradient();
    alignas(64) float row[max_dim] = {};
    const double lse = o.whole_lse[i];
    const auto by = [&](const auto& weigh) {
      const auto record = [&](int64_t j, float ds) {
        if (recorded) head.bias.record(i, j, ds);
      };
      backward_row(at<T>(a.q, b, h, i), x, at<T>(a.dout, b, h, i), spans, a.runs, keys.first, last, a.scale, o.delta[i],
                   numbers, weigh, record, row, keys.dk, cols, keys.dv, v_cols);
    };
    if (o.exact[i]) {
      const ExactRow<T> exact(a, b, h, i);
      by([&](int64_t j, float) { return exact.weigh(j, lse); });
    } else if (changes) {
      const RowOptions options(a, b, h, i, 1.0f);
      const auto own = static_cast<float>(lse - options.base());
      by([&](int64_t j, float score) { return options.weigh(j, score, own); });
    } else {
      by([&, own = static_cast<float>(lse)](int64_t, float score) {
        return PairWeight{std::exp(score - own), 1.0f, 1.0f};
      });
    }
    float* column = this->dq_of(head, i / block) + i % block;
    for (int64_t d = 0; d < a.head_dim; ++d) column[d * block] += row[d];
  }

  void write_key_block(int64_t b, int64_t hk, const KeyBlock& keys) const {
    for (int64_t j = 0; j < keys.keys; ++j) {
      write_row<T>(keys.dk + j * cols, a.scale, a.dk, b, hk, keys.first + j, a.head_dim);
      write_row<T>(keys.dv + j * v_cols, 1.0f, a.dv, b, hk, keys.first + j, a.v_dim);
    }
  }

  // Adds a query block of the dQ of `count` groups that have it, and writes its rows.
  void write_dq(int64_t b, int64_t h, int64_t qb, const float* dq, const Range* blocks, int64_t count) const {
    const auto has = [&](int64_t n) { return blocks[n].begin <= qb && qb < blocks[n].end; };
    int64_t first = 0;
    while (first < count && !has(first)) ++first;
    while (count > first && !has(count - 1)) --count;
    Block x;
    alignas(64) float rows[panel][max_dim];
    for (int64_t i = 0; i < min(block, a.q_len - qb * block); i += panel) {
      for (int64_t d = 0; d < a.head_dim; d += 16) {
        for (int64_t r = 0; r < 16; ++r)
          for (int64_t lane = 0; lane < panel; lane += Vec::width) {
            Vec sum = zero();
            if (d + r < dim_rows)
              for (int64_t n = first; n < count; ++n)
                if (has(n))
                  sum = sum + load(dq + n * this->group_dq() + (qb - blocks[n].begin) * this->block_dq() +
                                   (d + r) * block + i + lane);
            store(reinterpret_cast<float*>(x.unit[r]) + lane, sum);
          }
        transpose(x);
        for (int64_t r = 0; r < panel; ++r) std::memcpy(rows[r] + d, x.unit[r], 64);
      }
      for (int64_t r = 0; r < min(panel, a.q_len - qb * block - i); ++r)
        write_row<T>(rows[r], a.scale, a.dq, b, h, qb * block + i + r, a.head_dim);
    }
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
