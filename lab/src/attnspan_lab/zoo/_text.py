"""Batches of tokens."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROWS", "decoder_batch", "encoder_batch", "random_tokens", "sequence_batch"]

ROWS = 2
_FIRST = 32  # Smaller ids are special tokens.
_SEED = 1


def random_tokens(*shape: int, vocab: int, seed: int = _SEED) -> Tensor:
    """Draw ids of ordinary tokens."""
    return torch.randint(_FIRST, vocab, shape, generator=torch.Generator().manual_seed(seed))


def decoder_batch(layout: str, tokens: int, vocab: int) -> dict[str, Any]:
    """Make ids and labels (ROWS, tokens)."""
    ids = random_tokens(ROWS, tokens, vocab=vocab)
    if layout == "padded":
        mask = _padding(tokens)
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    batch = {"input_ids": ids, "labels": ids}
    return batch | {"position_ids": _positions(tokens)} if layout == "packed" else batch


def encoder_batch(layout: str, tokens: int, vocab: int) -> dict[str, Any]:
    """Make ids for masked language modelling: the labels ask for every fourth token."""
    batch = decoder_batch(layout, tokens, vocab)
    hidden = torch.arange(tokens) % 4 == 1
    return batch | {"labels": batch["labels"].where(hidden, -100)}


def sequence_batch(layout: str, tokens: int, vocab: int) -> dict[str, Any]:
    """Make a source of ``tokens`` tokens and a shorter target, so that cross attention is not square."""
    source = decoder_batch(layout, tokens, vocab)
    del source["labels"]
    target = decoder_batch(layout, max(tokens * 3 // 4, 2), vocab)
    return source | {("labels" if k == "labels" else f"decoder_{k}"): v for k, v in target.items()}


def _padding(tokens: int) -> Tensor:
    """Make a padding mask (ROWS, tokens) with 1 for valid tokens. The second row is shorter."""
    lengths = torch.tensor([tokens, max(tokens * 5 // 8, 1)])
    return (torch.arange(tokens) < lengths[:, None]).long()


def _positions(tokens: int) -> Tensor:
    """Make position ids (ROWS, tokens) of three documents in the first row and two in the second."""
    rows = [(tokens * 3 // 8, tokens * 5 // 8), (tokens * 3 // 4,)]
    found = []
    for starts in rows:
        edges = [0, *starts, tokens]
        found.append(torch.cat([torch.arange(b - a) for a, b in pairwise(edges)]))
    return torch.stack(found)
