// Forward: online softmax over key blocks for a block of query rows. Compiled once per instruction-set level.
//
// 1. K and V of each head are packed once (they are read by every query block of the head).
// 2. A query block of one head is worked on in strips of rows. A strip touches only keys that some row of
// it may see.
#include <cassert>
#include <optional>

#include "engines.h"
#include "exact.h"
#include "few.h"
#include "forward_tiles.h"
#include "pack.h"
#include "row_options.h"

namespace attnspan::ATTNSPAN_ISA {

// What depends on the dtype: packing, results, and rows that tiles do not serve.
template <class T, class E>
class Forward : ForwardTiles<E> {
  using Tiles = ForwardTiles<E>;
  using Pack = PackerFor<T, E>;
  using Tiles::a, Tiles::changes, Tiles::depth, Tiles::plan, Tiles::v_cols;
  using typename Tiles::Own, typename Tiles::Packed, typename Tiles::Rows, typename Tiles::Shared;

 public:
  static constexpr int64_t size = sizeof(T);
  static constexpr Blocks blocks_allowed = {
      {E::strip, Tiles::most_strips * E::strip}, {min(E::cut, 256), Tiles::most_keys}, false};

  Forward(const ForwardArgs& args, int threads)
      : Tiles(args, threads), slots(plan.local ? threads : a.batch * a.kv_heads) {}

  Scratch scratch() const {
    Carver shared, own;
    this->lay_out_shared(shared, slots);
    this->lay_out(own);
    return {shared.used(), own.used()};
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) const {
    Carver carver(shared);
    const Shared all = this->lay_out_shared(carver, slots);
    const auto own = [&](int thread) {
      Carver carver(per_thread + static_cast<size_t>(thread) * thread_bytes);
      return this->lay_out(carver);
    };
    // Later rows of a causal mask cost more: they come first.
    if (plan.local)
      return parallel(a.batch * a.kv_heads * plan.parts, [&](int64_t item, int thread) {
        const FlushSubnormals flush;
        part_of_head(item / plan.parts, plan.parts - 1 - item % plan.parts, all, thread, own(thread));
      });
    const auto whole_head = [&](int64_t n) { return this->packed_in(all, n, n / a.kv_heads, n % a.kv_heads, 0); };
    const int64_t packs = this->packs(), blocks = plan.most_blocks();
    parallel(slots * packs, [&](int64_t item, int) { pack(whole_head(item / packs), item % packs, plan.places); });
    parallel(a.batch * a.q_heads * blocks, [&](int64_t item, int thread) {
      const FlushSubnormals flush;
      const int64_t head = item / blocks, b = head / a.q_heads, h = head % a.q_heads, hk = h / a.group();
      const Range own_blocks = plan.blocks_of(b, hk, 0);
      if (const int64_t i = own_blocks.begin + blocks - 1 - item % blocks; i < own_blocks.end)
        query_block(h, plan[i], whole_head(b * a.kv_heads + hk), Ahead(), own(thread));
    });
  }

 private:
  // One sequence after the other, so that what is packed of it stays in the nearest caches; what the next one reads is
  // fetched meanwhile.
  void part_of_head(int64_t head, int64_t part, const Shared& all, int slot, const Own& o) const {
    const int64_t b = head / a.kv_heads, hk = head % a.kv_heads;
    for (Range left = plan.blocks_of(b, hk, part), own; left.size() > 0;) {
      own = plan.last_sequence(left), left.end = own.begin;
      const Range next = left.size() > 0 ? plan.last_sequence(left) : Range{}, places = plan.places_of(own);
      assert(places.size() <= plan.places && "the slot has room for what the part sees");
      const Packed packed = this->packed_in(all, slot, b, hk, places.begin);
      for (int64_t i = 0; i < this->packs(); ++i) pack(packed, i, places.size());
      const int64_t count = a.group() * own.size();
      for (int64_t n = 0; n < count; ++n) {
        const int64_t h = hk * a.group() + n / own.size(), i = own.end - 1 - n % own.size();
        Ahead ahead(this->pauses_of(plan[i]));
        fetch_keys(ahead, b, hk, next, n, count);
        if (n + 1 < count)
          fetch_queries(ahead, b, hk * a.group() + (n + 1) / own.size(), plan[own.end - 1 - (n + 1) % own.size()]);
        else if (next.size() > 0)
          fetch_queries(ahead, b, hk * a.group(), plan[next.end - 1]);
        query_block(h, plan[i], packed, ahead, o);
      }
    }
  }

  // The n-th of `count` shares of the keys and values that some blocks of one sequence see.
  void fetch_keys(Ahead& ahead, int64_t b, int64_t hk, Range blocks, int64_t n, int64_t count) const {
    if (blocks.size() == 0) return;
    const Sequence& s = plan.sequences[plan[blocks.begin].sequence];
    const Range places = plan.places_of(blocks);
    const int64_t first = s.key + places.begin - s.place, keys = min(places.size(), s.key + s.keys - first);
    const int64_t from = first + keys * n / count, rows = first + keys * (n + 1) / count - from;
    read_ahead(ahead, lines_of<T>(a, a.k, b, hk), from, rows, a.head_dim);
    read_ahead(ahead, lines_of<T>(a, a.v, b, hk), from, rows, a.v_dim);
  }
  void fetch_queries(Ahead& ahead, int64_t b, int64_t h, const QueryBlock& block) const {
    ahead.read(at<T>(a.q, b, h, block.row), a.q.row * size, block.rows, a.head_dim * size);
  }

  // The i-th pack of keys, of the first `size` places.
  void pack(const Packed& to, int64_t i, int64_t size) const {
    const Sequences& sequences = plan.sequences;
    const int64_t slice = sequences.slice_of(to.b, to.hk), last = sequences.of(slice).end,
                  end = to.place + min((i + 1) * Tiles::pack_keys, size);
    int64_t place = to.place + i * Tiles::pack_keys;
    if (place >= end) return;
    for (int64_t n = sequences.at_place(slice, place); n < last && place < end; ++n) {
      const Sequence& s = sequences[n];
      const int64_t until = min(end, s.place + s.places());
      for (int64_t count; place < until; place += count) {
        count = min(key_step, until - place);
        pack_step(to, place, s.key + place - s.place, count, max(0, min(count, s.keys - (place - s.place))));
      }
    }
  }

  // A step of keys from `key` on: the first `valid` of `count`, then zeros. What looks at so few rows leaves them in L1
  // for what copies them.
  void pack_step(const Packed& to, int64_t place, int64_t key, int64_t count, int64_t valid) const {
    const KeyValues<T> x(a, to.b, to.hk);
    if (a.pages.table != nullptr) return pack_pages(x, to, place, key, count, valid);
    pack_rows({x.key(key), a.k.row}, {x.value(key), a.v.row}, to, place, count, valid);
  }
  [[gnu::noinline]] void pack_pages(const KeyValues<T>& x, const Packed& to, int64_t place, int64_t key, int64_t count,
                                    int64_t valid) const {
    alignas(64) T keys[key_step * max_dim], values[key_step * max_dim];
    pack_rows(x.k.together(key, valid, a.head_dim, keys), x.v.together(key, valid, a.v_dim, values), to, place, count,
              valid);
  }
  void pack_rows(typename Lines<T>::Place k, typename Lines<T>::Place v, const Packed& to, int64_t place, int64_t count,
                 int64_t valid) const {
    const int64_t first = place - to.place;
    Norms& norms = to.norms[first / key_step];
    norms.k = largest_norm(k.data, k.stride, valid, a.head_dim);
    Pack::keys(k.data, k.stride, valid, a.head_dim, {to.k + first / panel * this->k_panel(), this->k_plane()},
               this->k_panel(), 0, count, depth);
    norms.v = largest_norm(v.data, v.stride, valid, a.v_dim);
    Pack::dims(v.data, v.stride, valid, a.v_dim, {to.v + first * panel, this->v_plane()}, this->v_panel(), 0, count,
               v_cols);
  }

  void query_block(int64_t h, const QueryBlock& block, const Packed& packed, Ahead ahead, const Own& o) const {
    const Rows rows = this->rows_of(packed.b, h, block);
    const T* q = at<T>(a.q, packed.b, h, rows.first);
    const float q_norm = largest_norm(q, a.q.row, rows.count, a.head_dim);
    const Norms norms = this->norms_of(packed, plan.sequences[block.sequence].places_of(rows.all));
    const int64_t first = min(rows.all.lo, rows.all.hi);
    const KeyValues<T> x(a, packed.b, packed.hk);
    const bool small = may_vanish(sized(q_norm, q, a.q.row, rows.count, a.head_dim)) ||
                       may_vanish(sized(norms.k, x.k, first, rows.all.hi, a.head_dim)) ||
                       may_vanish(sized(norms.v, x.v, first, rows.all.hi, a.v_dim));
    const FlushSubnormals flush(!small);
    // 0 * inf would reach rows that may not see the key, and pieces of an infinite number are no numbers.
    if (!std::isfinite(norms.v) || (E::pieces > 1 && !(std::isfinite(norms.k) && std::isfinite(q_norm))) ||
        (small && always_flushes<E>)) {
      for (int64_t i = rows.first; i < rows.first + rows.count; ++i) row(packed.b, h, i);
      return;
    }
    [[maybe_unused]] const typename E::Session session;
    // A negative scale is carried by -q, so that the larger score is the likelier key; scale 0 by q = 0.
    Pack::rows(q, a.q.row, rows.count, a.scale == 0.0f ? 0 : a.head_dim, {o.q, this->q_plane()}, depth, rows.padded(),
               a.scale < 0.0f);
    const int64_t result = a.out.wide ? int64_t{sizeof(float)} : size;
    ahead.write(
        static_cast<char*>(a.out.data) + result * (packed.b * a.out.batch + h * a.out.head + rows.first * a.out.row),
        a.out.row * result, rows.count, a.v_dim * result);
    this->attend(packed, h, rows, q_norm, norms, ahead, o);
    for (int64_t r = 0; r < rows.count; ++r) finish(packed.b, h, rows, o, r);
  }

  void finish(int64_t b, int64_t h, const Rows& rows, const Own& o, int64_t r) const {
    const int64_t i = rows.first + r;
    const bool sees = sees_any(rows.spans + r * a.runs * 2, a.runs);
    const float sum = sees ? whole_sum(o.sums + r * sum_lanes) : 0.0f;
    const double base = changes ? HeadBias::value_of_base(a, b, h, o.base[r]) : 0.0;
    const RowEnd end = end_of_row(o.maximum[r] - E::exponent_offset, sum, sink_of(a, h), kept_weight_of(a), base);
    if (sees && is_lost<T>(a, b, h, i, end.lse)) return exact_row(b, h, i);
    float* const out = o.out + r * v_cols;
    if (!sees) std::memset(out, 0, static_cast<size_t>(v_cols) * sizeof(float));
    float factor = end.factor * correction_of<E>(o.sums + r * sum_lanes, sum);
    if (const int lane = sees ? lane_to_settle<T, E>(a, o.sums + r * sum_lanes, sum) : -1; lane >= 0)
      factor = settle<T>(a, b, h, i, rows.origin + lane, E::value_error, end.weight, factor, out);
    write_row<T>(out, factor, a.out, b, h, i, a.v_dim);
    write_lse(a, b, h, i, end.lse);
  }

  void row(int64_t b, int64_t h, int64_t i) const {
    const int64_t hk = h / a.group();
    const KeyValues<T> x(a, b, hk);
    std::optional<RowOptions> options;
    if (changes) options.emplace(a, b, h, i, magnitude_of(a.scale));
    alignas(64) float sum_v[max_dim] = {};
    RowSums sums{.v = sum_v};
    const RowEnd end = forward_row(at<T>(a.q, b, h, i), x, a.bounds.slice(b, h) + i * a.runs * 2, a.runs, a.scale,
                                   options ? &*options : nullptr, sink_of(a, h), kept_weight_of(a), sums);
    if (is_lost<T>(a, b, h, i, end.lse)) return exact_row(b, h, i);
    if (sums.weights == 1 && std::isfinite(sums.total)) return write_value<T>(a, b, h, i, sums.key, end);
    write_row<T>(sum_v, end.factor, a.out, b, h, i, a.v_dim);
    write_lse(a, b, h, i, end.lse);
  }

  [[gnu::noinline, gnu::cold]] void exact_row(int64_t b, int64_t h, int64_t i) const {
    alignas(64) float out[max_dim] = {};
    const double lse = ExactRow<T>(a, b, h, i).forward(out);
    write_row<T>(out, 1.0f, a.out, b, h, i, a.v_dim);
    write_lse(a, b, h, i, lse);
  }

  const int64_t slots;
};

Kernels::ForwardPair forward_kernels(Dtype dtype) {
  return with_engine<Kernels::ForwardPair>(dtype, []<class T, class E>() -> Kernels::ForwardPair {
    return {Forward<T, E>::blocks_allowed,
            [](const ForwardArgs& args, int threads) {
              return few_queries(args) ? FewQueries<T, E>(args, threads).scratch()
                                       : Forward<T, E>(args, threads).scratch();
            },
            [](const ForwardArgs& args, const Parallel& parallel, char* shared, char* own, size_t bytes) {
              few_queries(args) ? FewQueries<T, E>(args, parallel.threads).run(parallel, shared, own, bytes)
                                : Forward<T, E>(args, parallel.threads).run(parallel, shared, own, bytes);
            }};
  });
}

}  // namespace attnspan::ATTNSPAN_ISA
