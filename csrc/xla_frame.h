// What every handler does with a call's frame.
#pragma once

#include "xla_ffi.h"

namespace attnspan {

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
