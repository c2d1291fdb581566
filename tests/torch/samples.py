"""Sample calls, the float64 oracle and derived tolerances, shared by the tests of the torch front end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mask_samples import BATCH, SAMPLES
from mask_samples import KEYS as K_LEN
from torch import Tensor

import attnspan
from attnspan import Prepared, Spans, reference
from attnspan.options import Given, Options
from attnspan.torch import dropout_seeds
from attnspan.torch._front import PLAIN

Q_LEN = K_LEN


def _blocks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query // 5 == key // 5


def _dense() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(BATCH, 1, Q_LEN, K_LEN, generator=generator) < 0.8


def _own_spans() -> Tensor:
    rows = torch.arange(Q_LEN)
    bounds = torch.stack([torch.stack([rows // 4, rows // 2], -1), torch.stack([rows // 2, rows], -1)], -2)
    bounds[5] = 0  # a row that sees nothing
    return bounds.to(torch.int32).view(1, 1, Q_LEN, 2, 2)


#: Every kind of mask, for BATCH rows of Q_LEN == K_LEN tokens; a new one at each call.
MASKS: dict[str, Callable[[], attnspan.Mask]] = {
    sample.function: partial(sample.mask, torch.from_numpy)
    for sample in SAMPLES
    if sample.name
    in {
        *("full", "causal", "window, both sides", "segments, per batch row", "causal documents", "prefix-LM"),
        *(
            "groups",
            "images in text",
            "key_padding",
            "keys, per batch row",
            "causal cache",
            "window and sinks",
        ),
    }
}
MASKS |= {
    "spans": lambda: attnspan.spans(_own_spans()),
    "from_predicate": lambda: attnspan.from_predicate(_blocks),
    "from_dense": lambda: attnspan.from_dense(_dense()),
}


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def _slopes(*shape: int) -> Tensor:
    return (_normal(*shape).detach().abs() / 4).requires_grad_()


def _seed() -> Tensor:
    return torch.tensor(0x0123_4567_89AB_CDEF)


#: Keywords of `attention` by option, for numbers of batch rows, query heads, queries and keys; parameters are
#: leaves that require gradients.
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "softcap": lambda *_: {"softcap": 1.5},
    "sinks": lambda _b, h, *_: {"sinks": _normal(h)},
    "sinks in bf16": lambda _b, h, *_: {"sinks": _normal(h, dtype=torch.bfloat16)},
    "alibi": lambda _b, h, *_: {"bias": attnspan.alibi(_slopes(h))},
    "alibi per row": lambda b, h, *_: {"bias": attnspan.alibi(_slopes(b, h))},
    "signed alibi": lambda _b, h, *_: {"bias": attnspan.alibi(_slopes(h), signed=True)},
    "relative": lambda _b, h, *_: {"bias": attnspan.relative(_normal(h, 9))},
    "t5": lambda _b, h, *_: {"bias": attnspan.relative(_normal(h, 8), attnspan.t5_buckets(8, 6))},
    "dense": lambda b, h, q, k: {"bias": _normal(b, h, q, k)},
    "dense per head": lambda _b, h, _q, k: {"bias": attnspan.dense_bias(_normal(h, 1, k))},
    "dense per row": lambda b, _h, q, k: {"bias": _normal(b, 1, q, k, dtype=torch.float16)},
    "dropout": lambda *_: {"dropout_p": 0.3, "dropout_seed": _seed()},
    "dropout seeds": lambda b, h, *_: {"dropout_p": 0.3, "dropout_seed": dropout_seeds(_seed(), b, h)},
    "all": lambda _b, h, *_: {
        "softcap": 2.0,
        "bias": attnspan.relative(_normal(h, 9)),
        "sinks": _normal(h, seed=6),
        "dropout_p": 0.2,
        "dropout_seed": _seed(),
    },
}


def parameters(options: object) -> list[Tensor]:
    """The tensors of options that require gradients."""
    leaves = torch.utils._pytree.tree_leaves(options)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


@dataclass
class Sample:
    """One call of the operator; `arguments` are (q, k, v, bounds, scale), then options if any."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    scale: float

    options: tuple[Any, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.bounds, self.scale, *self.options

    def requires_grad(self) -> "Sample":
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        options = tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.options
        )
        return Sample(q, k, v, self.bounds, self.scale, options)

    def with_options(self, name: str, *, indices: bool = False) -> "Sample":
        """The sample with an option of OPTIONS, as the operator takes it, and indices of all kinds."""
        (batch, heads, q_len, _), k_len = self.q.shape, self.k.shape[2]
        keywords = OPTIONS[name](batch, heads, q_len, k_len)
        if indices:
            keywords["q_index"] = torch.arange(batch * q_len).view(batch, q_len)
            keywords["k_index"] = torch.arange(k_len).flip(0)
        lowered = Given(**keywords).lower(
            PLAIN, self.q, self.k, Prepared(Spans(self.bounds, k_len)), fixed=True
        )
        assert lowered is not None
        options = tuple(x.detach() if isinstance(x, Tensor) else x for x in lowered)
        return Sample(self.q, self.k, self.v, self.bounds, self.scale, options)


def random_bounds(
    generator: torch.Generator, batch: int, heads: int, q_len: int, k_len: int, runs: int, empty: bool = True
) -> Tensor:
    """Random legal spans; every fifth row sees nothing if ``empty``, else every row sees a key."""
    cuts = torch.randint(0, k_len + 1, (batch, heads, q_len, 2 * runs), generator=generator).sort(-1).values
    bounds = cuts.view(batch, heads, q_len, runs, 2).to(torch.int32)
    if empty:
        bounds[:, :, ::5] = 0
    elif k_len:
        nothing = (bounds[..., 1] == bounds[..., 0]).all(-1)
        bounds[nothing] = 0
        bounds[..., -1, :][nothing] = torch.tensor([0, k_len], dtype=torch.int32)
    return bounds


def make_sample(
    seed: int = 0,
    *,
    batch: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 7,
    k_len: int = 9,
    head_dim: int = 16,
    v_dim: int = 16,
    runs: int = 1,
    mask_batch: int = 1,
    mask_heads: int = 1,
    dtype: torch.dtype = torch.float32,
    empty: bool = True,
    logits: float = 1.0,
    transposed: bool = True,
) -> Sample:
    """Standard-normal q, k, v (scores are multiplied by ``logits``) under random spans."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> Tensor:
        if transposed:
            return torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, dim, generator=generator).to(dtype)

    return Sample(
        normal(q_heads, q_len, head_dim),
        normal(kv_heads, k_len, head_dim),
        normal(kv_heads, k_len, v_dim),
        random_bounds(generator, mask_batch, mask_heads, q_len, k_len, runs, empty),
        logits * head_dim**-0.5,
    )


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def oracle(
    sample: Sample, dout: Tensor, dlse: Tensor | None = None, options: Options | None = None
) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64 of the inputs as they are, rounded to their dtype.

    With options (their arrays as NumPy), also the gradients of the lowered bias and of the sinks.
    """
    q, k, v = (to_numpy(x) for x in (sample.q, sample.k, sample.v))
    bounds = sample.bounds.numpy()
    out, lse = reference.forward(q, k, v, bounds, sample.scale, options)
    zeros = np.zeros_like(lse) if dlse is None else to_numpy(dlse)
    grads = reference.backward(to_numpy(dout), zeros, q, k, v, bounds, sample.scale, options)
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in (out, lse, *grads) if x is not None]


@contextmanager
def counted_kernel_calls() -> Iterator[list[str]]:
    """Collect the names of the kernel's entry points, once for each call; complete when the block ends."""
    from attnspan.kernels import cpu

    before = cpu.counters()
    calls: list[str] = []
    try:
        yield calls
    finally:
        after = cpu.counters()
        for name in after:
            calls.extend([name] * int(after[name]["calls"] - before[name]["calls"]))
