// The torch edge, see torch_edge.cc.
#pragma once

#include "array.h"

namespace attnspan {

// Makes the kernel the CPU implementation of attnspan::attention and attention_backward in the torch of this process;
// false where it has none of the functions that takes (before 2.10).
bool register_torch_operators();

// Throws if a tensor, whose TensorImpl is at `impl`, reaches beyond its storage.
void check_torch_storage(void* impl, const Array& a);

}  // namespace attnspan
