// What options make of scores: from products q . k to exponents in units of log2, for one query head.
#pragma once

#include "dropout.h"
#include "head_bias.h"
#include "rows.h"
#include "softcap.h"

namespace attnspan::ATTNSPAN_ISA {

// One head's scores on their way to exponents: scaled, capped, biased.
class Scores : public HeadBias {
 public:
  Scores() = default;

  // `c` turns a product into an exponent (it is positive: products come with the sign of the scale); `bound` is the
  // largest magnitude that scaled scores can have.
  Scores(const Problem& a, int64_t b, int64_t h, float c, float bound) : HeadBias(a, b, h), c_(c) {
    if (a.options.softcap > 0.0f) cap_ = Softcap::make(a.dtype, a.options.softcap, std::fabs(a.scale), bound);
  }

  // s[j] is the product of row i and key first + j; it becomes the exponent, less that of `base` (see `base_of`). Keys
  // beyond the last stay as they are. Returns lanes whose maximum is that of the exponents.
  Vec exponents(float* s, int64_t n, int64_t i, int64_t first, float base) const {
    n = max(0, min(n, a_->k_len - first));
    const bool capped = a_->options.softcap > 0.0f;
    if (capped) cap_.apply(s, n);
    const float c = capped ? 1.0f : c_;
    const Bias& bias = a_->options.bias;
    const int64_t q = query_index(*a_, b_, i);
    switch (bias.kind) {
      case BiasKind::none:
        return add(s, n, c, [](int64_t, Vec x) { return x; });
      case BiasKind::alibi:
      case BiasKind::signed_alibi:
      case BiasKind::distance:
        return base == 0.0f ? add_by_distance(s, n, c, first, q, [](Vec x) { return x; })
                            : add_by_distance(s, n, c, first, q, [base](Vec x) { return x - set(base); });
      case BiasKind::dense:
        return add_dense(s, n, c, i, first, base);
    }
    return set(-infinity);
  }

  // Calls use(f) where f(i)(j, s) is the exponent of the product s of row `row` + i and key first + j: what `exponents`
  // does for `rows` rows, with the base of each, and n keys, bit for bit, without a pass of its own. Hidden products
  // are -infinity. False, and no call, for what needs that pass.
  template <class Use>
  bool fuse(int64_t row, int64_t rows, int64_t first, int64_t n, const float* bases, const Use& use) const {
    const bool capped = a_->options.softcap > 0.0f;
    const BiasKind kind = a_->options.bias.kind;
    if (kind == BiasKind::none)
      return capped && cap_.as_polynomial([&](const auto& cap) { use([&](int64_t) { return cap; }); });
    if (capped) return false;
    if (kind == BiasKind::dense) return fuse_dense(row, first, n, bases, use);
    if (k_index_ != nullptr || a_->options.q_index.data != nullptr) return false;
    const int64_t distance = first - query_index(*a_, b_, row);  // of the first pair; it falls from row to row
    if (kind == BiasKind::distance) {
      const DistanceTable table = table_of_head();
      const bool below = distance + n - 1 <= -table.reach, above = distance - (rows - 1) >= table.reach;
      if (!below && !above) return false;
      const float bias = table.at(distance);
      return use([&](int64_t i) { return Same{set(c_), set(bias - bases[i])}; }), true;
    }
    float slope = slope_of_head(), side_of_base = -1.0f;
    if (!(std::fabs(slope) <= 1e20f)) return false;  // hidden keys might be at infinity
    if (kind == BiasKind::alibi) {                   // on one side of the query, |distance| is a straight line
      const Side side = side_of_keys(row, rows, first, n);
      if (side == Side::both) return false;
      if (side == Side::before)
        side_of_base = 1.0f;
      else
        slope = -slope;
    }
    const Sloped line(c_, slope);
    return use([&](int64_t i) { return line(distance - i + static_cast<int64_t>(side_of_base * bases[i])); }), true;
  }
  static constexpr int64_t most_fused = 1024;
  // May keys be hidden before their products are fused?
  bool fuses_hidden() const { return a_->options.softcap <= 0.0f && a_->options.bias.kind != BiasKind::dense; }

  const Softcap& cap() const { return cap_; }

 private:
  template <class B>
  struct Dense {
    const B* row;
    Vec factor, base;
    Vec operator()(int64_t j, Vec s) const { return fma(load(row + j) - base, set(log2_e), s * factor); }
  };
  template <class Use>
  bool fuse_dense(int64_t row, int64_t first, int64_t n, const float* bases, const Use& use) const {
    if (first + n > a_->k_len) return false;
    with_dense(0, [&](const auto* values) {
      using B = std::remove_cv_t<std::remove_pointer_t<decltype(values)> >;
      use([&](int64_t i) {
        return Dense<B>{values + (row + i) * a_->options.bias.row + first, set(c_), set(bases[i])};
      });
    });
    return true;
  }

  // One bias for all keys.
  struct Same {
    Vec factor, bias;
    Vec operator()(int64_t, Vec s) const { return fma(bias, set(log2_e), s * factor); }
  };

  // A bias that grows by `per_key` with each key.
  struct Sloped {
    Vec factor, slope, first = zero();
    Sloped(float c, float per_key) : factor(set(c)), slope(set(per_key * log2_e)) {}
    Sloped operator()(int64_t distance) const {
      Sloped row = *this;
      row.first = set(static_cast<float>(distance));
      return row;
    }
    Vec operator()(int64_t j, Vec s) const { return fma(slope, load(ramp.data() + j) + first, s * factor); }
  };
  alignas(64) static constexpr std::array<float, most_fused> ramp = [] {
    std::array<float, most_fused> x{};
    for (int64_t j = 0; j < most_fused; ++j) x[static_cast<size_t>(j)] = static_cast<float>(j);
    return x;
  }();

  template <class Bias>
  Vec add(float* s, int64_t n, float c, const Bias& bias) const {
    const Vec factor = set(c);
    Vec top = set(-infinity);
    int64_t j = 0;
    for (; j + Vec::width <= n; j += Vec::width) {
      const Vec x = bias(j, load(s + j) * factor);
      store(s + j, x);
      top = vmax(x, top);
    }
    if (j == n) return top;
    store_part(s + j, bias(j, load_part(s + j, n - j) * factor), n - j);
    for (; j < n; ++j) top = vmax(set(s[j]), top);
    return top;
  }

  // Biases less a base, which `less` takes from a distance or an entry of the table.
  template <class Less>
  Vec add_by_distance(float* s, int64_t n, float c, int64_t first, int64_t q, const Less& less) const {
    switch (a_->options.bias.kind) {
      case BiasKind::alibi:
        return add(s, n, c, [&, slope = set(-slope_of_head() * log2_e)](int64_t j, Vec x) {
          return fma(slope, less(magnitude(distances(first + j, q))), x);
        });
      case BiasKind::signed_alibi:
        return add(s, n, c, [&, slope = set(slope_of_head() * log2_e)](int64_t j, Vec x) {
          return fma(slope, less(distances(first + j, q)), x);
        });
      default:
        return add(s, n, c, [&, table = table_of_head()](int64_t j, Vec x) {
          return fma(less(from_table(table, first + j, q)), set(log2_e), x);
        });
    }
  }

  Vec add_dense(float* s, int64_t n, float c, int64_t i, int64_t first, float base) const {
    Vec top = zero();
    with_dense(i, [&](const auto* row) {
      const Vec unit = set(log2_e), from = set(base);
      top = add(s, n, c, [&](int64_t j, Vec x) {
        const Vec bias = n - j >= Vec::width ? load(row + first + j) : load_part(row + first + j, n - j);
        return fma(bias - from, unit, x);
      });
      // A bias is read once, in pieces too short for the processor to see them coming.
      prefetch_row(row + first + n, min(n, a_->k_len - first - n));
    });
    return top;
  }

  // Where the keys of [first, first + n) lie that rows [row, row + rows) see, from each row's query.
  enum class Side { before, after, both };
  Side side_of_keys(int64_t row, int64_t rows, int64_t first, int64_t n) const {
    bool before = true, after = true;
    for (int64_t i = row; i < row + rows && (before || after); ++i) {
      const int32_t* spans = a_->bounds.slice(b_, h_) + i * a_->runs * 2;
      const int64_t q = query_index(*a_, b_, i);
      for (int64_t r = 0; r < a_->runs; ++r) {
        const int64_t lo = max(spans[2 * r], first), hi = min(spans[2 * r + 1], first + n);
        if (lo >= hi) continue;
        before = before && hi <= q + 1;
        after = after && lo >= q;
      }
    }
    return before ? Side::before : after ? Side::after : Side::both;
  }

  // Key indices from position j on, less the query's.
  Vec distances(int64_t j, int64_t q) const {
    if (k_index_ == nullptr) return to_floats(count_from(j - q));
    alignas(64) int32_t index[Vec::width] = {};
    for (int64_t n = 0; n < min(Vec::width, a_->k_len - j); ++n) index[n] = k_index_[j + n];
    return to_floats(load_ints(index) + set_ints(static_cast<uint32_t>(-q)));
  }
  Vec from_table(const DistanceTable& table, int64_t j, int64_t q) const {
    if (k_index_ == nullptr) return table.ascending(j - q);
    float lanes[Vec::width] = {};
    for (int64_t n = 0; n < min(Vec::width, a_->k_len - j); ++n) lanes[n] = table.at(k_index_[j + n] - q);
    return load(lanes);
  }

  float c_ = 1.0f;
  Softcap cap_{};
};

inline const float* sink_of(const Problem& a, int64_t h) {
  return a.options.sinks == nullptr ? nullptr : a.options.sinks + h;
}

inline float kept_weight_of(const Problem& a) {
  return a.options.dropout.on() ? a.options.dropout.kept_weight() : 1.0f;
}

}  // namespace attnspan::ATTNSPAN_ISA
