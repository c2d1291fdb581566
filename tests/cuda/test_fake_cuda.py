"""What a compiler and `explain` see of CUDA tensors, without a GPU: they have no data.

`make test-cuda`, with torch's CUDA build. Autograd's engine wants a device: the operator's backward is called
by itself, and FlexAttention, which derives itself when it is traced, is traced without gradients.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan import causal, documents, window
from attnspan.call.options import alibi
from attnspan.kernels import _offsets, vendor
from attnspan.torch import attention, explain
from attnspan.torch._vendor import vendor_op
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
    bounds = torch.empty(1, 1, 128, 1, 2, dtype=torch.int32, device="cuda")
    named = named_op(q, k, v, bounds, 0.125, backend="triton")
    own = named_backward_op(named[0], None, q, k, v, bounds, *named, 0.125, backend="triton")
    results = *found, *gradients, named[0], *own[:3]
    for a, b in zip(results, (*wanted, q, k, v, q, q, k, v), strict=True):
        assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "cuda")
    for a, b in zip((*found, named[0]), (*wanted, wanted[0]), strict=True):
        assert a.stride() == b.stride()
    assert (named[1].shape, named[1].dtype) == ((1, 8, 128), torch.float64)


def _no_kernel() -> Any:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: None

    return Kernel()
