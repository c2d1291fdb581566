"""What a compiler and `explain` see of CUDA tensors, without a GPU: they have no data.

`make test-cuda`, with torch's CUDA build. Autograd's engine wants a device: the operator's backward is called
by itself, and FlexAttention, which derives itself when it is traced, is traced without gradients.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan import causal, documents, window
from attnspan.call.options import alibi
from attnspan.errors import BackendError
from attnspan.kernels import _offsets, vendor
from attnspan.torch import attention, explain
from attnspan.torch._vendor import vendor_op
from attnspan.torch.backends import MOST_KEYS
from attnspan.torch.ops import named_backward_op, named_op

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA: make test-cuda")


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    torch._dynamo.reset()
    with FakeTensorMode():
        yield


def qkv(length: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(1, 8, length, 64, device="cuda", dtype=dtype)
    k = torch.empty(1, 2, length, 64, device="cuda", dtype=dtype)
    return q, k, k


@pytest.mark.parametrize("backend", [None, "vendor", "flex", "triton"])
@pytest.mark.parametrize("options", ["none", "all"])
def test_one_graph_for_thirty_masks_and_five_lengths(backend: str | None, options: str) -> None:
    if (backend, options) == ("vendor", "all"):
        pytest.skip("it has no options")
    counter = CompileCounterWithBackend("eager")

    def block(x: Tensor, weights: Tensor, ids: Tensor, slopes: Tensor, sinks: Tensor) -> Tensor:
        q = (x @ weights).view(1, -1, 8, 64)
        k = (x @ weights[:, :128]).view(1, -1, 2, 64)
        more: dict[str, Any] = (
            {"softcap": 5.0, "bias": alibi(slopes), "sinks": sinks} if options == "all" else {}
        )
        mask = causal() & documents(ids) & window(40)
        found = attention(q, k, k, mask=mask, layout="bshd", backend=backend, **more)
        return x + found.flatten(2) @ weights.T

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    trains = backend in ("vendor", "triton") or (backend is None and options == "none")
    slopes, sinks = (torch.empty(8, device="cuda", requires_grad=trains) for _ in range(2))
    weights = torch.empty(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
    for step in range(30):
        x = torch.empty(1, 128 + 16 * (step % 5), 256, device="cuda", dtype=torch.bfloat16)
        ids = torch.empty(4, dtype=torch.int32, device="cuda")
        out = compiled(x, weights, ids, slopes, sinks)
        assert (out.shape, out.device.type, out.requires_grad) == (x.shape, "cuda", trains)
    assert counter.frame_count <= 2


def test_explain_names_what_runs() -> None:
    q, k, v = qkv(512)
    found = explain(q, k, v, mask=causal())
    assert (found.backend, found.problem.device, found.kernel) == ("vendor", "cuda", "FlashAttention 2")
    assert explain(q, k, v, mask=causal() | window(4, 4)).backend == "flex"
    assert "opt-in" in found.refusals["triton"]
    assert "on CPU arrays" in found.refusals["cpu"]
    assert explain(q, k, v, backend="triton").backend == "triton"


def test_nothing_stores_every_score_unasked() -> None:
    q, k, v = qkv(MOST_KEYS + 1, torch.float64)
    with pytest.raises(BackendError, match="beyond 4,096 keys it is opt-in"):
        explain(q, k, v)
    assert explain(q, k, v, backend="math").backend == "math"


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_results_of_the_operators(order: str) -> None:
    q, k, v = qkv(128)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    bounds = torch.empty(1, 1, 128, 1, 2, dtype=torch.int32, device="cuda")
    out, lse = named_op(q, k, v, bounds, 0.125, backend="triton")
    assert (out.shape, out.stride(), out.device.type) == (q.shape, (65536, 64, 512, 1), "cuda")
    assert (lse.shape, lse.dtype, lse.device.type) == ((1, 8, 128), torch.float64, "cuda")
    gradients = named_backward_op(out, None, q, k, v, bounds, out, lse, 0.125, backend="triton")
    for x, gradient in zip((q, k, v), gradients, strict=False):
        assert (gradient.shape, gradient.dtype, gradient.device.type) == (x.shape, x.dtype, "cuda")


def test_arrays_on_two_devices() -> None:
    q, k, v = qkv(64)
    with pytest.raises(ValueError, match="one device"):
        attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match=r"device cuda:0 \(as q\)"):
        attention(q, k, v, mask=window(3), sinks=torch.empty(8))


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_torchs_own_operators_take_what_vendor_hands_them(
    cudnn: bool, packed: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their schemas and fake kernels; ours have the same sizes and strides."""
    monkeypatch.setattr(vendor, "kernel_of", lambda *_, **__: "cuDNN" if cudnn else "FlashAttention 2")
    # Without a GPU, no device can be made current.
    monkeypatch.setattr(_offsets, "on_device_of", lambda _: nullcontext())
    for name in ("check_kernel", "clear_kernel", "lse_kernel"):
        monkeypatch.setattr(_offsets, name, _no_kernel())
    q, k, v = qkv(128)
    if order == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    ends = torch.empty(4, dtype=torch.int64, device="cuda") if packed else None
    band: tuple[Any, ...] = ends, ends, (128, 128), (-1, 0), 0.125
    found = vendor.forward(q, k, v, *band)
    flat = ends, ends, 128, 128, -1, 0, 0.125
    wanted = vendor_op(q, k, v, *flat)
    gradients = vendor.backward(torch.empty_like(found[0]), q, k, v, *found, *band)
    for a, b in zip((*found, *gradients), (*wanted, q, k, v), strict=True):
        assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "cuda")
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride()


def _no_kernel() -> Any:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: None

    return Kernel()


@pytest.mark.slow
def test_the_code_of_peers_is_counted_beside_ours() -> None:
    """The script's own process: it pretends that a GPU is there."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_code.py"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = {x.split(" | ")[0][2:]: x for x in done.stdout.splitlines()[2:]}
    names = "forward", "query_gradients", "key_gradients", "FlexAttention, forward"
    names += "FlashAttention 2, forward", "FlashAttention 2, backward"
    assert set(rows) == {f"{name}, D={dim}" for name in names for dim in (64, 128)}, done.stderr
    assert all("matrix " in x and "exp2 " in x for x in rows.values())
