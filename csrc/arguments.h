// From the arrays of an edge to the arguments of the kernel: one set of checks for Python and XLA.
#pragma once

#include <optional>

#include "array.h"

namespace attnspan {

// What a call has beside q, k, v and the bounds; arrays are absent where an option is.
struct OptionArrays {
  double softcap = 0.0;
  int bias_kind = 0;
  int64_t dropout_threshold = 0;  // of 2^16
  std::optional<Array> bias, sinks, dropout_seed, q_index, k_index;
};

struct GradientArrays {
  Array dout;
  std::optional<Array> dlse;
  Array out, lse, dq, dk, dv;
  std::optional<Array> dbias, dsinks, lse_low = {};
  bool part = false;  // see BackwardArgs
};

// These throw std::invalid_argument, which says what was expected and what came.
// With a table, int32 (batch, pages of a row), k and v are pools: (pages, kv_heads, keys of a page, dim).
Problem problem_of(const Array& q, const Array& k, const Array& v, const Array& bounds, float scale,
                   const std::optional<Array>& table = {});
Options options_of(const OptionArrays& given, const Problem& p);
float* rows_of(const char* name, const Array& a, const Problem& p);  // (batch, q_heads, q_len), float
// lse may be float, with or without `low`, which has what is lost so, or double.
void fill(ForwardArgs& args, const Array& out, const std::optional<Array>& lse, const std::optional<Array>& low = {});
void fill_lse(BackwardArgs& args, const Array& lse, const std::optional<Array>& low);
void fill(BackwardArgs& args, const GradientArrays& given);
void fill_option_gradients(BackwardArgs& args, const std::optional<Array>& dbias, const std::optional<Array>& dsinks);

// The level that runs; throws if ATTNSPAN_ISA names none that can.
Isa level();

// Throws std::bad_alloc, or std::invalid_argument with what went wrong in a call whose arrays fit, and how to mend it.
void raise_unless_ok(const Result& result, const Problem& p, Direction direction, Isa isa);

}  // namespace attnspan
