// A loop on the threads that XLA runs its own operations on.
#pragma once

#include "attention.h"
#include "xla_ffi.h"

namespace attnspan {

// `pool` must live while the result is used. Without a pool in the context, the threads of make_parallel.
struct XlaPool {
  const ffi::Api* api;
  ffi::Context* context;
};
Parallel make_parallel(XlaPool& pool, int threads);

}  // namespace attnspan
