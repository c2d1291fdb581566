"""The backends of torch, which register here, and their whole calls, which autograd differentiates.

`attnspan.backends` has the protocol and the table. `attnspan.torch.choice` chooses the backend of a call.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnspan.backends import ALL_OPTIONS, EVERYWHERE, Backend, Softmax, register
from attnspan.base.arrays import stored
from attnspan.call import Call, Part, Problem
from attnspan.call.options import Options
from attnspan.kernels import cpu, flex, vendor
from attnspan.kernels import math as math_kernel

from ._autograd import with_autograd
from ._options import dropout_seeds
from ._vendor import attend as attend_by_vendor
from .dtensor import is_dtensor, replicated
from .ops import CPU, forward_op, named_op

#: Largest number of keys for which a GPU stores every score by default.
MOST_KEYS = 4096

#: Gradients of the bias and the sinks, each None if the call does not have it.
OptionGradients = tuple[Tensor | None, Tensor | None]


def attend(backend: Backend, call: Call, *, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Run a call and return out and lse, differentiably. The caller receives lse if ``return_lse``."""
    if backend.attend is not None:
        return backend.attend(call)  # type: ignore[no-any-return]
    bounds, options, k_len = call.bounds, call.options or (), call.lowered_for
    if type(call.q) is not Tensor and is_dtensor(call.q):
        bounds, options, k_len = _on_mesh(call.q, call.bounds, call.options, call.lowered_for)
    arguments = call.q, call.k, call.v, bounds, _number(call.scale)
    if backend.name == CPU:
        out, lse = forward_op(*arguments, *options, k_len=k_len)
    else:
        out, lse = named_op(*arguments, *options, k_len=k_len, backend=backend.name)
    return out, (lse.float() if return_lse else lse)


class _Kernel:
    """A kernel that writes into arrays.

    Args:
        module: One of `attnspan.kernels`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def forward(self, part: Part, out: Tensor) -> Tensor:
        lse: Tensor = part.q.new_empty(part.q.shape[:3], dtype=torch.float64)
        self.paged(part, None, out, lse)
        return lse

    def backward(self, part: Part, whole: Softmax, grads: Sequence[Tensor]) -> OptionGradients:
        options = part.options or Options()
        bias = options.bias if whole.want_dbias else None
        dbias, dsinks = (
            None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
            for x in (bias, options.sinks)
        )
        self.module.backward(
            *(whole.dout, whole.dlse, part.q, part.k, part.v, whole.out, whole.lse, part.bounds, *grads),
            scale=part.scale,
            num_threads=torch.get_num_threads(),
            options=part.options,
            dbias=dbias,
            dsinks=dsinks,
            part=whole.has_more,
        )
        return dbias, dsinks

    def paged(self, part: Part, table: Tensor | None, out: Tensor, lse: Tensor) -> None:
        arrays = part.q, part.k, part.v, part.bounds, out, lse
        threads = torch.get_num_threads()
        self.module.forward(*arrays, scale=part.scale, num_threads=threads, options=part.options, table=table)


def of_kernel(name: str, module: Any, **more: Any) -> Backend:
    """Backend of a module with ``supports``, and with the functions of `attnspan.kernels.cpu`."""
    own = _Kernel(module)
    functions: Any = {"forward": own.forward, "backward": own.backward, "paged": own.paged}
    return Backend(name=name, supports=module.supports, options=ALL_OPTIONS, **functions, **more)


class _Framework:
    """Framework code, which autograd differentiates.

    Args:
        module: One of `attnspan.kernels`.
        exact: Whether parts are computed in float32 or wider. Otherwise a part's output is rounded to q's
            dtype before it is added.
    """

    def __init__(self, module: Any, *, exact: bool) -> None:
        self.module, self.exact = module, exact

    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        numbers: Any = {"scale": _number(call.scale), "options": call.options}
        arrays = stored(call.q, "q"), stored(call.k, "k"), stored(call.v, "v"), stored(call.bounds, "mask")
        return self.module.forward(*arrays, lowered_for=call.lowered_for, **numbers)  # type: ignore[no-any-return]

    def forward(self, part: Part, out: Tensor) -> Tensor:
        if self.exact:
            part = replace(part, **{name: getattr(part, name).to(out.dtype) for name in "qkv"})
        found, lse = self._part(part)
        out.copy_(found)
        return lse

    def _part(self, part: Part) -> tuple[Tensor, Tensor]:
        """Output in q's dtype, and lse as float64."""
        more: dict[str, Any] = {"wide_lse": True} if self.exact else {}
        out, lse = self.module.forward(
            part.q, part.k, part.v, part.bounds, scale=part.scale, options=part.options, **more
        )
        return out, lse.double()

    def backward(self, part: Part, whole: Softmax, grads: Sequence[Tensor]) -> OptionGradients:
        """Differentiate the code and the merge, out = sum of exp(lse_part - lse) * out_part, by autograd."""
        options = part.options or Options()
        leaves = {"q": part.q, "k": part.k, "v": part.v, "bias": options.bias, "sinks": options.sinks}
        dtype = torch.promote_types(part.q.dtype, torch.float32)
        as_given = () if self.exact else ("q", "k", "v")
        known = {
            name: x.detach().to(x.dtype if name in as_given else dtype).requires_grad_()
            for name, x in leaves.items()
            if x is not None
        }
        with with_autograd():
            own = options._replace(bias=known.get("bias"), sinks=known.get("sinks"))
            own_out, own_lse = self._part(replace(part, **{x: known[x] for x in "qkv"}, options=own))
            # The lse of a query without keys is -inf, which has no derivative.
            known_lse = own_lse.masked_fill(own_lse == -torch.inf, 0.0)
        weight = (own_lse - whole.lse).exp().masked_fill(own_lse == -torch.inf, 0.0).detach().to(dtype)
        dout = whole.dout.to(dtype)
        slack = (dout * (own_out.detach().to(dtype) - whole.out.to(dtype))).sum(-1)
        slack = slack if whole.dlse is None else slack + whole.dlse
        cotangents = (dout * weight[..., None]).to(own_out.dtype), (slack * weight).to(own_lse.dtype)
        found = torch.autograd.grad((own_out, known_lse), list(known.values()), cotangents, allow_unused=True)
        by_name: dict[str, Any] = dict(zip(known, found, strict=True))
        for grad, name in zip(grads, "qkv", strict=True):
            if by_name[name] is None:
                grad.zero_()
            else:
                grad.copy_(by_name[name])
        return by_name.get("bias"), by_name.get("sinks")


def _of_framework(name: str, module: Any, *, exact: bool, **more: Any) -> Backend:
    own = _Framework(module, exact=exact)
    functions: Any = {"attend": own.attend, "forward": own.forward, "backward": own.backward}
    return Backend(name=name, supports=module.supports, options=ALL_OPTIONS, **functions, **more)


def _attend_by_vendor(call: Call) -> tuple[Tensor, Tensor]:
    assert call.band is not None, "vendor.supports wants one"
    return attend_by_vendor(call.q, call.k, call.v, call.band, _number(call.scale))


def _whole_only(*_: Any) -> Any:
    raise NotImplementedError("vendor.supports refuses plans")


def _many_scores(problem: Problem) -> str | None:
    if problem.device != "cpu" and problem.k_len > MOST_KEYS:
        return f"it stores every score, so beyond {MOST_KEYS:,} keys it is opt-in"
    return None


for _backend in (
    of_kernel(CPU, cpu, default_on=("cpu",)),
    Backend(
        name="vendor",
        supports=vendor.supports,
        attend=_attend_by_vendor,
        forward=_whole_only,
        backward=_whole_only,
        default_on=(vendor.DEVICE,),
    ),
    _of_framework("flex", flex, exact=False, default_on=flex.DEVICES),
    _of_framework("math", math_kernel, exact=True, default_on=(EVERYWHERE,), limit=_many_scores),
):
    register(_backend, last=True)


def _number(scale: Any) -> float:
    """The scale as a number. In torch.jit.trace, a scale that is computed from a size is a tensor."""
    return float(scale) if isinstance(scale, Tensor) else scale


def _on_mesh(
    q: Any, bounds: Tensor, options: Options | None, k_len: Tensor | None
) -> tuple[Any, tuple[Any, ...], Any]:
    """Bounds, option arguments and k_len for the operator, on the mesh of q, a DTensor.

    Every rank has made the same ones from the same arguments.
    """
    from . import _strategies as _strategies  # registers them. The import of DTensor is slow

    seed = None if options is None else options.dropout_seed
    if options is not None and seed is not None and seed.dim() == 0:
        # Each rank numbers its batch elements and heads from 0, so it needs their seeds.
        seed = dropout_seeds(seed.full_tensor() if is_dtensor(seed) else seed, q.shape[0], q.shape[1])
        options = options._replace(dropout_seed=seed)
    mesh = q.device_mesh
    bounds, *arguments, k_len = (
        x if is_dtensor(x) else replicated(x, mesh) for x in (bounds, *(options or ()), k_len)
    )
    return bounds, tuple(arguments), k_len
