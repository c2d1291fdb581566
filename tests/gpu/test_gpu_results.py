"""Results and gradients of every backend on the GPU, against the float64 oracle."""

from typing import Any

import pytest
import torch
from covering import cells
from on_gpu import move, needs_gpu
from samples.bands import BANDS, qkv, results
from samples.conformance import OPTIONS, SHAPES, SMALL
from samples.parts import MASKS
from samples.problems import DTYPES, check, make, replace

from attnspan.torch import attention

pytestmark = needs_gpu


CASES = {mask: replace(SMALL, mask=mask) for mask in MASKS} | SHAPES


@pytest.mark.parametrize(
    ("option", "name", "dtype", "backend"), cells(OPTIONS, CASES, DTYPES, ("triton", "flex"))
)
def test_option_under_mask_and_in_shape(option: str, name: str, dtype: str, backend: str) -> None:
    case = replace(CASES[name], options=OPTIONS[option], dtype=DTYPES[dtype])
    problem = make(case)
    leaves = {n: x.detach().cuda().requires_grad_() for n, x in problem.inputs.items()}
    given = {n: x.detach().cuda().requires_grad_() for n, x in problem.setting.parameters.items()}
    keywords = {**problem.setting.build(given), "mask": move(problem.mask), "scale": case.factor}
    # Parameters that are leaves stay what they are; what comes with them is moved.
    keywords = {n: x if _holds(x, given) else move(x) for n, x in keywords.items()}
    out, lse = attention(*leaves.values(), **keywords, return_lse=True, backend=backend)
    dlse = torch.where(lse.isfinite(), problem.dlse.cuda(), 0.0)
    every = {**leaves, **given}
    found = torch.autograd.grad([out, lse], list(every.values()), [problem.dout.cuda(), dlse])
    named = {"out": out, "lse": lse, **{f"d{n}": x for n, x in zip(every, found, strict=True)}}
    check(case, {n: x.detach().double().cpu().numpy() for n, x in named.items()})


def _holds(x: Any, given: dict[str, Any]) -> bool:
    parts = [x, *vars(x).values()] if hasattr(x, "__dict__") else [x]
    return any(part is one for part in parts for one in given.values())


@pytest.mark.parametrize("length", [12, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, dtype: torch.dtype, length: int) -> None:
    if "queries and keys" in name and length != 12:
        pytest.skip("its offsets are those of 12 tokens")
    inputs = move(qkv(1 if "documents" in name else 2, length, length, dtype))
    mask, double = move(BANDS[name]), [x.double().requires_grad_() for x in inputs]
    wanted = results(*double, mask=mask, backend="math")
    found = results(*(x.requires_grad_() for x in inputs), mask=mask, backend="vendor")
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().equal(b.isfinite())
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = (x.requires_grad_() for x in move(qkv(2, 500, 500)))
    runs = [results(q, k, v, mask=BANDS["window"], backend="triton") for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_offsets_that_lead_out_of_arrays_give_nan() -> None:
    from attnspan.torch._vendor import vendor_op

    q, k, v = move(qkv())
    for offsets in ([0, 5, 3, 12], [1, 5, 12], [0, 5, 13], [0, -1, 12]):
        ends = torch.tensor(offsets, device="cuda")
        out, lse = vendor_op(q, k, v, ends, ends, 12, 12, -1, 0, 0.25)
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("backend", ["vendor", "flex", "triton"])
def test_memory_grows_with_the_length_alone(backend: str) -> None:
    peaks = []
    for length in (16384, 65536):
        q = torch.randn(1, length, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        q.requires_grad_()
        attention(q, q, q, mask=BANDS["causal"], backend=backend).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, q, q, mask=BANDS["causal"], backend=backend).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 5 * peaks[0], "four times the tokens"
    assert peaks[1] < 65536 * 65536 // 8


def test_without_memory_the_error_is_torchs_and_a_call_works_afterwards() -> None:
    length = 1 << 20
    q = torch.empty(1, 8, length, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(torch.OutOfMemoryError):
        attention(q, q, q, backend="math")
    small = q[:, :, :256]
    assert attention(small, small, small).shape == small.shape


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("backend", ["vendor", "flex", "triton"])
def test_tensors_need_not_be_on_the_current_device(backend: str) -> None:
    assert torch.cuda.current_device() == 0
    inputs = [x.detach() for x in qkv()]
    here, there = ([x.to(f"cuda:{i}").requires_grad_() for x in inputs] for i in (0, 1))
    mask = BANDS["documents from the host"]
    found = [results(*x, mask=mask, backend=backend) for x in (here, there)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)
