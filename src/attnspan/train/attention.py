"""The three ways to attend within documents, each with its mask prepared once per step.

Shapes: B rows, S tokens of a row, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

from attnspan import Prepared, causal, segments
from attnspan.torch import attention, checkpoint_policy
from attnspan.train.packing import PADDING

if TYPE_CHECKING:
    from attnspan.parallel.context import ContextParallel

__all__ = ["AnyMask", "Pieces", "StepMask", "attend", "keep_attention", "prepare_mask"]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where the segments of each row lie: what attention by one call per segment needs.

    Args:
        rows: For each row its (start, stop, is padding), in order and without gaps.

    Example:
        >>> Pieces.of(torch.tensor([[0, 0, 1, PADDING]], dtype=torch.int32)).rows
        [[(0, 2, False), (2, 3, False), (3, 4, True)]]
    """

    rows: list[list[tuple[int, int, bool]]]

    @classmethod
    def of(cls, ids: Tensor) -> Pieces:
        """Find the runs of equal ids.

        Args:
            ids: Segment of each token, (B, S) int32.
        """
        rows = []
        for row in ids:
            inner = (row.diff().nonzero().flatten() + 1).tolist()
            borders = pairwise([0, *inner, len(row)])
            rows.append([(start, stop, int(row[start]) == PADDING) for start, stop in borders])
        return cls(rows)


AnyMask = Union[Prepared, Tensor, Pieces, "ContextParallel"]


class StepMask(NamedTuple):
    """The mask of one batch, shared by all layers.

    Args:
        mask: Prepared spans for attnspan, a dense (B, 1, S, S) bool tensor for SDPA, or pieces for its calls.
        pairs: Visible (query, key) pairs of the batch, for one head.

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "attnspan").pairs
        4
    """

    mask: AnyMask
    pairs: int


def prepare_mask(ids: Tensor, kind: str) -> StepMask:
    """Lower "causal, within a segment" to what an attention takes; padding sees and is seen by nothing.

    Args:
        ids: Segment of each token, (B, S) int32.
        kind: "attnspan", "sdpa" or "sdpa-documents".

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "sdpa").mask.int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    batch, seq_len = ids.shape
    mask = (causal() & segments(ids, padding_id=PADDING)).prepare(seq_len, seq_len, batch=batch)
    pairs = int(mask.lowered.cost().sum())
    if kind == "sdpa-documents":
        return StepMask(Pieces.of(ids), pairs)
    return StepMask(mask if kind == "attnspan" else mask.lowered.dense(), pairs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> Tensor:
    """Attention of one layer: attnspan's, or torch's under a dense mask or by pieces.

    Args:
        q: Queries, (B, S, H, D).
        k: Keys, (B, S, G, D).
        v: Values, (B, S, G, D).
        mask: What `prepare_mask` made, or the plan of the ranks that hold S tokens each of longer rows.

    Returns:
        (B, S, H, D).

    Example:
        >>> ids = torch.tensor([[0, 1]], dtype=torch.int32)
        >>> q, k, v = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
        >>> out = attend(q, k, v, prepare_mask(ids, "sdpa").mask)
        >>> torch.allclose(out, v.expand_as(q))  # each token is alone in its document
        True
    """
    if isinstance(mask, Tensor):
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return out.transpose(1, 2)
    if isinstance(mask, Pieces):
        pieced: Tensor = _attend_pieces(q, k, v, mask)
        return pieced
    return attention(q, k, v, mask=mask, layout="bshd")


# Not compiled: the pieces are other ones at each step, and each would be a graph of its own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
    """Causal SDPA of each segment by itself; padding sees nothing, so its output is 0."""
    rows = []
    for index, row in enumerate(pieces.rows):
        outs = []
        for start, stop, is_padding in row:
            if is_padding:
                outs.append(torch.zeros_like(q[index, start:stop]))
                continue
            query, key, value = (x[index, None, start:stop].transpose(1, 2) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        rows.append(torch.cat(outs))
    return torch.stack(rows)


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: attnspan's, which keeps results of attention, and the same for SDPA.

    Args:
        ctx: Torch's context of the policy.
        op: The operator about to run.
        *args: Its arguments.
        **kwargs: Its keywords.

    Example:
        >>> keep_attention(None, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default).name
        'MUST_SAVE'
    """
    if op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return CheckpointPolicy.MUST_SAVE
    return checkpoint_policy(ctx, op, *args, **kwargs)
