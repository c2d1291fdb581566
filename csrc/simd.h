// One vector type per instruction-set level: `Vec` holds `Vec::width` floats. Loads and stores convert from and to
// bfloat16 and float16. Everything lives in a namespace named after the level, so that no inline function compiled
// with one level's flags can be linked into another's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// Takes float subnormals for zero while it lives. Far below the softmax's maximum, probabilities and their gradients
// are subnormal, and processors take a hundred cycles for each: a trained model's step was twice as long as an
// untrained one's.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  FlushSubnormals() {}
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

#if defined(__AVX512F__)

struct Vec {
  static constexpr int width = 16;
  __m512 v;
};
using Mask = __mmask16;

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
inline Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec floor(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// x - floor(x), 0 for infinities; and p * 2^floor(x) with p for p = 1 and x = -inf exactly 0: no clamp is needed.
inline Vec fraction(Vec x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_floor(Vec p, Vec x) { return {_mm512_scalef_ps(p.v, x.v)}; }
// p * 2^(floor(x) - shift) for a whole number `shift`: rounded down, a difference has the floor of the exact one.
inline Vec scale_by_floor(Vec p, Vec x, Vec shift) {
  return scale_by_floor(p, {_mm512_sub_round_ps(x.v, shift.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)});
}
inline Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_mov_ps(no.v, m, yes.v)}; }
// The maxima of four vectors at once.
inline void reduce_max4(Vec a, Vec b, Vec c, Vec d, float* to) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512 x = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(to, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
// The sums of four vectors at once.
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* to) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512 x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
inline Mask none() { return 0; }
inline Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
inline Mask between(int32_t key, const int32_t* lo, const int32_t* hi) {
  const __m512i j = _mm512_set1_epi32(key);
  return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(_mm512_loadu_si512(lo), j), j, _mm512_loadu_si512(hi));
}
inline Vec load(const bf16* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
}
inline Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline __m256i round_bf16(Vec a) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
#endif
}
inline void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
#if defined(__AVX512BF16__)
inline void store_two(bf16* p, Vec a, Vec b) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
}
// sum + a + b, rounded as they are stored.
inline Vec add_rounded(const bf16*, Vec sum, Vec a, Vec b = zero()) {
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  return {_mm512_dpbf16_ps(sum.v, _mm512_cvtne2ps_pbh(b.v, a.v), ones)};
}
#endif
inline void store(f16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_two(f16* p, Vec a, Vec b) {
  store(p, a);
  store(p + Vec::width, b);
}
inline Vec add_rounded(const f16*, Vec sum, Vec a, Vec b = zero()) {
  const auto round = [](Vec x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); };
  return {_mm512_add_ps(sum.v, _mm512_add_ps(round(a), round(b)))};
}

inline Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }

struct Ints {  // unsigned 32-bit integers, modulo 2^32
  __m512i v;
};
inline Ints set_ints(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int n>
inline Ints shift_right(Ints a) {
  return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
inline Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, n)};
}
inline Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }  // as signed
inline Mask share_bits(Ints a, Ints b) { return _mm512_test_epi32_mask(a.v, b.v); }
inline Ints select(Mask m, Ints yes, Ints no) { return {_mm512_mask_mov_epi32(no.v, m, yes.v)}; }
// A bit for each lane that is at least `least`, both below 2^31.
inline uint32_t bits_at_least(Ints a, uint32_t least) {
  return _mm512_cmpge_epi32_mask(a.v, _mm512_set1_epi32(static_cast<int>(least)));
}
inline Mask from_bits(uint32_t bits) { return static_cast<Mask>(bits); }

#elif defined(__AVX2__)

struct Vec {
  static constexpr int width = 8;
  __m256 v;
};
using Mask = __m256i;

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec floor(Vec a) { return {_mm256_floor_ps(a.v)}; }
inline Vec scale_exponent(Vec p, Vec n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(p.v, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)))};
}
inline Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, _mm256_castsi256_ps(m))}; }
inline Mask none() { return _mm256_setzero_si256(); }
inline Mask either(Mask a, Mask b) { return _mm256_or_si256(a, b); }
inline Mask between(int32_t key, const int32_t* lo, const int32_t* hi) {
  const __m256i j = _mm256_set1_epi32(key);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)), j);
  const __m256i inside = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi)), j);
  return _mm256_andnot_si256(below, inside);
}
inline Vec load(const bf16* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))};
}
inline Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline void store(bf16* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline void store(f16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline Mask greater(Vec a, Vec b) { return _mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)); }

struct Ints {
  __m256i v;
};
inline Ints set_ints(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
inline Ints load_ints(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
template <int n>
inline Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.v, n)};
}
template <int n>
inline Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.v, n)};
}
inline Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Mask share_bits(Ints a, Ints b) {
  return _mm256_xor_si256(_mm256_cmpeq_epi32(_mm256_and_si256(a.v, b.v), _mm256_setzero_si256()),
                          _mm256_set1_epi32(-1));
}
inline Ints select(Mask m, Ints yes, Ints no) { return {_mm256_blendv_epi8(no.v, yes.v, m)}; }
inline uint32_t bits_at_least(Ints a, uint32_t least) {
  const __m256i m = _mm256_cmpgt_epi32(a.v, _mm256_set1_epi32(static_cast<int>(least) - 1));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m)));
}
inline Mask from_bits(uint32_t bits) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes), lanes);
}

#else  // portable: the compiler's own vector types (SSE2, NEON, ...)

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
// Of the other forms, compilers make scalar code with branches, here and for float16 below.
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

#endif

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
