// Exponentials and the online softmax of a strip of scores, in base 2.
#pragma once

#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

inline constexpr float log2_e = 1.44269504088896340736f;

// Polynomials for 2^f on [0, 1], exact at both ends and minimax in relative error between: degree 6 to 6.5e-8 with its
// roundings (one unit in the last place) for float; degree 4 to 3.3e-6 for values that are rounded to bfloat16 right
// after but summed for lse as they are.
template <class C>
inline Vec exp2_fraction(Vec f) {
  if constexpr (sizeof(C) == 4) {
    Vec p = fma(set(0x1.c765a8p-13f), f, set(0x1.462150p-10f));
    p = fma(p, f, set(0x1.3d217cp-7f));
    p = fma(p, f, set(0x1.c686b4p-5f));
    p = fma(p, f, set(0x1.ebfd74p-3f));
    p = fma(p, f, set(0x1.62e42ap-1f));
    return fma(p, f, set(1.0f));
  } else {
    constexpr float k = std::is_same_v<C, f16> ? 0x1p15f : 1.0f;  // see AmxEngine's exponent_offset
    Vec p = fma(set(k * 0x1.bc31dap-7f), f, set(k * 0x1.aa3fcap-5f));
    p = fma(p, f, set(k * 0x1.ee5884p-3f));
    p = fma(p, f, set(k * 0x1.62d51cp-1f));
    return fma(p, f, set(k));
  }
}

// 2^x for x <= 128: 0 for -inf, NaN for NaN. 2^15 times that for float16.
template <class C>
inline Vec exp2(Vec x) {
  return scale_by_floor(exp2_fraction<C>(fraction(x)), x);
}

// 2^(x - shift) for a shift that is a whole number: as exact as 2^x, however large the shift. x is finite.
template <class C>
inline Vec exp2_shifted(Vec x, Vec shift) {
  const Vec whole = floor(x);
  return scale_by_floor(exp2_fraction<C>(x - whole), whole - shift);
}

// Scores of keys that a row may not see become -inf: everything outside the row's spans.
// `cols` keys from `first` on; spans are sorted and disjoint, an empty one may stand anywhere.
inline void hide(float* s, int64_t first, int64_t cols, const int32_t* spans, int64_t runs) {
  int64_t at = 0;
  for (int64_t r = 0; r < runs; ++r) {
    const int64_t lo = spans[2 * r] - first, hi = spans[2 * r + 1] - first;
    if (lo >= hi || hi <= at) continue;
    for (const int64_t end = min(lo, cols); at < end; ++at) s[at] = -infinity;
    at = max(at, hi);
    if (at >= cols) return;
  }
  for (; at < cols; ++at) s[at] = -infinity;
}

// Natural logarithm of sum * 2^maximum.
inline double log_sum(double maximum, float sum) {
  return maximum * 0.69314718055994530942 + static_cast<double>(std::log(sum));
}

// State of the online softmax of a strip: for each row the maximum so far, in units of log2, and a vector of partial
// sums.
struct Running {
  float* maximum;
  float* sums;
};

// May terms 2^x * v be summed that are up to 2^40 greater than v, given the largest squared norm of the values? Floats
// have room for 2^31 of them with |v| <= 2^50.
inline bool moderate(float v_norm) { return v_norm <= 0x1p100f; }

// The Cauchy-Schwarz bound on |c * q . k|, from the largest squared norms.
inline float largest_product(float q_norm, float k_norm, float c) { return std::sqrt(q_norm) * std::sqrt(k_norm) * c; }

// Are exponentials up to this exponent within 2^-40 .. 2^40? Relative precision does not depend on their size, as long
// as their products with v neither overflow nor vanish. False for NaN.
inline bool within_range(float exponent, float v_norm) {
  return exponent <= 40.0f && moderate(v_norm) && v_norm >= 0x1p-60f;
}

// The factor of a row's weighted values, and its lse. Taken from large biases, a base comes back to lse: no float could
// hold what is left when they cancel.
struct RowEnd {
  float factor;
  double lse;
};

// From the row's maximum (in units of log2) and the sum of its weights relative to that; 0: it saw nothing.
inline RowEnd end_of_row(float maximum, float sum) {
  if (sum == 0.0f) return {0.0f, -HUGE_VAL};
  return {1.0f / sum, log_sum(static_cast<double>(maximum), sum)};
}

// The same with a sink, which is one more logit without a value (null: none), where exponents are less `base`.
[[gnu::noinline]] inline RowEnd end_of_row(float maximum, float sum, const float* sink, float kept_weight,
                                           double base) {
  RowEnd end = end_of_row(maximum, sum);
  if (sink != nullptr && sum == 0.0f) return {0.0f, static_cast<double>(*sink)};
  if (sink != nullptr) {
    const double given = static_cast<double>(maximum), s = (static_cast<double>(*sink) - base) * 1.44269504088896340736;
    const double top = s > given ? s : given;
    const float seen = static_cast<float>(std::exp2(given - top)),
                total = sum * seen + static_cast<float>(std::exp2(s - top));
    end = {seen / total, log_sum(top, total)};
  }
  end.factor *= kept_weight;
  end.lse += base;
  return end;
}

inline Vec row_maximum(const float* s, int64_t cols) {
  Vec a = load(s), b = load(s + Vec::width);
  for (int64_t j = 2 * Vec::width; j < cols; j += 2 * Vec::width) {
    a = vmax(load(s + j), a);
    b = vmax(load(s + j + Vec::width), b);
  }
  return vmax(a, b);
}

// s * c - shift. float16 results are finer than the scores of large logits: only if the product is rounded as the
// maximum was, so that the likeliest key's exponent is exactly 0, does a row with one likely key return its value.
template <class C>
inline Vec exponent(Vec s, Vec factor, Vec shift) {
  if constexpr (std::is_same_v<C, f16>)
    return rounded_product(s, factor) - shift;
  else
    return fma(s, factor, zero() - shift);
}

// A multiply-add gives the likeliest key what the maximum's rounding took away, and of products beyond this that may be
// more than floats can raise 2 to.
inline constexpr float most_fused_maximum = 0x1p20f;

// s * c - shift in place, where the product is rounded as the maximum was: the likeliest key's exponent is 0.
inline void shift_large(float* s, int64_t cols, float c, float shift) {
  for (int64_t j = 0; j < cols; j += Vec::width) store(s + j, rounded_product(load(s + j), set(c)) - set(shift));
}

// Exponents of a plain row.
template <class C>
struct Scaled {
  Vec factor, shift;
  Vec operator()(int64_t, Vec s) const { return exponent<C>(s, factor, shift); }
};

// 2^from(j, s[j]) for one row of whole vector pairs, summed; `put(j, x, y)` stores the two vectors from column j on.
template <class C, class From, class Put>
inline Vec exponentials(const float* s, int64_t cols, const From& from, const Put& put) {
  constexpr int w = Vec::width;
  Vec a = zero(), b = zero();
  for (int64_t j = 0; j < cols; j += 2 * w) {
    const Vec x = exp2<C>(from(j, load(s + j))), y = exp2<C>(from(j + w, load(s + j + w)));
    a = a + x;
    b = b + y;
    put(j, x, y);
  }
  return a + b;
}

// The same, times 2^exponent_offset, as a row of A of an engine's products; p may be s itself where an element is one
// piece. With `Drops`, weights whose bit in `kept` is not set become 0 after they are summed.
template <class E, bool Drops, class From>
inline Vec weights_of(const float* s, typename E::Element* p, int64_t plane, int64_t cols, const From& from,
                      const uint32_t* kept) {
  return exponentials<typename E::Exponential>(s, cols, from, [=](int64_t j, Vec x, Vec y) {
    if constexpr (Drops) {
      const uint32_t bits = kept[j / 32] >> (j % 32);
      x = select(from_bits(bits), x, zero());
      y = select(from_bits(bits >> Vec::width), y, zero());
    }
    if constexpr (Vec::width == panel)
      E::store_group(p + j, 0, plane, x, y);
    else
      store_two(p + j, x, y);
  });
}

// Any function of an index, called through a pointer: what is compiled once need not be a template of it.
class Each {
 public:
  template <class Function>
  Each(const Function& f)
      : context_(&f), call_([](const void* f, int64_t i) { (*static_cast<const Function*>(f))(i); }) {}
  void operator()(int64_t i) const { call_(context_, i); }

 private:
  const void* context_;
  void (*call_)(const void*, int64_t);
};

// Rows of scores that become weights, four at a time: `prepare(i)` readies rows [i, i + 4), `bits` has `words` of each
// row's kept weights, or is null; `tops` has lanes with the maxima of the four rows, or is null.
struct Strip {
  static constexpr bool fused = false;
  Each prepare;
  const uint32_t* bits;
  int64_t words;
  const Vec* tops = nullptr;

  Vec maximum(int64_t i, const float* s, int64_t cols) const {
    return tops == nullptr ? row_maximum(s, cols) : tops[i % 4];
  }
  template <class E>
  auto exponents(int64_t, float c, float shift) const {
    return Scaled<typename E::Exponential>{set(c), set(shift)};
  }
};

// The same where products become exponents as they become weights, by make(i, shift) of row i (see `Scores::fuse`).
template <class Make>
struct FusedStrip {
  static constexpr bool fused = true;
  Each prepare;
  const Make& make;
  const uint32_t* bits;
  int64_t words;

  Vec maximum(int64_t, const float*, int64_t) const { return set(-infinity); }  // never called
  template <class E>
  auto exponents(int64_t i, float, float shift) const {
    return make(i, shift);
  }
};

// The weights of row i of a strip, as a row of A; returns lanes of their sum.
template <class E, class S>
inline Vec weights_of_row(const S& strip, int64_t i, const float* s, typename E::Element* p, int64_t plane,
                          int64_t cols, float c, float shift) {
  const auto from = strip.template exponents<E>(i, c, shift);
  return strip.bits == nullptr ? weights_of<E, false>(s, p, plane, cols, from, nullptr)
                               : weights_of<E, true>(s, p, plane, cols, from, strip.bits + i * strip.words);
}

inline void scale_row(float* o, int64_t n, float factor) {
  const Vec f = set(factor);
  for (int64_t j = 0; j < n; j += Vec::width) store(o + j, load(o + j) * f);
}

// Turns a strip of scores (rows x cols, hidden ones -inf; rows a multiple of 4) into probabilities relative to the new
// running maximum and rescales the accumulated output of rows whose maximum rose (Milakov & Gimelshein 2018, eq. 3). c
// > 0.
//
// The maximum is left alone while it rises by at most `slack`: any shift gives the same result, and rescaling is then
// rare. `between` is called after each four rows, with the first of them.
//
// `Bounded`: the exponential of every score, less the row's maximum as it is given, is at most 2^40, and at least 2^-40
// for one that the row sees (see `within_range`). Then the maximum need not be found: it stays.
template <class E, bool Bounded, class S>
[[gnu::noinline]] inline void softmax_strip(float* s, int64_t lds, typename E::Element* p, int64_t ldp, int64_t plane,
                                            int64_t rows, int64_t cols, float c, float slack, Running run, float* out,
                                            int64_t v_cols, const S& strip, const Each& between) {
  for (int64_t i = 0; i < rows; i += 4) {
    float *row = s + i * lds, *maximum = run.maximum + i;
    const auto weigh = [&](int r, float factor, float shift) {
      float* sum = run.sums + (i + r) * Vec::width;
      store(sum,
            load(sum) + weights_of_row<E>(strip, i + r, row + r * lds, p + (i + r) * ldp, plane, cols, factor, shift));
    };
    strip.prepare(i);
    if constexpr (Bounded) {
      for (int r = 0; r < 4; ++r) weigh(r, c, maximum[r]);
      between(i);
      continue;
    }
    float now[4], shift[4];
    reduce_max4(strip.maximum(i, row, cols), strip.maximum(i + 1, row + lds, cols),
                strip.maximum(i + 2, row + 2 * lds, cols), strip.maximum(i + 3, row + 3 * lds, cols), now);
    bool rose = false;
    for (int r = 0; r < 4; ++r) {
      now[r] = now[r] * c > maximum[r] + slack ? now[r] * c : maximum[r];
      rose |= now[r] > maximum[r];
      shift[r] = now[r] == -infinity ? 0.0f : now[r];
    }
    if (rose)
      for (int r = 0; r < 4; ++r) {
        // Nothing seen yet: the accumulators are zero, and -inf - -inf would be NaN.
        const float factor = maximum[r] == -infinity ? 0.0f : std::exp2(maximum[r] - now[r]);
        scale_row(out + (i + r) * v_cols, v_cols, factor);
        scale_row(run.sums + (i + r) * Vec::width, Vec::width, factor);
        maximum[r] = now[r];
      }
    for (int r = 0; r < 4; ++r) {
      const bool fused = std::fabs(shift[r]) <= most_fused_maximum;
      if (!fused) shift_large(row + r * lds, cols, c, shift[r]);
      weigh(r, fused ? c : 1.0f, fused ? shift[r] : 0.0f);
    }
    between(i);
  }
}

}  // namespace attnspan::ATTNSPAN_ISA
