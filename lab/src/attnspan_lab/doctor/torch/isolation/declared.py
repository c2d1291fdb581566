"""Facts that a batch states about its tokens: documents, padding, and pairs that may see each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attnspan_lab.doctor.names import IDS, marks_padding, valid_entries
from attnspan_lab.doctor.torch.masks.hiding_values import highest_hiding

__all__ = ["Declared", "declared", "paddings", "real_tokens"]

# Masks (B, S) that choose tokens for another purpose than attention.
_OTHER_MASKS = re.compile(r"loss|label|target|prompt|completion|response|assistant|special|mlm|masked_pos")
_PAIRS = 2**22  # maximum number of pairs of a batch's mask that are followed


@dataclass
class Declared:
    """Facts that the tensors of a batch state.

    Args:
        documents: Document number of each token, (B, S), or None. Padding has the number -1.
        source: The tensor that states the documents.
        ids: Code that makes document numbers of this tensor, for remedies.
        valid: Tokens that are not padding, bool (B, S), or None if all are valid or unknown.
        padding: The tensor that states the padding.
        mask: The same as `valid`, also if all tokens are valid.
        later: Whether a mask (B, S, S) of the batch shows later tokens. None without such a mask.
        unread: A reason for each tensor that looks like one of these facts and cannot be read.
    """

    documents: Tensor | None = None
    source: str = ""
    ids: str = "ids"
    valid: Tensor | None = None
    padding: str = ""
    mask: Tensor | None = None
    later: bool | None = None
    unread: tuple[str, ...] = ()

    @property
    def apart(self) -> Tensor | None:
        """Pairs of a token and a token of another document or of padding, bool (B, S, S)."""
        if self.documents is None:
            return None
        other = self.documents[:, :, None] != self.documents[:, None, :]
        return other & (self.documents >= 0)[:, :, None]


def declared(
    named: Mapping[str, Tensor], shape: tuple[int, int], documents: Tensor | None = None
) -> Declared:
    """Read the facts of a batch.

    Args:
        named: Tensors of the batch with their names.
        shape: Batch size and number of tokens.
        documents: Document numbers that the factory declares.
    """
    found, unread = Declared(), list[str]()
    for name, valid in paddings(named, shape):
        found.mask, found.padding = valid, name
        found.valid = None if bool(valid.all()) else valid
    for name, pairs in _pairs(named, shape, unread):
        _of_pairs(found, name, pairs)
    if documents is not None:
        found.documents, found.source = documents.expand(shape), "the factory's third value"
    else:
        for name, numbers, ids in _documents(named, shape, unread):
            if bool((numbers != numbers[:, :1]).any()):
                found.documents, found.source, found.ids = numbers, name, ids
                break
    if found.valid is not None and found.documents is not None:
        found.documents = found.documents.masked_fill(~found.valid, -1)
    found.unread = tuple(unread)
    return found


def _documents(
    named: Mapping[str, Tensor], shape: tuple[int, int], unread: list[str]
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the name of a tensor, the document numbers that it states, and code that makes them."""
    for pattern, read, code in _DOCUMENTS:
        for name, x in named.items():
            if re.search(pattern, name.lower()) and not x.is_floating_point():
                numbers = read(x, shape)
                if numbers is None:
                    unread.append(f"{name} of shape {tuple(x.shape)} does not fit tokens of shape {shape}")
                else:
                    yield name, numbers, code.format(name=name)


def _fitted(x: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Bring numbers of tokens to (B, S). A single axis is one row for all, or the tokens of all rows."""
    batch, length = shape
    if x.shape in (shape, (1, length)) or (x.shape == (length,) and (batch == 1 or batch != length)):
        return x.expand(shape)
    return x.view(shape) if x.dim() == 1 and x.numel() == batch * length else None


def _of_offsets(x: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Number the documents of ``cu_seqlens``, which counts the tokens of one row or of all rows."""
    total = prod(shape)
    if x.dim() != 1 or len(x) < 2 or int(x[0]) != 0 or bool((x.diff() < 0).any()) or int(x[-1]) > total:
        return None
    size = shape[1] if int(x[-1]) <= shape[1] else total
    numbers = torch.searchsorted(x[1:].contiguous(), torch.arange(size, device=x.device), right=True)
    return _fitted(numbers, shape) if size != shape[1] else numbers.expand(shape)


def _of_positions(x: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Number the documents of positions, which start again. Positions in time stay equal within images."""
    of_time = x.dim() == 3
    fitted = _fitted(x[0] if of_time else x, shape)
    if fitted is None:
        return None
    starts = torch.ones_like(fitted, dtype=torch.bool)
    steps = fitted.diff(dim=1)
    starts[:, 1:] = steps < 0 if of_time else steps != 1
    return starts.long().cumsum(1) - 1


# Names of tensors that state documents, the function that reads their numbers, and code that makes these.
_DOCUMENTS = (
    (
        IDS.pattern,
        _fitted,
        "{name}",
    ),
    (r"cu_?(seq|doc)\w*len", _of_offsets, "torch.arange(len({name}) - 1).repeat_interleave({name}.diff())"),
    (
        r"^pos(ition)?s?(_?ids?)?$|^input_pos$",
        _of_positions,
        "(torch.diff({name}, dim=-1, prepend={name}[..., :1]) != 1).cumsum(-1)",
    ),
)


def paddings(
    named: Mapping[str, Tensor], shape: tuple[int, int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and padding masks of a shape, or of all shapes (B, S). True marks valid tokens."""
    for name, x in named.items():
        fits = x.dim() == 2 if shape is None else x.shape == shape
        fits = fits and "mask" in name and not _OTHER_MASKS.search(name.lower())
        if fits and bool(((x == 0) | (x == 1)).all()):
            yield name, valid_entries(name, x)


def real_tokens(padding: str) -> str:
    """Write code that is true, or 1, at real tokens, from the name of a padding mask."""
    return f"({padding} == 0)" if marks_padding(padding) else padding


def _pairs(
    named: Mapping[str, Tensor], shape: tuple[int, int], unread: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield masks of pairs, bool (B, S, S). True means that the query sees the key."""
    batch, length = shape
    for name, x in named.items():
        if "mask" not in name.lower() or x.dim() not in (3, 4) or x.shape[-2:] != (length, length):
            continue
        shown = _shown(x)
        if shown is None or batch * length**2 > _PAIRS or shown.flatten(0, -3).shape[0] % batch not in (0, 1):
            unread.append(f"{name} of shape {tuple(x.shape)} cannot be read as a mask of pairs")
            continue
        rows = batch if shown.shape[0] % batch == 0 else 1
        yield name, shown.reshape(rows, -1, length, length).any(1).expand(batch, -1, -1)


def _shown(x: Tensor) -> Tensor | None:
    """Read a mask, whether it adds, multiplies or selects. None for a bias that hides nothing."""
    limit = highest_hiding(x)
    if x.is_floating_point() and bool((x <= limit).any()):
        return x > limit
    if not bool(((x == 0) | (x == 1)).all()) or bool((x == 0).all()):
        return None
    shown = x != 0
    # A token sees itself: a mask that hides this marks the hidden pairs.
    own = shown.diagonal(dim1=-2, dim2=-1).float().mean()
    return ~shown if bool(own < 0.5) else shown


def _of_pairs(found: Declared, name: str, pairs: Tensor) -> None:
    """Read padding (no query sees the key), later tokens, and documents (tokens that nothing connects)."""
    valid = pairs.any(1)
    if not bool(valid.all()) and found.valid is None:
        found.valid, found.padding = valid, name
    real = pairs & valid[:, None, :] & valid[:, :, None]
    found.later = bool(found.later) or bool(real.triu(1).any())
    reach = real | real.mT | torch.eye(real.shape[-1], dtype=torch.bool, device=real.device)
    for _ in range(real.shape[-1].bit_length()):
        reach = (reach.float() @ reach.float()) > 0
    numbers = reach.int().argmax(-1)
    if bool((numbers != numbers[:, :1])[valid].any()):
        found.documents, found.source = numbers, name
