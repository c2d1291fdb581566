"""What problems of attention are made of: sizes, masks, options.

A setting builds the keywords of `attention` from its parameters, which may be tensors of torch or arrays of
another framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attnspan as a
from attnspan import Spans


@dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
        options: Names of OPTIONS.
        mask: A name of MASKS, or "random": `runs` spans a row; every fifth row sees nothing if `empty`.
        mask_batch, mask_heads: Batch rows and heads that random spans tell apart; all by default.
        scale: 1 / sqrt(head_dim) by default.
        stored: The order of axes in memory: "bshd", as projections leave them, "bhsd", or "mixed" (q alone
            as "bshd").
    """

    options: tuple[str, ...] = ()
    mask: str = "random"
    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 64
    k_len: int = 64
    head_dim: int = 64
    v_dim: int = 64
    runs: int = 1
    mask_batch: int | None = None
    mask_heads: int | None = None
    empty: bool = True
    scale: float | None = None
    stored: str = "mixed"
    seed: int = 0

    def __str__(self) -> str:
        changed = [x.name for x in fields(self) if getattr(self, x.name) != x.default]
        shown = ",".join(f"{name}={getattr(self, name)}" for name in changed)
        return shown.replace("torch.", "").replace(" ", "") or "default"

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "heads": self.heads, "q_len": self.q_len, "k_len": self.k_len}

    @property
    def factor(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


def random_bounds(
    generator: torch.Generator, batch: int, heads: int, q_len: int, k_len: int, runs: int, empty: bool = True
) -> Tensor:
    """Legal spans; every fifth row sees nothing if ``empty`` and there are several, else each sees a key."""
    cuts = torch.randint(0, k_len + 1, (batch, heads, q_len, 2 * runs), generator=generator).sort(-1).values
    bounds = cuts.view(batch, heads, q_len, runs, 2).to(torch.int32)
    if empty and q_len > 1:
        bounds[:, :, ::5] = 0
    elif k_len:
        nothing = (bounds[..., 1] == bounds[..., 0]).all(-1)
        bounds[nothing] = 0
        bounds[..., -1, :][nothing] = torch.tensor([0, k_len], dtype=torch.int32)
    return bounds


# Masks. With a mask comes q_index (B|1, Sq) as docs/masks.md says; None for the last rows of the keys.


def _random(runs: int, per_batch: bool, per_head: bool) -> Callable[[Case], tuple[Any, None]]:
    def make(case: Case) -> tuple[Any, None]:
        batch, heads = case.batch if per_batch else 1, case.heads if per_head else 1
        generator = torch.Generator().manual_seed(runs)
        return Spans(random_bounds(generator, batch, heads, case.q_len, case.k_len, runs), case.k_len), None

    return make


def _ids(case: Case) -> Tensor:
    """Segment ids of every batch row; the last token is padding."""
    cuts = torch.stack([torch.arange(case.k_len) >= 5 + 4 * b for b in range(case.batch)])
    ids = cuts.long()
    ids[:, -1] = -1
    return ids


def _cache(case: Case) -> tuple[Any, np.ndarray]:
    lengths = torch.tensor([case.k_len - 3 * b for b in range(case.batch)])
    q_index = lengths.numpy()[:, None] - case.q_len + np.arange(case.q_len)
    return a.causal() & a.cache(lengths), q_index


def _two_sided_documents(case: Case) -> tuple[Any, np.ndarray]:
    """Documents whose queries are the last ones of their keys: chunks of a prefill, packed."""
    cu_q, cu_k = np.array([0, 4, 9, 15]), np.array([0, 6, 12, 17])
    document = np.searchsorted(cu_q, np.arange(case.q_len), side="right") - 1
    ends = np.append(cu_q, 0)[document + 1], np.append(cu_k, 0)[document + 1]
    q_index = np.arange(case.q_len) - ends[0] + ends[1]  # the padding rows behind see nothing
    return a.causal() & a.documents(torch.from_numpy(cu_q), torch.from_numpy(cu_k)), q_index[None]


def _documents_of(length: int) -> Callable[[Case], tuple[Any, None]]:
    def make(case: Case) -> tuple[Any, None]:
        cu = torch.arange(0, case.k_len + length, length).clamp(max=case.k_len)
        return a.causal() & a.documents(cu), None

    return make


#: For 17 queries and 17 keys; "full", "causal" and "segments" for any.
MASKS: dict[str, Callable[[Case], tuple[Any, np.ndarray | None]]] = {
    "full": lambda _: (a.full(), None),
    "causal": lambda _: (a.causal(), None),
    "window": lambda _: (a.window(5, 2), None),
    "segments": lambda case: (a.causal() & a.segments(_ids(case), padding_id=-1), None),
    "documents": lambda _: (a.causal() & a.documents(torch.tensor([0, 7, 8, 15])), None),
    "documents, chunks": _two_sided_documents,
    "prefix-LM": lambda _: (a.causal() | a.prefix(torch.tensor([4, 9])), None),
    "groups": lambda case: (a.causal() | a.groups(_ids(case)), None),
    "key_padding, nothing in one row": lambda _: (a.key_padding(torch.tensor([12, 0])), None),
    "cache": _cache,
    "global and window": lambda _: (a.causal() & (a.window(3) | a.global_keys(2)), None),
    "R = 1 per head": _random(1, per_batch=False, per_head=True),
    "R = 2 per batch row": _random(2, per_batch=True, per_head=False),
    "R = 5 per batch row and head": _random(5, per_batch=True, per_head=True),
}
#: For any numbers of queries and keys.
LONG_MASKS: dict[str, Callable[[Case], tuple[Any, None]]] = {
    "documents of 50": _documents_of(50),
    "documents of 700": _documents_of(700),
    "window of 40": lambda _: (a.causal() & a.window(40), None),
    "window of 300": lambda _: (a.causal() & a.window(300), None),
    "first key and window": lambda _: (a.causal() & (a.window(10) | a.global_keys(1)), None),
}


# Options.


@dataclass(frozen=True)
class Setting:
    """`build(parameters)` gives the keywords of `attention`; each parameter gets a gradient."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    build: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}


@dataclass
class Draw:
    """Random arrays for a problem."""

    case: Case
    generator: torch.Generator

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator).to(dtype)

    def places(self, n: int) -> Tensor:
        """Global indices (batch, n) in any order, another one in each batch row."""
        far = 2 * (self.case.q_len + self.case.k_len)
        return torch.stack(
            [torch.randperm(far, generator=self.generator)[:n] for _ in range(self.case.batch)]
        )

    def setting(self, names: tuple[str, ...]) -> Setting:
        """Several options in one."""
        parts = [OPTIONS[name](self) for name in names]
        parameters = {name: x for part in parts for name, x in part.parameters.items()}
        return Setting(parameters, lambda p: {name: x for part in parts for name, x in part.build(p).items()})


def _fixed(**keywords: Any) -> Setting:
    return Setting(build=lambda _: keywords)


def _sinks(draw: Draw, dtype: torch.dtype = torch.float32) -> Setting:
    return Setting({"sinks": draw.normal(draw.case.heads, dtype=dtype)}, lambda p: {"sinks": p["sinks"]})


def _sinks_of_which_one_is_none(draw: Draw) -> Setting:
    setting = _sinks(draw)
    setting.parameters["sinks"][0] = -torch.inf
    return setting


def _alibi(slopes: Tensor, signed: bool = False) -> Setting:
    return Setting({"slopes": slopes}, lambda p: {"bias": a.alibi(p["slopes"], signed=signed)})


def _slopes(draw: Draw) -> Tensor:
    return draw.normal(draw.case.batch, draw.case.heads) / 32


def _table(draw: Draw, columns: int, buckets: np.ndarray | None = None) -> Setting:
    table = draw.normal(draw.case.heads, columns)
    return Setting({"table": table}, lambda p: {"bias": a.relative(p["table"], buckets)})


def _dense(
    per_batch: bool,
    per_head: bool,
    per_row: bool,
    dtype: torch.dtype | None = None,
    spoil: Callable[[Tensor], object] = lambda _: None,
    three_dims: bool = False,
) -> Callable[[Draw], Setting]:
    def make(draw: Draw) -> Setting:
        case = draw.case
        sizes = case.batch if per_batch else 1, case.heads if per_head else 1, case.q_len if per_row else 1
        values = draw.normal(*sizes, case.k_len, dtype=dtype or case.dtype)
        spoil(values)
        values = values[0] if three_dims else values
        return Setting({"values": values}, lambda p: {"bias": a.dense_bias(p["values"])})

    return make


def _make_holes(values: Tensor) -> None:
    values[..., ::3] = -torch.inf
    values[:, :, 2] = -torch.inf  # a row that sees nothing, however many spans it has


def _make_deep_rows(values: Tensor) -> None:
    """As masks are filled: such rows are padding, or all alike."""
    values[:, :, 1:4] -= torch.tensor([1e4, 1e7, 1e9])[:, None]
    values[:, :, 4] = torch.finfo(torch.float32).min


def _seeds(draw: Draw) -> Tensor:
    return torch.randint(-(2**62), 2**62, (draw.case.batch, draw.case.heads), generator=draw.generator)


FLOAT = torch.float32
#: Parts of a call, by name; those named "... given" go with options that read positions.
OPTIONS: dict[str, Callable[[Draw], Setting]] = {
    "softcap": lambda _: _fixed(softcap=1.5),
    "strong softcap": lambda _: _fixed(softcap=0.2),
    "sinks": _sinks,
    "sinks, one none": _sinks_of_which_one_is_none,
    "sinks, bf16": lambda draw: _sinks(draw, torch.bfloat16),
    "alibi": lambda draw: _alibi(torch.from_numpy(a.alibi_slopes(draw.case.heads))),
    "alibi, per batch row": lambda draw: _alibi(_slopes(draw)),
    "alibi, signed": lambda draw: _alibi(_slopes(draw)[0], signed=True),
    "alibi, signed, per batch row": lambda draw: _alibi(_slopes(draw), signed=True),
    "T5": lambda draw: _table(draw, 12, a.t5_buckets(12, 40)),
    "distance table": lambda draw: _table(draw, 15),
    "long distance table": lambda draw: _table(draw, 2 * 800 + 1),
    "one distance": lambda draw: _table(draw, 1),
    "dense": _dense(True, True, True),
    "dense, float32": _dense(True, True, True, FLOAT),
    "dense, per head": _dense(False, True, True),
    "dense, per head, float32": _dense(False, True, True, FLOAT),
    "dense, all heads": _dense(True, False, True),
    "dense, all heads, float32": _dense(True, False, True, FLOAT),
    "dense, all heads, float16": _dense(True, False, True, torch.float16),
    "dense, one for all": _dense(False, False, True),
    "dense, one for all, float32": _dense(False, False, True, FLOAT),
    "dense, per key": _dense(True, True, False),
    "dense, per key and head, float32": _dense(False, True, False, FLOAT, three_dims=True),
    "dense, per key, all heads": _dense(True, False, False),
    "dense, per key, one for all": _dense(False, False, False),
    "dense with holes": _dense(False, True, True, FLOAT, _make_holes),
    "dense with deep rows": _dense(False, True, True, FLOAT, _make_deep_rows),
    "dropout": lambda _: _fixed(dropout_p=0.3, dropout_seed=torch.tensor(-77)),
    "dropout by seeds": lambda draw: _fixed(dropout_p=0.5, dropout_seed=_seeds(draw)),
    "queries given": lambda draw: _fixed(q_index=draw.places(draw.case.q_len)),
    "keys given": lambda draw: _fixed(k_index=draw.places(draw.case.k_len)),
    "shifted queries given": lambda draw: _fixed(q_index=torch.arange(13, draw.case.q_len + 13)[None]),
}
#: An option of each kind.
ALL = ("softcap", "distance table", "sinks", "dropout")


def keywords(names: str | tuple[str, ...], *sizes: int, grad: bool = True, seed: int = 5) -> dict[str, Any]:
    """Keywords of `attention` for numbers of batch rows, heads, queries and keys; parameters are leaves."""
    case = Case(**dict(zip(("batch", "heads", "q_len", "k_len"), sizes, strict=True)))
    names = (names,) if isinstance(names, str) else names
    setting = Draw(case, torch.Generator().manual_seed(seed)).setting(names)
    return setting.build({name: x.requires_grad_(grad) for name, x in setting.parameters.items()})


def leaves(keywords: object) -> list[Tensor]:
    """The tensors of options that require gradients."""
    found = torch.utils._pytree.tree_leaves(keywords)
    return [x for x in found if isinstance(x, Tensor) and x.requires_grad]
