"""Options under the compiler: one graph, few compilations, equal gradients."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import everything, few
from problem_parts import leaves
from samples import OPTIONS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import Prepared, alibi, cache, causal, segments
from attnspan.torch import attention

HEADS = 4
EPS = torch.finfo(torch.float32).eps


def _inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, length, 16, requires_grad=True), torch.randn(batch, 2, length, 16)


def _run(q: Tensor, k: Tensor, ids: Tensor, several: list[dict[str, Any]]) -> list[Tensor]:
    return [attention(q, k, k, mask=causal() & segments(ids), **options) for options in several]


def _agree(compiled: Callable[..., list[Tensor]], names: list[str], batch: int, length: int) -> None:
    """Run both on fresh inputs, and compare outputs and every gradient."""
    q, k = _inputs(batch, length)
    ids = torch.randint(0, 2, (batch, length)).cumsum(-1)
    several = [OPTIONS[name](batch, HEADS, length, length) for name in names]
    wanted = [q, *leaves(several)]
    results = []
    for run in (compiled, _run):
        outs = run(q, k, ids, several)
        results.append([*outs, *torch.autograd.grad(torch.stack(outs).square().sum(), wanted)])
    for got, true in zip(*results, strict=True):
        assert got.dtype == true.dtype
        torch.testing.assert_close(got, true)


# Each kind of array once: the next test has "all".
@pytest.mark.parametrize(
    "names",
    [[x] for x in OPTIONS] if everything() else [["dense, all heads, float16", "alibi, per batch row", "T5"]],
    ids=str,
)
def test_every_option_compiles_in_full_and_once(names: list[str]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_run, fullgraph=True, backend=counter)
    for _ in range(2):  # New values of everything: seed, slopes, table, mask.
        _agree(compiled, names, 2, 33)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", few(["all", "dense", "dropout by seeds", "alibi, per batch row"], 1))
def test_few_compilations_over_many_shapes(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_run, fullgraph=True, backend=counter)
    generator = random.Random(0)
    for _ in range(6 if everything() else 3):
        _agree(compiled, [name], generator.randint(2, 5), generator.randint(2, 90))
    assert counter.frame_count <= 2


def test_a_new_seed_or_new_slopes_are_no_recompilation_but_take_effect() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, k: Tensor, slopes: Tensor, seed: Tensor) -> Tensor:
        return attention(q, k, k, bias=alibi(slopes), dropout_p=0.3, dropout_seed=seed)

    q, k = _inputs(2, 33)
    slopes = torch.rand(HEADS)
    outs = [run(q, k, slopes * n, torch.tensor(seed)) for n in range(3) for seed in (5, 2**60)]
    assert counter.frame_count == 1
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert not torch.equal(a, b)


def test_positions_of_a_prepared_mask_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def run(q: Tensor, k: Tensor, slopes: Tensor, mask: Prepared) -> Tensor:
        return attention(q, k, k, mask=mask, bias=alibi(slopes))

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    k, slopes = torch.randn(2, 2, 24, 16), torch.rand(HEADS)
    for lengths in ([24, 13], [5, 9], [3, 3]):
        q = torch.randn(2, HEADS, 3, 16)
        mask = (causal() & cache(torch.tensor(lengths))).prepare(3, 24, batch=2, like=q)
        torch.testing.assert_close(compiled(q, k, slopes, mask), run(q, k, slopes, mask))
    assert counter.frame_count == 1
