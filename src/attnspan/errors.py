"""Errors of all front ends, in one style: the expected value, the actual value, and a remedy."""

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
    """Call `raiser` with the class and the text of each error that is created.

    A compiler that traces a program keeps only the first word of an error. The raiser of its framework raises
    the whole text instead. It returns if no program is traced.

    Args:
        raiser: A function of an exception class and a text.

    Example, which logs each error::

        register_raiser(lambda kind, text: logging.error("%s: %s", kind.__name__, text))
    """
    _raisers.append(raiser)


def shown(value: object) -> str:
    """Format a size or a shape. Compilers can trace it if sizes are symbols, which ``str`` does not allow.

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
    """Base of all errors. It builds the message, so that no error leaves out a part."""

    # The class that users know, if a compiler derived another class from it.
    public: ClassVar[type[Exception] | None] = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes pickle errors, and the class cannot be called with the text alone.
        return _restored, (self.public or type(self), self.args)

    def __init__(self, what: str, *, expected: str, got: str, remedy: str) -> None:
        text = f"{what}: expected {expected}, got {got}. {remedy}."
        for raiser in _raisers:
            raiser(type(self), text)
        # No super().__init__(), which torch.compile cannot trace.
        self.args = (text,)


class ShapeError(_Explained, ValueError):
    """An error for sizes that do not fit each other.

    Example:
        >>> from attnspan import documents
        >>> documents([3])
        Traceback (most recent call last):
        attnspan.errors.ShapeError: documents: cu_seqlens_q: expected at least 2 offsets: 0 and the end of \
the first document, got 1. Pass cumulative lengths with a 0 before them.
    """


class DtypeError(_Explained, TypeError):
    """An error for types or dtypes that attention does not accept, or that differ.

    Example:
        >>> from attnspan import segments
        >>> segments([0.5])
        Traceback (most recent call last):
        attnspan.errors.DtypeError: segments: q_ids: expected an integer array, got float64. Convert it to \
int32 or int64.
    """


class DeviceError(_Explained, ValueError):
    """An error for arguments on several devices or of several frameworks.

    Example:
        >>> import torch
        >>> from attnspan.torch import attention
        >>> q = torch.zeros(1, 2, 4, 16)
        >>> attention(q, q, q.to("meta"))
        Traceback (most recent call last):
        attnspan.errors.DeviceError: q, k and v: expected one device, got cpu, cpu, meta. Move them to one \
device.
    """


class OptionError(_Explained, ValueError):
    """An error for an argument whose value is not accepted.

    Example:
        >>> from attnspan import global_keys
        >>> global_keys(-1)
        Traceback (most recent call last):
        attnspan.errors.OptionError: global_keys: n: expected 0 to 2147483647, got -1. Lengths and indices \
are int32.
    """


class BackendError(_Explained, ValueError):
    """An error for a call that no backend, or not the requested backend, can run.

    Example:
        >>> import torch
        >>> from attnspan.torch import attention
        >>> q = torch.zeros(1, 2, 4, 16)
        >>> attention(q, q, q, backend="triton")
        Traceback (most recent call last):
        attnspan.errors.BackendError: backend='triton': expected a backend that can run the call, got \
triton: it runs on CUDA tensors, not on cpu. Change what the reason names, or choose another by backend= or \
attnspan.backend.
    """


class NotAnArrayError(_Explained, AttributeError):
    """An error for code of another library that reads a mask as if it were an array.

    Example:
        >>> from attnspan import causal
        >>> causal().ndim
        Traceback (most recent call last):
        attnspan.errors.NotAnArrayError: ndim of causal(): expected an array, got a mask of attnspan. Pass \
the mask to the layer: attention_fn=functools.partial(attention_fn, layer_mask=mask), or pass an array to \
code that reads ndim.
    """


class UsageError(_Explained, TypeError):
    """An error for a wrong call, such as an unknown keyword or an operator that masks do not have.

    Example:
        >>> from attnspan import causal
        >>> ~causal()
        Traceback (most recent call last):
        attnspan.errors.UsageError: causal(): expected & (keys that both masks show) or | (keys that either \
shows), got another operator. Masks have no ~, + or -. Describe the visible keys, for example by \
from_dense(visible) or from_predicate(fn).
    """


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

    Pass sizes unformatted. Formatting a traced size makes it a constant to a compiler, so texts are formatted
    only if the rule is broken.

    Args:
        holds: Whether the rule holds.
        what: Name of the argument that the rule is about.
        expected: Description of the expected value, with ``{}`` for each of ``values``.
        got: The actual value: a text, a size or a shape.
        remedy: A remedy, without a full stop.
        *values: Values that ``expected`` is formatted with.
        error: Class of the error.

    Raises:
        error: If ``holds`` is false.

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
