"""The check of a wrapped kernel on one call: as an operator, and against float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan.masks import Mask, causal, documents, full
from attnspan.torch import compat
from attnspan.torch._attention import attention

from ._contract import address, as_tuple, expect_declared

if TYPE_CHECKING:
    from ._wrap import Wrapped

Named = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """Result of `Wrapped.check`: errors of the kernel, and of torch's SDPA on the same inputs.

    Attributes:
        errors: Relative error for "out" and each gradient (dq, dk, dv): the norm of the difference from
            float64 over the norm of the float64 result.
        sdpa: The same errors of `torch.nn.functional.scaled_dot_product_attention`. They are at least the
            rounding error of the float64 result in the dtype.
        opcheck: The outcome of each test of `torch.library.opcheck`.

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
        """The kernel's errors divided by SDPA's errors."""
        return {name: error / self.sdpa[name] for name, error in self.errors.items()}

    def __str__(self) -> str:
        lines = [
            f"{name:<9} {self.errors[name]:.1e}, SDPA {self.sdpa[name]:.1e}: {ratio:.2f} x"
            for name, ratio in self.ratios.items()
        ]
        return "\n".join([*lines, f"opcheck   {', '.join(self.opcheck)}"])


def check(
    wrapped: "Wrapped", named: Named, mask: Mask | None, oracle: Callable[..., Any] | None, within: float
) -> Report:
    """Check one call and return the report. The arguments are keyed by name."""
    owner = compat.name_of(wrapped.op)
    _check_repeats(wrapped, named, owner)
    report = Report(*_compare(wrapped, named, mask, oracle), {})
    got = ", ".join(f"{name}: {x:.3g} times" for name, x in report.ratios.items() if not x <= within)
    expected = f"errors of at most {within:g} times SDPA's against float64"
    remedy = "Check mask, scale and layout of the call, or pass oracle=fn"
    expect_declared(not got, owner, expected, got, remedy)
    found = torch.library.opcheck(wrapped.op, tuple(_fresh(named, wrapped.differentiable).values()))
    return Report(report.errors, report.sdpa, dict(found))


def _fresh(named: Named, sources: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Copy the arguments, floating ones to another dtype if it is given. Sources require gradients."""
    copies = {
        name: x.detach().clone().to(dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x
        for name, x in named.items()
    }
    for name in sources:
        if isinstance(copies[name], Tensor):
            copies[name].requires_grad_()
    return copies


def _check_repeats(wrapped: "Wrapped", named: Named, owner: str) -> None:
    """Raise if a kernel writes to inputs, differs on a second call, or returns the same memory twice."""
    given = _fresh(named, ())
    with torch.no_grad():
        first = as_tuple(wrapped.op(*given.values()))
        expected, got = "an input that the kernel only reads", "an input that it changed"
        for name, x in given.items():
            same = not isinstance(x, Tensor) or _equal(x, named[name])
            expect_declared(same, f"{owner}, input {name!r}", expected, got, "Let the kernel work on a clone")
        kept = [x.clone() for x in first]
        second = as_tuple(wrapped.op(*given.values()))
    for a, b, before in zip(first, second, kept, strict=True):
        own, remedy = not a.numel() or address(a) != address(b), "Let the kernel return a clone of its buffer"
        expect_declared(own, owner, "new memory for each call", "the same memory in two calls", remedy)
        expected, got = "the same result for the same arguments", "a different result in the second call"
        remedy = "Pass its seed or state as an argument, because compilers may run the kernel twice"
        expect_declared(_equal(before, b), owner, expected, got, remedy)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _compare(
    wrapped: "Wrapped", named: Named, mask: Mask | None, oracle: Callable[..., Any] | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return relative errors of the kernel and of SDPA against float64, keyed by result."""
    parameters, layout = wrapped.parameters, wrapped.layout
    roles = parameters.required[:3]
    mask = _mask_of(named) if mask is None else mask
    dtype, width = named[roles[0]].dtype, named[roles[0]].shape[-1]
    scales = (named.get(name) for name in ("softmax_scale", "sm_scale", "scale"))
    scale = next((float(x) for x in scales if x is not None), width**-0.5)

    def attend(run: Callable[..., Tensor], given: Named) -> Tensor:
        q, k, v = (_swap(given[name], layout) for name in roles)
        return _swap(run(q, k, v, mask=mask, scale=scale), layout, back=True)

    def exact(given: Named) -> Any:
        if oracle is None:
            return attend(partial(attention, backend="math"), given)
        return oracle(**dict(zip(given, parameters.plain(given.values()), strict=True)))

    sources = [name for name in roles if name in wrapped.differentiable]
    wanted = _results(exact, _fresh(named, sources, torch.float64), sources)
    ours = _results(lambda given: wrapped.op(*given.values()), _fresh(named, sources), sources)
    theirs = _results(lambda given: attend(_sdpa, given), _fresh(named, sources), sources)
    errors = {name: _error(ours[name], x) for name, x in wanted.items()}
    sdpa = {name: max(_error(theirs[name], x), _error(x.to(dtype), x)) for name, x in wanted.items()}
    return errors, {name: error or torch.finfo(dtype).eps for name, error in sdpa.items()}


def _results(function: Callable[[Named], Any], given: Named, sources: Sequence[str]) -> dict[str, Tensor]:
    """Return the first output and the gradients of the sources."""
    with torch.set_grad_enabled(bool(sources)):
        out = as_tuple(function(given))[0]
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, [given[name] for name in sources], dout) if sources else ()
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(sources, grads, strict=True)}}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Run torch's own attention with the dense mask. A query that sees no key gives 0, as in kernels."""
    spans = mask.spans(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], like=q)
    dense = torch.as_tensor(spans.dense(), device=q.device).expand(q.shape[0], q.shape[1], -1, -1)
    blind, grouped = ~dense.any(-1, keepdim=True), q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=dense | blind, scale=scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0)


def _swap(x: Tensor, layout: str, back: bool = False) -> Tensor:
    """Convert from a layout to "bhsd", or back."""
    if layout == "thd":
        return x[0].transpose(0, 1) if back else x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if layout == "bshd" else x


def _mask_of(named: Named) -> Mask:
    """Return the mask that the parameters of common kernels describe."""
    mask = causal() if named.get("causal", named.get("is_causal", False)) else full()
    if isinstance(named.get("cu_seqlens_q"), Tensor):
        return mask & documents(named["cu_seqlens_q"], named.get("cu_seqlens_k"))
    return mask


def _error(got: Tensor, wanted: Tensor) -> float:
    expected, found = f"shape {tuple(got.shape)}", f"{tuple(wanted.shape)}"
    expect_declared(got.shape == wanted.shape, "oracle", expected, found, "Check the layout")
    norm = float(wanted.double().norm())
    return float((got.double() - wanted.double()).norm()) / (norm or 1.0)
