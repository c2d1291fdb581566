"""What this room raises and warns of."""

from functools import partial

from ..errors import _Explained, expect


class DeclarationError(_Explained, ValueError):
    """A wrapped kernel or its backward contradicts what was declared of it.

    Example:
        >>> raise DeclarationError("out", expected="dtype float32", got="bfloat16", remedy="Declare it")
        Traceback (most recent call last):
        attnspan.interop._errors.DeclarationError: out: expected dtype float32, got bfloat16. Declare it.
    """


class RetraceWarning(UserWarning):
    """`call_jax` traces one function of the source again and again for the same shapes."""


class SpecializedShapesWarning(UserWarning):
    """JAX cannot trace a function for symbolic sizes, so it is compiled once for each size."""


expect_declared = partial(expect, error=DeclarationError)
