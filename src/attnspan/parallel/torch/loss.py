"""Losses over ranks that each hold a part of the tokens, and gradients of replicated parameters.

**The loss is the sum over ranks of their local parts.** Each part is the sum over the rank's tokens, divided
by the number of tokens of all ranks. Averaging per-rank means gives a different value, because ranks hold
different numbers of targets. Gradients of replicated parameters are therefore summed, never averaged. ::

    total = cross_entropy(logits, targets, reduction="sum")       # this rank's tokens
    count = global_token_count(targets, mesh)                     # targets of all ranks
    token_mean(total, count).backward()
    sum_gradients(model.parameters(), mesh)                       # not with FSDP2, see sum_gradients

`document_weights` makes each document count the same, instead of each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from attnspan.base.arrays import arrays_for, is_array, is_integer, kind_of
from attnspan.base.plain import check_plain
from attnspan.errors import DtypeError, expect
from attnspan.parallel.rows import checked_fill

from .agreement import agreement_of

__all__ = [
    "RankGroups",
    "document_weights",
    "global_token_count",
    "next_token_targets",
    "sum_gradients",
    "sum_over",
    "token_mean",
]

#: Participating ranks: a mesh (all of its dimensions), one group, or None for this process alone.
RankGroups = DeviceMesh | dist.ProcessGroup | None

_BUCKET_BYTES = 32 * 2**20


def sum_over(x: Tensor, ranks: RankGroups) -> Tensor:
    """Sum a tensor over ranks, outside of autograd. Use it for counts and for losses that you print.

    Args:
        x: Tensor of any shape, of a dtype that the group's backend can add. `sum_over` does not change it.
        ranks: A mesh, a process group, or None for this process alone.

    Returns:
        A new tensor, the same on all ranks.

    Raises:
        PlanMismatchError: The calls differ between ranks.

    Example:
        >>> sum_over(torch.tensor([1.5, 2.0]), None).tolist()
        [1.5, 2.0]
    """
    check_plain("sum_over", x)
    total = x.detach().clone()
    for group in _groups(ranks):
        _agree(group, "sum_over", total.shape, total.dtype)
        dist.all_reduce(total, group=group)
    return total


def _agree(group: dist.ProcessGroup, call: str, shape: object, dtype: torch.dtype) -> None:
    """Check that all ranks add the same kind of tensor. Compiled code compares nothing."""
    if not torch.compiler.is_compiling():
        agreement_of(group).note({"call": call, "shape": shape, "dtype": str(dtype)})


def global_token_count(targets: Tensor, ranks: RankGroups, *, ignore_index: int = -100) -> Tensor:
    """Count the targets of all ranks that carry loss. Every rank divides its sum by this count.

    Args:
        targets: This rank's targets, integers of any shape.
        ranks: A mesh, a process group, or None for this process alone. Its ranks must hold each token once:
            pass the ranks of context parallelism and data parallelism together.
        ignore_index: Target without loss, such as padding.

    Returns:
        0-d int64 tensor on the targets' device, the same on all ranks.

    Raises:
        DtypeError: ``targets`` are an unknown subclass of tensors.
        PlanMismatchError: The calls differ between ranks.

    Example:
        >>> int(global_token_count(torch.tensor([[7, 3, -100]]), None))
        2
    """
    check_plain("targets", targets)
    return sum_over((targets != ignore_index).sum(), ranks)


def token_mean(total: Tensor, count: Tensor | int) -> Tensor:
    """Compute this rank's part of the mean loss. The parts of all ranks add up to the mean over all tokens.

    Args:
        total: Sum of the losses of this rank's tokens, 0-d.
        count: Tokens of all ranks, from `global_token_count`. If it is 0, the loss and its gradients are 0.

    Raises:
        DtypeError: An argument is an unknown subclass of tensors.

    Example:
        >>> float(token_mean(torch.tensor(6.0), 4)), float(token_mean(torch.tensor(0.0), 0))
        (1.5, 0.0)
    """
    check_plain("total", total)
    check_plain("count", count)
    # The count may be a sum of loss weights below 1.
    divisor = torch.where(count > 0, count, 1) if isinstance(count, Tensor) else (count if count > 0 else 1)
    return total / divisor


def next_token_targets(tokens: Any, ids: Any = None, *, ignore_index: int = -100) -> Any:
    """Shift tokens to targets. Call it before sharding, because a token's successor may be on another rank.

    For tokens that are already sharded, use `attnspan.parallel.roll`.

    Args:
        tokens: Whole sequences, (..., S), a tensor or a NumPy array of signed integers.
        ids: Segment id of each token, (..., S). A target never belongs to another segment, and negative ids
            are padding. None if each sequence is one segment.
        ignore_index: Target of a token without successor.

    Returns:
        Targets, like ``tokens``. Shard them with `Layout.shard`.

    Raises:
        DtypeError: ``tokens`` are not signed integers, or ``ids`` are no integers.
        OptionError: ``ids`` have another shape than ``tokens``, or ``tokens`` cannot hold `ignore_index`.

    Example:
        >>> next_token_targets(torch.tensor([5, 6, 7, 8, 0]), torch.tensor([0, 0, 1, 1, -1])).tolist()
        [6, -100, 8, -100, -100]
    """
    _check_tokens("tokens", tokens, ids)
    signed = np.dtype(str(tokens.dtype).removeprefix("torch.")).kind == "i"
    remedy = "Convert them to int64, because ignore_index is negative"
    expect(signed, "tokens", "signed integers", str(tokens.dtype), remedy, error=DtypeError)
    ignore_index = checked_fill("ignore_index", ignore_index, tokens)
    # Copies and assignments work alike for tensors and NumPy arrays.
    targets = tokens.clone() if isinstance(tokens, Tensor) else tokens.copy()
    targets[..., :-1] = tokens[..., 1:]
    targets[..., -1:] = ignore_index
    if ids is not None:
        targets[..., :-1][(ids[..., 1:] != ids[..., :-1]) | (ids[..., :-1] < 0)] = ignore_index
    return targets


def document_weights(targets: Any, ids: Any = None, *, power: float = 1.0, ignore_index: int = -100) -> Any:
    """Weigh targets so that each document counts the same. Call it before sharding, with whole documents.

    Shard the weights with the targets. Then compute the mean of the documents' mean losses ::

        total = (weights * cross_entropy(logits, targets, reduction="none")).sum()
        loss = token_mean(total, sum_over(weights.sum(), mesh))

    Args:
        targets: Targets of whole sequences, (..., S), a tensor or a NumPy array of integers.
        ids: Segment id of each token, (..., S). Tokens of a sequence with the same id form a document, and
            negative ids are padding. None if each sequence is one document.
        power: A target of a document with n targets weighs ``n ** -power``. With 1, documents count the same.
            With 0, tokens count the same. 0.5 is a compromise.
        ignore_index: Target without loss. Its weight is 0.

    Returns:
        float32 weights, like ``targets``. With power 1 they add up to the number of documents with loss.

    Raises:
        DtypeError: ``targets`` or ``ids`` are no integers.
        OptionError: ``ids`` have another shape than ``targets``, or ``power`` is negative or no number.

    Example:
        >>> targets, ids = torch.tensor([6, 7, -100, 9, -100]), torch.tensor([0, 0, 0, 1, 1])
        >>> document_weights(targets, ids).tolist()
        [0.5, 0.5, 0.0, 1.0, 0.0]
    """
    _check_tokens("targets", targets, ids)
    fits = isinstance(power, Real) and not isinstance(power, bool) and 0 <= power < float("inf")
    expect(fits, "power", "a number of at least 0", repr(power), "Pass 1 for equal documents")
    known = arrays_for([targets]).to_numpy(targets) != ignore_index
    documents = np.zeros(known.shape, np.int64) if ids is None else arrays_for([ids]).to_numpy(ids)
    known &= documents >= 0
    names, number = np.unique(documents, return_inverse=True)
    sequence = np.arange(known.size) // max(known.shape[-1], 1)  # Sequences may use the same ids.
    number = number.reshape(-1) + sequence * len(names)
    count = np.bincount(number, known.reshape(-1))[number].reshape(known.shape)
    weights = np.where(known, np.maximum(count, 1) ** -float(power), 0).astype(np.float32)
    return torch.from_numpy(weights).to(targets.device) if isinstance(targets, Tensor) else weights


def _check_tokens(name: str, tokens: Any, ids: Any) -> None:
    """Raise unless tokens and their ids are integers of the same shape (..., S)."""
    for what, x in ((name, tokens), ("ids", ids)):
        if x is None and what == "ids":
            continue
        check_plain(what, x)
        holds = isinstance(x, (Tensor, np.ndarray)) and is_integer(x) and x.ndim > 0
        shown = f"{kind_of(x)} of shape {tuple(x.shape)}" if is_array(x) else kind_of(x)
        wanted, remedy = "integers (..., S), a tensor or a NumPy array", "Convert them to int64"
        expect(holds, what, wanted, shown, remedy, error=DtypeError)
    if ids is not None:
        remedy = "Pass the segment id of each of these tokens"
        got, shape = tuple(ids.shape), tuple(tokens.shape)
        expect(got == shape, "ids", "one for each token, {}", got, remedy, shape)


def sum_gradients(
    parameters: Iterable[Tensor], ranks: RankGroups, *, bucket_bytes: int = _BUCKET_BYTES
) -> None:
    """Sum the gradients of replicated parameters over ranks, in place, in large buffers.

    If this rank has not used a parameter, its gradient counts as 0. The rank gets the sum of the other
    ranks' gradients, so that all ranks make the same update. Do not call this function with FSDP2. Instead
    make FSDP2 sum gradients: call ``set_gradient_divide_factor(1.0)`` and
    ``set_force_sum_reduction_for_comms(True)`` on each sharded module.

    Args:
        parameters: All parameters of the model, in the same order on all ranks. `sum_gradients` skips frozen
            parameters.
        ranks: A mesh, a process group, or None for this process alone. With None, nothing happens.
        bucket_bytes: Approximate size of a buffer, in bytes.

    Raises:
        OptionError: A parameter is a DTensor, or a gradient is sparse.
        PlanMismatchError: The calls differ between ranks.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> sum_gradients([weight], None)
        >>> weight.grad.tolist()
        [1.0, 1.0]
    """
    if not (groups := _groups(ranks)):
        return
    for gradients in _buckets(parameters, bucket_bytes):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        # In bfloat16 and float16 each addition would round.
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        for group in groups:
            _agree(group, "sum_gradients", len(flat), gradients[0].dtype)
            dist.all_reduce(flat, group=group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))


def _groups(ranks: RankGroups) -> list[dist.ProcessGroup]:
    """Return the process groups of the ranks. A sum over one group after the other covers all ranks."""
    if isinstance(ranks, DeviceMesh):
        return ranks.get_all_groups()
    return [] if ranks is None else [ranks]


def _buckets(parameters: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield buckets of about `bucket_bytes` each, with gradients of one dtype and device."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        got = f"a DTensor of shape {tuple(parameter.shape)}"
        remedy = "With FSDP2, leave out this call. On each sharded module, call "
        remedy += "set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True)"
        expect(not isinstance(parameter, DTensor), "parameters", "replicated parameters", got, remedy)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad, remedy = parameter.grad, "Make the layer without sparse=True"
        expect(grad.layout is torch.strided, "parameters", "dense gradients", str(grad.layout), remedy)
        other = bucket and (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (other or sum(x.nbytes for x in bucket) + grad.nbytes > bucket_bytes):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
