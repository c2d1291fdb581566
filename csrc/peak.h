// What this machine does at best: the ceilings that measured speeds are held against.
#pragma once

#include "attention.h"

namespace attnspan {

// The last two are what the kernel reaches for on matrix tiles: a float32 product is six of bfloat16 pieces.
enum class PeakKind : int { fma_f32 = 0, dot_bf16 = 1, amx_bf16 = 2, amx_f32 = 3, amx_f16 = 4 };
inline constexpr int peak_kinds = 5;
inline constexpr const char* peak_kind_names[] = {"fma_f32", "dot_bf16", "amx_bf16", "amx_f32", "amx_f16"};

bool has_peak(PeakKind kind, Isa level);  // does the level have such instructions?

// Multiply-adds on registers alone, FLOP/s over all threads.
double peak_rate(PeakKind kind, Isa level, const Parallel& parallel, double seconds);

// Reading memory once, bytes/s over all threads.
double read_rate(Isa level, const char* data, int64_t bytes, const Parallel& parallel, double seconds);

}  // namespace attnspan
