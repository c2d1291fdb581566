"""The kernels for TPUs lower to a TPU's programs, which JAX makes on any machine."""

import jax
import pytest
from covering import few

from attnspan.jax.backends import Operands, Static
from attnspan.jax.backends import pallas_tpu as pallas
from attnspan.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI

LOWERED = {
    "plain": (Static(scale=0.1), {}),
    "signed alibi": (Static(scale=0.1, bias_kind=SIGNED_ALIBI), {"bias": ((2, 4), "float32")}),
    "distance table": (Static(scale=0.1, bias_kind=DISTANCE), {"bias": ((4, 9), "float32")}),
    "dense": (Static(scale=0.1, bias_kind=DENSE), {"bias": ((2, 1, 300, 400), "float32")}),
    "dense of keys": (Static(scale=0.1, bias_kind=DENSE), {"bias": ((1, 4, 1, 400), "bfloat16")}),
    "indices and all the rest": (
        Static(scale=0.1, softcap=5.0, bias_kind=ALIBI, dropout_p=0.1),
        {
            "sinks": ((4,), "float32"),
            "bias": ((1, 4), "float32"),
            "seeds": ((2, 4, 2), "uint32"),
            "q_index": ((1, 300), "int32"),
            "k_index": ((2, 400), "int32"),
        },
    ),
}


def _lower(static: Static, arrays: dict, dtype: str, head_dim: int, runs: int = 2) -> str:
    """The program for a TPU, of both directions; JAX makes it on any machine."""

    def shaped(shape: tuple, kind: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    q, k = shaped((2, 4, 300, head_dim)), shaped((2, 2, 400, head_dim))
    lse = shaped((2, 4, 300), "float32")
    given = Operands(
        shaped((1, 1, 300, runs, 2), "int32"), **{name: shaped(*each) for name, each in arrays.items()}
    )

    def both(dout, q, k, v, given, lse):
        out, _ = pallas.forward(q, k, v, given, static)
        return out, pallas.backward(dout, lse, q, k, v, given, out, lse, static, True)

    exported = jax.export.export(jax.jit(both), platforms=["tpu"])(q, q, k, k, given, lse)
    return str(exported.mlir_module())


@pytest.mark.parametrize("option", few(LOWERED, 2))
def test_lowers_for_a_tpu(option: str) -> None:
    static, arrays = LOWERED[option]
    program = _lower(static, arrays, "bfloat16", 64)
    kernels = 4 if static.bias_kind in (DENSE, DISTANCE) else 3
    assert program.count("@tpu_custom_call") == kernels


@pytest.mark.parametrize("head_dim", few([37, 64, 128], 1))
def test_lowers_for_a_tpu_in_float32(head_dim: int) -> None:
    assert _lower(Static(scale=0.1), {}, "float32", head_dim, runs=9).count("@tpu_custom_call") == 3


def test_lowers_for_a_tpu_with_64_bit_types_on() -> None:
    with jax.enable_x64(True):
        static, arrays = LOWERED["indices and all the rest"]
        assert _lower(static, arrays, "bfloat16", 128).count("@tpu_custom_call") == 3
