// The table of tuned configurations that calls without one of their own look up.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace attnspan {

// What of a mask decides which configuration is best: the share of pairs that it shows.
enum class MaskKind : int { dense = 0, half = 1, sparse = 2, decode = 3 };
inline constexpr const char* mask_kind_names[] = {"dense", "half", "sparse", "decode"};
inline constexpr int mask_kinds = 4;

struct TunedKey {
  Direction direction;
  Isa isa;
  Dtype dtype;
  int64_t head_dim, length_bucket;
  MaskKind mask_kind;
};

struct TunedRow {
  TunedKey key;
  Config config;
};

int64_t length_bucket(int64_t k_len);  // ceil(log2(k_len)), 0 for no keys
MaskKind mask_kind(int64_t q_len, int64_t k_len, double pairs_of_a_head);

void set_tuned(const std::vector<TunedRow>& rows);
bool find_tuned(const TunedKey& key, Config* config);
Config tuned_for(Direction direction, Isa level, const Problem& problem, int64_t pairs);

}  // namespace attnspan
