// XLA's custom calls: their handlers, and what these share.
#pragma once

#include "attention.h"
#include "xla_ffi.h"

namespace attnspan {

// The kernel, on XLA's own buffers.
ffi::Handler xla_forward();
ffi::Handler xla_backward();

// A loop on the threads that XLA runs its own operations on. `pool` must live while the result is used. Without a pool
// in the context, the threads of make_parallel.
struct XlaPool {
  const ffi::Api* api;
  ffi::Context* context;
};
Parallel make_parallel(XlaPool& pool, int threads);

inline ffi::Error* error_of(const ffi::CallFrame& frame, int code, const char* message) {
  ffi::ErrorCreate args{sizeof(args), nullptr, message, code};
  return frame.api->error_create(&args);
}

// XLA asks every handler which version of the interface it was written for.
inline bool answered_metadata(const ffi::CallFrame& frame) {
  for (ffi::Extension* x = frame.extension; x != nullptr; x = x->next)
    if (x->type == 1) {
      ffi::Metadata& metadata = *reinterpret_cast<ffi::MetadataExtension*>(x)->metadata;
      metadata.version.major = 0, metadata.version.minor = 1;
      metadata.traits = 0;
      return true;
    }
  return false;
}

}  // namespace attnspan
