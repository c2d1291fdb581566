// One query row in double precision, for rows with scores that floats do not hold. Many times slower than one in tiles.
#pragma once

#include "pack.h"
#include "row_options.h"

namespace attnspan::ATTNSPAN_ISA {

// Up to here a double of an lse tells the weights of its row to a float's precision.
inline constexpr double most_lse_of_tiles = 0x1p29;

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
        options_(a, b, h, i, 1.0f),
        q_(at<T>(a.q, b, h, i)),
        x_(a, b, h / a.group()) {}

  // Is all that the row sees finite? What is not has made its results NaN already.
  bool sees_numbers() const {
    if (!finite(q_, 0, 1, a_.head_dim)) return false;
    bool numbers = true;
    for (int64_t r = 0; r < a_.runs; ++r)
      x_.k.each_run(spans_[2 * r], spans_[2 * r + 1], [&](int64_t, int64_t n, const T* keys) {
        numbers = numbers && finite(keys, a_.k.row, n, a_.head_dim);
      });
    if (!numbers) return false;
    if (a_.options.bias.kind != BiasKind::none)
      for_each_key([&](int64_t j) { numbers = numbers && options_.scores().bias_of(i_, j) < HUGE_VAL; });
    return numbers;
  }

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
      const T* const value = x_.value(j);
      for (int64_t d = 0; d < a_.v_dim; ++d) sum[d] += p * static_cast<double>(to_float(value[d]));
    });
    for (int64_t d = 0; d < a_.v_dim; ++d) out[d] = static_cast<float>(sum[d]);
    return whole;
  }

  // The likeliest key, to floats, among those as far from key `place` as whole panels are, as a lane of the row's sums
  // has them. -1 if none is likely at all.
  int64_t likeliest_key(int64_t place) const {
    alignas(64) float query[max_dim];
    widen(q_, query, a_.head_dim);
    int64_t key = -1;
    float top = -infinity;
    for (int64_t r = 0; r < a_.runs; ++r) {
      const int64_t lo = spans_[2 * r], hi = spans_[2 * r + 1];
      for (int64_t j = lo + ((place - lo) & (panel - 1)); j < hi; j += panel) {
        float x = dot(query, x_.key(j), a_.head_dim) * a_.scale;
        if (a_.options.change_scores()) x = options_.exponent(j, x);
        if (x > top) top = x, key = j;
      }
    }
    return key;
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

  // Eight sums: processors need not wait for one addition after the other.
  static double product(const T* x, const T* y, int64_t n) {
    constexpr int lanes = 8;
    double sum[lanes] = {};
    int64_t d = 0;
    for (; d + lanes <= n; d += lanes)
      for (int i = 0; i < lanes; ++i)
        sum[i] += static_cast<double>(to_float(x[d + i])) * static_cast<double>(to_float(y[d + i]));
    for (; d < n; ++d) sum[0] += static_cast<double>(to_float(x[d])) * static_cast<double>(to_float(y[d]));
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }

  // Scores beyond floats are infinite, as in every other implementation.
  [[gnu::noinline]] double exponent(int64_t j, float* slope) const {
    double x = product(q_, x_.key(j), a_.head_dim) * static_cast<double>(a_.scale);
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
  const T* const q_;
  const KeyValues<T> x_;
};

// Is the lse of a row infinite or NaN because a score is beyond floats?
template <class T>
[[gnu::always_inline]] inline bool is_lost(const Problem& a, int64_t b, int64_t h, int64_t i, double lse) {
  return !std::isfinite(lse) && lse != -HUGE_VAL && ExactRow<T>(a, b, h, i).sees_numbers();
}

// A row whose weight is all that of key j: a weight of 1 leaves its value as it is.
template <class T>
void write_value(const ForwardArgs& a, int64_t b, int64_t h, int64_t i, int64_t j, const RowEnd& end) {
  const T* const value = lines_of<T>(a, a.v, b, h / a.group()).at(j);
  const float weight = end.weight * (a.options.dropout.on() ? RowOptions(a, b, h, i, 1.0f).kept_weight(j) : 1.0f);
  if (weight == 1.0f && !a.out.wide) {
    std::memcpy(at<T>(a.out, b, h, i), value, static_cast<size_t>(a.v_dim) * sizeof(T));
  } else {
    alignas(64) float floats[max_dim];
    widen(value, floats, a.v_dim);
    write_row<T>(floats, weight, a.out, b, h, i, a.v_dim);
  }
  write_lse(a, b, h, i, end.lse);
}

// For a row whose weight is nearly all in the lane of its sums that has key `place`. Where its output is within a
// relative `error` of what the likeliest key alone would give, it becomes that. Returns the factor that is left.
template <class T>
[[gnu::noinline, gnu::cold]] float settle(const ForwardArgs& a, int64_t b, int64_t h, int64_t i, int64_t place,
                                          float error, float weight, float factor, float* out) {
  const int64_t key = ExactRow<T>(a, b, h, i).likeliest_key(place);
  if (key < 0) return factor;
  if (a.options.dropout.on()) weight *= RowOptions(a, b, h, i, 1.0f).kept_weight(key);
  alignas(64) float value[max_dim];
  widen(lines_of<T>(a, a.v, b, h / a.group()).at(key), value, a.v_dim);
  for (int64_t d = 0; d < a.v_dim; d += Vec::width) {
    // Halves: the output may be a unit above the largest float.
    const Vec x = load(value + d) * set(0.5f * weight), y = load(out + d) * set(0.5f * factor);
    store(out + d, select(greater(magnitude(x) * set(error), magnitude(y - x)), x + x, y + y));
  }
  return 1.0f;
}

// The lane for `settle`, or -1. Outputs of 16 bits need none if they are the key's value: rounding makes them that.
// With dropout they are a multiple of it, which weights of two pieces miss by more than a rounding.
template <class T, class E>
inline int lane_to_settle(const ForwardArgs& a, const float* sums, float sum) {
  const bool rounded = sizeof(T) == 2 && !a.out.wide && !(E::pieces == 2 && a.options.dropout.on());
  return rounded ? -1 : lone_lane(sums, sum);
}

}  // namespace attnspan::ATTNSPAN_ISA
