"""JAX functions that become a part of the XLA graph, and their calls on XLA tensors.

torch_xla keys its traces by the identity of the function, and keeps them forever. Each function here is
therefore made once for its static arguments, and its own arguments are arrays only.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnspan.base.forks import ForkSafeLock
from attnspan.call import schema

if TYPE_CHECKING:
    from attnspan.jax.part import JaxPart


#: A function of arrays that JAX traces.
Program = Callable[..., Any]

# All calls of a function share one torch_xla object, which stores the arguments of the current call.
_lock = ForkSafeLock()


def call(program: Program, *args: Any) -> list[Tensor]:
    """Run a program of this module. Results are lazy tensors, traced once for each set of shapes.

    ``args`` are XLA tensors, None, or nested sequences of them.
    """
    import torch_xla.core.xla_builder as xb

    with _lock.held(), _wide(args):
        return list(xb.call_jax(program, args))


def shapes(program: Program, *args: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return shapes and dtype names of a program's results, without computing them."""
    jax = jax_of_xla()

    def abstract(x: Any) -> Any:
        if isinstance(x, Tensor):
            return jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        return None if x is None else [abstract(part) for part in x]

    with _wide(args):
        results = jax.eval_shape(program, *map(abstract, args))
    return [(result.shape, str(result.dtype)) for result in results]


def jax_of_xla() -> Any:
    """Import JAX after torch_xla has its devices. In the other order, JAX would own the TPUs."""
    from torch_xla._internal.jax_workarounds import jax_env_context, jax_import_guard

    jax_import_guard()
    with jax_env_context():
        import jax

        return jax


def _wide(args: Sequence[Any]) -> Any:
    """Enable JAX's 64-bit mode if a tensor has dtype float64."""
    flat = (x for arg in args for x in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    if not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in flat):
        return nullcontext()
    jax_of_xla()
    from jax.experimental import enable_x64  # type: ignore[attr-defined]

    return enable_x64()


@cache
def lowering(recipe: str, sizes: tuple[int, int, int, int]) -> Program:
    """Return ``program(arrays, q_index, k_index)``, which lowers the mask of a text from `recipe.encode`.

    ``sizes`` are q_len, k_len, batch and heads. Results are the bounds, the queries' indices if they are not
    the last keys, and ``k_index`` if it is given.
    """
    from .recipe import decode

    q_len, k_len, batch, heads = sizes

    def program(arrays: Sequence[Any], q_index: Any, k_index: Any) -> list[Any]:
        import jax.numpy as jnp

        indices = {"q_index": q_index, "k_index": k_index}
        like = jnp.zeros((), jnp.int32)
        placed = decode(recipe, arrays).spans(q_len, k_len, batch=batch, heads=heads, like=like, **indices)
        results = (placed.lowered.bounds, placed.q_index, placed.k_index)
        return [jnp.asarray(x) for x in results if x is not None]

    return program


@cache
def splitting(batch: int, heads: int) -> Program:
    """Return ``program(words)``, the seeds of all batch elements and heads: int32 (2,) to int32 (B, H, 2)."""

    def program(words: Any) -> list[Any]:
        from jax.lax import bitcast_convert_type

        from attnspan.jax.dropout import split_seeds

        low, high = bitcast_convert_type(words, "uint32")
        return [bitcast_convert_type(split_seeds(low, high, batch, heads), "int32")]

    return program


Numbers = tuple[tuple[str, Any], ...]


@cache
def forward(numbers: Numbers) -> Program:
    """Return ``program(arrays)`` with results out and lse. The arrays have seeds of int32."""

    def program(arrays: Sequence[Any]) -> list[Any]:
        from attnspan.jax.backends import xla

        return list(xla.forward(_part(arrays, numbers)))

    return program


@cache
def backward(numbers: Numbers, want_dbias: bool) -> Program:
    """Return ``program(arrays, out, lse, dout, dlse)``, whose results are the gradients.

    Gradients of options have leading axes for batch and heads, of size 1 if the gradient is summed over them.
    Missing gradients are left out.
    """

    def program(arrays: Sequence[Any], out: Any, lse: Any, dout: Any, dlse: Any) -> list[Any]:
        from attnspan.jax.backends import xla
        from attnspan.jax.part import GRADIENTS

        part = _part(arrays, numbers)
        found = zip(GRADIENTS, xla.backward(part, out, lse, dout, dlse, want_dbias), strict=True)
        whole = {name: schema.dim(name, "b", kind=part.bias_kind) is None for name in GRADIENTS}
        return [x[None] if whole[name] else x for name, x in found if x is not None]

    return program


def _part(arrays: Sequence[Any], numbers: Numbers) -> "JaxPart":
    from jax.lax import bitcast_convert_type

    from attnspan.jax.part import ARRAYS, JaxPart

    fields = dict(zip(ARRAYS, arrays, strict=True)) | dict(numbers)
    if (seeds := fields["dropout_seed"]) is not None:
        fields["dropout_seed"] = bitcast_convert_type(seeds, "uint32")
    return JaxPart(**fields)
