"""`from_torch`: a torch function on JAX's arrays. Torch is imported by the first call, not by this module."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .._installed import require

__all__ = ["from_torch"]


def from_torch(fn: Callable[..., Any], *, results: Any = None) -> Callable[..., Any]:
    """A torch function on JAX's arrays, differentiable by torch's autograd.

    Called with arrays it runs at once, on their memory, and each result is copied. Where JAX traces (``jit``,
    ``grad``, ``vmap``, ``scan``) it becomes part of the program: on a CPU its arguments are XLA's own buffers
    and each result is copied once; elsewhere it is a callback to the host, which copies both.
    ``vmap`` calls it once for each element. Backward calls ``fn`` again under autograd.

    Args:
        fn: A pure function of tensors, in any structure that is a pytree of JAX; it must neither write to
            them nor keep them. Other arguments than arrays are passed on unchanged. Parameters that it
            closes over get no gradient: pass them, with `torch.func.functional_call` for a module.
        results: Shapes and element types of what ``fn`` returns, as `jax.ShapeDtypeStruct`, in its structure;
            found with torch's fake tensors by default.

    Returns:
        The function of arrays, and of arguments as ``fn`` takes them.

    Raises:
        ImportError: torch is not installed.
        TypeError: At the call: an argument is a tensor or a key of JAX, a result is not a tensor, or JAX
            would narrow the element type of either.
        ValueError: At the call: no arrays; ``fn`` wrote to an argument. A program that runs later raises
            `jax.errors.JaxRuntimeError` with the error's text; so it does where ``fn`` kept an argument, or
            returned other shapes or element types than were found or declared.

    Example:
        >>> import jax, torch
        >>> square = from_torch(lambda x: (x * x).sum())
        >>> x = jax.numpy.array([1.0, 2.0])
        >>> float(square(x)), jax.jit(jax.grad(square))(x).tolist()
        (5.0, [2.0, 4.0])
    """
    require("torch", "attnspan.jax.from_torch", "torch")
    run = import_module("._torch_calls", __package__).call

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(fn, results, args, kwargs)

    return call
