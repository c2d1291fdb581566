"""One error style for every front end: what was expected, what came, how to mend it."""

from collections.abc import Callable
from typing import Any, ClassVar

from attnspan.base.recorded import without_tracer_warnings

__all__ = [
    "BackendError",
    "DeviceError",
    "DtypeError",
    "NotAnArrayError",
    "OptionError",
    "ShapeError",
    "UsageError",
    "expect",
    "register_raiser",
    "shown",
]

_raisers: list[Callable[[type[Exception], str], None]] = []


def register_raiser(raiser: Callable[[type[Exception], str], None]) -> None:
    """Call `raiser` with the class and the text of each error that is made.

    A compiler that reads a program keeps only the first word of an error. The raiser of its framework raises
    the whole text instead, and returns if nothing is being read.
    """
    _raisers.append(raiser)


def shown(value: object) -> str:
    """A size or a shape as text. Unlike ``str``, compilers can trace it where sizes are symbols.

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
    """Builds the message, so that no error can leave out one of its parts."""

    # The class that users know, if a compiler made another from it.
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
    """Sizes that do not fit each other."""


class DtypeError(_Explained, TypeError):
    """Element types that attention does not take, or that differ."""


class DeviceError(_Explained, ValueError):
    """Arguments that live on several devices."""


class OptionError(_Explained, ValueError):
    """A keyword whose value is outside what the call accepts."""


class BackendError(_Explained, ValueError):
    """No backend, or not the requested one, can run the problem."""


class NotAnArrayError(_Explained, AttributeError):
    """Code of another library reads a mask as if it were an array."""


class UsageError(_Explained, TypeError):
    """A call or an operator of another library, or one that would not do what it seems to."""


def expect(
    holds: Any,
    what: str,
    expected: str,
    got: object,
    remedy: str,
    *values: object,
    error: type[_Explained] = OptionError,
) -> None:
    """Raise ``error`` unless a rule holds.

    Pass sizes as they are. Formatting a traced size makes it a constant to a compiler, so texts are made only
    when the rule is broken.

    Args:
        holds: The rule.
        what: The argument that it is about.
        expected: What the argument must be, with ``{}`` for each of ``values``.
        got: What came: a text, a size or a shape.
        remedy: How to mend it, without a full stop.
        *values: What ``expected`` is formatted with.
        error: The class of the error.

    Example:
        >>> expect(2 == 3, "k", "{} heads", 3, "Repeat them", 2, error=ShapeError)
        Traceback (most recent call last):
        attnspan.errors.ShapeError: k: expected 2 heads, got 3. Repeat them.
    """
    if not isinstance(holds, bool):  # a comparison of sizes in torch.jit.trace
        with without_tracer_warnings():
            holds = bool(holds)
    if not holds:
        text = expected.format(*map(shown, values)) if values else expected
        raise error(what, expected=text, got=shown(got), remedy=remedy)
