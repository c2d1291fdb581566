"""The operator outside of attention through which changed tokens reach results of other tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place, place_here
from attnspan_lab.doctor.torch.recording.calls import changed_tokens
from attnspan_lab.doctor.torch.recording.operators import is_plain, operator_name
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Mixing", "mixing_operator"]

_MOST = 2**31  # bytes of results that are kept for the comparison
_CLOSE = 1e-4
_REDUCED = ("mean", "sum", "amax", "amin", "max", "min", "std", "var", "var_mean", "linalg_vector_norm")
_REMEDIES = {
    "topk": "Choose for each token alone: topk over the experts (dim=-1), not over the tokens",
    "sort": "Sort within each token, not over the tokens",
    **dict.fromkeys(
        _REDUCED, "Reduce over the channels (dim=-1), or over earlier tokens, and not over the tokens"
    ),
    "native_group_norm": "Normalise each token alone, for example with LayerNorm over the channels",
    "native_layer_norm": "Normalise each token alone: LayerNorm over the channels only",
    "_softmax": "Let this softmax run over the channels or experts of each token, not over the tokens",
}


class Mixing(NamedTuple):
    """The operator that mixes tokens, and its line."""

    place: Place
    operator: str

    @property
    def cause(self) -> str:
        """Say which operator mixes tokens."""
        return f"{self.operator} mixes tokens at this line: its result is the first one that changes"

    @property
    def remedy(self) -> str:
        """Write the remedy if tokens must not see later ones, or "" for the kind's remedy."""
        return _REMEDIES.get(self.operator, "")


def mixing_operator(
    subject: Subject, batch: Any, name: str, groups: Tensor, only: int | None
) -> Mixing | None:
    """Find the first operator through which changed tokens of one group change rows of other tokens.

    Args:
        subject, batch, name: The step, and the name of its tokens.
        groups: Tokens that are changed together, integer (B, S).
        only: The group to change, or None for every group in turn.

    Returns:
        The operator, or None if the two steps cannot be compared.
    """
    tokens = subject.named(batch)[name]
    numbers = sorted({int(x) for x in groups.flatten().tolist() if x >= 0})[:4] if only is None else [only]
    training = [x for x in subject.model.modules() if x.training]
    subject.model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Results(groups.shape) as before:
            subject.call(subject.model, batch)
        groups = groups.to(tokens.device)
        for number in numbers:
            mine = (groups == number).reshape(tokens.shape[: 2 if tokens.dim() > 1 else 1])
            mine = mine.reshape(*mine.shape, *[1] * (tokens.dim() - mine.dim()))
            other = subject.with_tokens(batch, name, torch.where(mine, changed_tokens(tokens), tokens))
            compared = _Compared(before.results, groups != number)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), compared:
                subject.call(subject.model, other)
            if compared.found is not None:
                return compared.found
    except Exception:  # The caller then names a module.
        return None
    finally:
        for module in training:
            module.training = True
    return None


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of all operators."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.results, self.size = shape, list[tuple[str, list[Tensor]]](), 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        outs = [x.detach().clone() for x in tree_leaves(out) if is_plain(x)]
        self.size += sum(x.numel() * x.itemsize for x in outs)
        if self.size > _MOST:
            raise MemoryError("the results of all operators are too large")
        self.results.append((operator_name(op), outs))
        return out


class _Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares the results of operators between two steps, until rows of other tokens differ.

    Args:
        before: Results of the other step.
        kept: Tokens that were not changed, bool (B, S).
    """

    def __init__(self, before: list[tuple[str, list[Tensor]]], kept: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before, self.kept = iter(before), kept
        self.found: Mixing | None = None
        self.alive: list[Tensor] = []  # Other tensors must not get the ids of these.
        self.mixed: dict[int, Mixing] = {}  # Results without a row for each token that differ.

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if self.found is not None:
            return out
        name, wanted = next(self.before)
        if name != operator_name(op):
            raise RuntimeError("another operator ran")
        place = place_here()
        known = [x for y in tree_leaves((args, kwargs)) if (x := self.mixed.get(id(y))) is not None]
        outs = [x for x in tree_leaves(out) if is_plain(x)]
        here = known[:1] or ([] if place is None else [Mixing(place, name)])
        for x, y in zip(outs, wanted, strict=True):
            rows, others = _rows(x, self.kept), _rows(y, self.kept)
            if rows is None or others is None or rows.shape != others.shape:
                if here and not _same(x, y) and (known or not _is_reshape(op, args, x)):
                    self.mixed[id(x)] = here[0]
                    self.alive.append(x)
            elif here and not _same(rows, others):
                self.found = here[0]
        return out


def _is_reshape(op: Any, args: Any, x: Tensor) -> bool:
    """Whether an operator only gives its first argument another shape. It mixes nothing yet."""
    moves = getattr(op, "is_view", False) or operator_name(op) in ("clone", "_unsafe_view", "_reshape_copy")
    return moves and isinstance(args[0], Tensor) and args[0].numel() == x.numel()


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    both = x.isfinite() & y.isfinite()
    error = (x - y)[both].abs()
    return torch.equal(x.isfinite(), y.isfinite()) and bool((error <= _CLOSE * y[both].abs().max()).all())


def _rows(x: Tensor, kept: Tensor) -> Tensor | None:
    """Select the rows of tokens that were not changed. None if a tensor has not one dim of tokens."""
    batch, length = kept.shape
    if x.dim() and x.shape[0] == batch * length and batch > 1 and list(x.shape).count(length) == 0:
        return x[kept.flatten()]
    if not x.dim() or (x.shape[0] != batch and batch > 1):
        return None
    start = int(x.shape[0] == batch)
    dims = [i for i, n in enumerate(x.shape[start:], start) if n == length]
    if len(dims) != 1:
        return None
    x = x.movedim(dims[0], start)
    return x[kept] if start else x[kept[0]]
