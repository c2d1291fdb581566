// What one instruction-set level provides; implemented in forward.cc and backward.cc, once per level.
#pragma once

#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {

// Empty function pointers where a level has nothing better than the one below it.
Kernels::ForwardPair forward_kernels(Dtype dtype);
Kernels::BackwardPair backward_kernels(Dtype dtype);

}  // namespace attnspan::ATTNSPAN_ISA
