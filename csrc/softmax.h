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

#if defined(__AMX_BF16__)
// The powers of two at sixteenths, with their slopes and curvatures up to the next one.
template <class C>
struct Sixteenths {
  static constexpr float k = std::is_same_v<C, f16> ? 0x1p15f : 1.0f;
  alignas(64) static constexpr float power[16] = {
      k * 0x1.000000p+0f, k * 0x1.0b5586p+0f, k * 0x1.172b84p+0f, k * 0x1.2387a6p+0f,
      k * 0x1.306fe0p+0f, k * 0x1.3dea64p+0f, k * 0x1.4bfdaep+0f, k * 0x1.5ab07ep+0f,
      k * 0x1.6a09e6p+0f, k * 0x1.7a1148p+0f, k * 0x1.8ace54p+0f, k * 0x1.9c4918p+0f,
      k * 0x1.ae89fap+0f, k * 0x1.c199bep+0f, k * 0x1.d5818ep+0f, k * 0x1.ea4afap+0f};
  alignas(64) static constexpr float slope[16] = {
      k * 0x1.62d7d0p-1f, k * 0x1.728da2p-1f, k * 0x1.82f584p-1f, k * 0x1.941758p-1f,
      k * 0x1.a5fb5ap-1f, k * 0x1.b8aa22p-1f, k * 0x1.cc2caap-1f, k * 0x1.e08c52p-1f,
      k * 0x1.f5d2e6p-1f, k * 0x1.06054ep+0f, k * 0x1.119f12p+0f, k * 0x1.1dbc52p+0f,
      k * 0x1.2a62e0p+0f, k * 0x1.3798cep+0f, k * 0x1.45647ap+0f, k * 0x1.53cc80p+0f};
  alignas(64) static constexpr float curve[16] = {
      k * 0x1.f5f9dap-3f, k * 0x1.0619a6p-2f, k * 0x1.11b450p-2f, k * 0x1.1dd280p-2f,
      k * 0x1.2a7a0ap-2f, k * 0x1.37b100p-2f, k * 0x1.457dbcp-2f, k * 0x1.53e6e2p-2f,
      k * 0x1.62f35cp-2f, k * 0x1.72aa66p-2f, k * 0x1.831390p-2f, k * 0x1.9436b8p-2f,
      k * 0x1.a61c1cp-2f, k * 0x1.b8cc58p-2f, k * 0x1.cc5062p-2f, k * 0x1.e0b1a0p-2f};
};

// 2^(x - floor(x)), for weights of 16 bits 2^15 times that for float16. While tiles work, one of two units multiplies
// vectors, and the one that shuffles them has little to do: two products and a table (minimax in relative error,
// 6.3e-7 with roundings, exact at both ends) are faster than four products.
//
// `Near`: |x| < 2^18, or x is so small that 2^x is 0.
template <class C, bool Near>
inline Vec power_of_fraction(Vec x) {
  if constexpr (sizeof(C) == 4) return exp2_fraction<C>(fraction(x));
  using Table = Sixteenths<C>;
  // Rounded, the fraction of a small negative number is 1.
  const Ints place = sixteenths(Near ? x : vmin(fraction(x), set(0x1.fffffep-1f)));
  const Vec rest = beyond_sixteenth(x);
  const Vec slope = fma(look_up(Table::curve, place), rest, look_up(Table::slope, place));
  return fma(slope, rest, look_up(Table::power, place));
}
#else
template <class C, bool>
inline Vec power_of_fraction(Vec x) {
  return exp2_fraction<C>(fraction(x));
}
#endif

// 2^x for x <= 128: 0 for -inf, NaN for NaN. 2^15 times that for float16.
template <class C>
inline Vec exp2(Vec x) {
  return scale_by_floor(power_of_fraction<C, true>(x), x);
}

// 2^(x - shift) for a shift that is a whole number: exactly 2^x times 2^-shift, and as exact as 2^x.
//
// So no result depends on which shift was taken, but for weights below 2^-126: a row that meets its likeliest key late,
// or next to rows that need a maximum, has the bits of one that needed none.
template <class C>
inline Vec exp2_shifted(Vec x, Vec shift) {
  return scale_by_floor(power_of_fraction<C, false>(x), x, shift);
}

// The same where |x| < 2^18, or the power is 0, or what comes of it is not used.
template <class C>
inline Vec exp2_near(Vec x, Vec shift) {
  return scale_by_floor(power_of_fraction<C, true>(x), x, shift);
}

// 2^n for a whole number n <= 0; NaN for NaN.
inline float power_of_two(float n) {
  if (n >= -126.0f) return as_float(static_cast<uint32_t>(127 + static_cast<int>(n)) << 23);
  return n < -126.0f ? 0.0f : n;
}

// State of the online softmax of a strip: for each row a whole number that its maximum so far exceeds by little, in
// units of log2, and partial sums: of every 32nd weight (with fewer lanes, a sum of many equal weights errs more than
// one of exact ones), and of weights as products take them, where some engine of this level rounds them to 16 bits.
struct Running {
  float* maximum;
  float* sums;
};
inline constexpr int64_t weight_lanes = 32;
#if defined(__AVX512BF16__)
inline constexpr int64_t sum_lanes = weight_lanes + Vec::width;
#else
inline constexpr int64_t sum_lanes = weight_lanes;
#endif
template <class E>
inline constexpr bool rounds_weights = [] {
  constexpr bool rounds = sizeof(typename E::Exponential) == 2;
  static_assert(!rounds || sum_lanes > weight_lanes, "there is room for the sums of rounded weights");
  return rounds;
}();

inline float whole_sum(const float* lanes) {
  Vec sum = load(lanes) + load(lanes + Vec::width);
  for (int64_t i = 2 * Vec::width; i < weight_lanes; i += Vec::width) sum = sum + load(lanes + i);
  return reduce_add(sum);
}

// What the weighted values of a row are multiplied by, besides, so that rounded weights have a sum of 1 too, as far as
// floats do: so has the weight of the only key that counts.
template <class E>
inline float correction_of(const float* lanes, float sum) {
  if constexpr (rounds_weights<E>)
    if (const float rounded = reduce_add(load(lanes + weight_lanes)); rounded > 0.0f) return sum / rounded;
  return 1.0f;
}

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
  float weight = 1.0f;  // of all keys: less than 1 with a sink
};

// Which lane of a row's sums has all of its weight, if each other lane has less than 2^-22 of it. -1: none.
inline int lone_lane(const float* sums, float sum) {
  if (!(sum < infinity)) return -1;  // a key with NaN or infinity is no lone one
  const auto least = static_cast<uint32_t>(max(1, as_bits(sum * 0x1p-22f)));  // positive floats ascend as their bits
  uint32_t lanes = 0;
  for (int i = 0; i < weight_lanes; i += Vec::width)
    lanes |= bits_at_least(load_ints(reinterpret_cast<const int32_t*>(sums + i)), least) << i;
  return std::has_single_bit(lanes) ? std::countr_zero(lanes) : -1;
}

// std::frexp, without a call where the number is not subnormal.
inline float split(float x, int* exponent) {
  const uint32_t bits = as_bits(x), biased = bits >> 23 & 0xffu;
  if (biased == 0 || biased == 0xffu) return std::frexp(x, exponent);
  *exponent = static_cast<int>(biased) - 126;
  return as_float((bits & 0x807fffffu) | 0x3f000000u);
}

// From the row's maximum (in units of log2) and the sum of its weights relative to that, with a sink, which is one more
// logit without a value (null: none), where exponents are less `base`. A sum of 0 saw nothing.
[[gnu::noinline]] inline RowEnd end_of_row(float maximum, float sum, const float* sink, float kept_weight,
                                           double base) {
  if (sum == 0.0f) return {0.0f, sink != nullptr ? static_cast<double>(*sink) : -HUGE_VAL};
  // Of all maxima that mean the same, the one that leaves the sum between 1/2 and 1: lse does not depend on which was
  // taken.
  int exponent = 0;
  sum = split(sum, &exponent);
  const double given = static_cast<double>(maximum) + exponent;
  double top = given;
  float seen = 1.0f, weight = 1.0f;
  if (sink != nullptr) {
    const double s = (static_cast<double>(*sink) - base) * 1.44269504088896340736;
    top = s > given ? s : given;
    seen = static_cast<float>(std::exp2(given - top));
    const float keys = sum * seen;
    sum = keys + static_cast<float>(std::exp2(s - top));
    weight = keys / sum;
  }
  const float factor = seen / sum * kept_weight;
  return {exponent > -64 && exponent < 64 ? factor * as_float(static_cast<uint32_t>(127 - exponent) << 23)
                                          : std::ldexp(factor, -exponent),
          top * 0.69314718055994530942 + static_cast<double>(std::log(sum)) + base, weight};
}

inline Vec row_maximum(const float* s, int64_t cols) {
  Vec a = load(s), b = a;
  int64_t j = Vec::width;
  for (; j + 2 * Vec::width <= cols; j += 2 * Vec::width) {
    a = vmax(load(s + j), a);
    b = vmax(load(s + j + Vec::width), b);
  }
  return j < cols ? vmax(vmax(load(s + j), a), b) : vmax(a, b);
}

// Exponents of a plain row. The product is rounded before anything is taken from it (what follows is no addition, with
// which compilers could fuse it), so that what is taken does not change the bits of the weight.
struct Scaled {
  Vec factor;
  Vec operator()(int64_t, Vec s) const { return s * factor; }
};

// What the compiler may assume about a row: its shift is 0, its exponents are in the range of `exp2_near`, or nothing.
enum class Shift { none, near, any };

// 2^(from(j, s[j]) - shift) for one row of whole vectors, added to its sums; `put(j, x...)` stores two vectors from
// column j on, or the last one.
template <class C, Shift shifted, class From, class Put>
inline void exponentials(const float* s, int64_t cols, const From& from, float shift, float* sums, const Put& put) {
  constexpr int w = Vec::width, vectors = weight_lanes / w;
  const auto weight = [by = set(shift)](Vec x) {
    if constexpr (shifted == Shift::none) return exp2<C>(x);
    return shifted == Shift::near ? exp2_near<C>(x, by) : exp2_shifted<C>(x, by);
  };
  Vec sum[vectors];
  for (int i = 0; i < vectors; ++i) sum[i] = load(sums + i * w);
  const auto two = [&](int64_t j, int i) {
    const Vec x = weight(from(j, load(s + j))), y = weight(from(j + w, load(s + j + w)));
    sum[i] = sum[i] + x;
    sum[i + 1] = sum[i + 1] + y;
    put(j, x, y);
  };
  int64_t j = 0;
  for (; j + weight_lanes <= cols; j += weight_lanes)
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i += 2) two(j + i * w, i);
#pragma GCC unroll 8
  for (int i = 0; i + 2 < vectors; i += 2)
    if (j + 2 * w <= cols) two(j, i), j += 2 * w;
  if (j < cols) {
    const Vec x = weight(from(j, load(s + j)));
    sum[0] = sum[0] + x;
    put(j, x);
  }
  for (int i = 0; i < vectors; ++i) store(sums + i * w, sum[i]);
}

// The same, times 2^exponent_offset, as a row of A of an engine's products; p may be s itself where an element is one
// piece. With `Drops`, weights whose bit in `kept` is not set become 0 after they are summed.
template <class E, bool Drops, Shift shifted, class From>
inline void weights_of(const float* s, typename E::Element* p, int64_t plane, int64_t cols, const From& from,
                       float shift, float* sums, const uint32_t* kept) {
  constexpr bool rounds = rounds_weights<E> && (Drops || !E::sums_rows);
  Vec rounded = zero();
  if constexpr (rounds) rounded = load(sums + weight_lanes);
  const auto put = [=, &rounded]<class... Last>(int64_t j, Vec x, Last... y) {
    if constexpr (rounds) rounded = add_rounded(p, rounded, x, y...);
    if constexpr (Drops) {
      const uint32_t bits = kept[j / 32] >> (j % 32);
      x = select(from_bits(bits), x, zero());
      ((y = select(from_bits(bits >> Vec::width), y, zero())), ...);
    }
    if constexpr (sizeof...(y) == 0) {
      if constexpr (E::seen_step < 2 * Vec::width) store(p + j, x);  // else there is none
    } else if constexpr (Vec::width == panel) {
      E::store_group(p + j, 0, plane, x, y...);
    } else {
      store_two(p + j, x, y...);
    }
  };
  exponentials<typename E::Exponential, shifted>(s, cols, from, shift, sums, put);
  if constexpr (rounds) store(sums + weight_lanes, rounded);
}

// What `weights_of` leaves to do for a strip of rows of weights: where none is dropped, some engines sum rounded ones.
template <class E>
inline void sum_rounded(const typename E::Element* p, int64_t ldp, float* sums, int64_t rows, int64_t cols,
                        bool drops) {
  if constexpr (E::sums_rows)
    if (!drops) E::add_row_sums(p, ldp, sums + weight_lanes, sum_lanes, round_up(rows, E::rows), cols);
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
  Scaled exponents(int64_t, float c) const { return {set(c)}; }
};

// The same where products become exponents as they become weights, by make(i) of row i (see `Scores::fuse`).
template <class Make>
struct FusedStrip {
  static constexpr bool fused = true;
  Each prepare;
  const Make& make;
  const uint32_t* bits;
  int64_t words;

  Vec maximum(int64_t, const float*, int64_t) const { return set(-infinity); }  // never called
  auto exponents(int64_t i, float) const { return make(i); }
};

// The weights of row i of a strip, as a row of A.
template <class E, class S>
inline void weights_of_row(const S& strip, int64_t i, const float* s, typename E::Element* p, int64_t plane,
                           int64_t cols, float c, float shift, float* sums) {
  const auto from = strip.exponents(i, c);
  if (strip.bits != nullptr)
    weights_of<E, true, Shift::any>(s, p, plane, cols, from, shift, sums, strip.bits + i * strip.words);
  else if (S::fused || shift != 0.0f)
    weights_of<E, false, Shift::any>(s, p, plane, cols, from, shift, sums, nullptr);
  else
    weights_of<E, false, Shift::none>(s, p, plane, cols, from, shift, sums, nullptr);
}

inline void scale_row(float* o, int64_t n, float factor) {
  const Vec f = set(factor);
  for (int64_t j = 0; j < n; j += Vec::width) store(o + j, load(o + j) * f);
}

// Weights that wait for their product, of one row: `cols` of them, in planes of pieces.
template <class C>
struct Waiting {
  C* p;
  int64_t plane, cols;
  int pieces;
  // By a power of two, which is exact.
  void scale(float factor) const {
    for (int piece = 0; piece < pieces; ++piece)
      for (int64_t j = 0; j < cols; j += Vec::width) {
        C* x = p + piece * plane + j;
        store(x, load(x) * set(factor));
      }
  }
};

// Raises the running maxima of up to four rows to what `tops` has lanes of, and rescales what the rows have summed, and
// what waits(r) says of row r (Milakov & Gimelshein 2018, eq. 3): by powers of two, which is exact. A maximum is left
// alone while it rises by at most `slack`: rescaling is then rare.
template <class Waits>
inline void raise_maxima(const Vec (&tops)[4], int rows, float c, float slack, Running run, float* out, int64_t v_cols,
                         const Waits& waits) {
  float now[4];
  reduce_max4(tops[0], tops[1], tops[2], tops[3], now);
  for (int r = 0; r < rows; ++r) {
    float& maximum = run.maximum[r];
    if (now[r] * c <= maximum + slack) continue;
    const float to = std::ceil(now[r] * c);
    // Nothing seen yet: the accumulators are zero, and -inf - -inf would be NaN.
    const float factor = maximum == -infinity ? 0.0f : power_of_two(maximum - to);
    scale_row(out + r * v_cols, v_cols, factor);
    scale_row(run.sums + r * sum_lanes, sum_lanes, factor);
    waits(r).scale(factor);
    maximum = to;
  }
}

#if defined(__AMX_BF16__)
// Rows of `Cols` scores become weights one after the other, `Ldp` apart, where nothing is hidden or changed. `Bounded`:
// the maxima are 0, and stay. Else they are within what `exp2_near` takes, and are raised for a row of its own.
template <class E, bool Bounded, int64_t Cols, int64_t Ldp>
struct PlainRows {
  const float* s;
  typename E::Element* p;
  int64_t plane;
  Vec c;
  float slack;
  Running run;
  float* out;
  int64_t v_cols, before;  // so many weights stand before p, and wait for their product
  [[gnu::always_inline]] void operator()() {
    constexpr Shift shift = Bounded ? Shift::none : Shift::near;
    if constexpr (!Bounded) {
      const Vec top = row_maximum(s, Cols) * c;
      if (any(greater(top, set(*run.maximum + slack)))) raise();
    }
    weights_of<E, false, shift>(s, p, plane, Cols, Scaled{c}, Bounded ? 0.0f : *run.maximum, run.sums, nullptr);
    s += Cols, p += Ldp, run.sums += sum_lanes;
    if constexpr (!Bounded) run.maximum += 1, out += v_cols;
  }

 private:
  [[gnu::noinline, gnu::cold]] void raise() const {
    const Vec top = row_maximum(s, Cols), tops[4] = {top, top, top, top};
    alignas(64) float factor[Vec::width];
    store(factor, c);
    raise_maxima(tops, 1, factor[0], slack, run, out, v_cols,
                 [&](int64_t) { return Waiting{p - before, plane, before, E::pieces}; });
  }
};
#endif

// Rows of scores (hidden ones -inf) become weights relative to the running maximum, in their order. c > 0.
template <class E>
struct Weigh {
  float* s;
  int64_t lds;
  typename E::Element* p;
  int64_t ldp, plane, rows, cols;
  float c, slack;
  Running run;
  float* out;
  int64_t v_cols, before;  // so many weights stand before p, and wait for their product

  // `Bounded`: the exponential of every score, less the row's maximum as it is given, is at most 2^40, and at least
  // 2^-40 for one that the row sees (see `within_range`). Then the maximum need not be found: it stays. Else it is
  // raised first, for four rows at once.
  template <bool Bounded, class S>
  [[gnu::noinline]] void strip(const S& strip) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (r % 4 == 0) {
        strip.prepare(r);
        if constexpr (!Bounded) raise(strip, r);
      }
      const float shift = run.maximum[r] == -infinity ? 0.0f : run.maximum[r];
      weights_of_row<E>(strip, r, s + r * lds, p + r * ldp, plane, cols, c, shift, run.sums + r * sum_lanes);
    }
  }

 private:
  template <class S>
  void raise(const S& strip, int64_t i) const {
    const int count = static_cast<int>(min(4, rows - i));
    const auto top = [&](int64_t r) { return strip.maximum(i + r, s + (i + r) * lds, cols); };
    const Vec tops[4] = {top(0), top(min(1, count - 1)), top(min(2, count - 1)), top(count - 1)};
    raise_maxima(tops, count, c, slack, {run.maximum + i, run.sums + i * sum_lanes}, out + i * v_cols, v_cols,
                 [&](int64_t r) { return Waiting{p + (i + r) * ldp - before, plane, before, E::pieces}; });
  }
};

}  // namespace attnspan::ATTNSPAN_ISA
