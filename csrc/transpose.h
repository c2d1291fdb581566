// Transposed loads: units of 32 bits (a float, or two halves side by side) of several rows, each row in a lane.
#pragma once

#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

// Of vectors as units: `lanes` takes 16 bytes from each row of a vector's 128-bit lanes, the others mix two vectors
// within these lanes.
#if defined(__AVX512F__)
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
#elif defined(__AVX2__)
[[gnu::always_inline]] inline Vec lanes(const char* p, int64_t stride) {
  const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(p));
  return {
      _mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(reinterpret_cast<const float*>(p + stride)), 1)};
}
inline Vec low_units(Vec a, Vec b) { return {_mm256_unpacklo_ps(a.v, b.v)}; }
inline Vec high_units(Vec a, Vec b) { return {_mm256_unpackhi_ps(a.v, b.v)}; }
inline Vec low_pairs(Vec a, Vec b) { return {_mm256_shuffle_ps(a.v, b.v, 0x44)}; }
inline Vec high_pairs(Vec a, Vec b) { return {_mm256_shuffle_ps(a.v, b.v, 0xee)}; }
#else
inline Vec lanes(const char* p, int64_t) { return load(reinterpret_cast<const float*>(p)); }
inline Vec low_units(Vec a, Vec b) { return {__builtin_shufflevector(a.v, b.v, 0, 4, 1, 5)}; }
inline Vec high_units(Vec a, Vec b) { return {__builtin_shufflevector(a.v, b.v, 2, 6, 3, 7)}; }
inline Vec low_pairs(Vec a, Vec b) { return {__builtin_shufflevector(a.v, b.v, 0, 1, 4, 5)}; }
inline Vec high_pairs(Vec a, Vec b) { return {__builtin_shufflevector(a.v, b.v, 2, 3, 6, 7)}; }
#endif

// Four units of each of Vec::width rows, `stride` bytes apart: r[u] has unit u of all rows. Every fourth row goes to
// another lane of 128 bits as it is loaded, which leaves two mixes for each vector.
[[gnu::always_inline]] inline void load_units(const void* p, int64_t stride, Vec (&r)[4]) {
  const auto row = [&](int64_t i) { return lanes(static_cast<const char*>(p) + i * stride, 4 * stride); };
  const Vec a = row(0), b = row(1), c = row(2), d = row(3);
  const Vec x = low_units(a, b), y = high_units(a, b), z = low_units(c, d), w = high_units(c, d);
  r[0] = low_pairs(x, z), r[1] = high_pairs(x, z), r[2] = low_pairs(y, w), r[3] = high_pairs(y, w);
}

// Halves `Half` (0: the first ones) of units, as floats.
template <class T, int Half>
[[gnu::always_inline]] inline Vec halves(Vec units) {
#if defined(__AVX512F__)
  const __m512i x = _mm512_castps_si512(units.v);
  const __m512i high = _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  if constexpr (std::is_same_v<T, bf16>)
    return {_mm512_castsi512_ps(Half == 0 ? _mm512_slli_epi32(x, 16) : high)};
  else
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(Half == 0 ? x : _mm512_srli_epi32(x, 16)))};
#elif defined(__AVX2__)
  const __m256i x = _mm256_castps_si256(units.v), low = _mm256_set1_epi32(0xffff);
  if constexpr (std::is_same_v<T, bf16>)
    return {_mm256_castsi256_ps(Half == 0 ? _mm256_slli_epi32(x, 16) : _mm256_andnot_si256(low, x))};
  const __m256i own = Half == 0 ? _mm256_and_si256(x, low) : _mm256_srli_epi32(x, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(own, own), 0x08);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed))};
#else
  for (int i = 0; i < Vec::width; ++i)
    units.v[i] = to_float(T{static_cast<uint16_t>(as_bits(units.v[i]) >> (16 * Half))});
  return units;
#endif
}

// Sixteen lines of sixteen units.
struct alignas(64) Block {
  uint32_t unit[16][16];
  // Rows of floats.
  void set(int64_t row, const float* from) { std::memcpy(unit[row], from, 64); }
  void get(int64_t row, float* to) const { std::memcpy(to, unit[row], 64); }
};

[[gnu::noinline]] inline void transpose(Block& x) {
  const Block from = x;
  for (int64_t i = 0; i < 16; i += Vec::width)
    for (int64_t d = 0; d < 16; d += 4) {
      Vec r[4];
      load_units(from.unit[i] + d, 64, r);
      for (int64_t n = 0; n < 4; ++n) std::memcpy(x.unit[d + n] + i, &r[n].v, sizeof r[n].v);
    }
}

}  // namespace attnspan::ATTNSPAN_ISA
