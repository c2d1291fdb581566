"""Calls whose batch, length and number of documents vary: one of each mask, option, layout and entry point.

Arrays are made anew for each problem, so every axis of every array varies with it. `build` runs inside the
compiled function, on lengths that a compiler may hold as symbols.
"""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnspan as a
from attnspan import library as lib
from attnspan.torch import attention, scaled_dot_product_attention

HEADS, KV_HEADS, DIM = 4, 2, 8

Arrays = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Batch rows, keys, and documents (or images, or whatever else the mask counts)."""

    batch: int
    length: int
    parts: int


#: Lengths are multiples of 4, for grids. The first problem has no size twice, so that each is its own symbol.
PROBLEMS = tuple(
    Sizes(*x)
    for x in (
        *((3, 20, 5), (5, 28, 9), (2, 48, 7), (4, 16, 3), (6, 44, 8), (1, 24, 4)),
        *((7, 36, 6), (3, 32, 2), (2, 64, 11), (8, 12, 3), (5, 40, 10), (1, 52, 5)),
    )
)


@dataclass(frozen=True)
class Sample:
    """One mask, named as the function that makes it.

    Attributes:
        name: the function, and what is special.
        build: (k_len, arrays) -> mask.
        arrays: the mask's tensors for a problem.
        rows: number of queries, of the number of keys; as many by default.
        keys: number of keys of a problem; its length by default.
        batch: number of batch rows, where the mask's structure fixes it.
        multiple: a number that the mask needs the length to be a multiple of.
        outside: why it cannot be lowered inside a compiled function; it is prepared outside then.
    """

    name: str
    build: Callable[..., a.Mask]
    arrays: Callable[[Sizes], Arrays] = lambda _: ()
    rows: Callable[[int], int] = lambda length: length
    keys: Callable[[Sizes], int] = lambda s: s.length
    batch: int | None = None
    multiple: int = 1
    outside: str = ""

    @property
    def function(self) -> str:
        return self.name.partition(",")[0]


def _ids(s: Sizes) -> Arrays:
    return (torch.randint(0, 2, (s.batch, s.length)).cumsum(-1),)


def _ids_of_one(s: Sizes) -> Arrays:
    return (torch.randint(0, 2, (s.length,)).cumsum(-1),)


def _groups(s: Sizes) -> Arrays:
    ids = _ids(s)[0]
    return (torch.where(ids % 2 == 0, ids, -1),)


def _lengths(s: Sizes) -> Arrays:
    return (torch.randint(1, s.length + 1, (s.batch,)),)


def _lengths_of_rows(s: Sizes) -> Arrays:
    return (torch.arange(s.length),)


def _cu(s: Sizes) -> Arrays:
    inner = torch.randint(0, s.length + 1, (s.parts - 1,)).sort().values
    return (torch.cat([torch.tensor([0]), inner, torch.tensor([s.length])]),)


def _prefixes_and_cu(s: Sizes) -> Arrays:
    return (torch.randint(0, 6, (s.parts,)), *_cu(s))


def _cu_and_prefix_of(s: Sizes) -> Arrays:
    return (*_cu(s), torch.randint(0, s.parts, (s.parts,)).minimum(torch.arange(s.parts)))


def _bounds(s: Sizes) -> Arrays:
    rows = torch.arange(s.length, dtype=torch.int32)
    return (torch.stack([rows // 2, rows], -1)[None, None, :, None].expand(s.batch, 1, -1, 1, 2),)


def _dense(s: Sizes) -> Arrays:
    ends = torch.randint(0, s.length, (s.batch, 1, s.length, 1))
    return (torch.arange(s.length) < ends,)


def _marked(s: Sizes) -> Arrays:
    return (torch.arange(s.length).expand(s.batch, -1) < torch.randint(1, 4, (s.batch, 1)),)


def _images(s: Sizes) -> Arrays:
    return (torch.arange(s.parts) * 2 + torch.randint(0, 2, (s.batch, s.parts)),)


def _intervals(s: Sizes) -> Arrays:
    starts = torch.randint(0, s.length // 2, (s.batch, 2))
    return (torch.stack([starts, starts + 3], -1),)


def _parents(s: Sizes) -> Arrays:
    return (torch.stack([torch.arange(s.parts) // 2 - 1] * s.batch).clamp(min=-1), _prefix_of_tree(s))


def _prefix_of_tree(s: Sizes) -> Tensor:
    return torch.randint(0, s.length - s.parts + 1, (s.batch,))


def _chosen(s: Sizes) -> Arrays:
    blocks = s.length // 4
    return (torch.randint(-1, blocks, (s.batch, HEADS, blocks, 2)),)


def _ids_of_tile(s: Sizes) -> Arrays:
    return (torch.arange(4) // 3,)


def _later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    del b, h
    return (q >= k) & (q - k < 7)


class _BlockMask:
    mask_mod = staticmethod(_later)


def _square(s: Sizes) -> int:
    # Of one R: where that varies with the data, a compiler sees one more size that varies.
    return 256 if s.length > 24 else 64


VALUES = "its R follows from the values of its order"

_PARSED = a.parse("causal() & window(3)")  # Made outside: no compiler reads Python's parser.

MASKS = (
    Sample("full", lambda n: a.full()),
    Sample("causal", lambda n: a.causal()),
    Sample("window", lambda n: a.window(5, 2)),
    Sample("window, of the length", lambda n: a.window(n // 4)),
    Sample("segments", lambda n, ids: a.causal() & a.segments(ids), _ids),
    Sample("segments, one row", lambda n, ids: a.segments(ids), _ids_of_one),
    Sample("documents", lambda n, cu: a.documents(cu), _cu),
    Sample("documents, keys", lambda n, x, y: a.causal() & a.documents(x, y), lambda s: _cu(s) + _cu(s)),
    Sample("prefix", lambda n, lengths: a.causal() | a.prefix(lengths), _lengths),
    Sample("prefix, of the length", lambda n: a.causal() | a.prefix(n // 2)),
    Sample(
        "prefix, documents",
        lambda n, lengths, cu: (a.causal() | a.prefix(lengths, cu)) & a.documents(cu),
        _prefixes_and_cu,
    ),
    Sample("groups", lambda n, ids: a.causal() | a.groups(ids), _groups),
    Sample("key_padding", lambda n, lengths: a.key_padding(lengths), _lengths),
    # Of an even length: torch does not know that n // 2 <= n.
    Sample("key_padding, of the length", lambda n: a.key_padding(n // 2), multiple=2),
    Sample("keys", lambda n, valid: a.causal() & a.keys(valid, 3), _marked),
    Sample("cache", lambda n, lengths: a.causal() & a.cache(lengths), _lengths),
    Sample("cache, fewer rows", lambda n, x: a.causal() & a.cache(x), _lengths, lambda length: length // 4),
    Sample("global_keys", lambda n: a.causal() & (a.window(3) | a.global_keys(2))),
    Sample("spans", lambda n, bounds: a.spans(bounds), _bounds),
    Sample("from_dense", lambda n, x: a.from_dense(x, max_runs=2), _dense),
    Sample("from_predicate", lambda n: a.from_predicate(_later, max_runs=1)),
    Sample("from_block_mask", lambda n: a.from_block_mask(_BlockMask, max_runs=2)),
    Sample("parse", lambda n: _PARSED),
    Sample("dilated", lambda n: lib.dilated(4, 2)),
    Sample("global_sliding", lambda n: lib.global_sliding(2, 3)),
    Sample("global_sliding, marked", lambda n, x: lib.global_sliding(2, x), _marked),
    Sample("prefix_lm", lambda n, lengths: lib.prefix_lm(lengths), _lengths),
    Sample("prefix_lm, packed", lambda n, x, cu: lib.prefix_lm(x, cu), _prefixes_and_cu),
    Sample("shared_prefix", lambda n, cu, of: lib.shared_prefix(cu, of), _cu_and_prefix_of),
    Sample("block_causal", lambda n: lib.block_causal(5)),
    Sample("block_diffusion", lambda n: lib.block_diffusion(n // 2, 4), multiple=2),
    Sample("draft_blocks", lambda n, prefix: lib.draft_blocks(prefix, 4), _lengths),
    Sample("tree", lambda n, parents, prefix: lib.tree(parents, prefix, depth=5), _parents),
    Sample("natten", lambda n: lib.natten((n // 4, 4), (3, 3)), multiple=4),
    Sample("sasa", lambda n: lib.sasa((n // 4, 4), (1, 2)), multiple=4),
    Sample("sta", lambda n: lib.sta((n // 4, 4), (1, 4), (1, 2)), multiple=4),
    Sample(
        "tiled_natten", lambda n: lib.tiled_natten((n // 4, 4), (3, 3), (1, 2)), outside=VALUES, multiple=4
    ),
    Sample("morton_natten", lambda n: lib.morton_natten(int(n**0.5), 3), keys=_square, outside=VALUES),
    Sample("flamingo", lambda n, at: lib.flamingo(at, 4), _images, keys=lambda s: s.parts * 4),
    Sample(
        "vision_cross_attention", lambda n, x: lib.vision_cross_attention(x, n // 2), _intervals, multiple=2
    ),
    Sample("spatial_heads", lambda n: lib.spatial_heads(2, n // 4, 0.8), multiple=4),
    Sample("temporal_heads", lambda n: lib.temporal_heads(0, 4, n // 4, 1.5), multiple=4),
    Sample("selected_blocks", lambda n, chosen: lib.selected_blocks(chosen, 4), _chosen),
    Sample("per_row", lambda n, cu: lib.per_row([a.causal(), a.documents(cu)]), _cu, batch=2),
    Sample("per_head", lambda n, x: lib.per_head([a.window(2)] * 3 + [a.causal() | a.prefix(x)]), _lengths),
    Sample("per_document", lambda n, cu: lib.per_document(lib.global_sliding(1, 2), cu), _cu),
    Sample("batchify", lambda n, ids: lib.batchify(a.causal() & a.segments(ids), 4), _ids_of_tile),
    Sample("reordered", lambda n: lib.reordered(a.causal(), torch.arange(n).flip(0)), outside=VALUES),
)


@dataclass(frozen=True)
class Call:
    """One call with an option, a layout or another entry point: `run(q, k, *arrays)`."""

    name: str
    run: Callable[..., Any]
    arrays: Callable[[Sizes], tuple[Any, ...]] = lambda _: ()
    shapes: Callable[[Sizes], tuple[tuple[int, ...], tuple[int, ...]]] = lambda s: (
        (s.batch, HEADS, s.length, DIM),
        (s.batch, KV_HEADS, s.length, DIM),
    )
    multiple: int = 1

    def __call__(self, *inputs: Any) -> Any:
        return self.run(*inputs)

    def inputs(self, s: Sizes) -> tuple[Any, ...]:
        q, k = self.shapes(s)
        return torch.randn(q), torch.randn(k), *self.arrays(s)


def _seed(_: Sizes) -> tuple[Tensor]:
    return (torch.randint(2**40, ()),)


def _packed(s: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (s.length, HEADS, DIM), (s.length, KV_HEADS, DIM)


def _all_heads(s: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((s.batch, HEADS, s.length, DIM),) * 2


CALLS = (
    Call("attention, math", lambda q, k, cu: attention(q, k, k, mask=a.documents(cu), backend="math"), _cu),
    Call(
        "attention, an expression as argument",
        lambda q, k, mask: attention(q, k, k, mask=mask),
        lambda s: (a.causal() & a.documents(*_cu(s)),),
    ),
    Call("q_index", lambda q, k, x: attention(q, k, k, mask=a.causal(), q_index=x), _lengths_of_rows),
    Call("layout thd", lambda q, k, x: attention(q, k, k, mask=a.documents(x), layout="thd"), _cu, _packed),
    Call(
        "alibi, cache",
        lambda q, k, x, n: attention(q, k, k, mask=a.causal() & a.cache(n), bias=a.alibi(x)),
        lambda s: (torch.rand(s.batch, HEADS), *_lengths(s)),
    ),
    Call(
        "relative, documents",
        lambda q, k, x, cu: attention(q, k, k, mask=a.documents(cu), bias=a.relative(x)),
        lambda s: (torch.rand(HEADS, 9), *_cu(s)),
    ),
    Call(
        "dense bias, key_padding",
        lambda q, k, x, n: attention(q, k, k, mask=a.key_padding(n), bias=x),
        lambda s: (torch.rand(s.batch, HEADS, s.length, s.length), *_lengths(s)),
    ),
    Call(
        "dropout, documents",
        lambda q, k, x, cu: attention(
            q, k, k, mask=a.causal() & a.documents(cu), dropout_p=0.3, dropout_seed=x
        ),
        lambda s: (*_seed(s), *_cu(s)),
    ),
    Call(
        "dropout, math",
        lambda q, k, x: attention(q, k, k, dropout_p=0.3, dropout_seed=x, backend="math"),
        _seed,
    ),
    Call("sdpa", lambda q, k: scaled_dot_product_attention(q, k, k, is_causal=True), shapes=_all_heads),
    Call(
        "sdpa, booleans", lambda q, k, x: scaled_dot_product_attention(q, k, k, x), _dense, shapes=_all_heads
    ),
    Call(
        "sdpa, bias",
        lambda q, k, x: scaled_dot_product_attention(q, k, k, x),
        lambda s: (torch.rand(s.batch, 1, s.length, s.length),),
        shapes=_all_heads,
    ),
)
