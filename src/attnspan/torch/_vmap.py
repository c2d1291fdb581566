"""Batching rules of the operators: under ``torch.func.vmap``, the kernel runs once for all mapped calls.

The mapped axis joins the batch. If gradients are summed over the batch, or options have no batch axis, it
joins the heads instead, and each mapped call has separate heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnspan.call import schema
from attnspan.call.dropout import split_seeds

_OF_OPTIONS = schema.with_gradient(schema.OPTIONS)
#: Arguments and results by operator. Gradients are named after their arrays.
_ROWS = {False: schema.FORWARD, True: schema.BACKWARD}
_RESULTS = {
    False: schema.names(schema.RESULTS),
    True: (*schema.with_gradient(schema.INPUTS), *_OF_OPTIONS),
}


def rule(op: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
    """Batching rule of an operator, for ``torch.library.register_vmap``."""

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        given = schema.by_name(_ROWS[backward], args)
        mapped = {name: at for name, at in zip(given, in_dims, strict=False) if at is not None}
        size, kind = info.batch_size, given["bias_kind"]
        summed = _summed(given) if backward else ()
        letter = "h" if summed or any(schema.dim(x, "b", None, kind) is None for x in mapped) else "b"
        dims = {name: schema.dim(name, letter, None, kind) for name in (*given, *_RESULTS[backward])}
        # Indices have no head axis, and the number of keys has no axis.
        if any(dims[name] is None for name in mapped):
            return _in_turn(op, size, in_dims, args)
        q_shape = [n for i, n in enumerate(given["q"].shape) if i != mapped.get("q")]
        if given["dropout_seed"] is not None:
            _split_seed(given, mapped, *q_shape[:2])
        folded = dict(given)
        for name, x in given.items():
            if isinstance(x, Tensor) and (dim := dims[name]) is not None:
                shared = schema.is_shared(name, letter, kind)
                whole = q_shape[letter == "h"] if shared else None
                folded[name] = _fold(x, mapped.get(name), dim, size, whole, shared and name not in summed)
        results, out_dims = [], []
        for name, x in zip(_RESULTS[backward], op(*list(folded.values())[: len(args)]), strict=True):
            dim = None if backward and name in _OF_OPTIONS and name not in summed else dims[name]
            if dim is not None:
                x = x.unflatten(dim, (size, x.shape[dim] // size if size else 0))
                at = mapped.get(name)
                one = name in summed and given[name].shape[dim + (at is not None and at <= dim)] == 1
                x = x.sum(dim + 1, keepdim=True) if one else x
            results.append(x)
            out_dims.append(dim)
        return tuple(results), tuple(out_dims)

    return batched


def _summed(given: dict[str, Any]) -> tuple[str, ...]:
    """Options whose gradients a backward call computes. These gradients are summed over the batch."""
    return tuple(x for x in _OF_OPTIONS if given[x] is not None and given.get(f"want_d{x}", True))


def _fold(x: Tensor, at: int | None, dim: int, size: int, whole: int | None, shared: bool) -> Tensor:
    """`x` with the mapped axis `at`, or a new axis if all calls share `x`, joined with axis `dim`.

    ``whole`` is the size to which an axis of size 1 expands. If ``shared``, the axis may keep size 1.
    """
    if at is None and shared and x.shape[dim] == 1:
        return x
    x = x.unsqueeze(dim) if at is None else x.movedim(at, dim)
    sizes = [-1] * x.dim()
    sizes[dim] = size
    if whole is not None:
        sizes[dim + 1] = whole
    return x.expand(sizes).flatten(dim, dim + 1)


def _split_seed(given: dict[str, Any], mapped: dict[str, int], batch: int, heads: int) -> None:
    """Replace a single seed by the seeds of each batch element and head, as the kernels would."""
    seed, at = given["dropout_seed"], mapped.get("dropout_seed")
    if seed.dim() - (at is not None) == 0:
        rows, columns = (torch.arange(n, device=seed.device) for n in (batch, heads))
        given["dropout_seed"] = split_seeds(seed[..., None, None], rows[:, None], columns[None])


def _in_turn(
    op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Results of one call after the other."""
    found = [
        op(*(x if at is None else x.select(at, i) for x, at in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    return tuple(torch.stack(x) for x in zip(*found, strict=True)), (0,) * len(found[0])


def encode_rule(op: Callable[..., Any]) -> Callable[..., Any]:
    """Batching rule of ``attnspan::encode``: the mapped axis joins the batch."""

    def batched(info: Any, in_dims: Sequence[Any], visible: Tensor, runs: int) -> tuple[Tensor, int]:
        visible = visible.movedim(in_dims[0], 0)
        bounds = op(visible.flatten(0, 1), runs)
        return bounds.unflatten(0, (info.batch_size, visible.shape[1])), 0

    return batched
