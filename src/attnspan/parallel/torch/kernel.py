"""One rank's attention on keys that it has at hand, without autograd; results may be wider than inputs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.call import Problem
from attnspan.call.options import Options
from attnspan.interop._operators import with_autograd
from attnspan.kernels import math as math_kernel
from attnspan.torch._backends import MODULES, choose_backend, warn_if_slow
from attnspan.torch._front import capability_of

__all__ = ["Call", "attend", "differentiate"]

#: Those that write into arrays, which may be wider than q: the others are framework code.
_KERNELS = ("cpu", "triton")


class Call(NamedTuple):
    """Arguments that forward and backward share.

    Args:
        q: Shape (B, H, n, D).
        k: Shape (B, G, K, D).
        v: Shape (B, G, K, Dv).
        bounds: Shape (B|1, H|1, n, R, 2), int32, contiguous.
        scale: Factor of the scores.
        options: Those of a call, in the form that kernels take; None for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    scale: float
    options: Options | None

    @property
    def backend(self) -> str:
        """Name of the backend that runs the call."""
        of_gpu = ("", "", capability_of(self.q.device)) if self.q.is_cuda else ()
        choice = choose_backend(Problem.of(self.q, self.k, self.v, self.bounds, more=of_gpu), None)
        warn_if_slow(choice)
        return choice.name


def attend(call: Call, out: Tensor) -> Tensor:
    """Write the output, in q's dtype or float32.

    Args:
        call: What to attend to.
        out: Shape (B, H, n, Dv), written; unit last stride.

    Returns:
        lse, shape (B, H, n), float64: parts of a softmax are merged by differences of lse, which float32
        loses where lse is large.
    """
    backend = call.backend
    if backend in _KERNELS:
        lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float64)
        threads = torch.get_num_threads()
        options: Any = {"scale": call.scale, "num_threads": threads, "options": call.options}
        MODULES[backend].forward(*call[:4], out, lse, **options)
        return lse
    q, k, v = call[:3]
    if backend == "math":  # In the dtype of the result: parts of a sum are not rounded before they are added.
        q, k, v = (x.to(out.dtype) for x in (q, k, v))
    found, lse = _plain(backend, q, k, v, call, call.options)
    out.copy_(found)
    return lse


def _plain(
    backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call, options: Options | None
) -> tuple[Tensor, Tensor]:
    """Framework code: the output in q's dtype, lse in float64, or in float32 to float64's rounding."""
    more: dict[str, Any] = {"scale": call.scale, "options": options}
    if backend == "math":
        return math_kernel.forward(q, k, v, call.bounds, wide_lse=True, **more)
    out, lse = MODULES[backend].forward(q, k, v, call.bounds, **more)
    return out, lse.double()


def differentiate(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
    *,
    part: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of a call that may be a part of a whole: other keys share its rows' softmax.

    Args:
        call: The part.
        dout: Gradient of the whole output, shape (B, H, n, Dv).
        dlse: Gradient of the whole lse, or None.
        out: The whole output, in q's dtype.
        lse: The whole lse, float64.
        grads: dq, dk and dv, written, in q's dtype or float32.
        part: Whether the whole has other keys.

    Returns:
        Gradients of the bias and of the sinks of ``call.options``, or None where there is none.
    """
    bias = None if call.options is None else call.options.bias
    sinks = None if call.options is None else call.options.sinks
    backend = call.backend
    if backend in _KERNELS:
        dbias, dsinks = (
            None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
            for x in (bias, sinks)
        )
        MODULES[backend].backward(
            *(dout, dlse, *call[:3], out, lse, call.bounds, *grads),
            scale=call.scale,
            num_threads=torch.get_num_threads(),
            options=call.options,
            dbias=dbias,
            dsinks=dsinks,
            **({"part": part} if backend == "cpu" else {}),  # others take lse as it is
        )
        return dbias, dsinks
    return _differentiate_plainly(backend, call, dout, dlse, out, lse, grads)


def _differentiate_plainly(
    backend: str,
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """By autograd through framework code and the merge, out = sum of exp(lse_part - lse) out_part."""
    options = call.options or Options()
    leaves = {"q": call.q, "k": call.k, "v": call.v, "bias": options.bias, "sinks": options.sinks}
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    # FlexAttention is made for 16 bits; framework code is exact in the dtype of sums.
    as_given = () if backend == "math" else ("q", "k", "v")
    known = {
        name: x.detach().to(x.dtype if name in as_given else dtype).requires_grad_()
        for name, x in leaves.items()
        if x is not None
    }
    with with_autograd():
        given = options._replace(bias=known.get("bias"), sinks=known.get("sinks"))
        q, k, v = (known[x] for x in "qkv")
        part, part_lse = _plain(backend, q, k, v, call, given)
        # A row that sees nothing has lse -inf, whose derivative is none.
        known_lse = part_lse.masked_fill(part_lse == -torch.inf, 0.0)
    weight = (part_lse.to(lse.dtype) - lse).exp().masked_fill(part_lse == -torch.inf, 0.0).detach()
    weight = weight.to(dtype)
    slack = (dout.to(dtype) * (part.detach().to(dtype) - out.to(dtype))).sum(-1)
    slack = slack if dlse is None else slack + dlse
    cotangents = ((dout.to(dtype) * weight[..., None]).to(part.dtype), (slack * weight).to(part_lse.dtype))
    found = torch.autograd.grad((part, known_lse), list(known.values()), cotangents, allow_unused=True)
    by_name: dict[str, Any] = dict(zip(known, found, strict=True))
    for grad, name in zip(grads, ("q", "k", "v"), strict=True):
        if by_name[name] is None:
            grad.zero_()
        else:
            grad.copy_(by_name[name])
    return by_name.get("bias"), by_name.get("sinks")
