// Which attention weights dropout keeps: a hash of indices, so that tiles, threads and shards all agree on it.
//
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") makes a seed for each head from the
// seed, and two words for each row from the head's. A cheap bijective mixer turns them and a key's index into 32 random
// bits, which decide for two keys: those whose indices differ by 16 within a group of 32.
#pragma once

#include "attention.h"
#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

struct RandomPair {
  uint32_t first, second;
};

inline RandomPair philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {c0, c1};
}

inline uint64_t seed_of_head(const Problem& a, int64_t b, int64_t h) {
  const Dropout& d = a.options.dropout;
  if (d.per_head) return static_cast<uint64_t>(d.seeds[b * a.q_heads + h]);
  const RandomPair words =
      philox(static_cast<uint32_t>(b), static_cast<uint32_t>(h), 0, 1, static_cast<uint64_t>(d.seeds[0]));
  return words.first | static_cast<uint64_t>(words.second) << 32;
}

inline int32_t query_index(const Problem& a, int64_t b, int64_t i) {
  const int32_t* given = a.options.q_index.of(b);
  return given != nullptr ? given[i] : static_cast<int32_t>(a.k_len - a.q_len + i);
}

// The two words of query row i of a head with this seed.
inline RandomPair random_of_row(const Problem& a, uint64_t seed, int64_t b, int64_t i) {
  return philox(static_cast<uint32_t>(query_index(a, b, i)), 0, 0, 0, seed);
}

inline Ints mix(Ints x, RandomPair row) {
  x = x ^ set_ints(row.first);
  x = (x ^ shift_right<16>(x)) * set_ints(0x7feb352du);
  x = (x ^ shift_right<15>(x)) + set_ints(row.second);
  x = x * set_ints(0x846ca68bu);
  return x ^ shift_right<16>(x);
}

// A bit for each of the 32 keys from the `first` on, a multiple of 32 unless keys have indices of their own.
inline uint32_t kept_of_group(const Problem& a, RandomPair row, int64_t b, int64_t first) {
  const uint32_t threshold = a.options.dropout.threshold;
  const int32_t* given = a.options.k_index.of(b);
  uint32_t bits = 0;
  if (given == nullptr) {
    for (int lane = 0; lane < 16; lane += Vec::width) {
      const Ints x = mix(count_from(first / 2 + lane), row);
      bits |= bits_at_least(x & set_ints(0xffffu), threshold) << lane;
      bits |= bits_at_least(shift_right<16>(x), threshold) << (16 + lane);
    }
    return bits;
  }
  alignas(64) int32_t index[32] = {};
  for (int64_t j = 0; j < min(32, a.k_len - first); ++j) index[j] = given[first + j];
  for (int lane = 0; lane < 32; lane += Vec::width) {
    const Ints k = load_ints(index + lane);
    const Ints x = mix(shift_left<4>(shift_right<5>(k)) + (k & set_ints(15)), row);
    bits |= bits_at_least(select(share_bits(k, set_ints(16)), shift_right<16>(x), x & set_ints(0xffffu)), threshold)
            << lane;
  }
  return bits;
}

// A bit for each of the 32 keys from the `first` on: is the row's weight of it kept?
inline uint32_t kept_of_32(const Problem& a, RandomPair row, int64_t b, int64_t first) {
  const int64_t past = a.options.k_index.of(b) == nullptr ? first % 32 : 0;
  const uint32_t bits = kept_of_group(a, row, b, first - past);
  return past == 0 ? bits : bits >> past | kept_of_group(a, row, b, first - past + 32) << (32 - past);
}

inline bool bit_of(const uint32_t* bits, int64_t j) { return (bits[j / 32] >> (j % 32) & 1) != 0; }

}  // namespace attnspan::ATTNSPAN_ISA
