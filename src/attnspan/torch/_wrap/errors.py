"""The error of a kernel that does other than what was said of it."""

from ...errors import _Explained


class DeclarationError(_Explained, ValueError):
    """A wrapped kernel, its backward or the words about them contradict each other.

    Example:
        >>> raise DeclarationError("out", expected="dtype float32", got="bfloat16", remedy="Declare it")
        Traceback (most recent call last):
        attnspan.torch._wrap.errors.DeclarationError: out: expected dtype float32, got bfloat16. Declare it.
    """
