// Runs a parallel loop for an edge: on the OpenMP runtime that the process already has (torch's, so that two pools do
// not fight), else on threads of its own.
#pragma once

#include "attention.h"

namespace attnspan {

Parallel make_parallel(int threads);
const char* threading_name();  // which runtime the next loop would use

}  // namespace attnspan
