"""FlexAttention as a backend: the same blocks when traced, one graph for all masks, what GPUs run."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_flex import eager
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import OutOfResources

from attnspan import Mask, causal, documents, key_padding
from attnspan.backends import table
from attnspan.base import installed as _installed
from attnspan.call import Problem
from attnspan.call.options import Options, alibi
from attnspan.errors import BackendError
from attnspan.experimental import triton
from attnspan.kernels import flex
from attnspan.torch import attention
from attnspan.torch.backends import MOST_KEYS
from attnspan.torch.choice import choose_backend

ON_GPU = Problem(1, 4, 2, 8, 8, 64, 64, 1, "bfloat16", "cuda")


def bounds_of(mask: Mask, length: int) -> Tensor:
    return torch.tensor(mask.spans(length, length).lowered.bounds)


@pytest.mark.slow
def test_masks_of_several_lengths_compile_to_few_graphs() -> None:
    """Training steps."""
    # Slopes without gradient: torch's array code, compiled, forgets that tensors of a score_mod have one.
    sinks = torch.randn(4, requires_grad=True)
    options: dict[str, Any] = {"softcap": 5.0, "bias": alibi(torch.rand(4)), "sinks": sinks}
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        mask = causal() & documents(ids)
        return attention(q, k, k, mask=mask, backend="flex", **options)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    with eager():
        for step in range(3):
            length = 48 + 16 * step
            q, k = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16)
            ids = torch.tensor([0, 3 + step, 40, length])
            q, k = q.requires_grad_(), k.requires_grad_()
            leaves = [q, k, sinks]
            wanted = attention(q, k, k, mask=causal() & documents(ids), backend="math", **options)
            found = compiled(q, k, ids)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            steps = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
            for a, b in zip(*steps, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_what_gpus_run() -> None:
    assert choose_backend(ON_GPU, None).name == "flex"
    assert choose_backend(replace(ON_GPU, device="xpu"), None).name == "flex"
    double = replace(ON_GPU, dtype="float64")
    few = choose_backend(double, None)
    assert few.name == "math"
    assert "not float64" in few.refusals["flex"]
    many = replace(double, k_len=MOST_KEYS + 1)
    with pytest.raises(BackendError, match="beyond 4,096 keys it is opt-in"):
        choose_backend(many, None)
    assert choose_backend(many, "math").name == "math"
    assert choose_backend(ON_GPU, "triton").name == "triton"
    assert "opt-in" in str(table("torch")["triton"].against(ON_GPU))
    assert "FlexAttention has no backward there" in str(flex.supports(replace(ON_GPU, device="cpu")))
    assert "it takes no DTensors" in str(flex.supports(replace(ON_GPU, extras=("DTensors",))))
    assert "no empty arrays" in str(flex.supports(replace(ON_GPU, k_len=0)))
    old = replace(ON_GPU, capability=61)
    assert choose_backend(old, None).name == "math"
    with pytest.raises(BackendError, match=r"(?s)vendor: it takes .* 8\.0.*flex: torch compiles for .* 7\.0"):
        choose_backend(replace(old, k_len=MOST_KEYS + 1), None)


@pytest.mark.parametrize("name", ["vendor", "flex", "triton"])
def test_old_gpus_and_old_packages_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = replace(ON_GPU, band="documents", capability=90)
    supports = table("torch")[name].supports
    assert supports(packed) is None
    assert "not 6.1" in str(supports(replace(packed, capability=61)))
    for package, least, text in (
        ("triton", "99.0", "needs triton 99.0 or newer, not"),
        ("no-such", "1", "missing"),
    ):
        monkeypatch.setitem(_installed._lacking, "triton", _installed._why_lacking(package, least))
        assert text in str(supports(packed))


@pytest.mark.slow
def test_an_uncompiled_call_compiles_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "program", flex.program.__wrapped__)
    compile_, made = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda f, **k: made.append(f) or compile_(f, **k, backend="eager"))
    q, bounds = torch.randn(1, 1, 32, 16), bounds_of(causal(), 32)
    wanted = attention(q, q, q, mask=causal(), scale=0.25)
    out, _ = flex.forward(q, q, q, bounds, scale=0.25)
    torch.testing.assert_close(out, wanted)
    flex.forward(q, q, q, bounds, scale=0.25, options=Options(softcap=1.0))
    assert len({id(f.__code__) for f in made}) == 2, "torch counts recompilations by code object"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "within"),
    [("cpu", nullcontext), ("math", nullcontext), ("flex", eager), ("triton", triton.interpreted)],
)
def test_no_key_beside_a_sink_of_minus_infinity_is_no_nan(backend: str, within: Any) -> None:
    mask = causal() & key_padding(torch.tensor([3]), side="left")
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    with within():
        out, lse = attention(q, q, q, mask=mask, sinks=sinks, backend=backend, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum(), (q, sinks))
    assert not out[0, :, :2].any()
    assert lse[0, :, 0].tolist() == [-torch.inf, 0.5]
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_blocks_too_large_for_a_gpu_are_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any, **__: Any) -> None:
        raise OutOfResources(200_000, 101_376, "shared memory")

    q = torch.randn(1, 1, 16, 16)
    with triton.interpreted():
        from attnspan.experimental.triton import _launch

        monkeypatch.setattr(_launch, "forward", launch)
        with pytest.raises(BackendError, match=r"shared memory.*Leave the name out"):
            attention(q, q, q, backend="triton")
