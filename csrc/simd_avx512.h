// Vectors of AVX-512, part of simd.h.
#pragma once

namespace attnspan::ATTNSPAN_ISA {

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
inline Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
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
// Two rows of 32 numbers, x[side][row]: as they are, and as lines of 16 pairs of the rows.
inline void store_both_ways(bf16* first, bf16* second, bf16* const (&lines)[2], const Vec (&x)[2][2]) {
  alignas(64) static constexpr uint16_t order[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const auto a = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1][0].v, x[0][0].v)),
             b = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1][1].v, x[0][1].v));
  _mm512_storeu_si512(first, a);
  _mm512_storeu_si512(second, b);
  for (int side = 0; side < 2; ++side)
    _mm512_storeu_si512(lines[side], _mm512_permutex2var_epi16(a, _mm512_load_si512(order[side]), b));
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

inline bool any(Mask m) { return m != 0; }
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

// Modulo 16, how many sixteenths there are below x, for |x| < 2^18: the lowest bits of a sum that has no smaller ones.
inline Ints sixteenths(Vec x) {
  return {_mm512_castps_si512(
      _mm512_add_round_ps(x.v, _mm512_set1_ps(0x1.8p19f), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))};
}
// x less the largest sixteenth below it, 0 for infinities.
inline Vec beyond_sixteenth(Vec x) {
  return {_mm512_reduce_ps(x.v, (4 << 4) | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
// Of 16 numbers those at `place`, modulo 16.
inline Vec look_up(const float* numbers, Ints place) {
  return {_mm512_permutexvar_ps(place.v, _mm512_load_ps(numbers))};
}

// Vectors as units of 32 bits, a float or two halves side by side: `lanes` takes 16 bytes from each of several rows,
// the others mix two vectors within 128 bits, and `halves` makes floats of the first or the second ones.
[[gnu::always_inline]] inline Vec lanes(const char* p, int64_t stride) {
  const auto row = [&](int64_t i) { return _mm_loadu_ps(reinterpret_cast<const float*>(p + i * stride)); };
  const __m512 x = _mm512_mask_broadcast_f32x4(_mm512_castps128_ps512(row(0)), 0x00f0, row(1));
  return {_mm512_mask_broadcast_f32x4(_mm512_mask_broadcast_f32x4(x, 0x0f00, row(2)), 0xf000, row(3))};
}
inline Vec low_units(Vec a, Vec b) { return {_mm512_unpacklo_ps(a.v, b.v)}; }
inline Vec high_units(Vec a, Vec b) { return {_mm512_unpackhi_ps(a.v, b.v)}; }
inline Vec low_pairs(Vec a, Vec b) {
  return {_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a.v), _mm512_castps_pd(b.v)))};
}
inline Vec high_pairs(Vec a, Vec b) {
  return {_mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a.v), _mm512_castps_pd(b.v)))};
}
template <class T, int Half>
[[gnu::always_inline]] inline Vec halves(Vec units) {
  const __m512i x = _mm512_castps_si512(units.v);
  const __m512i high = _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  if constexpr (std::is_same_v<T, bf16>)
    return {_mm512_castsi512_ps(Half == 0 ? _mm512_slli_epi32(x, 16) : high)};
  else
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(Half == 0 ? x : _mm512_srli_epi32(x, 16)))};
}

}  // namespace attnspan::ATTNSPAN_ISA
