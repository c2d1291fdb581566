"""Triton's kernels in its interpreter: parts, NaNs; and their code for GPUs that are not there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import quick_triton  # noqa: F401
import torch
import triton_compiled
from samples import parts
from torch import Tensor

from attnspan import causal, documents, window
from attnspan.call import Problem
from attnspan.call.options import Options
from attnspan.errors import OptionError
from attnspan.experimental import triton
from attnspan.experimental.triton import _launch
from attnspan.experimental.triton._config import Config
from attnspan.kernels import math
from attnspan.torch import attention

#: Bytes of shared memory that a program may have.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MATRIX = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
#: What the ordinary run compiles, in one process: capability, dtype, head dim, option, descriptors.
SAMPLE = (
    (100, "bfloat16", 64, "none", 0),
    (90, "bfloat16", 128, "dense", 0),
    (90, "bfloat16", 128, "none", 1),
)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with triton.interpreted():
        yield


random_bounds = partial(parts.random_bounds, torch.Generator().manual_seed(0))


def qkv(q_len: int = 40, k_len: int = 56, heads: int = 4) -> tuple[Tensor, ...]:
    return torch.randn(2, heads, q_len, 16), torch.randn(2, 2, k_len, 16), torch.randn(2, 2, k_len, 24)


def run(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    triton.forward(q, k, v, bounds, out, lse, scale=0.25, **options)
    return out, lse


# The keys are two tiles, so that the third part has none.
@pytest.mark.slow
@pytest.mark.parametrize("parts", [3, *(pytest.param(x, marks=pytest.mark.long) for x in (2, 64))])
def test_keys_in_parts_give_the_same(parts: int) -> None:
    q, k, v = qkv(q_len=3)
    bounds = random_bounds(2, 1, 3, 56, 2)
    bounds[0, 0, 0] = 0
    options = Options(sinks=torch.randn(4), softcap=3.0)
    for given in (None, options):
        whole, in_parts = (run(q, k, v, bounds, parts=n, options=given) for n in (1, parts))
        for a, b in zip(whole, in_parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice):RuntimeWarning")
@pytest.mark.parametrize(("name", "bad"), [("k", torch.nan), ("v", torch.inf), ("dout", torch.nan)])
def test_a_nan_reaches_only_blocks_that_see_it(name: str, bad: float) -> None:
    """Two documents, in blocks of their own; a scale that is negative."""
    shapes = {"q": (1, 2, 80, 16), "k": (1, 1, 80, 16), "v": (1, 1, 80, 24), "dout": (1, 2, 80, 24)}
    tensors = {x: torch.randn(shape) for x, shape in shapes.items()}
    results = []
    for backend in ("triton", "math"):
        *inputs, dout = (x.clone() for x in tensors.values())
        if backend == "triton":
            dict(zip(shapes, (*inputs, dout), strict=True))[name][:, :, 70, 3] = bad
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, mask=documents([0, 64, 80]), scale=-0.25, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, dout)])
    for spoiled, clean in zip(*results, strict=True):
        torch.testing.assert_close(spoiled[:, :, :64], clean[:, :, :64], rtol=1e-5, atol=1e-5)
    assert not all(bool(x[:, :, 64:].isfinite().all()) for x in results[0][1:])


def test_keys_that_no_row_sees_are_not_read() -> None:
    """Slots of a cache that were never written."""
    q, k, v = qkv(q_len=4)
    k[:, :, 39:], v[:, :, 39:] = torch.nan, torch.nan
    bounds = torch.tensor(causal().spans(4, 39).lowered.bounds)
    for a, b in zip(run(q, k, v, bounds), run(q, k[:, :, :39], v[:, :, :39], bounds), strict=True):
        torch.testing.assert_close(a, b)


def test_illegal_rows_are_nan_and_read_nothing_outside() -> None:
    q, k, v = qkv()
    bounds = torch.tensor(causal().spans(40, 56).lowered.bounds).clone()
    wanted = math.forward(q, k, v, bounds, scale=0.25)
    bounds[0, 0, 5], bounds[0, 0, 7] = torch.tensor([-9, 3]), torch.tensor([2, 4_000])
    out, lse = run(q, k, v, bounds)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[5, 7]] = True
    assert out[:, :, bad].isnan().all()
    assert lse[:, :, bad].isnan().all()
    torch.testing.assert_close(out[:, :, ~bad], wanted[0][:, :, ~bad])
    torch.testing.assert_close(lse[:, :, ~bad], wanted[1][:, :, ~bad])


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 4, 2, 8, 8, 64, 64, 1, "bfloat16", "cpu")
    assert triton.supports(problem) is None
    sizes = {"head_dim": 257, "v_dim": 0, "dtype": "float64"}
    for name, size in sizes.items():
        reason = triton.supports(Problem(**{**vars(problem), name: size}))
        assert reason is not None
        assert str(size) in reason
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(OptionError, match="TRITON_INTERPRET=1"), triton.interpreted():
        pass


def _calls(*factors: Any) -> list[Any]:
    calls = list(product(*factors))
    return [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.long, id=str(x)) for x in calls]


OPTIONS = ("softcap", "alibi", "dense", "dropout", "everything")
CALLS = [
    *_calls(SHARED, ("bfloat16", "float16", "float32"), (64, 128, 256), ["none"], [0]),
    *_calls((80, 90, 100), ["bfloat16"], (64, 128, 256), OPTIONS, [0]),
    *_calls((90, 100), ["bfloat16"], (64, 128), ["none"], [1]),
]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_code_for_gpus(call: Any) -> None:
    """Compiled ahead of time: matrix instructions, no spilled registers, and shared memory suffices."""
    found, (capability, dtype, _, options, descriptors) = _compiled(call), call
    assert set(found) - {"bias_gradients_kernel"} == {
        *("row_ranges_kernel", "key_ranges_kernel", "order_kernel", "forward_kernel", "delta_kernel"),
        *("query_gradients_kernel", "key_gradients_kernel"),
        *("check_kernel", "clear_kernel", "lse_kernel"),
    }
    if descriptors:
        found = {"forward_kernel": found["forward_kernel"]}
        assert found["forward_kernel"]["by_engine"]
    # Products of float32 are long sequences of ordinary instructions.
    most = 64 if options != "none" else 48 if dtype == "float32" else 0
    for name, each in found.items():
        assert each["shared"] <= SHARED[capability], name
        assert each["STACK"] + each["LOCAL"] <= most, (name, each)
        if name.startswith(("forward", "query", "key_gradients")) and dtype != "float32":
            # Blocks of 32 rows or keys are too small for wgmma and tcgen05.
            assert {"mma.sync", MATRIX[capability]} & {*each["matrix"]}, name
            if name == "forward_kernel":
                assert MATRIX[capability] in each["matrix"]


@pytest.mark.slow
def test_blocks_with_the_most_keys_start_first_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 2, 60, 16, requires_grad=True), torch.randn(1, 1, 60, 16, requires_grad=True)
    mask = causal() & documents([0, 4, 32, 60])
    results = []
    for waves in (False, True):
        monkeypatch.setattr(_launch, "_has_waves", lambda *_, answer=waves: answer)
        out = attention(q, k, k, mask=mask, backend="triton")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dim", [64, 40])
def test_tensor_descriptors_change_no_bit(dim: int) -> None:
    q, k, v = (torch.randn(1, 70, h, dim).transpose(1, 2) for h in (2, 1, 1))
    bounds = (causal() & window(40)).spans(70, 70, like=q).lowered.bounds.contiguous()
    found = []
    for bit in (0, 1):
        out, lse = torch.empty_like(q), torch.empty(1, 2, 70)
        config = Config(32, 16, 4, 1, descriptors=bit, specialized=bit)
        _launch.forward(q, k, v, bounds, out, lse, scale=0.125, config=config)
        found.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _compiled(call: Any) -> dict[str, Any]:
    calls = tuple(SAMPLE) if call in SAMPLE else (call,)
    return {each["kernel"]: each for each in _all_compiled(calls)[calls.index(call)]}


@cache
def _all_compiled(calls: Any) -> Any:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, triton_compiled.__file__, json.dumps(calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout)
