"""The operator ``attnspan::encode``: booleans that a compiled program made, as spans."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._encoding import CHUNK_PAIRS, encode, register_operator
from ..errors import register_raiser

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "encode(Tensor visible, int runs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

_WHAT = "from_predicate, from_dense"


def _new_bounds(visible: Tensor, runs: int) -> Tensor:
    return visible.new_empty((*visible.shape[:3], runs, 2), dtype=torch.int32)


def _rows_at_once(visible: Tensor) -> int:
    pairs = visible.shape[0] * visible.shape[1] * visible.shape[3]
    return max(CHUNK_PAIRS // max(pairs, 1), 1)


def _encode_cpu(visible: Tensor, runs: int) -> Tensor:
    """Bounds of all rows; an OptionError for a row with more than ``runs`` runs."""
    bounds, step = _new_bounds(visible, runs), _rows_at_once(visible)
    for i in range(0, visible.shape[2], step):
        rows = encode(visible[:, :, i : i + step].numpy(), runs, _WHAT)
        bounds[:, :, i : i + step] = torch.from_numpy(rows)
    return bounds


def _encode_device(visible: Tensor, runs: int) -> Tensor:
    """The same without waiting for the device; (0, -1) in each span of a row with too many runs."""
    bounds, step = _new_bounds(visible, runs), _rows_at_once(visible)
    for i in range(0, visible.shape[2], step):
        bounds[:, :, i : i + step] = _encode_rows(visible[:, :, i : i + step], runs)
    return bounds


def _encode_rows(visible: Tensor, runs: int) -> Tensor:
    # Edges of a row alternate between starts and stops: the n-th one is an end of span n // 2.
    padded = torch.nn.functional.pad(visible, (1, 1))
    edges = padded[..., 1:] != padded[..., :-1]
    rank = edges.cumsum(-1, dtype=torch.int32)
    slot = torch.where(edges & (rank <= 2 * runs), rank - 1, 2 * runs)
    places = torch.arange(edges.shape[-1], dtype=torch.int32, device=visible.device).expand(edges.shape)
    ends = places.new_zeros((*edges.shape[:-1], 2 * runs + 1)).scatter_(-1, slot.long(), places)
    bounds = ends[..., :-1].reshape(*ends.shape[:-1], runs, 2)
    broken = rank[..., -1:, None] > 2 * runs
    return torch.where(broken, torch.arange(0, -2, -1, dtype=torch.int32, device=visible.device), bounds)


_library.impl("encode", _encode_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("encode", _encode_device, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::encode", _new_bounds, lib=_library)

encode_op = torch.ops.attnspan.encode.default


def _raise(kind: type[Exception], text: str) -> None:
    """Raise an error from the compiler itself while it reads the program that makes it."""
    if torch.compiler.is_dynamo_compiling():
        _raise_now(kind, text)


# Run by the compiler as it reads the call: what it reads would lose the text.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _raise_now(kind: type[Exception], text: str) -> None:
    raise _traced(kind)(text)  # type: ignore[arg-type]


@cache
def _traced(kind: type[Exception]) -> type[Exception]:
    """`kind` as an error that the compiler hands on as it is; without fullgraph it breaks the graph."""
    from torch._dynamo.exc import Unsupported  # Loaded by the compiler alone: it takes seconds.

    def initialise(self: Any, text: str) -> None:
        Unsupported.__init__(self, text)

    body = {"__module__": kind.__module__, "__init__": initialise, "public": kind}
    return type(kind.__name__, (kind, Unsupported), body)


register_operator("torch", encode_op)
register_raiser(_raise)
