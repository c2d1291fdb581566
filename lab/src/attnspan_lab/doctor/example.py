"""A small model whose attention and mask can be chosen, whole and on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspan import Mask, causal, from_predicate, segments
from attnspan.parallel import Layout
from attnspan.torch import attention
from attnspan_lab.doctor.steps import outcome_of
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.zoo.step import Outcome

__all__ = ["ATTENTIONS", "MASKS", "GivenModel", "Trial"]

#: "causal"; "function", causal within documents, by a mask function; "spans", the same by ids.
MASKS: tuple[str, ...] = ("causal", "function", "spans")
#: Attentions of the example, and the masks that each can have.
ATTENTIONS: dict[str, tuple[str, ...]] = {
    "attnspan": MASKS,
    "flex": MASKS[:2],
    "sdpa": MASKS[:1],
}
_HEADS, _DIM, _VOCABULARY, _BATCH, _LENGTH, _LAYERS = 2, 32, 40, 2, 32, 2


def _mask(name: str, ids: Any) -> Mask:
    if name == "function":
        return from_predicate(lambda b, _, q, k: (q >= k) & (ids[b, q] == ids[b, k]))
    return causal() & segments(ids) if name == "spans" else causal()


def _attend(
    kind: str, mask: str, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, shared: Any, index: Any
) -> Tensor:
    if kind == "attnspan":
        return attention(q, k, v, mask=_mask(mask, ids) if shared is None else shared, q_index=index)
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del h
        return (i >= j) & (ids[b, i] == ids[b, j]) if mask == "function" else i >= j

    n = q.shape[2]
    if kind == "flex":
        blocks = create_block_mask(visible, len(q), None, n, n, device="cpu")
        return flex_attention(q, k, v, block_mask=blocks)  # type: ignore[return-value]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen = seen if mask == "causal" else seen & (ids[:, None, :, None] == ids[:, None, None])
    scores: Tensor = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


class _Block(nn.Module):
    def __init__(self, kind: str, mask: str) -> None:
        super().__init__()
        self.kind, self.mask = kind, mask
        self.norm, self.qkv, self.out = nn.LayerNorm(_DIM), nn.Linear(_DIM, 3 * _DIM), nn.Linear(_DIM, _DIM)

    def forward(self, x: Tensor, ids: Tensor, shared: Any, index: Any) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3 * _HEADS, -1)).transpose(1, 2)
        q, k, v = parts.chunk(3, 1)
        out = _attend(self.kind, self.mask, q, k, v, ids, shared, index)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return x + projected


class _Model(nn.Module):
    def __init__(self, kind: str, mask: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(_VOCABULARY, _DIM), nn.Linear(_DIM, _VOCABULARY)
        self.blocks = nn.ModuleList([_Block(kind, mask) for _ in range(_LAYERS)])

    def forward(self, tokens: Tensor, ids: Tensor, shared: Any = None, index: Any = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, ids, shared, index)
        return self.head(x)  # type: ignore[no-any-return]


class Trial:
    """The example: a model, three batches of one shape whose documents differ, and steps of it.

    Args:
        kind: One of `ATTENTIONS`, or "written out".
        mask: One of `MASKS`.
    """

    against = "eager float64"

    def __init__(self, kind: str, mask: str) -> None:
        self.mask, self.model = mask, _Model(kind, mask)
        self.kernel_calls = _LAYERS if kind == "attnspan" else 0
        draw = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randint(_VOCABULARY, (_BATCH, _LENGTH), generator=draw),
                torch.randint(3, (_BATCH, _LENGTH), generator=draw).sort().values,
            )
            for _ in range(3)
        ]

    def outcome(self, call: Callable[..., Any], number: int, ranks: str = "one") -> Outcome:
        """A step: results and gradients of the whole, also where ranks have parts of it.

        Args:
            call: The model, compiled or not.
            number: Of the batch.
            ranks: "one", "data" (batch rows) or "context" (tokens).
        """
        tokens, ids = self.batches[number]
        self.model.zero_grad(set_to_none=True)
        size = _BATCH * _LENGTH * _VOCABULARY
        weights = torch.cos(torch.arange(size, dtype=torch.float64) * 0.73).reshape(_BATCH, _LENGTH, -1)
        rank = 0 if ranks == "one" else dist.get_rank()
        if ranks == "context":
            layout = Layout.of(_mask(self.mask, ids.numpy()), q_len=_LENGTH, ranks=2, batch=_BATCH)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            rows = layout.shard({"tokens": tokens, "ids": ids, "weights": weights}, rank)
            plan = layout.plan(heads=(_HEADS, _HEADS)).on(mesh, rows=rows)
            out = call(rows["tokens"], rows["ids"], plan, rows["q_index"])
            weights = rows["weights"]
        else:
            part = slice(rank, rank + 1) if ranks == "data" else slice(None)
            tokens, ids, weights = tokens[part], ids[part], weights[part]
            out = call(tokens, ids)
        if out.requires_grad:
            (out * weights.to(out.dtype)).sum().backward()
        gradients = {
            name: _whole(x.grad, ranks) for name, x in self.model.named_parameters() if x.grad is not None
        }
        found = out.detach().double()
        if ranks == "context":
            found = layout.gather(found, mesh)
        elif ranks == "data":
            every = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(every, found)
            found = torch.cat(every)
        return Outcome({"0": found}, gradients)


def _whole(gradient: Tensor, ranks: str) -> Tensor:
    """The sum over ranks. FSDP has the mean, in parts; without it, each rank has its own."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor().double() * 2
    gradient = gradient.double()
    if ranks != "one":
        dist.all_reduce(gradient)
    return gradient


class GivenModel:
    """A model that was given, as a `Trial`: its own batches, in evaluation mode, on one rank."""

    kernel_calls = 0  # Not known.
    against = "plain eager mode"

    def __init__(self, subject: Subject) -> None:
        self.subject, self.model = subject, subject.model.eval()
        self.batches = subject.batches[:1] * 2

    def outcome(self, call: Callable[..., Any], number: int, ranks: str = "one") -> Outcome:
        """A step of a batch."""
        assert ranks == "one"
        return outcome_of(self.subject, call, self.batches[number])
