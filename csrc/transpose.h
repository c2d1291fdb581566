// Rows become columns: 16 lines of 16 units of 32 bits, or four units of as many rows as a vector has lanes.
#pragma once

#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

// Four units of each of Vec::width rows, `stride` bytes apart: r[u] has unit u of all rows. Every fourth row goes to
// another lane of 128 bits as it is loaded, which leaves two mixes for each vector.
[[gnu::always_inline]] inline void load_units(const void* p, int64_t stride, Vec (&r)[4]) {
  const auto row = [&](int64_t i) { return lanes(static_cast<const char*>(p) + i * stride, 4 * stride); };
  const Vec a = row(0), b = row(1), c = row(2), d = row(3);
  const Vec x = low_units(a, b), y = high_units(a, b), z = low_units(c, d), w = high_units(c, d);
  r[0] = low_pairs(x, z), r[1] = high_pairs(x, z), r[2] = low_pairs(y, w), r[3] = high_pairs(y, w);
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
