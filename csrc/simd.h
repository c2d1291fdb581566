// One vector type per instruction-set level: `Vec` holds `Vec::width` floats. Loads and stores convert from and to
// bfloat16 and float16. Everything lives in a namespace named after the level, so that no inline function compiled
// with one level's flags can be linked into another's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__SSE2__)
#pragma GCC diagnostic push
#if !defined(__clang__)
// GCC 12 takes the "undefined" operands of its own AVX-512 intrinsics for our mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef ATTNSPAN_ISA
#error "ATTNSPAN_ISA must name the instruction-set level"
#endif

namespace attnspan::ATTNSPAN_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// Takes float subnormals for zero while it lives, or as they are. Far below the softmax's maximum, probabilities and
// their gradients are subnormal, and processors take a hundred cycles for each: a trained model's step was twice as
// long as an untrained one's.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  explicit FlushSubnormals(bool flush = true) : before_(_mm_getcsr()) {
    _mm_setcsr(flush ? before_ | bits : before_ & ~bits);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned bits = 0x8040u;
  unsigned before_;
#elif defined(__aarch64__)
  explicit FlushSubnormals(bool flush = true) {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(flush ? before_ | bits : before_ & ~bits));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  static constexpr uint64_t bits = uint64_t{1} << 24;
  uint64_t before_;
#else
  explicit FlushSubnormals(bool = true) {}
  ~FlushSubnormals() {}

 private:
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
#if defined(__F16C__)
inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }
#else
inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) return as_float(sign | as_bits(static_cast<float>(mantissa) * 0x1p-24f));
  return as_float(sign | (exponent == 0x1fu ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
#endif

}  // namespace attnspan::ATTNSPAN_ISA

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace attnspan::ATTNSPAN_ISA {

// Compilers' vectors of every width have them.
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }

inline void store_two(float* p, Vec a, Vec b) {
  store(p, a);
  store(p + Vec::width, b);
}

// One step of depth in a panel of 16 columns: a row of floats, or two rows of bfloat16 side by side.
inline void store_step(float* line, const Vec (&x)[1]) { store(line, x[0]); }
#if defined(__AVX512BF16__)
inline void store_step(bf16* line, const Vec (&x)[2]) {
  const __m512i even = _mm512_cvtepu16_epi32(round_bf16(x[0])), odd = _mm512_cvtepu16_epi32(round_bf16(x[1]));
  _mm512_storeu_si512(line, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}
#endif

#if !defined(__AVX512F__)
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* to) {
  to[0] = reduce_add(a), to[1] = reduce_add(b), to[2] = reduce_add(c), to[3] = reduce_add(d);
}
inline void reduce_max4(Vec a, Vec b, Vec c, Vec d, float* to) {
  to[0] = reduce_max(a), to[1] = reduce_max(b), to[2] = reduce_max(c), to[3] = reduce_max(d);
}

// The same steps without the instructions, for exponents up to 128: 2^-127 and less is 0, as subnormals are; a NaN
// passes (the order of vmax's operands matters). -infinity is clamped where numbers have no fraction any more.
inline Vec above_infinity(Vec x) { return vmax(set(-0x1p23f), x); }
inline Vec fraction(Vec x) { return above_infinity(x) - floor(above_infinity(x)); }
inline Vec scale_by_floor(Vec p, Vec x) { return scale_exponent(p, vmax(set(-127.0f), floor(x))); }
inline Vec scale_by_floor(Vec p, Vec x, Vec shift) { return scale_exponent(p, vmax(set(-127.0f), floor(x) - shift)); }
#endif

inline Vec magnitude(Vec a) { return vmax(a, zero() - a); }

inline Ints count_from(int64_t first) {
  alignas(64) static constexpr int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return set_ints(static_cast<uint32_t>(first)) + load_ints(lanes);
}

// The first n < width elements; the others are zero.
template <class T>
inline Vec load_part(const T* p, int64_t n) {
  T x[Vec::width] = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return load(x);
}
template <class T>
inline void store_part(T* p, Vec a, int64_t n) {
  T x[Vec::width];
  store(x, a);
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}

}  // namespace attnspan::ATTNSPAN_ISA
