// What one instruction-set level provides; implemented in forward.cc, backward.cc and peak_loops.cc, once per level.
#pragma once

#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {

// Empty function pointers where a level has nothing better than the one below it.
Kernels::ForwardPair forward_kernels(Dtype dtype);
Kernels::BackwardPair backward_kernels(Dtype dtype);
PeakLoops peak_loops();

}  // namespace attnspan::ATTNSPAN_ISA
