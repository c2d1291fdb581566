"""One error style for every front end: what was expected, what came, how to mend it."""

from collections.abc import Callable
from typing import Any, ClassVar

__all__ = [
    "BackendError",
    "DeviceError",
    "DtypeError",
    "OptionError",
    "ShapeError",
    "UsageError",
    "register_raiser",
    "shown",
]

_raisers: list[Callable[[type[Exception], str], None]] = []


def register_raiser(raiser: Callable[[type[Exception], str], None]) -> None:
    """Name what raises in place of a program that a compiler reads, which would lose all but the first word.

    Args:
        raiser: called with the class and the text of each error that is made; it raises while its framework
            reads the program, and else returns.

    Example:
        >>> register_raiser(lambda kind, text: None)
    """
    _raisers.append(raiser)


def shown(value: object) -> str:
    """A size or a shape as text; unlike ``str``, a compiler follows it where sizes are symbols.

    Example:
        >>> shown(3), shown((3,)), shown((3, 4))
        ('3', '(3,)', '(3, 4)')
    """
    if not isinstance(value, tuple):
        return f"{value}"
    sizes = ", ".join([f"{x}" for x in value])
    return f"({sizes},)" if len(value) == 1 else f"({sizes})"


def _restored(kind: type[Exception], args: tuple[str, ...]) -> Exception:
    return kind.__new__(kind, *args)


class _Explained(Exception):
    """Builds the message, so that no error can leave out one of its three parts."""

    # The class that users know, where a compiler made another from it.
    public: ClassVar[type[Exception] | None] = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send errors back; the class cannot be called with the text alone.
        return _restored, (self.public or type(self), self.args)

    def __init__(self, what: str, *, expected: str, got: str, remedy: str) -> None:
        text = f"{what}: expected {expected}, got {got}. {remedy}."
        for raiser in _raisers:
            raiser(type(self), text)
        # Not super().__init__(), which torch.compile cannot trace.
        self.args = (text,)


class ShapeError(_Explained, ValueError):
    """Sizes that do not fit each other.

    Example:
        >>> raise ShapeError("k", expected="4 dims", got="3", remedy="Add a heads dim")
        Traceback (most recent call last):
        attnspan.errors.ShapeError: k: expected 4 dims, got 3. Add a heads dim.
    """


class DtypeError(_Explained, TypeError):
    """An element type that attention does not take, or several that differ."""


class DeviceError(_Explained, ValueError):
    """Arguments that live on several devices."""


class OptionError(_Explained, ValueError):
    """A keyword whose value is outside what the call accepts."""


class BackendError(_Explained, ValueError):
    """No backend, or not the one that was asked for, can run the problem."""


class UsageError(_Explained, TypeError):
    """A call or an operator that would mean something else than it seems to, or that another library has.

    Example:
        >>> from attnspan import causal, window
        >>> causal() and window(2)
        Traceback (most recent call last):
        attnspan.errors.UsageError: bool(causal()): expected masks combined by & and |, got a test for \
truth, as `and`, `or`, `not` and `if` make. Write a & b or a | b; test for a mask that may be missing \
by `mask is None`.
    """
