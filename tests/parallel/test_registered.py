"""A backend of CONTRIBUTING.md runs the parts of a plan, on all ranks and on all devices of a JAX mesh."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from recipe import followed
from torch.distributed.device_mesh import init_device_mesh
from virtual_devices import on_devices
from worlds import ranks

from attnspan import causal
from attnspan.parallel import Layout
from attnspan.torch import attention


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@ranks(2)
def test_its_kernel_runs(strategy: str) -> None:
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, 12, 8, generator=make, requires_grad=True) for h in (4, 2, 2)]
    wanted = attention(*whole, mask=causal(), backend="math")
    gradients = torch.autograd.grad(wanted.square().sum(), whole)
    mesh = init_device_mesh("cpu", (2,))
    layout, rank = Layout.contiguous(12, 2), mesh.get_local_rank()
    plan = layout.plan(causal(), heads=(4, 2), strategy=strategy).on(mesh, rows="unchecked")
    own = slice(6 * rank, 6 * rank + 6)
    inputs: list[Any] = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    with followed("torch") as runs:
        out = attention(*inputs, mask=plan, backend="mine")
        before = runs.total()
        assert before >= 1
        found = torch.autograd.grad(out.square().sum(), inputs)
        assert runs.total() > before
    torch.testing.assert_close(out, wanted[:, :, own])
    for got, want in zip(found, gradients, strict=True):
        torch.testing.assert_close(got, want[:, :, own])


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
@pytest.mark.parametrize("axes", [{"batch": 2, "sequence": 2}, {"sequence": 4, "strategy": "ring"}], ids=str)
@on_devices
def test_its_jax_kernel_runs_on_a_mesh(axes: dict[str, Any]) -> None:
    import jax_split

    split, mask = jax_split.Split(**axes), jax_split.packed(3, 21)
    given = jax_split.inputs(split.num_heads, 21, 21)
    with followed("jax") as runs:
        got = jax_split.attend(split.place(mask, 21), given, backend="mine")
    assert runs.total() >= 2  # traced in forward and in backward
    jax_split.check(got, jax_split.oracle(given, mask))
