"""Rows of tokens that go through caches in pieces, and what attention over each row as a whole gives."""

import random
from collections.abc import Callable

import torch
from closeness import relative_error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan.torch import RollingCache, StaticCache, attention
from attnspan.torch._cache_rows import CacheRows as Cache

HEADS, KV_HEADS, DIM = 4, 2, 16
Width = int | tuple[int, int] | None


class Tokens:
    """Rows of random tokens, and what attention over each row as a whole gives, in float64 by plain torch."""

    def __init__(self, batch: int, length: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> Tensor:
            return torch.randn(batch, heads, length, DIM, generator=generator)

        self.q, self.k, self.v = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)
        self.batch, self.length = batch, length

    def error(self, out: Tensor, width: Width = None, keep: Tensor | None = None) -> float:
        """Relative error of the tokens of ``keep`` (B, length), all by default, as a multiple of torch's own.

        Each token sees the last ``width`` ones, itself included. A pair has next to that number how many of
        the first tokens are seen by all later ones. The worst token counts as well as all of them: one among
        a thousand would vanish in the norm.
        """
        keep = torch.ones(self.batch, self.length, dtype=torch.bool) if keep is None else keep
        wanted, theirs, ours = (
            x.transpose(1, 2)[keep].double().flatten(1)
            for x in (self._attend(torch.float64, width), self._attend(torch.float32, width), out)
        )
        assert len(wanted) > 0
        # Of a single key torch's attention makes no error at all; nobody is asked for less than rounding.
        rounding = torch.finfo(torch.float32).eps
        worst_of_ours, worst_of_theirs = ((x - wanted).norm(dim=-1).max() for x in (ours, theirs))
        worst = worst_of_ours / max(worst_of_theirs, rounding * wanted.norm(dim=-1).max())
        return max(relative_error(ours, wanted) / max(relative_error(theirs, wanted), rounding), float(worst))

    def _attend(self, dtype: torch.dtype, width: Width) -> Tensor:
        at = torch.arange(self.length)
        ago = at[:, None] - at
        width, first = width if isinstance(width, tuple) else (width, 0)
        visible = (ago >= 0) & ((ago < (self.length if width is None else width)) | (at < first))
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

    def chunk(self, x: Tensor, lengths: list[int], counts: list[int], n: int) -> Tensor:
        """The next tokens of each row at the end of (B, heads, n, dim), with NaN before them."""
        new = torch.full((*x.shape[:2], n, x.shape[3]), torch.nan, dtype=x.dtype)
        for b, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            new[b, :, n - count :] = x[b, :, start : start + count]
        return new


def feed(
    cache: Cache,
    tokens: Tokens,
    out: Tensor,
    counts: list[int],
    n: int,
    call: Callable[..., Tensor] | None = None,
) -> None:
    """One step of ragged chunks through the cache; the outputs of real tokens go into ``out``."""
    lengths = cache.lengths.tolist()
    q, k, v = (tokens.chunk(x, lengths, counts, n) for x in (tokens.q, tokens.k, tokens.v))
    given = None if counts == [n] * len(counts) else torch.tensor(counts)
    positions = cache.positions(n, given)
    found = (call or step)(cache, q, k, v, given)
    for b, (start, count) in enumerate(zip(lengths, counts, strict=True)):
        out[b, :, start : start + count] = found[b, :, n - count :]
        assert positions[b, n - count :].tolist() == list(range(start, start + count))
    assert torch.equal(cache.q_index(n), positions)
    assert cache.lengths.tolist() == [a + c for a, c in zip(lengths, counts, strict=True)]


def step(cache: Cache, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None) -> Tensor:
    keys, values = cache.update(k, v, counts)
    return attention(q, keys, values, mask=cache.mask(k.shape[2]))


def ragged(generator: random.Random, cache: Cache, length: int, n: int) -> list[int]:
    return [min(generator.randint(0, n), length - start) for start in cache.lengths.tolist()]


def make(kind: str, batch: int = 2, size: int = 24, **options: object) -> Cache:
    if kind == "static":
        return StaticCache(batch, KV_HEADS, size, DIM, **options)
    return RollingCache(batch, KV_HEADS, 4, DIM, chunk=4, keep=3 if kind == "sinks" else 0, **options)


#: The kinds of caches, and how many keys a token sees through those that `make` makes.
WIDTH: dict[str, Width] = {"static": None, "rolling": 5, "sinks": (5, 3)}
KINDS = tuple(WIDTH)
