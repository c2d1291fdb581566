"""torch's kernels for plain masks: what they are handed, and what is made of what they give."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from samples.bands import BANDS, OFFSETS, qkv, results
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from vendor_kernels import standing_in

from attnspan import causal, documents, key_padding, segments, window
from attnspan.call import Problem
from attnspan.call.options import alibi
from attnspan.errors import BackendError
from attnspan.kernels import vendor
from attnspan.torch import _vendor, attention, checkpoint_policy, explain
from attnspan.torch._vendor import vendor_op
from attnspan.torch.choice import choose_backend

PLAIN = Problem(1, 4, 2, 8, 8, 64, 64, 1, "bfloat16", "cuda", "causal")


@pytest.fixture
def vendors() -> Iterator[None]:
    with standing_in():
        yield


#: A mask, and numbers of batch rows and of queries; there are 12 keys.
PROBLEMS = {name: (mask, 1 if "documents" in name else 2, 12) for name, mask in BANDS.items()}
PROBLEMS["one query for all documents but one"] = (documents([0, 1, 1, 2], [0, 5, 9, 12]), 1, 2)
PROBLEMS |= {
    f"{name}, {n} rows": (BANDS[name], 2, n) for name in ("full", "causal", "window") for n in (1, 5)
}


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_bands(name: str, cudnn: bool) -> None:
    mask, *sizes = PROBLEMS[name]
    torch.manual_seed(0)
    q, k, v = qkv(*sizes)
    wanted = results(*(x.detach().double().requires_grad_() for x in (q, k, v)), mask=mask, backend="math")
    with standing_in(cudnn):
        found = results(q, k, v, mask=mask, backend="vendor")
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().equal(b.isfinite())
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", BANDS)
def test_lowered_masks_are_known_for_what_they_were(vendors: None, name: str) -> None:
    (q, k, v), mask = qkv(), BANDS[name]

    def attend(mask: Any) -> Tensor:
        return attention(q, k, v, mask=mask, backend="vendor")

    lowered = mask.spans(12, 12, like=q), mask.prepare(12, 12)
    for each in (*lowered, *pickle.loads(pickle.dumps(lowered))):
        assert torch.equal(attend(each), attend(mask))
    if "queries and keys" not in name:
        assert torch.equal(attend(lowered[1] & causal()), attend(mask & causal()))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_results_are_stored_like_those_of_other_kernels(vendors: None, layout: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    if layout != "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if layout == "thd":
        q, k, v = (x[0] for x in (q, k, v))
    call: Any = {"mask": causal() & documents(OFFSETS), "layout": layout, "return_lse": True}
    out, lse = attention(q, k, v, backend="vendor", **call)
    wanted, wanted_lse = attention(q, k, v, backend="math", **call)
    assert (out.stride(), lse.stride()) == (wanted.stride(), wanted_lse.stride())
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 12], [1, 5, 12], [0, 5, 13], [0, -1, 12], [0, 5, 2**31 + 5], [2, 2, 2]], ids=str
)
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_offsets_that_lead_out_of_arrays_give_nan(vendors: None, offsets: list[int], side: str) -> None:
    q, k, v = qkv()
    wrong, right = torch.tensor(offsets), torch.linspace(0, 12, len(offsets)).long()
    both = (wrong, right) if side == "queries" else (right, wrong)
    out, lse = vendor_op(q, k, v, *both, 12, 12, -1, -1, 0.25)
    assert out.isnan().all()
    assert lse.isnan().all()
    for gradient in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert gradient.isnan().all()


def test_what_is_handed_on_and_what_is_not() -> None:
    assert choose_backend(PLAIN, None).name == "vendor"
    assert choose_backend(replace(PLAIN, capability=90), None).name == "vendor"
    for change, reason in {
        "device": ("xpu", "not on xpu"),
        "capability": (75, "8.0 or newer, not 7.5"),
        "dtype": ("float32", "not float32"),
        "extras": (("indices",), "no indices"),
        "band": ("", "documents"),
        "v_dim": (32, "one head dim"),
        "k_len": (0, "no empty arrays"),
        "q_len": (9, "no more queries than keys"),
    }.items():
        other = replace(PLAIN, **{change: reason[0]})
        assert reason[1] in str(vendor.supports(other)), change
        assert choose_backend(replace(other, dtype="float32"), None).name in ("flex", "math"), change
    assert "no plan over ranks" in str(vendor.supports(replace(PLAIN, band="", extras=("plan over ranks",))))
    wide = replace(PLAIN, head_dim=256, v_dim=256)
    assert vendor.supports(wide) is None
    assert "up to 192" in str(vendor.supports(replace(wide, capability=89)))
    assert "one batch element" in str(vendor.supports(replace(PLAIN, band="documents", batch=2)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mask": causal() | window(2, 2)}, "it takes full"),
        ({"mask": segments(torch.zeros(12, dtype=torch.int64))}, "it takes full"),
        ({"mask": causal() & key_padding(torch.tensor([5]))}, "it takes full"),
        ({"mask": (causal() | window(1, 1)).prepare(12, 12)}, "it takes full"),
        ({"mask": causal().spans(12, 12, q_index=np.arange(12))}, "it takes full"),
        ({"mask": causal().spans(12, 12, k_index=np.arange(2, 14))}, "it takes full"),
        ({"mask": causal().prepare(12, 12).lowered}, "it takes full"),
        ({"mask": documents(OFFSETS) & documents(OFFSETS + 0)}, "it takes full"),
        ({"mask": documents([0, 8, 12], [0, 2, 12]) & window(10, 3)}, "it takes full"),
        ({"mask": causal(), "scale": -0.25}, "no scale of 0 or below"),
        ({"mask": causal(), "scale": 0.0}, "no scale of 0 or below"),
        ({"mask": causal(), "softcap": 3.0}, "no softcap"),
        ({"mask": causal(), "bias": alibi(torch.rand(4))}, "no bias"),
        ({"mask": causal(), "sinks": torch.rand(4)}, "no sinks"),
        ({"mask": causal(), "q_index": torch.arange(12)}, "no indices"),
        ({"mask": causal(), "return_lse": True}, "no gradient of lse"),
    ],
)
def test_what_is_more_than_a_band_is_refused(vendors: None, given: dict[str, Any], reason: str) -> None:
    q, k, v = qkv()
    with pytest.raises(BackendError, match=reason):
        attention(q, k, v, backend="vendor", **given)


def test_offsets_from_the_host_are_copied_once(vendors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _vendor._copied.cache_clear()
    handed = []
    forward = vendor.forward
    monkeypatch.setattr(vendor, "forward", lambda *a: handed.append(a[3:6]) or forward(*a))
    q, k, v = qkv()
    with FakeTensorMode():  # A traced call leaves nothing behind.
        attention(*(x.detach() for x in qkv()), mask=documents([0, 3, 12]), backend="vendor")
    handed.clear()
    for _ in range(3):
        attention(q, k, v, mask=documents([0, 3, 12]), backend="vendor")
    attention(q, k, v, mask=documents([0, 5, 12]), backend="vendor")
    assert handed[0][0] is handed[2][1]
    assert handed[3][0].tolist() == [0, 5, 12]
    assert [x[2] for x in handed] == [(9, 9)] * 3 + [(7, 7)], "the longest document is known"


@pytest.mark.slow
def test_one_graph_for_many_packings(vendors: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return attention(q, k, v, mask=causal() & documents(ends), backend="vendor")

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for step in range(3):
        length = 12 + 2 * step
        q, k, v = qkv(1, length, length)
        ends = torch.tensor([0, 1 + 2 * step, 10, length])
        out = compiled(q, k, v, ends)
        wanted = call(q, k, v, ends)
        assert torch.equal(out, wanted)
        assert out.stride() == wanted.stride()
        gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, wanted))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert counter.frame_count <= 2
    torch._dynamo.reset()
    attend = torch.compile(attention, fullgraph=True, backend="eager")
    with pytest.raises((ValueError, RuntimeError), match=r"mask|vendor"):
        attend(*(x.detach() for x in qkv(1, 8, 12)), mask=causal().prepare(8, 8), backend="vendor")


@pytest.mark.slow
def test_the_operator(vendors: None) -> None:
    for offsets in ((None, None), (OFFSETS, OFFSETS)):
        torch.library.opcheck(vendor_op, (*qkv(dtype=torch.float32), *offsets, 12, 12, -1, 0, 0.25))
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(attention(q, k, v, backend="vendor").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(dq.sum(), q)


def test_which_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN where it is trusted, an activated implementation of FlashAttention before either."""
    q, wide, few = torch.zeros(1, 1, 8, 64), torch.zeros(1, 1, 8, 160), torch.zeros(1, 1, 5, 64)
    kernel = lambda x=q, keys=q, window=(-1, -1): vendor.kernel_of(x, keys, keys, window)  # noqa: E731
    assert kernel() == "FlashAttention 2"
    machine = {"capability": (9, 0), "version": 91900}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine["capability"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: machine["version"])
    assert kernel() == kernel(window=(-1, 0)) == kernel(few) == "cuDNN"
    others = kernel(window=(3, 0)), kernel(wide, wide), kernel(few, window=(-1, 0)), kernel(q[:, :, :1])
    assert set(others) == {"FlashAttention 2"}
    for capability, version in (((9, 0), 91500), ((12, 0), 91900), ((8, 0), 91900)):
        machine.update(capability=capability, version=version)
        assert kernel() == "FlashAttention 2", machine
    machine["capability"] = (10, 0)
    assert kernel() == "cuDNN"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    assert kernel() == "FA3"


def test_what_is_not_aligned_is_copied() -> None:
    x = torch.zeros(2, 4, 16, 72, dtype=torch.bfloat16)
    for even in (x, x[..., 8:72]):
        assert _vendor._aligned(even).data_ptr() == even.data_ptr()
    for odd in (x[..., 4:68], x.flatten()[: 2 * 4 * 16 * 68].view(2, 4, 16, 68)[..., :64], x.mT):
        copy = _vendor._aligned(odd)
        assert torch.equal(copy, odd)
        assert copy.data_ptr() != odd.data_ptr()


@pytest.mark.parametrize("policy", [False, True])
def test_checkpoints_keep_its_results(vendors: None, policy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = vendor.forward
    monkeypatch.setattr(vendor, "forward", lambda *a: calls.append(1) or forward(*a))
    keep = partial(create_selective_checkpoint_contexts, checkpoint_policy)
    context: Any = {"context_fn": keep} if policy else {}
    q, k, v = qkv()
    out = checkpoint(
        lambda *x: attention(*x, mask=causal(), backend="vendor"), q, k, v, use_reentrant=False, **context
    )
    out.sum().backward()
    assert len(calls) == (1 if policy else 2)


@pytest.mark.parametrize("name", BANDS)
def test_counted_operations(vendors: None, name: str) -> None:
    counted = []
    for backend in ("vendor", "cpu"):
        q, k, v = qkv()
        with FlopCounterMode(display=False) as counter:
            attention(q, k, v, mask=BANDS[name], backend=backend).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] == explain(q, k, v, mask=BANDS[name]).flops * 7 // 2
