"""Why torch's fused kernels refuse a call: changes of its arguments are tried until a fused kernel runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.kernels import fused_kind
from attnspan_lab.doctor.torch.recording.operators import Operation, Operations
from attnspan_lab.doctor.torch.recording.watch import watching
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import capitalized, lowered

__all__ = ["Refusal", "refusal", "refusal_of_multihead"]

Given = dict[str, Any]
_OURS = "call attnspan.torch.attention, which stores no scores"
_ATTNSPAN = capitalized(_OURS)


class Refusal(NamedTuple):
    """Cause, remedy and trial of a call that runs torch's math kernel."""

    cause: str
    remedy: str
    tried: str


class _Change(NamedTuple):
    """A change of a call.

    Args:
        cause: The reason for a refusal that the change removes.
        applies: Whether a call has this reason.
        change: Makes the changed arguments.
        remedy: Code for the user.
    """

    cause: str
    applies: Callable[[Given], bool]
    change: Callable[[Given], Given]
    remedy: str


def _each(given: Given, change: Callable[[Tensor], Tensor], *names: str) -> Given:
    return given | {x: change(given[x]) for x in names or ("query", "key", "value")}


def _shared(given: Given) -> Given:
    times = given["query"].shape[1] // given["key"].shape[1]
    return _each(given, lambda x: x.repeat_interleave(times, 1), "key", "value") | {"enable_gqa": False}


def _mask_dims(given: Given) -> int:
    mask = given.get("attn_mask")
    return mask.dim() if isinstance(mask, Tensor) else 0


_CHANGES = (
    _DROPOUT := _Change(
        "dropout_p is not 0",
        lambda x: bool(x.get("dropout_p")),
        lambda x: x | {"dropout_p": 0.0},
        f"{_ATTNSPAN} and has dropout too. Or pass dropout_p=0.0, which changes training: "
        "attention has no dropout then",
    ),
    _Change(
        "q, k and v have 3 dims instead of 4",
        lambda x: x["query"].dim() == 3,
        lambda x: _each(x, lambda y: y[None]),
        "Pass q, k and v of 4 dims, such as q[None], and take [0] of the result",
    ),
    _Change(
        "the mask has 3 dims instead of 2 or 4",
        lambda x: _mask_dims(x) == 3,
        lambda x: _each(x, lambda y: y[None], "attn_mask"),
        "Pass a mask of 4 dims: attn_mask=mask[None]",
    ),
    _Change(
        "the mask requires a gradient",
        lambda x: _mask_dims(x) > 0 and bool(x["attn_mask"].requires_grad),
        lambda x: _each(x, Tensor.detach, "attn_mask"),
        "If the mask needs its gradient, call attnspan.torch.attention(q, k, v, bias=mask). "
        "If it does not, pass attn_mask=mask.detach()",
    ),
    _Change(
        "q and v have different head dims",
        lambda x: x["query"].shape[-1] != x["value"].shape[-1],
        lambda x: _each(x, lambda y: F.pad(y, (0, x["query"].shape[-1] - y.shape[-1])), "value"),
        f"Pad v with zeros to the head dim of q, and cut the result. Or: {_OURS}, with other head dims of v",
    ),
    _Change(
        "the last dim of q, k or v is not contiguous",
        lambda x: any(x[y].stride(-1) != 1 for y in ("query", "key", "value")),
        lambda x: _each(x, Tensor.contiguous),
        "Keep the head dim last in memory, for example with x.transpose(1, 2) of (B, S, H, D)",
    ),
    _Change(
        "k and v have fewer heads",
        lambda x: x["query"].dim() == 4 and x["query"].shape[1] != x["key"].shape[1],
        _shared,
        f"Repeat k and v for each query head. Or: {_OURS} and copies no keys",
    ),
)


def refusal(call: Attention, *, training: bool = True) -> Refusal:
    """Find the changes with which a fused kernel runs. Each cause that is named was necessary in a trial.

    Args:
        call: A call of torch's function that stored its scores.
        training: The model is in training mode, so that dropout belongs to it.
    """
    given = call.given
    device = f"on {given['query'].device.type} with torch {torch.__version__}"
    found = [x for x in _CHANGES if x.applies(given)]
    if not training:
        found = [x._replace(remedy="Pass dropout_p=0.0") if x is _DROPOUT else x for x in found]
    for changes in ([], *([x] for x in found), found):
        if kernel := _fused(given, changes):
            break
    if kernel and not changes:
        cause = "A setting around this call chooses the math kernel, such as sdpa_kernel(SDPBackend.MATH)"
        return Refusal(cause, "Call it without this setting", f"the call alone runs {kernel} {device}")
    if not kernel:
        cause = _cause(found, device).removesuffix(": ")
        return Refusal(cause, _ATTNSPAN, "no change of the arguments made a fused kernel run")
    for x in found if len(changes) > 1 else ():
        fewer = [y for y in changes if y is not x]
        changes = fewer if _fused(given, fewer) else changes
    changed = "dropout_p=0.0" if [x.cause for x in changes] == [_DROPOUT.cause] else "this change"
    remedy = ". ".join(x.remedy for x in changes)
    return Refusal(_cause(changes, device), remedy, f"with {changed}, {kernel} runs {device}")


def _cause(changes: list[_Change], device: str) -> str:
    return f"torch's fused kernels refuse this call {device}: {'; '.join(x.cause for x in changes)}"


class _Kernels(Operations):  # type: ignore[no-untyped-call]
    """Records the fused attention kernel that runs."""

    kernel = ""

    def note(self, operation: Operation) -> None:
        """Record the first fused kernel."""
        if fused_kind(operation.op, operation.name):
            self.kernel = self.kernel or str(operation.op).removesuffix(".default")


def _fused(given: Given, changes: list[_Change]) -> str:
    """Return the fused kernel that runs a call with changes, or "" if none does."""
    own: Given = {}
    for change in changes:
        given = change.change(given)
    for name, x in given.items():
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        own[name] = x.detach().requires_grad_(x.requires_grad) if is_float else x
    kernels = _Kernels()
    try:
        with torch.enable_grad(), kernels:
            F.scaled_dot_product_attention(**own)
    except (RuntimeError, ValueError, TypeError):
        return ""  # The change does not fit the other arguments.
    return kernels.kernel


def refusal_of_multihead(subject: Subject, batch: Any, place: Place | None) -> Refusal:
    """Try need_weights=False, and then no dropout, for calls of nn.MultiheadAttention at a line."""
    cause = "nn.MultiheadAttention computes its weights unless it is called with need_weights=False"
    remedy = "Pass need_weights=False"
    try:
        kernels, asked = _of_multihead(subject, batch, place)
    except Exception as error:
        text = f"with need_weights=False, the step raises {type(error).__name__}: the weights are used"
        return Refusal(cause, f"Stop using the weights, and pass need_weights=False. Or: {_OURS}", text)
    if kernels:
        return Refusal(cause, remedy, f"with need_weights=False, {kernels} runs")
    kernels, _ = _of_multihead(subject, batch, place, dropout=0.0)
    if kernels:
        device = next((x.device.type for x in subject.model.parameters()), "cpu")
        refused = f"torch's fused kernels refuse dropout on {device} with torch {torch.__version__}"
        cause = f"{cause}, and {refused}" if asked else refused
        make = f"{lowered(remedy)}, and make" if asked else "make"
        remedy = f"{_ATTNSPAN} and has dropout too. Or: {make} nn.MultiheadAttention with dropout=0.0"
        return Refusal(
            cause,
            f"{remedy}, which changes training",
            f"with need_weights=False and dropout=0.0, {kernels} runs",
        )
    return Refusal(cause, _ATTNSPAN, "with need_weights=False, scores are stored as well")


def _of_multihead(
    subject: Subject, batch: Any, place: Place | None, dropout: float | None = None
) -> tuple[str, bool]:
    """Run a step without weights. Return the fused kernels at a line, and whether weights were asked for."""
    with _without_weights(dropout) as asked, watching(subject.rows(batch), subject.named(batch)) as watcher:
        subject.step(subject.model, batch, backward=False)
    kernels = {x.kernel for x in watcher.calls if x.place == place}
    return ", ".join(sorted(kernels)) if all(kernels) else "", any(asked)


@contextmanager
def _without_weights(dropout: float | None) -> Iterator[list[bool]]:
    real, asked = nn.MultiheadAttention.forward, list[bool]()
    signature = inspect.signature(real)

    def forward(self: nn.MultiheadAttention, *args: Any, **options: Any) -> Any:
        bound, own = signature.bind(self, *args, **options), self.dropout
        asked.append(bool(bound.arguments.get("need_weights", True)))
        bound.arguments["need_weights"] = False
        self.dropout = own if dropout is None else dropout
        try:
            return real(*bound.args, **bound.kwargs)
        finally:
            self.dropout = own

    nn.MultiheadAttention.forward = forward  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        nn.MultiheadAttention.forward = real  # type: ignore[method-assign]
