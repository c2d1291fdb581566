"""What this room raises and warns of."""

from ..errors import OptionError, _Explained


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


def expect(
    holds: bool, what: str, expected: str, got: str, remedy: str, kind: type[_Explained] = OptionError
) -> None:
    """Raise ``kind`` unless a rule holds."""
    if not holds:
        raise kind(what, expected=expected, got=got, remedy=remedy)


def expect_declared(holds: bool, what: str, expected: str, got: str, remedy: str) -> None:
    """Raise `DeclarationError` unless a kernel does what was declared of it."""
    expect(holds, what, expected, got, remedy, DeclarationError)
