// XLA's custom call of a Python function, on XLA's own buffers.
#pragma once

#include "xla_ffi.h"

struct _object;

namespace attnspan {

// Calls the function of `set_xla_callback` with the attribute `key` and lists of (address, XLA's number of the element
// type, shape) for arguments and for results. The function returns None, or the text of what went wrong.
ffi::Handler xla_callback();

// The caller holds the GIL.
void set_xla_callback(_object* callable);

}  // namespace attnspan
