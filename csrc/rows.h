// One query row at a time, over its visible keys only and straight from the arrays. Serves heads with NaN or infinity,
// where 0 * inf in a masked tile would reach rows that may not see the key.
#pragma once

#include "lines.h"
#include "softmax.h"
#include "spans.h"

namespace attnspan::ATTNSPAN_ISA {

template <class T>
inline Vec load_upto(const T* p, int64_t left) {
  return left >= Vec::width ? load(p) : load_part(p, left);
}

template <class T>
inline float dot(const float* x, const T* y, int64_t n) {
  Vec a = zero(), b = zero();
  int64_t d = 0;
  for (; d + 2 * Vec::width <= n; d += 2 * Vec::width) {
    a = fma(load(x + d), load(y + d), a);
    b = fma(load(x + d + Vec::width), load(y + d + Vec::width), b);
  }
  for (; d < n; d += Vec::width) a = fma(load(x + d), load_upto(y + d, n - d), a);
  return reduce_add(a + b);
}

// y += factor * x; y is padded to whole vectors.
template <class T>
inline void add_scaled(float factor, const T* x, float* y, int64_t n) {
  const Vec f = set(factor);
  for (int64_t d = 0; d < n; d += Vec::width) store(y + d, fma(f, load_upto(x + d, n - d), load(y + d)));
}

template <class T>
inline void widen(const T* x, float* y, int64_t n) {
  for (int64_t d = 0; d < n; d += Vec::width) store(y + d, load_upto(x + d, n - d));
}

template <class T>
inline void write_row(const float* x, float factor, T* y, int64_t n) {
  const Vec f = set(factor);
  int64_t d = 0;
  for (; d + Vec::width <= n; d += Vec::width) store(y + d, load(x + d) * f);
  if (d < n) store_part(y + d, load(x + d) * f, n - d);
}

// The same as row i of a result.
template <class T>
[[gnu::always_inline]] inline void write_row(const float* x, float factor, const Tensor& to, int64_t b, int64_t h,
                                             int64_t i, int64_t n) {
  if (to.wide)
    write_row(x, factor, at<float>(to, b, h, i), n);
  else
    write_row(x, factor, at<T>(to, b, h, i), n);
}

inline void write_lse(const ForwardArgs& a, int64_t b, int64_t h, int64_t i, double lse) {
  const int64_t at = (b * a.q_heads + h) * a.q_len + i;
  if (a.lse != nullptr) a.lse[at] = static_cast<float>(lse);
  if (a.lse_low != nullptr)
    a.lse_low[at] = std::isfinite(a.lse[at]) ? static_cast<float>(lse - static_cast<double>(a.lse[at])) : 0.0f;
  if (a.wide_lse != nullptr) a.wide_lse[at] = lse;
}

inline constexpr int64_t row_keys = 256;

// What one row has seen so far: sums relative to its running maximum (in units of log2).
struct RowSums {
  float top = -infinity, total = 0.0f;
  float* v;                      // round_up(v_dim, Vec::width) floats, zero at first
  int64_t weights = 0, key = 0;  // how many are not 0, and the key of the last of them
};

template <class T>
inline void prefetch_row(const T* p, int64_t n) {
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += line) __builtin_prefetch(p + i);
}

// Scores become probabilities relative to the row's running maximum, to which its sums are rescaled.
[[gnu::noinline]] inline void row_softmax(float* s, int64_t n, int64_t v_cols, float c, RowSums* sums) {
  const int64_t padded = round_up(n, 2 * Vec::width);
  for (int64_t j = n; j < padded; ++j) s[j] = -infinity;
  const float now = std::ceil(reduce_max(row_maximum(s, padded)) * c);
  if (now > sums->top) {
    const float factor = sums->top == -infinity ? 0.0f : power_of_two(sums->top - now);
    if (sums->top != -infinity) scale_row(sums->v, v_cols, factor);
    sums->total *= factor;
    if (factor == 0.0f) sums->weights = 0;
    sums->top = now;
  }
  alignas(64) float lanes[sum_lanes] = {};
  exponentials<float, Shift::any>(s, padded, Scaled{set(c)}, sums->top == -infinity ? 0.0f : sums->top, lanes,
                                  [&](int64_t j, auto... p) { ((store(s + j, p), j += Vec::width), ...); });
  sums->total += whole_sum(lanes);
}

// The factor of scores that come with the sign of the scale, in units of log2.
inline float magnitude_of(float scale) { return scale == 0.0f ? 1.0f : std::fabs(scale) * log2_e; }

// A query row as `add_keys` wants it, and the factor of its scores. As in the tiles: -q for a negative scale, q = 0 for
// scale 0.
template <class T>
inline float prepare_query(const T* q, int64_t dim, float scale, float* query) {
  widen(q, query, dim);
  scale_row(query, round_up(dim, Vec::width), scale == 0.0f ? 0.0f : std::copysign(1.0f, scale));
  return magnitude_of(scale);
}

// What backward needs of one pair: its weight, what dropout makes of it, and how its exponent follows its score.
struct PairWeight {
  float p, kept, slope;
};

// One row's share of the gradients through keys [first, last), whose accumulators `dk` and `dv` start at key `first`.
// As in the tiles, dq and dk lack the factor `scale`. `weigh` makes a PairWeight of a key and its score, `record` is
// given the gradient of its exponent. Where all numbers are finite, pairs without a weight are left out.
template <class T, class Weigh, class Record>
void backward_row(const T* q, const KeyValues<T>& x, const T* dout, const int32_t* spans, int64_t runs, int64_t first,
                  int64_t last, float scale, float delta, bool finite, const Weigh& weigh, const Record& record,
                  float* dq, float* dk, int64_t dk_stride, float* dv, int64_t dv_stride) {
  alignas(64) float query[max_dim], grad[max_dim];
  widen(q, query, x.dim);
  widen(dout, grad, x.v_dim);
  for (int64_t r = 0; r < runs; ++r)
    for (int64_t j = max(spans[2 * r], first); j < min(spans[2 * r + 1], last); ++j) {
      const PairWeight w = weigh(j, dot(query, x.key(j), x.dim) * scale);
      if (finite && w.p == 0.0f) continue;
      const float ds = w.p * (w.kept * dot(grad, x.value(j), x.v_dim) - delta);
      record(j, ds);
      add_scaled(ds * w.slope, x.key(j), dq, x.dim);
      add_scaled(ds * w.slope, q, dk + (j - first) * dk_stride, x.dim);
      add_scaled(w.p * w.kept, dout, dv + (j - first) * dv_stride, x.v_dim);
    }
}

}  // namespace attnspan::ATTNSPAN_ISA
