// One query row in double precision, for rows whose scores or biases are so large that floats lose what tells keys
// apart. Slow: such rows are few.
#pragma once

#include "scores.h"

namespace attnspan::ATTNSPAN_ISA {

// Backward takes the weights of a row from a float lse that is as precise as the weights, up to this size.
inline constexpr double most_plain_lse = 128.0;

// Has a row lost what matters, given its lse, and what has been taken from its biases? So have those with scores beyond
// floats and, before anybody looks, those with NaN.
inline bool is_lost(const Problem& a, double lse, double base) {
  if (!std::isfinite(lse)) return lse != -HUGE_VAL;
  const BiasKind kind = a.options.bias.kind;
  return kind != BiasKind::none && kind != BiasKind::dense && !(std::fabs(lse - base) <= most_plain_lse);
}

// The logarithm of a sum of exponentials, one after the other; NaN beside NaN or infinity.
class LogSum {
 public:
  void add(double x) {
    if (x > top_) {
      sum_ = (top_ == -HUGE_VAL ? sum_ : sum_ * std::exp(top_ - x)) + std::exp(x - x);
      top_ = x;
    } else if (x != -HUGE_VAL) {
      sum_ += std::exp(x - top_);
    }
  }
  double value() const { return sum_ == 0.0 ? -HUGE_VAL : top_ + std::log(sum_); }

 private:
  double top_ = -HUGE_VAL, sum_ = 0.0;
};

template <class T>
class ExactRow {
 public:
  ExactRow(const Problem& a, int64_t b, int64_t h, int64_t i)
      : a_(a),
        i_(i),
        sink_(sink_of(a, h)),
        spans_(a.bounds.slice(b, h) + i * a.runs * 2),
        options_(RowOptions::make<T>(a, b, h, i, 1.0f)),
        q_(at<T>(a.q, b, h, i)),
        k_(at<T>(a.k, b, h / a.group(), 0)),
        v_(at<T>(a.v, b, h / a.group(), 0)) {}

  // Logarithm of the sum over all keys that the row sees, and the sink.
  double lse() const {
    LogSum sum;
    if (sink_ != nullptr) sum.add(static_cast<double>(*sink_));
    for_each_key([&](int64_t j) { sum.add(exponent(j, nullptr)); });
    return sum.value();
  }

  // The row's output, and its lse.
  double forward(float* out) const {
    const double whole = lse();
    double sum[max_dim] = {};
    for_each_key([&](int64_t j) {
      const PairWeight w = weigh(j, whole);
      const double p = static_cast<double>(w.p) * static_cast<double>(w.kept);
      for (int64_t d = 0; d < a_.v_dim; ++d) sum[d] += p * static_cast<double>(to_float(v_[j * a_.v.row + d]));
    });
    for (int64_t d = 0; d < a_.v_dim; ++d) out[d] = static_cast<float>(sum[d]);
    return whole;
  }

  // Of key j, for this lse.
  PairWeight weigh(int64_t j, double lse) const {
    PairWeight w{0.0f, options_.kept_weight(j), 1.0f};
    const double x = exponent(j, &w.slope);
    if (x != -HUGE_VAL && lse != -HUGE_VAL) w.p = static_cast<float>(std::exp(x - lse));
    return w;
  }

 private:
  template <class Use>
  void for_each_key(const Use& use) const {
    for (int64_t r = 0; r < a_.runs; ++r)
      for (int64_t j = spans_[2 * r]; j < spans_[2 * r + 1]; ++j) use(j);
  }

  // Scores beyond floats are infinite, as in every other implementation.
  double exponent(int64_t j, float* slope) const {
    const T* key = k_ + j * a_.k.row;
    double x = 0.0;
    for (int64_t d = 0; d < a_.head_dim; ++d)
      x += static_cast<double>(to_float(q_[d])) * static_cast<double>(to_float(key[d]));
    x *= static_cast<double>(a_.scale);
    if (std::fabs(x) > static_cast<double>(std::numeric_limits<float>::max())) x = x > 0.0 ? HUGE_VAL : -HUGE_VAL;
    if (const auto cap = static_cast<double>(a_.options.softcap); cap > 0.0) {
      const double t = std::tanh(x / cap);
      x = cap * t;
      if (slope != nullptr) *slope = static_cast<float>(1.0 - t * t);
    }
    return x + options_.scores().bias_of(i_, j);
  }

  const Problem& a_;
  const int64_t i_;
  const float* const sink_;
  const int32_t* const spans_;
  const RowOptions options_;
  const T *const q_, *const k_, *const v_;
};

}  // namespace attnspan::ATTNSPAN_ISA
