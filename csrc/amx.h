// The instructions of matrix tiles, for numbers of tiles that are template parameters: the compilers' own names want
// literals, and learned of float16 tiles late.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace attnspan::ATTNSPAN_ISA {

inline void load_tile_config(const void* config) { _tile_loadconfig(config); }
inline void release_tiles() { _tile_release(); }

template <int tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// `stride` bytes lie between rows. That it reads memory is said once for a whole product.
template <int tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(from), "r"(stride));
}
// The same for data that is not read again soon: the load does not displace other lines of L1.
template <int tile>
inline void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(from), "r"(stride));
}
template <int tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(to), "r"(stride) : "memory");
}

// sum += a * b: by its bytes, because assemblers learned of float16 tiles late.
template <class C, int sum, int a, int b>
inline void multiply_tiles() {
  constexpr int prefix = std::is_same_v<C, f16> ? 3 : 2;
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((~b & 15) << 3 | prefix), "i"(0xc0 | sum << 3 | a));
}

}  // namespace attnspan::ATTNSPAN_ISA
