// tanh for capping scores: an odd polynomial as short as the scores allow.
#pragma once

#include <array>
#include <cmath>

#include "attention.h"
#include "softmax.h"

namespace attnspan::ATTNSPAN_ISA {

// tanh(x) = x * (c[0] + c[1] x^2 + ... + c[degree] x^(2 degree)) for |x| <= reach.
struct TanhPolynomial {
  static constexpr int most = 8;
  double reach;
  int degree;
  std::array<double, most + 1> c;
};

// Interpolates tanh(sqrt t) / sqrt t at the Chebyshev points of [0, reach^2]: within a small factor of minimax.
inline TanhPolynomial tanh_polynomial(double reach, int degree) {
  const auto f = [](double t) { return t < 1e-12 ? 1.0 : std::tanh(std::sqrt(t)) / std::sqrt(t); };
  std::array<double, TanhPolynomial::most + 1> t{}, y{};
  for (int i = 0; i <= degree; ++i) {
    t[i] = 0.5 * reach * reach * (1.0 + std::cos(M_PI * (2 * i + 1) / (2 * degree + 2)));
    y[i] = f(t[i]);
  }
  for (int order = 1; order <= degree; ++order)  // divided differences
    for (int i = degree; i >= order; --i) y[i] = (y[i] - y[i - 1]) / (t[i] - t[i - order]);
  TanhPolynomial p{reach, degree, {}};
  for (int i = degree; i >= 0; --i) {  // p = p * (t - t[i]) + y[i]
    for (int n = degree; n > 0; --n) p.c[n] = p.c[n - 1] - t[i] * p.c[n];
    p.c[0] = y[i] - t[i] * p.c[0];
  }
  return p;
}

inline double error_of(const TanhPolynomial& p) {
  double worst = 0.0;
  for (int i = 1; i <= 64; ++i) {
    const double x = p.reach * i / 64, t = x * x;
    double value = 0.0;
    for (int n = p.degree; n >= 0; --n) value = value * t + p.c[n];
    worst = std::fmax(worst, std::fabs(x * value / std::tanh(x) - 1.0));
  }
  return worst;
}

// The shortest polynomials of relative error `accuracy` for a few reaches.
class TanhTable {
 public:
  static constexpr std::array<double, 9> reaches = {0.125, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.25};
  [[gnu::noinline]] explicit TanhTable(double accuracy) {
    for (size_t i = 0; i < reaches.size(); ++i)
      for (int degree = 1; degree <= TanhPolynomial::most; ++degree)
        if (polynomials_[i] = tanh_polynomial(reaches[i], degree); error_of(polynomials_[i]) <= accuracy) break;
  }
  // For |x| <= bound, or null beyond all of them (and for NaN).
  const TanhPolynomial* find(float bound) const {
    for (const TanhPolynomial& p : polynomials_)
      if (bound <= p.reach) return &p;
    return nullptr;
  }
  const TanhPolynomial& unit() const { return polynomials_[7]; }

 private:
  std::array<TanhPolynomial, reaches.size()> polynomials_{};
};

// An error of the exponent is one of the weight: halves round weights to 2^-9 or 2^-12, and the exponential of bfloat16
// weights has an error of 3.3e-6.
inline const TanhTable& tanh_table(Dtype dtype) {
  if (dtype == Dtype::f32) {
    static const TanhTable table(3e-8);
    return table;
  }
  static const TanhTable table(4e-6);
  return table;
}

// Scores to capped ones: to_cap * tanh(from_score * s).
class Softcap {
 public:
  Softcap() = default;
  // `scale` times a score is capped at `cap`, `bound` is the largest magnitude of scaled scores (may be infinite).
  // Caps beyond 2^100 are as none to scores that floats hold apart, but have factors that are no normal floats.
  [[gnu::noinline]] static Softcap make(Dtype dtype, float cap, float scale, float bound) {
    cap = cap < 0x1p100f ? cap : 0x1p100f;
    Softcap s;
    const TanhPolynomial* short_one = tanh_table(dtype).find(bound / cap);
    const TanhPolynomial& p = short_one != nullptr ? *short_one : tanh_table(Dtype::f32).unit();
    s.wide_ = short_one == nullptr;
    s.degree_ = p.degree;
    s.from_score_ = scale / cap;
    s.to_cap_ = cap * log2_e;
    double power = 1.0;  // of from_score
    for (int n = 0; n <= p.degree; ++n) {
      s.c_[n] = static_cast<float>(p.c[n] * static_cast<double>(s.to_cap_));
      power *= n == 0 ? static_cast<double>(s.from_score_) : static_cast<double>(s.from_score_ * s.from_score_);
      s.of_score_[n] = static_cast<float>(p.c[n] * static_cast<double>(s.to_cap_) * power);
    }
    const double size = std::fabs(power);
    s.foldable_ = !s.wide_ && size >= 1e-30 && size <= 1e30;
    return s;
  }

  // s[j] for j < n, in place: units of log2. `slopes`, if wanted, get the derivatives, 1 - tanh^2.
  void apply(float* s, int64_t n, float* slopes = nullptr) const {
    if (wide_) return apply_wide(s, n, slopes);
    with_degree<TanhPolynomial::most>(degree_, [&](auto degree) { apply_short<degree>(s, n, slopes); });
  }

  // Calls use(f) with f(j, s) = capped s, if the cap is one polynomial of s itself in float's range.
  template <class Use>
  bool as_polynomial(const Use& use) const {
    constexpr int most_folded = 6;
    if (!foldable_ || degree_ > most_folded) return false;
    with_degree<most_folded>(degree_, [&](auto degree) { use(Capped<degree>(*this)); });
    return true;
  }

 private:
  // Given a capped score, as long as tanh is not all but 1.
  Vec slope_of(Vec capped) const {
    const Vec t = capped * set(1.0f / to_cap_);
    return fma(zero() - t, t, set(1.0f));
  }

  // Calls use(n) with n as a constant, 1 <= n <= N.
  template <int N, class Use>
  static void with_degree(int n, const Use& use) {
    if constexpr (N > 1)
      if (n < N) return with_degree<N - 1>(n, use);
    use(std::integral_constant<int, N>{});
  }

  template <int N>
  struct Capped {
    Vec c[N + 1];
    explicit Capped(const Softcap& cap) {
      for (int n = 0; n <= N; ++n) c[n] = set(cap.of_score_[n]);
    }
    Vec operator()(int64_t, Vec s) const {
      const Vec t = s * s;
      Vec y = c[N];
      for (int n = N - 1; n >= 0; --n) y = fma(y, t, c[n]);
      return s * y;
    }
  };

  template <int N>
  Vec polynomial(Vec x) const {
    const Vec t = x * x;
    Vec y = set(c_[N]);
    for (int n = N - 1; n >= 0; --n) y = fma(y, t, set(c_[n]));
    return x * y;
  }
  template <int N>
  void apply_short(float* s, int64_t n, float* slopes) const {
    const Vec from = set(from_score_);
    for (int64_t j = 0; j < n; j += Vec::width) {
      const Vec capped = polynomial<N>(load(s + j) * from);
      store(s + j, capped);
      if (slopes != nullptr) store(slopes + j, slope_of(capped));
    }
  }
  // Near 0 by the polynomial, whose error is relative. Beyond 1 by 1 - r with r = 2 / (e^(2 |x|) + 1), rounded once.
  // Its derivative, r * (2 - r), loses nothing where tanh is all but 1.
  void apply_wide(float* s, int64_t n, float* slopes) const {
    for (int64_t j = 0; j < n; j += Vec::width) {
      const Vec x = load(s + j) * set(from_score_), size = magnitude(x);
      const Vec e = exp2<float>(zero() - vmax(set(-64.0f), zero() - size * set(2.0f * log2_e)));
      const Vec one = set(1.0f), r = set(2.0f) / (e + one);
      const Vec side = select(greater(zero(), x), zero() - one, one) * set(to_cap_);
      const Vec t = x * x;
      Vec y = set(c_[degree_]);
      for (int i = degree_; i-- > 0;) y = fma(y, t, set(c_[i]));
      const Mask beyond = greater(size, one);
      store(s + j, select(beyond, fma(zero() - r, side, side), x * y));
      if (slopes != nullptr) store(slopes + j, select(beyond, r * (set(2.0f) - r), slope_of(x * y)));
    }
  }

  bool wide_ = false, foldable_ = false;
  int degree_ = 0;
  float from_score_ = 0.0f, to_cap_ = 1.0f;
  std::array<float, TanhPolynomial::most + 1> c_{}, of_score_{};  // of score / cap, and of the score
};

}  // namespace attnspan::ATTNSPAN_ISA
