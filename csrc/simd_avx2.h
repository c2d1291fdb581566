// Vectors of AVX2, part of simd.h.
#pragma once

namespace attnspan::ATTNSPAN_ISA {

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

// Vectors as units of 32 bits, a float or two halves side by side: `lanes` takes 16 bytes from each of several rows,
// the others mix two vectors within 128 bits, and `halves` makes floats of the first or the second ones.
[[gnu::always_inline]] inline Vec lanes(const char* p, int64_t stride) {
  const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(p));
  return {
      _mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(reinterpret_cast<const float*>(p + stride)), 1)};
}
inline Vec low_units(Vec a, Vec b) { return {_mm256_unpacklo_ps(a.v, b.v)}; }
inline Vec high_units(Vec a, Vec b) { return {_mm256_unpackhi_ps(a.v, b.v)}; }
inline Vec low_pairs(Vec a, Vec b) { return {_mm256_shuffle_ps(a.v, b.v, 0x44)}; }
inline Vec high_pairs(Vec a, Vec b) { return {_mm256_shuffle_ps(a.v, b.v, 0xee)}; }
template <class T, int Half>
[[gnu::always_inline]] inline Vec halves(Vec units) {
  const __m256i x = _mm256_castps_si256(units.v), low = _mm256_set1_epi32(0xffff);
  if constexpr (std::is_same_v<T, bf16>)
    return {_mm256_castsi256_ps(Half == 0 ? _mm256_slli_epi32(x, 16) : _mm256_andnot_si256(low, x))};
  const __m256i own = Half == 0 ? _mm256_and_si256(x, low) : _mm256_srli_epi32(x, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(own, own), 0x08);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed))};
}

}  // namespace attnspan::ATTNSPAN_ISA
