"""Problems of every kind for context parallelism, and what one process alone makes of them.

Shapes: B batch rows, H query heads, G key/value heads, S queries, D and Dv head dimensions.
"""

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attnspan
from attnspan.torch import attention
from samples.parts import ALL, keywords
from samples.parts import leaves as parameters

Ids = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """One attention call: the problem, and how ranks are to share it."""

    mask: str = "segments"
    option: str = "none"
    heads: tuple[int, int] = (4, 2)
    length: int = 37
    k_len: int | None = None
    batch: int = 2
    dims: tuple[int, int] = (16, 16)
    dtype: str = "float32"
    seed: int = 0
    strategy: str = "exchange"
    partition: str = "balanced"
    rows_per_chunk: int | None = None
    members: int = 1
    layout: str = "bhsd"
    return_lse: bool = True

    @property
    def keys(self) -> int:
        return self.length if self.k_len is None else self.k_len

    @property
    def problem(self) -> "Case":
        """The case without what must not change the result."""
        return replace(self, strategy="", partition="", rows_per_chunk=None, members=1, layout="bhsd")


def _generator(case: Case, salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * case.seed + 10 * case.length + salt)


def segment_ids(case: Case, rows: int, mean: int = 12, salt: int = 1) -> Tensor:
    """Ids (rows, S) of packed segments with lengths from 1 to 2 * mean - 1."""
    generator, found = _generator(case, salt), []
    for _ in range(rows):
        lengths = torch.randint(1, 2 * mean, (case.keys,), generator=generator)
        found.append(torch.repeat_interleave(torch.arange(case.keys), lengths)[: case.keys])
    return torch.stack(found)


def _cuts(case: Case) -> Tensor:
    """Ends of documents, of which the last rows belong to none."""
    ids = segment_ids(case, 1)[0, : max(case.keys - 3, 1)]
    sizes = torch.bincount(ids)
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)


def _lengths(case: Case, *, least: int = 0) -> Tensor:
    lengths = torch.randint(least, case.keys + 1, (case.batch,), generator=_generator(case, 2))
    lengths[-1] = case.keys
    return lengths


def _own_spans(case: Case, heads: int = 1) -> attnspan.Mask:
    """Two random spans a row, per batch row; every fifth row sees nothing."""
    shape = (case.batch, heads, case.length, 4)
    cuts = torch.randint(0, case.keys + 1, shape, generator=_generator(case, 3)).sort(-1).values
    cuts[:, :, ::5] = 0
    return attnspan.spans(cuts.view(*shape[:3], 2, 2).to(torch.int32))


def _blocks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query // 5 == key // 5


def _by_head(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query // (head + 3) == key // (head + 3)


def _dense(case: Case) -> Tensor:
    coarse = torch.rand(case.batch, 1, case.length, case.keys // 8 + 1, generator=_generator(case, 4)) < 0.7
    return coarse.repeat_interleave(8, -1)[..., : case.keys]


#: Every kind of mask, for any length; those with a batch axis differ from row to row.
MASKS: dict[str, Callable[[Case], attnspan.Mask]] = {
    "full": lambda _: attnspan.full(),
    "causal": lambda _: attnspan.causal(),
    "window": lambda case: attnspan.window(case.length // 4, 2),
    "segments": lambda case: attnspan.causal() & attnspan.segments(segment_ids(case, case.batch)),
    "shared segments": lambda case: attnspan.causal() & attnspan.segments(segment_ids(case, 1)),
    "documents": lambda case: attnspan.causal() & attnspan.documents(_cuts(case)),
    "prefix": lambda case: attnspan.causal() | attnspan.prefix(_lengths(case)),
    "groups": lambda case: attnspan.causal() | attnspan.groups(segment_ids(case, case.batch, mean=5)),
    "key_padding": lambda case: attnspan.key_padding(_lengths(case)),
    "cache": lambda case: attnspan.causal() & attnspan.cache(_lengths(case, least=1)),
    "global_keys": lambda _: attnspan.causal() & (attnspan.window(3) | attnspan.global_keys(2)),
    "spans": _own_spans,
    "spans per head": lambda case: _own_spans(case, case.heads[0]),
    "from_predicate": lambda _: attnspan.from_predicate(_blocks),
    "predicate per head": lambda _: attnspan.from_predicate(_by_head),
    "from_dense": lambda case: attnspan.from_dense(_dense(case)),
}

#: Those that make sense where queries and keys differ in number.
CROSS_MASKS = ("full", "causal", "window", "key_padding", "global_keys", "spans", "from_dense")


def _normal(case: Case, salt: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(case, salt))


def _part(*names: str) -> Callable[[Case], dict[str, Any]]:
    """Options of tests/samples/parts.py."""
    return lambda case: keywords(names, case.batch, case.heads[0], case.length, case.keys, seed=case.seed)


#: Keywords of `attention` by option; parameters are leaves that require gradients.
OPTIONS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "none": lambda _: {},
    "softcap": _part("softcap"),
    "sinks": _part("sinks"),
    "alibi": _part("alibi"),
    "alibi per row": _part("alibi, per batch row"),
    "relative": _part("distance table"),
    "deep relative": lambda case: {
        "bias": attnspan.relative((_normal(case, 7, case.heads[0], 41) * 300 - 1e9).requires_grad_()),
        "sinks": (_normal(case, 6, case.heads[0]) - 1e9).requires_grad_(),
    },
    "t5": _part("T5"),
    "dropout": _part("dropout"),
    "dropout seeds": _part("dropout by seeds"),
    "all": _part(*ALL),
}

#: MHA, GQA, MQA, and numbers that 2, 3 or 4 ranks do not divide, or that are fewer than the ranks.
HEADS = ((4, 4), (4, 2), (4, 1), (5, 5), (6, 3), (7, 1), (2, 1))


@dataclass(frozen=True)
class Inputs:
    """Standard-normal q, k, v and gradients of out and lse, all in "bhsd" and whole."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def inputs(case: Case) -> Inputs:
    """The same ones in every process, rounded to the case's dtype."""
    (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    dtype = getattr(torch, case.dtype)
    q = _normal(case, 10, case.batch, q_heads, case.length, dim).to(dtype)
    k = _normal(case, 11, case.batch, kv_heads, case.keys, dim).to(dtype)
    v = _normal(case, 12, case.batch, kv_heads, case.keys, v_dim).to(dtype)
    dout = _normal(case, 13, case.batch, q_heads, case.length, v_dim).to(dtype)
    return Inputs(q, k, v, dout, _normal(case, 14, case.batch, q_heads, case.length))


Results = dict[str, Tensor]


def _alone(case: Case, wide: bool) -> Results:
    whole, options = inputs(case), OPTIONS[case.option](case)
    q, k, v, dout = (x.double() if wide else x for x in (whole.q, whole.k, whole.v, whole.dout))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # A parameter in float32 has the same value in float64, where the math backend takes it.
    out, lse = attention(
        *leaves,
        mask=MASKS[case.mask](case),
        return_lse=True,
        backend="math" if wide or case.dtype == "float64" or max(case.dims) > 256 else "cpu",
        **options,
    )
    found = {"out": out.detach(), "lse": lse.detach()}
    extra = parameters(options)
    outs, gradients = ([out, lse], [dout, whole.dlse.to(lse.dtype)]) if case.return_lse else ([out], [dout])
    got = torch.autograd.grad(outs, [*leaves, *extra], gradients, allow_unused=True)
    names = ["dq", "dk", "dv", *(f"parameter {i}" for i in range(len(extra)))]
    for name, x, gradient in zip(names, [*leaves, *extra], got, strict=True):
        found[name] = torch.zeros_like(x) if gradient is None else gradient
    return found


@functools.lru_cache(maxsize=2048)
def _cached(problem: Case, wide: bool) -> Results:
    return _alone(problem, wide)


def unsharded(case: Case) -> Results:
    """What the kernel gives on one process: out, lse, dq, dk, dv and the gradients of the parameters."""
    return _cached(case.problem, False)


def exact(case: Case) -> Results:
    """The same in float64, of the inputs as they are, rounded to their dtype."""
    return _cached(case.problem, True)


def pairs(
    factors: Iterable[Sequence[Any]], seed: int = 0, without: Collection[tuple[int, int]] = ()
) -> Iterator[tuple[Any, ...]]:
    """Few rows of a product that is too large to list, in which each pair of values of two factors occurs.

    Pairs of the columns `without` occur by chance.
    """
    columns, chooser = list(factors), random.Random(seed)
    two = [each for each in itertools.combinations(range(len(columns)), 2) if each not in without]
    missing = {(a, x, b, y) for a, b in two for x in range(len(columns[a])) for y in range(len(columns[b]))}

    def gain(chosen: dict[int, int], a: int, x: int) -> int:
        found = ((a, x, b, y) if a < b else (b, y, a, x) for b, y in chosen.items())
        return sum(pair in missing for pair in found)

    while missing:
        a, x, b, y = min(missing)
        chosen = {a: x, b: y}
        for column in range(len(columns)):
            if column not in chosen:
                values = list(range(len(columns[column])))
                chooser.shuffle(values)
                chosen[column] = max(values, key=lambda value: gain(chosen, column, value))
        missing -= {(a, chosen[a], b, chosen[b]) for a, b in two}
        yield tuple(values[chosen[i]] for i, values in enumerate(columns))
