// What csrc/amx.h does, computed: for machines without matrix tiles, and for sanitizers, which do not see what a tile
// reads. Roundings are those that Intel's Software Developer's Manual gives for TDPBF16PS and TDPFP16PS: even and odd
// elements are summed by themselves from zero on, subnormal results are zeros.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../csrc/simd.h"

namespace attnspan::ATTNSPAN_ISA {

struct EmulatedTiles {
  bool configured = false;
  alignas(64) float tile[8][16][16];
};
inline EmulatedTiles& tiles() {
  static thread_local EmulatedTiles state;
  return state;
}

// A use outside of a session is an illegal instruction.
inline void demand_tiles() {
  if (!tiles().configured) __builtin_trap();
}

inline void load_tile_config(const void*) {
  tiles().configured = true, std::memset(tiles().tile, 0, sizeof tiles().tile);
}
inline void release_tiles() { tiles().configured = false; }

template <int n>
inline void clear_tile() {
  demand_tiles();
  std::memset(tiles().tile[n], 0, sizeof tiles().tile[n]);
}

template <int n>
inline void load_tile(const void* from, int64_t stride) {
  demand_tiles();
  for (int i = 0; i < 16; ++i) std::memcpy(tiles().tile[n][i], static_cast<const char*>(from) + i * stride, 64);
}

template <int n>
inline void stream_tile(const void* from, int64_t stride) {
  load_tile<n>(from, stride);
}

template <int n>
inline void store_tile(void* to, int64_t stride) {
  demand_tiles();
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tiles().tile[n][i], 64);
}

inline __m512 without_subnormals(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(normal, x);
}

// The lower (0) or upper (1) half of each word, as floats.
template <class C, int half>
inline __m512 halves(__m512i words) {
  const __m512i low = half == 0 ? words : _mm512_srli_epi32(words, 16);
  if constexpr (std::is_same_v<C, f16>)
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low));
  else
    return without_subnormals(_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
}

template <class C, int sum, int a, int b>
inline void multiply_tiles() {
  demand_tiles();
  auto& tile = tiles().tile;
  __m512 lines[16][2];
  for (int k = 0; k < 16; ++k) {
    const __m512i line = _mm512_loadu_si512(tile[b][k]);
    lines[k][0] = halves<C, 0>(line), lines[k][1] = halves<C, 1>(line);
  }
  for (int m = 0; m < 16; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < 16; ++k) {
      int32_t word;
      std::memcpy(&word, &tile[a][m][k], 4);
      const __m512i words = _mm512_set1_epi32(word);
      even = without_subnormals(_mm512_fmadd_ps(halves<C, 0>(words), lines[k][0], even));
      odd = without_subnormals(_mm512_fmadd_ps(halves<C, 1>(words), lines[k][1], odd));
    }
    const __m512 both = without_subnormals(_mm512_add_ps(even, odd));
    _mm512_storeu_ps(tile[sum][m], without_subnormals(_mm512_add_ps(_mm512_loadu_ps(tile[sum][m]), both)));
  }
}

}  // namespace attnspan::ATTNSPAN_ISA
