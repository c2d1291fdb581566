// Exponentials and the online softmax of a strip of scores, in base 2.
#pragma once

#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

inline constexpr float log2_e = 1.44269504088896340736f, ln_2 = 0.69314718055994530942f;

// Polynomials for 2^f on [-1/2, 1/2], minimax in relative error: degree 5 to 7.5e-8 for float, degree 3 to 7.5e-5 for values that
// are rounded to bfloat16 (whose half unit is 2e-3) right after.
template <class C>
inline Vec exp2_fraction(Vec f) {
  if constexpr (sizeof(C) == 4) {
    Vec p = fma(set(0x1.5c08e6p-10f), f, set(0x1.3d0c54p-7f));
    p = fma(p, f, set(0x1.c6b6e4p-5f));
    p = fma(p, f, set(0x1.ebf918p-3f));
    p = fma(p, f, set(0x1.62e428p-1f));
    return fma(p, f, set(1.0f));
  } else {
    Vec p = fma(set(0x1.c3f760p-5f), f, set(0x1.f0de1ap-3f));
    p = fma(p, f, set(0x1.62f31ap-1f));
    return fma(p, f, set(0x1.fff692p-1f));
  }
}

// 2^x for x <= 128; exactly 0 below -150, NaN for NaN (the order of vmax's operands matters).
template <class C>
inline Vec exp2(Vec x) {
  x = vmax(set(-150.0f), x);
  const Vec n = round(x);
  return scale_exponent(exp2_fraction<C>(x - n), n);
}

// Scores of keys that a row may not see become -inf: everything outside the row's spans.
// `cols` keys from `first` on; spans are sorted and disjoint, an empty one may stand anywhere.
inline void hide(float* s, int64_t first, int64_t cols, const int32_t* spans, int64_t runs) {
  int64_t at = 0;
  for (int64_t r = 0; r < runs; ++r) {
    const int64_t lo = spans[2 * r] - first, hi = spans[2 * r + 1] - first;
    if (lo >= hi || hi <= at) continue;
    for (const int64_t end = least(lo, cols); at < end; ++at) s[at] = -infinity;
    at = most(at, hi);
    if (at >= cols) return;
  }
  for (; at < cols; ++at) s[at] = -infinity;
}

// State of the online softmax of one strip; `maximum` is in units of log2.
struct Running {
  float* maximum;
  float* sum;
};

inline Vec row_maximum(const float* s, int64_t cols) {
  constexpr int w = Vec::width;
  Vec a = load(s), b = load(s + w);
  int64_t j = 2 * w;
  for (; j + 2 * w <= cols; j += 2 * w) {
    a = vmax(load(s + j), a);
    b = vmax(load(s + j + w), b);
  }
  for (; j < cols; j += w) a = vmax(load(s + j), a);
  return vmax(a, b);
}

// p = 2^(s * c - shift) for one row, returned sum; p may be s itself.
template <class C>
inline float exponentials(const float* s, C* p, int64_t cols, float c, float shift) {
  constexpr int w = Vec::width;
  const Vec cv = set(c), sv = set(-shift);
  Vec a = zero(), b = zero();
  int64_t j = 0;
  for (; j + 2 * w <= cols; j += 2 * w) {
    const Vec x = exp2<C>(fma(load(s + j), cv, sv)), y = exp2<C>(fma(load(s + j + w), cv, sv));
    a = a + x;
    b = b + y;
    store(p + j, x);
    store(p + j + w, y);
  }
  for (; j < cols; j += w) {
    const Vec x = exp2<C>(fma(load(s + j), cv, sv));
    a = a + x;
    store(p + j, x);
  }
  return reduce_add(a + b);
}

inline void scale_row(float* o, int64_t n, float factor) {
  const Vec f = set(factor);
  for (int64_t j = 0; j < n; j += Vec::width) store(o + j, load(o + j) * f);
}

// Turns a strip of scores (rows x cols, hidden ones -inf) into probabilities relative to the new running maximum and rescales
// the accumulated output of rows whose maximum rose (Milakov & Gimelshein 2018, eq. 3). c > 0.
template <class C>
inline void softmax_strip(float* s, int64_t lds, C* p, int64_t ldp, int64_t rows, int64_t cols, float c, Running run,
                          float* out, int64_t ldo, int64_t v_cols) {
  for (int64_t i = 0; i < rows; ++i) {
    const float before = run.maximum[i];
    const float top = reduce_max(row_maximum(s + i * lds, cols)) * c;
    const float now = top > before ? top : before;
    const float shift = now == -infinity ? 0.0f : now;
    const float sum = exponentials<C>(s + i * lds, p + i * ldp, cols, c, shift);
    if (now > before) {
      const float factor = before == -infinity ? 0.0f : std::exp2(before - now);
      run.sum[i] *= factor;
      scale_row(out + i * ldo, v_cols, factor);
      run.maximum[i] = now;
    }
    run.sum[i] += sum;
  }
}

}  // namespace attnspan::ATTNSPAN_ISA
