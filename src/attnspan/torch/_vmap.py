"""Batching rules of the operators: under ``torch.func.vmap``, the kernel runs once for all mapped calls.

The mapped axis joins the batch. If gradients are summed over the batch, or options have no batch axis, it
joins the heads instead, and each mapped call has separate heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnspan.call.biases import DISTANCE
from attnspan.call.dropout import split_seeds
from attnspan.call.options import Options

#: Arguments by operator. The results are named after arguments of the same shape.
_NAMES = {
    False: ("q", "k", "v", "bounds", "scale", *Options._fields, "k_len", "backend"),
    True: (
        *("dout", "dlse", "q", "k", "v", "bounds", "out", "lse", "scale", *Options._fields),
        *("want_dbias", "backend"),
    ),
}
_RESULTS = {False: ("out", "lse"), True: ("q", "k", "v", "bias", "sinks")}
#: Arguments whose batch or head axis has size 1 if all batch elements or heads share them.
_BROADCAST = ("bounds", "bias", "q_index", "k_index")


def rule(op: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
    """Batching rule of an operator, for ``torch.library.register_vmap``."""

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        # Torch omits trailing defaults.
        given = dict(zip(_NAMES[backward], args, strict=False))
        mapped = {name: at for name, at in zip(given, in_dims, strict=True) if at is not None}
        table, sinks = given.get("bias_kind") == DISTANCE, given.get("sinks") is not None
        want_dbias = bool(given.get("want_dbias")) and given["bias"] is not None
        by_head = "sinks" in mapped or (table and "bias" in mapped) or want_dbias or (backward and sinks)
        # Indices have no head axis, and the number of keys has no axis.
        if "k_len" in mapped or (by_head and not mapped.keys().isdisjoint(("q_index", "k_index"))):
            return _in_turn(op, info.batch_size, in_dims, args)
        q_shape = [n for i, n in enumerate(given["q"].shape) if i != mapped.get("q")]
        if given.get("dropout_seed") is not None:
            _split_seed(given, mapped, *q_shape[:2])
        full, dims, size = q_shape[by_head], _axes(by_head, table), info.batch_size
        folded = dict(given)
        for name, x in given.items():
            if isinstance(x, Tensor) and name in dims:
                shared = name in _BROADCAST and not (name == "bias" and want_dbias)
                whole = full if name in _BROADCAST else None
                folded[name] = _fold(x, mapped.get(name), dims[name], size, whole, shared)
        results, out_dims = [], []
        for name, x in zip(_RESULTS[backward], op(*folded.values()), strict=True):
            absent = backward and ((name == "bias" and not want_dbias) or (name == "sinks" and not sinks))
            if not absent:
                dim = dims[name]
                x = x.unflatten(dim, (size, x.shape[dim] // size if size else 0))
                at = mapped.get("bias")
                one = name == "bias" and given["bias"].shape[dim + (at is not None and at <= dim)] == 1
                x = x.sum(dim + 1, keepdim=True) if one else x
            results.append(x)
            out_dims.append(None if absent else dim)
        return tuple(results), tuple(out_dims)

    return batched


def _axes(by_head: bool, table: bool) -> dict[str, int]:
    """Axis that the mapped axis joins, for each argument that has such an axis."""
    names: tuple[str, ...]
    if not by_head:
        names = ("dout", "dlse", "q", "k", "v", "bounds", "out", "lse", "dropout_seed", "q_index", "k_index")
        return dict.fromkeys(names if table else (*names, "bias"), 0)
    names = ("dout", "dlse", "q", "k", "v", "bounds", "out", "lse", "dropout_seed")
    return {**dict.fromkeys(names, 1), "bias": 0 if table else 1, "sinks": 0}


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
