// What is added to one query head's scores, pair by pair, and what is taken from that again because it is large.
#pragma once

#include <algorithm>

#include "dropout.h"
#include "rows.h"

namespace attnspan::ATTNSPAN_ISA {

// A distance table's value for each distance, its ends beyond.
struct DistanceTable {
  const float* values;
  int64_t reach;
  int64_t size() const { return 2 * reach + 1; }
  int64_t clamp(int64_t distance) const { return max(0, min(2 * reach, distance + reach)); }
  float at(int64_t distance) const { return values[clamp(distance)]; }
  // The values of consecutive distances, from `distance` on.
  Vec ascending(int64_t distance) const {
    const int64_t i = distance + reach;
    if (i >= 0 && i + Vec::width <= size()) return load(values + i);
    if (i + Vec::width <= 1) return set(values[0]);
    if (i >= 2 * reach) return set(values[2 * reach]);
    float lanes[Vec::width];
    for (int n = 0; n < Vec::width; ++n) lanes[n] = at(distance + n);
    return load(lanes);
  }
};

// The bias of one query head, of whatever kind.
class HeadBias {
 public:
  HeadBias() = default;
  HeadBias(const Problem& a, int64_t b, int64_t h)
      : a_(&a), b_(b), h_(h), k_index_(a.options.k_index.of(b)), large_table_(has_large_table()) {}

  float slope_of_head() const { return *a_->options.bias.floats(b_, h_); }
  DistanceTable table_of_head() const { return {a_->options.bias.floats(b_, h_), a_->options.bias.reach}; }
  int64_t key_index(int64_t j) const { return k_index_ == nullptr ? j : k_index_[j]; }

  // Bias of one pair, in natural units.
  double bias_of(int64_t i, int64_t j) const {
    const Bias& bias = a_->options.bias;
    const int64_t distance = key_index(j) - query_index(*a_, b_, i);
    switch (bias.kind) {
      case BiasKind::none:
        return 0.0;
      case BiasKind::alibi:
        return static_cast<double>(-slope_of_head()) * static_cast<double>(distance < 0 ? -distance : distance);
      case BiasKind::signed_alibi:
        return static_cast<double>(slope_of_head()) * static_cast<double>(distance);
      case BiasKind::distance:
        return static_cast<double>(table_of_head().at(distance));
      case BiasKind::dense: {
        const float value = dense_at(i, j);
        return value < hides ? -HUGE_VAL : static_cast<double>(value);
      }
    }
    return 0.0;
  }

  // `n` dense values of row i from key j on, as floats; `to` has room for whole vectors.
  void dense_row(int64_t i, int64_t j, int64_t n, float* to) const {
    with_dense(i, [&](const auto* row) { widen(row + j, to, n); });
  }

  // The base of row i: the largest finite bias of the keys that it sees. It is subtracted from each bias of the row,
  // which changes only the lse. For slopes it is given as a distance. It is 0 for slopes and tables whose biases are
  // small.
  [[gnu::noinline]] float base_of(int64_t i, const int32_t* spans) const {
    switch (a_->options.bias.kind) {
      case BiasKind::none:
        return 0.0f;
      case BiasKind::alibi:
      case BiasKind::signed_alibi:
        return base_of_slope(i, spans);
      case BiasKind::distance:
        return base_of_table(i, spans);
      case BiasKind::dense:
        break;
    }
    const float largest = largest_of_dense(i, spans);
    return std::isfinite(largest) && largest >= hides ? largest : 0.0f;
  }
  static constexpr float hides = -2.36e38f;  // in units of log2, what is below is -infinity

  // The bias that a base stands for, in natural units.
  static double value_of_base(const Problem& a, int64_t b, int64_t h, float base) {
    const auto x = static_cast<double>(base);
    const BiasKind kind = a.options.bias.kind;
    if (base == 0.0f || (kind != BiasKind::alibi && kind != BiasKind::signed_alibi)) return x;
    return static_cast<double>(*a.options.bias.floats(b, h)) * (kind == BiasKind::alibi ? -x : x);
  }
  double value_of_base(float base) const { return value_of_base(*a_, b_, h_, base); }
  float largest_of_dense(int64_t i, const int32_t* spans) const {
    Vec top = set(-infinity);
    with_dense(i, [&](const auto* row) {
      // Rows are often a page each, at whose ends processors stop fetching ahead.
      const auto* next = row + (i + 1 < a_->q_len ? a_->options.bias.row : 0);
      for (int64_t r = 0; r < a_->runs; ++r)
        for (int64_t j = spans[2 * r]; j < spans[2 * r + 1]; j += Vec::width) {
          __builtin_prefetch(next + j);
          const int64_t left = spans[2 * r + 1] - j;
          // What is beyond the end of a span becomes the value before it.
          top = vmax(left >= Vec::width ? load(row + j) : set(to_float(row[j])), top);
          if (left < Vec::width)
            for (int64_t n = 1; n < left; ++n) top = vmax(set(to_float(row[j + n])), top);
        }
    });
    return reduce_max(top);
  }

  // The largest bias of a key that row i sees, for a bias with slopes, in units of log2; NaN where it is not known.
  float largest_of_slope(int64_t i, const int32_t* spans) const {
    if (k_index_ != nullptr) return NAN;
    const int64_t q = query_index(*a_, b_, i);
    const float slope = slope_of_head() * log2_e;
    float largest = -infinity;
    const auto meet = [&](int64_t key) {
      const auto d = static_cast<float>(key - q);
      const float bias = a_->options.bias.kind == BiasKind::alibi ? -slope * std::fabs(d) : slope * d;
      largest = bias > largest ? bias : largest;
    };
    for (int64_t r = 0; r < a_->runs; ++r)
      if (const int64_t lo = spans[2 * r], hi = spans[2 * r + 1]; lo < hi)
        meet(lo), meet(hi - 1), meet(max(lo, min(q, hi - 1)));
    return largest == -infinity ? 0.0f : largest;
  }

  // Biases up to this are added as they are: floats of such scores are fine enough.
  static constexpr float most_plain_bias = 64.0f;

 protected:
  template <class Use>
  void with_dense(int64_t i, const Use& use) const {
    const Bias& bias = a_->options.bias;
    const int64_t at = b_ * bias.batch + h_ * bias.head + i * bias.row;
    if (bias.dtype == Dtype::f32)
      use(static_cast<const float*>(bias.data) + at);
    else if (bias.dtype == Dtype::bf16)
      use(static_cast<const bf16*>(bias.data) + at);
    else
      use(static_cast<const f16*>(bias.data) + at);
  }
  float dense_at(int64_t i, int64_t j) const {
    float value = 0.0f;
    with_dense(i, [&](const auto* row) { value = to_float(row[j]); });
    return value;
  }

  const Problem* a_ = nullptr;
  int64_t b_ = 0, h_ = 0;
  const int32_t* k_index_ = nullptr;
  bool large_table_ = false;  // is a value of the distance table beyond `most_plain_bias`?

 private:
  bool has_large_table() const {
    if (a_->options.bias.kind != BiasKind::distance) return false;
    const DistanceTable table = table_of_head();
    return !std::all_of(table.values, table.values + table.size(),
                        [](float x) { return std::fabs(x) <= most_plain_bias; });
  }

  // The distance of the key with the largest bias.
  float base_of_slope(int64_t i, const int32_t* spans) const {
    const float slope = slope_of_head();
    const bool alibi = a_->options.bias.kind == BiasKind::alibi;
    const int64_t q = query_index(*a_, b_, i);
    float largest = -infinity, base = 0.0f;
    const auto meet = [&](int64_t distance) {
      const auto d = static_cast<float>(alibi && distance < 0 ? -distance : distance);
      if (const float bias = alibi ? -slope * d : slope * d; bias > largest) largest = bias, base = d;
    };
    for (int64_t r = a_->runs; r-- > 0;) {
      const int64_t lo = spans[2 * r], hi = spans[2 * r + 1];
      if (lo >= hi) continue;
      meet(key_index(lo) - q), meet(key_index(hi - 1) - q);
      if (alibi && slope > 0.0f && largest >= -most_plain_bias) return 0.0f;  // none is above 0
      if (k_index_ == nullptr)
        meet(max(lo, min(q, hi - 1)) - q);
      else
        meet_extremes(lo, hi, q, meet);
    }
    return std::isfinite(largest) && std::fabs(largest) > most_plain_bias ? base : 0.0f;
  }
  template <class Meet>
  void meet_extremes(int64_t lo, int64_t hi, int64_t q, const Meet& meet) const {
    int64_t low = INT64_MAX, high = INT64_MIN, nearest = INT64_MAX;
    for (int64_t j = lo; j < hi; ++j) {
      const int64_t d = k_index_[j] - q, size = d < 0 ? -d : d;
      low = d < low ? d : low, high = d > high ? d : high, nearest = size < nearest ? size : nearest;
    }
    meet(low), meet(high);
    if (a_->options.bias.kind == BiasKind::alibi) meet(nearest);
  }

  // The largest entry that the row sees, if the table has large ones.
  float base_of_table(int64_t i, const int32_t* spans) const {
    if (!large_table_) return 0.0f;
    const DistanceTable table = table_of_head();
    const int64_t q = query_index(*a_, b_, i);
    float largest = -infinity;
    for (int64_t r = 0; r < a_->runs; ++r) {
      const int64_t lo = spans[2 * r], hi = spans[2 * r + 1];
      if (lo >= hi) continue;
      if (k_index_ == nullptr)
        largest = std::max(
            largest, *std::max_element(table.values + table.clamp(lo - q), table.values + table.clamp(hi - 1 - q) + 1));
      else
        for (int64_t j = lo; j < hi; ++j) largest = std::max(largest, table.at(k_index_[j] - q));
    }
    return std::isfinite(largest) && std::fabs(largest) > most_plain_bias ? largest : 0.0f;
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
