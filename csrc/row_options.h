// A query row of a call with options, and the pass over a row's keys that serves plain calls too.
#pragma once

#include "rows.h"
#include "scores.h"

namespace attnspan::ATTNSPAN_ISA {

// One query row of a call with options: its scores and what dropout does to its weights.
class RowOptions {
 public:
  // `c` turns a product into an exponent, as for `Scores`.
  RowOptions(const Problem& a, int64_t b, int64_t h, int64_t i, float c)
      : a_(&a), b_(b), i_(i), base_(0.0f), scores_(a, b, h, c, infinity) {
    base_ = scores_.base_of(i, a.bounds.slice(b, h) + i * a.runs * 2);
    if (a.options.dropout.on()) random_ = random_of_row(a, seed_of_head(a, b, h), b, i);
  }
  float exponents(float* s, int64_t n, int64_t first, float c) const {
    if (!a_->options.change_scores()) return c;
    scores_.exponents(s, n, i_, first, base_);
    return 1.0f;
  }
  void drop(float* s, int64_t n, int64_t first) const {
    if (!a_->options.dropout.on()) return;
    for (int64_t j = first; j < first + n;) {
      const int64_t group = round_down(j, 32);
      const uint32_t bits = kept_of(group);
      for (; j < min(first + n, group + 32); ++j)
        if (!bit_of(&bits, j - group)) s[j - first] = 0.0f;
    }
  }
  // The exponent of key j with scaled score x, relative to the base; sets `slope` to its derivative.
  float exponent(int64_t j, float x, float* slope = nullptr) const {
    if (const float cap = a_->options.softcap; cap > 0.0f) {
      const float t = std::tanh(x / cap);
      x = cap * t;
      if (slope != nullptr) *slope = 1.0f - t * t;
    }
    return x + static_cast<float>(scores_.bias_of(i_, j) - base());
  }
  // The weight of key j with scaled score x, in a row with this lse relative to the base.
  PairWeight weigh(int64_t j, float x, float lse) const {
    PairWeight w{0.0f, kept_weight(j), 1.0f};
    x = exponent(j, x, &w.slope);
    w.p = x == -infinity || lse == -infinity ? 0.0f : std::exp(x - lse);
    return w;
  }
  // What dropout makes of the weight of key j.
  float kept_weight(int64_t j) const {
    if (!a_->options.dropout.on()) return 1.0f;
    const int64_t group = round_down(j, 32);
    const uint32_t bits = kept_of(group);
    return bit_of(&bits, j - group) ? a_->options.dropout.kept_weight() : 0.0f;
  }
  double base() const { return scores_.value_of_base(base_); }
  float base_key() const { return base_; }
  const Scores& scores() const { return scores_; }
  // A bit for each of the 32 keys from the `first` on, a multiple of 32.
  uint32_t kept_of(int64_t first) const { return kept_of_32(*a_, random_, b_, first); }

 private:
  const Problem* a_;
  int64_t b_, i_;
  float base_;
  Scores scores_;
  RandomPair random_{};
};

// Adds keys [first, first + n) to what a row has seen, n <= row_keys. The query is padded to max_dim, times the sign of
// the scale; c is its magnitude times log2(e). `options` is null for a plain call.
template <class T>
[[gnu::noinline]] inline void add_keys(const float* query, const KeyValues<T>& x, int64_t first, int64_t n, float c,
                                       const RowOptions* options, RowSums* sums) {
  alignas(64) float s[row_keys];
  for (int64_t j = 0; j < n; ++j) s[j] = dot(query, x.key(first + j), x.dim);
  const float factor = options == nullptr ? c : options->exponents(s, n, first, c);
  row_softmax(s, n, round_up(x.v_dim, Vec::width), factor, sums);
  for (int64_t j = 0; j < n; ++j)
    if (s[j] != 0.0f) ++sums->weights, sums->key = first + j;
  if (options != nullptr) options->drop(s, n, first);
  for (int64_t j = 0; j < n; ++j) add_scaled(s[j], x.value(first + j), sums->v, x.v_dim);
}

// One query row over the keys of its spans.
template <class T>
RowEnd forward_row(const T* q, const KeyValues<T>& x, const int32_t* spans, int64_t runs, float scale,
                   const RowOptions* options, const float* sink, float kept_weight, RowSums& sums) {
  alignas(64) float query[max_dim];
  const float c = prepare_query(q, x.dim, scale, query);
  for (int64_t r = 0; r < runs; ++r)
    for (int64_t at = spans[2 * r], hi = spans[2 * r + 1]; at < hi; at += row_keys)
      add_keys(query, x, at, min(row_keys, hi - at), c, options, &sums);
  return end_of_row(sums.top, sums.total, sink, kept_weight, options == nullptr ? 0.0 : options->base());
}

}  // namespace attnspan::ATTNSPAN_ISA
