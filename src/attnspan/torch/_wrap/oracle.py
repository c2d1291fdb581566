"""The check of a wrapped kernel: as an operator, and against float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...masks import Mask, causal, documents, full
from .._attention import Layout, attention
from .errors import DeclarationError
from .parameters import Parameters

_SCALES = ("softmax_scale", "sm_scale", "scale")


@dataclass(frozen=True)
class Report:
    """What `Wrapped.check` found: errors of the kernel and of torch's own attention on the same inputs.

    Args:
        errors: For "out" and each gradient (dq, dk, dv) the norm of the difference from float64 over the norm
            of the float64 result.
        sdpa: The same of `torch.nn.functional.scaled_dot_product_attention`; not below the rounding of the
            exact result to the dtype, which is the least that any kernel has.
        opcheck: What `torch.library.opcheck` said of each of its tests.

    Example:
        >>> print(Report({"out": 3e-7}, {"out": 2e-7}, {"test_schema": "SUCCESS"}))
        out       3.0e-07, SDPA 2.0e-07: 1.50 x
        opcheck   test_schema
    """

    errors: Mapping[str, float]
    sdpa: Mapping[str, float]
    opcheck: Mapping[str, str]

    @property
    def ratios(self) -> dict[str, float]:
        """The kernel's errors over SDPA's."""
        return {name: error / self.sdpa[name] for name, error in self.errors.items()}

    def __str__(self) -> str:
        lines = [
            f"{name:<9} {self.errors[name]:.1e}, SDPA {self.sdpa[name]:.1e}: {ratio:.2f} x"
            for name, ratio in self.ratios.items()
        ]
        return "\n".join([*lines, f"opcheck   {', '.join(self.opcheck)}"])


@dataclass(frozen=True)
class Call:
    """One call of a wrapped kernel, as the check needs it.

    Args:
        op: The operator.
        values: The values.
        names: Of the parameters.
        roles: Names of the parameters that are q, k and v.
        differentiable: Names of those that have a gradient.
        layout: Order of the dims of q, k, v.
        owner: The operator, for errors.
        parameters: The parameters of the kernel.
    """

    op: torch._ops.OpOverload
    values: Sequence[Any]
    names: Sequence[str]
    roles: Sequence[str]
    differentiable: Sequence[str]
    layout: Layout
    owner: str
    parameters: Parameters

    @property
    def named(self) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self.names, self.values, strict=True))


def check_repeats(call: Call) -> None:
    """Refuse a kernel that writes to inputs, gives other bits the second time, or hands out memory twice.

    Raises:
        ValueError: It does.
    """
    values = [x.detach().clone() if isinstance(x, Tensor) else x for x in call.values]
    with torch.no_grad():
        first = _as_tuple(call.op(*values))
        for name, x, before in zip(call.names, values, call.values, strict=True):
            if isinstance(x, Tensor) and not torch.equal(x.nan_to_num(), before.nan_to_num()):
                raise DeclarationError(
                    f"{call.owner}, input {name!r}",
                    expected="an input that the kernel only reads",
                    got="one that it changed",
                    remedy="Let the kernel work on a clone",
                )
        kept = [x.clone() for x in first]
        second = _as_tuple(call.op(*values))
    for a, b, before in zip(first, second, kept, strict=True):
        if a.numel() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            raise DeclarationError(
                call.owner,
                expected="outputs in memory of their own at each call",
                got="the same memory in two calls",
                remedy="Let the kernel return a clone of its buffer",
            )
        if not torch.equal(before.nan_to_num(), b.nan_to_num()):
            raise DeclarationError(
                call.owner,
                expected="the same result for the same arguments",
                got="another one at the second call",
                remedy="Give what it draws on (a seed, a state) to the kernel as an argument: compilers and "
                "checkpoints run it again, or once instead of twice",
            )


def check_operator(call: Call) -> dict[str, str]:
    """Run torch's own checks of operators, with gradients where the kernel has them.

    Raises:
        torch.library.OpCheckError: One fails.
    """
    values = [x.detach().clone() if isinstance(x, Tensor) else x for x in call.values]
    for place, name in enumerate(call.names):
        if name in call.differentiable and isinstance(values[place], Tensor):
            values[place].requires_grad_()
    return dict(torch.library.opcheck(call.op, tuple(values)))


def compare(
    call: Call, mask: Mask | None, oracle: Callable[..., Any] | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the kernel and of SDPA against float64.

    Args:
        call: The call.
        mask: What each query may see; None for what the parameters ``causal``, ``cu_seqlens_q`` and
            ``cu_seqlens_k`` say, else everything.
        oracle: Called with all arguments by name, floating tensors in float64; None for attention under the
            mask and scale.

    Returns:
        Relative errors of the kernel and of SDPA, by name.
    """
    named = call.named
    mask = _mask_of(named) if mask is None else mask
    q = named[call.roles[0]]
    scale = next((float(named[name]) for name in _SCALES if named.get(name) is not None), q.shape[-1] ** -0.5)

    def exact(**all_named: Any) -> Tensor:
        if oracle is not None:
            plain = call.parameters.plain(all_named.values())
            return _as_tuple(oracle(**dict(zip(all_named, plain, strict=True))))[0]
        q, k, v = (all_named[name] for name in call.roles)
        q, k, v = (_to_bhsd(x, call.layout) for x in (q, k, v))
        out = attention(q, k, v, mask=mask, scale=scale, backend="math")
        return _from_bhsd(out, call.layout)

    def peer(**all_named: Any) -> Tensor:
        q, k, v = (all_named[name] for name in call.roles)
        return _sdpa(q, k, v, mask, scale, call.layout)

    def kernel(**all_named: Any) -> Tensor:
        return _as_tuple(call.op(*all_named.values()))[0]

    generator = torch.Generator().manual_seed(0)
    wanted = _results(exact, call, None, torch.float64)
    dout = torch.randn(wanted["out"].shape, generator=generator, dtype=torch.float64).to(q.device)
    wanted, ours, theirs = (
        _results(function, call, dout, dtype)
        for function, dtype in ((exact, torch.float64), (kernel, None), (peer, None))
    )
    errors = {name: _error(ours[name], x) for name, x in wanted.items()}
    sdpa = {name: max(_error(theirs[name], x), _error(x.to(q.dtype), x)) for name, x in wanted.items()}
    return errors, {name: error or torch.finfo(q.dtype).eps for name, error in sdpa.items()}


def _results(
    function: Callable[..., Tensor], call: Call, dout: Tensor | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The output, and with ``dout`` the gradients of those of q, k, v that have one."""
    named = {
        name: x.detach().to(dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x
        for name, x in call.named.items()
    }
    if dout is None:
        with torch.no_grad():
            return {"out": function(**named)}
    sources = [name for name in call.roles if name in call.differentiable]
    for name in sources:
        named[name] = named[name].clone().requires_grad_()
    with torch.set_grad_enabled(bool(sources)):
        out = function(**named)
    grads = torch.autograd.grad(out, [named[name] for name in sources], dout.to(out.dtype)) if sources else ()
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(sources, grads, strict=True)}}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, layout: Layout) -> Tensor:
    """Torch's own attention on the mask's dense form; a row that sees nothing gives 0, as in kernels."""
    q, k, v = (_to_bhsd(x, layout) for x in (q, k, v))
    spans = mask.spans(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], like=q)
    dense = torch.as_tensor(spans.dense(), device=q.device)
    dense = dense.expand(q.shape[0], q.shape[1], -1, -1)
    blind = ~dense.any(-1, keepdim=True)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=dense | blind, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return _from_bhsd(out.masked_fill(blind, 0), layout)


def _to_bhsd(x: Tensor, layout: Layout) -> Tensor:
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if layout == "bshd" else x


def _from_bhsd(x: Tensor, layout: Layout) -> Tensor:
    if layout == "thd":
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if layout == "bshd" else x


def _mask_of(named: Mapping[str, Any]) -> Mask:
    """What the field's parameters say of the mask."""
    mask = causal() if named.get("causal", named.get("is_causal", False)) else full()
    if isinstance(named.get("cu_seqlens_q"), Tensor):
        return mask & documents(named["cu_seqlens_q"], named.get("cu_seqlens_k"))
    return mask


def _error(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        raise DeclarationError(
            "oracle",
            expected=f"shape {tuple(got.shape)}",
            got=f"{tuple(wanted.shape)}",
            remedy="Check the layout",
        )
    norm = float(wanted.double().norm())
    difference = float((got.double() - wanted.double()).norm())
    return difference / norm if norm else difference


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)
