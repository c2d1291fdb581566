"""Each backend, and one that follows CONTRIBUTING.md, runs the parts of a plan on all ranks or devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from eager_flex import eager
from recipe import followed
from torch.distributed.device_mesh import init_device_mesh
from virtual_devices import on_devices
from which_ran import counted
from worlds import ranks

from attnspan import alibi, causal
from attnspan.experimental import triton
from attnspan.parallel import Layout
from attnspan.torch import attention

WITHIN: dict[str, Any] = {"flex": eager, "triton": triton.interpreted}


@contextmanager
def running(backend: str) -> Iterator[Any]:
    """Counts the calls of the backend's functions."""
    if backend == "mine":
        with followed("torch") as runs:
            yield runs
    else:
        with WITHIN.get(backend, nullcontext)(), counted("torch") as runs:
            yield runs


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@pytest.mark.parametrize("backend", ["mine", "flex", "triton", "math"])
@ranks(2)
def test_its_parts_merge_to_the_whole(backend: str, strategy: str) -> None:
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, 12, 16, generator=make, requires_grad=True) for h in (4, 2, 2)]
    # What CONTRIBUTING.md shows takes no options.
    slopes = None if backend == "mine" else torch.rand(4, generator=make, requires_grad=True)
    options: Any = {} if slopes is None else {"bias": alibi(slopes), "softcap": 4.0}
    wanted, lse = attention(*whole, mask=causal(), backend="math", return_lse=True, **options)
    parameters = [] if slopes is None else [slopes]
    gradients = torch.autograd.grad(wanted.square().sum() + lse.sum(), [*whole, *parameters])
    mesh = init_device_mesh("cpu", (2,))
    layout, rank = Layout.contiguous(12, 2), mesh.get_local_rank()
    plan = layout.plan(causal(), heads=(4, 2), strategy=strategy).on(mesh, rows="unchecked")
    own = slice(6 * rank, 6 * rank + 6)
    inputs: list[Any] = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    with running(backend) as runs:
        out, lse = attention(*inputs, mask=plan, backend=backend, return_lse=True, **options)
        before = runs.total()
        assert before >= 1
        found = torch.autograd.grad(out.square().sum() + lse.sum(), [*inputs, *parameters])
        assert runs.total() > before
    torch.testing.assert_close(out, wanted[:, :, own], rtol=1e-4, atol=1e-5)
    for got, want in zip(found[:3], gradients[:3], strict=True):
        torch.testing.assert_close(got, want[:, :, own], rtol=1e-4, atol=1e-5)
    for got, want in zip(found[3:], gradients[3:], strict=True):
        torch.distributed.all_reduce(got)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
@pytest.mark.parametrize("axes", [{"batch": 2, "sequence": 2}, {"sequence": 4, "strategy": "ring"}], ids=str)
@on_devices
def test_a_jax_kernel_runs_on_a_mesh(axes: dict[str, Any]) -> None:
    import jax_split

    split, mask = jax_split.Split(**axes), jax_split.packed(3, 21)
    given = jax_split.inputs(split.num_heads, 21, 21)
    with followed("jax") as runs:
        got = jax_split.attend(split.place(mask, 21), given, backend="mine")
    assert runs.total() >= 2  # traced in forward and in backward
    jax_split.check(got, jax_split.oracle(given, mask))
