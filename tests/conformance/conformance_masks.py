"""The masks of the conformance suite, with the indices of their rows where those are not the last ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import attnspan as a


@dataclass(frozen=True)
class MaskSample:
    """`q_index` (B|1, Sq) is what docs/masks.md says of the mask; None for the last rows of the keys."""

    mask: a.Mask | a.Spans
    q_index: np.ndarray | None = None


def random_spans(
    generator: torch.Generator, batch: int, heads: int, q_len: int, k_len: int, runs: int
) -> a.Spans:
    """Legal spans; every fifth row sees nothing."""
    cuts = torch.randint(0, k_len + 1, (batch, heads, q_len, 2 * runs), generator=generator).sort(-1).values
    if q_len > 1:
        cuts[:, :, ::5] = 0
    return a.Spans(cuts.view(batch, heads, q_len, runs, 2).int(), k_len)


def _random(runs: int, per_batch: bool, per_head: bool) -> Callable[[Any], MaskSample]:
    def make(shape: Any) -> MaskSample:
        batch, heads = shape.batch if per_batch else 1, shape.heads if per_head else 1
        generator = torch.Generator().manual_seed(runs)
        return MaskSample(random_spans(generator, batch, heads, shape.q_len, shape.k_len, runs))

    return make


def _ids(shape: Any) -> torch.Tensor:
    """Segment ids of every batch row; the last token is padding."""
    cuts = torch.stack([torch.arange(shape.k_len) >= 5 + 4 * b for b in range(shape.batch)])
    ids = cuts.long()
    ids[:, -1] = -1
    return ids


def _cache(shape: Any) -> MaskSample:
    lengths = torch.tensor([shape.k_len - 3 * b for b in range(shape.batch)])
    q_index = lengths.numpy()[:, None] - shape.q_len + np.arange(shape.q_len)
    return MaskSample(a.causal() & a.cache(lengths), q_index)


def _two_sided_documents(shape: Any) -> MaskSample:
    """Documents whose queries are the last ones of their keys: chunks of a prefill, packed."""
    cu_q, cu_k = np.array([0, 4, 9, 15]), np.array([0, 6, 12, 17])
    document = np.searchsorted(cu_q, np.arange(shape.q_len), side="right") - 1
    ends = np.append(cu_q, 0)[document + 1], np.append(cu_k, 0)[document + 1]
    q_index = np.arange(shape.q_len) - ends[0] + ends[1]  # the padding rows behind see nothing
    mask = a.causal() & a.documents(torch.from_numpy(cu_q), torch.from_numpy(cu_k))
    return MaskSample(mask, q_index[None])


#: For shapes of 17 queries and 17 keys.
MASKS: dict[str, Callable[[Any], MaskSample]] = {
    "full": lambda _: MaskSample(a.full()),
    "causal": lambda _: MaskSample(a.causal()),
    "window": lambda _: MaskSample(a.window(5, 2)),
    "segments": lambda shape: MaskSample(a.causal() & a.segments(_ids(shape), padding_id=-1)),
    "documents": lambda _: MaskSample(a.causal() & a.documents(torch.tensor([0, 7, 8, 15]))),
    "documents, chunks": _two_sided_documents,
    "prefix-LM": lambda _: MaskSample(a.causal() | a.prefix(torch.tensor([4, 9]))),
    "groups": lambda shape: MaskSample(a.causal() | a.groups(_ids(shape))),
    "key_padding, nothing in one row": lambda _: MaskSample(a.key_padding(torch.tensor([12, 0]))),
    "cache": _cache,
    "global and window": lambda _: MaskSample(a.causal() & (a.window(3) | a.global_keys(2))),
    "R = 1 per head": _random(1, per_batch=False, per_head=True),
    "R = 2 per batch row": _random(2, per_batch=True, per_head=False),
    "R = 5 per batch row and head": _random(5, per_batch=True, per_head=True),
}
