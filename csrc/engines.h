// Which engine a level has for a dtype.
#pragma once

#include "amx_engine.h"
#include "tile.h"

namespace attnspan::ATTNSPAN_ISA {

// Calls make<T, E>() with the engine that this level has for a dtype. Nothing, `{}`, where it has none that is better
// than what the level below has.
template <class Pair, class Make>
Pair with_engine(Dtype dtype, const Make& make) {
  switch (dtype) {
#if defined(ATTNSPAN_AMX_FP16)
    case Dtype::f16:
      return make.template operator()<f16, AmxEngine<f16, 1> >();
    default:
      return {};
#elif defined(__AMX_BF16__)
    case Dtype::bf16:
      return make.template operator()<bf16, AmxEngine<bf16, 1> >();
    case Dtype::f16:
      return make.template operator()<f16, AmxEngine<bf16, 2> >();
    default:
      return make.template operator()<float, AmxEngine<bf16, 3> >();
#elif defined(__AVX512BF16__)
    case Dtype::bf16:
      return make.template operator()<bf16, VectorEngine<bf16> >();
    default:
      return {};
#else
    case Dtype::bf16:
      return make.template operator()<bf16, VectorEngine<float> >();
    case Dtype::f16:
      return make.template operator()<f16, VectorEngine<float> >();
    default:
      return make.template operator()<float, VectorEngine<float> >();
#endif
  }
}

}  // namespace attnspan::ATTNSPAN_ISA
