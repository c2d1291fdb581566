// The kernel's handlers for XLA's custom calls.
#pragma once

#include "xla_ffi.h"

namespace attnspan {

ffi::Handler xla_forward();
ffi::Handler xla_backward();

}  // namespace attnspan
