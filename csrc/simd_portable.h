// The compiler's own vector types (SSE2, NEON, ...), part of simd.h.
#pragma once

namespace attnspan::ATTNSPAN_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

struct Vec {
  static constexpr int width = 4;
  f32x4 v;
};
using Mask = i32x4;

inline Vec zero() { return {f32x4{}}; }
inline Vec set(float x) { return {f32x4{x, x, x, x}}; }
inline Vec load(const float* p) {
  Vec a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec vmax(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
// Written in other ways, these compile to scalar code with branches; so does float16 below.
#if defined(__aarch64__)
inline float reduce_add(Vec a) { return vaddvq_f32(a.v); }
inline float reduce_max(Vec a) { return vmaxvq_f32(a.v); }
#else
inline float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(Vec a) {
  const float x = a.v[0] > a.v[2] ? a.v[0] : a.v[2], y = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return x > y ? x : y;
}
#endif
inline Vec floor(Vec a) {
  for (int i = 0; i < 4; ++i) a.v[i] = __builtin_floorf(a.v[i]);
  return a;
}
inline Vec scale_exponent(Vec p, Vec n) {
  const i32x4 bits = (__builtin_convertvector(n.v, i32x4) + 127) << 23;
  f32x4 factor;
  std::memcpy(&factor, &bits, sizeof factor);
  return {p.v * factor};
}
inline Vec select(Mask m, Vec yes, Vec no) { return {m ? yes.v : no.v}; }
inline Mask none() { return i32x4{}; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask between(int32_t key, const int32_t* lo, const int32_t* hi) {
  i32x4 l, h;
  std::memcpy(&l, lo, sizeof l);
  std::memcpy(&h, hi, sizeof h);
  return (l <= key) & (h > key);
}
inline Mask greater(Vec a, Vec b) { return a.v > b.v; }

typedef uint32_t u32x4 __attribute__((vector_size(16)));
struct Ints {
  u32x4 v;
};
inline Ints set_ints(uint32_t x) { return {u32x4{x, x, x, x}}; }
inline Ints load_ints(const int32_t* p) {
  Ints a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline Ints operator+(Ints a, Ints b) { return {a.v + b.v}; }
inline Ints operator*(Ints a, Ints b) { return {a.v * b.v}; }
inline Ints operator^(Ints a, Ints b) { return {a.v ^ b.v}; }
inline Ints operator&(Ints a, Ints b) { return {a.v & b.v}; }
template <int n>
inline Ints shift_right(Ints a) {
  return {a.v >> n};
}
template <int n>
inline Ints shift_left(Ints a) {
  return {a.v << n};
}
inline Vec to_floats(Ints a) {
  i32x4 x;
  std::memcpy(&x, &a.v, sizeof x);
  return {__builtin_convertvector(x, f32x4)};
}
inline Mask share_bits(Ints a, Ints b) { return (a.v & b.v) != 0; }
inline Ints select(Mask m, Ints yes, Ints no) { return {m ? yes.v : no.v}; }
inline uint32_t bits_at_least(Ints a, uint32_t least) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(a.v[i] >= least) << i;
  return bits;
}
inline Mask from_bits(uint32_t bits) { return (u32x4{bits, bits, bits, bits} & u32x4{1, 2, 4, 8}) != 0; }

inline void from_float(float x, bf16* y) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  y->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
inline void from_float(float x, f16* y) {
  const uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: let a float addition do the rounding at the right bit.
    half = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  y->bits = static_cast<uint16_t>(sign | half);
}

template <class T>
inline Vec load_each(const T* p) {
  return {f32x4{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
}
inline Vec load(const bf16* p) { return load_each(p); }
inline void store(bf16* p, Vec a) {
  for (int i = 0; i < 4; ++i) from_float(a.v[i], p + i);
}
#if defined(__aarch64__)
inline Vec load(const f16* p) {
  float16x4_t half;
  std::memcpy(&half, p, sizeof half);
  return {vcvt_f32_f16(half)};
}
inline void store(f16* p, Vec a) {
  const float16x4_t half = vcvt_f16_f32(a.v);
  std::memcpy(p, &half, sizeof half);
}
#else
inline Vec load(const f16* p) { return load_each(p); }
inline void store(f16* p, Vec a) {
  for (int i = 0; i < 4; ++i) from_float(a.v[i], p + i);
}
#endif

// Vectors as units of 32 bits, a float or two halves side by side: `lanes` takes 16 bytes from each of several rows,
// the others mix two vectors within 128 bits, and `halves` makes floats of the first or the second ones.
inline Vec lanes(const char* p, int64_t) {
  Vec a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
template <int A, int B, int C, int D>
inline Vec pick(Vec a, Vec b) {
#if defined(__clang__)
  return {__builtin_shufflevector(a.v, b.v, A, B, C, D)};
#else
  return {__builtin_shuffle(a.v, b.v, i32x4{A, B, C, D})};
#endif
}
inline Vec low_units(Vec a, Vec b) { return pick<0, 4, 1, 5>(a, b); }
inline Vec high_units(Vec a, Vec b) { return pick<2, 6, 3, 7>(a, b); }
inline Vec low_pairs(Vec a, Vec b) { return pick<0, 1, 4, 5>(a, b); }
inline Vec high_pairs(Vec a, Vec b) { return pick<2, 3, 6, 7>(a, b); }
template <class T, int Half>
inline Vec halves(Vec units) {
  constexpr int shift = (std::endian::native == std::endian::little) == (Half == 0) ? 0 : 16;
  for (int i = 0; i < Vec::width; ++i) units.v[i] = to_float(T{static_cast<uint16_t>(as_bits(units.v[i]) >> shift)});
  return units;
}

}  // namespace attnspan::ATTNSPAN_ISA
