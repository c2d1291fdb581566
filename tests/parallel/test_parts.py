"""Parts of a softmax by each backend: merged, they are the whole, and so are their gradients."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from eager_flex import eager
from torch import Tensor

from attnspan import causal
from attnspan.backends import Softmax, table
from attnspan.call import Part
from attnspan.call.options import ALIBI, Options, alibi
from attnspan.experimental import triton
from attnspan.torch import attention

WITHIN: dict[str, Any] = {
    "cpu": nullcontext,
    "math": nullcontext,
    "flex": eager,
    "triton": triton.interpreted,
}


def part_of(bounds: Tensor, start: int, stop: int) -> Tensor:
    return (bounds.clamp(start, stop) - start).contiguous()


@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", WITHIN)
def test_parts_merge(name: str, dtype: torch.dtype, options: bool) -> None:
    backend = table("torch")[name]
    torch.manual_seed(0)
    sizes = (4, 12), (2, 20), (2, 20)
    q, k, v = (torch.randn(1, h, s, 16).to(dtype) for h, s in sizes)
    slopes = torch.rand(1, 4)
    bounds = torch.tensor(causal().spans(12, 20).lowered.bounds)
    at = torch.arange(8, 20, dtype=torch.int32)[None], torch.arange(20, dtype=torch.int32)[None]

    def given(start: int, stop: int) -> Options | None:
        indices = {"q_index": at[0], "k_index": at[1][:, start:stop].contiguous()}
        return Options(softcap=4.0, bias=slopes, bias_kind=ALIBI, **indices) if options else None

    ends = [(0, 9), (9, 20)]  # some rows see nothing of the second
    calls = [Part(q, k[:, :, a:b], v[:, :, a:b], part_of(bounds, a, b), 0.25, given(a, b)) for a, b in ends]
    wide = [x.double().requires_grad_() for x in (q, k, v, slopes)]
    with WITHIN[name]():
        outs = [torch.empty(1, 4, 12, 16) for _ in calls]
        lses = [backend.forward(call, out) for call, out in zip(calls, outs, strict=True)]
        lse = torch.stack(lses).logsumexp(0)
        out = sum(o * (part - lse).exp()[..., None] for o, part in zip(outs, lses, strict=True))
        dout = torch.randn(out.shape).to(dtype)
        found = [torch.zeros(x.shape) for x in (q, k, v)]
        of_slopes = torch.zeros(slopes.shape)
        whole = Softmax(out.to(dtype), lse, dout, None, has_more=True)
        for call, (a, b) in zip(calls, ends, strict=True):
            grads = [torch.empty(x.shape) for x in (call.q, call.k, call.v)]
            dbias, dsinks = backend.backward(call, whole, grads)
            found[0] += grads[0]
            for to, x in zip(found[1:], grads[1:], strict=True):
                to[:, :, a:b] += x
            assert dsinks is None
            assert (dbias is not None) == options
            of_slopes += 0 if dbias is None else dbias
    more: Any = {"softcap": 4.0, "bias": alibi(wide[3])} if options else {}
    wanted, wanted_lse = attention(
        *wide[:3], mask=causal(), scale=0.25, backend="math", return_lse=True, **more
    )
    gradients = torch.autograd.grad(wanted, wide if options else wide[:3], dout.double())
    precise = dtype == torch.float32
    close = {"rtol": 1e-4, "atol": 1e-5} if precise else {"rtol": 3e-2, "atol": 3e-2}
    for a, b in zip([out, lse, *found, of_slopes], [wanted, wanted_lse, *gradients], strict=False):
        torch.testing.assert_close(a.double(), b, **close)
