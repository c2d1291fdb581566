"""One training step of a model: results, gradients, and their difference from float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = [
    "Outcome",
    "differences",
    "documents_of",
    "in_float64",
    "objective",
    "results_of",
    "run_step",
    "take_step",
]


@dataclass(frozen=True)
class Outcome:
    """Results of a step.

    Attributes:
        results: Results by name in float64, without padding rows.
        gradients: Gradients by parameter name in float64. Parameters without a gradient are left out.
    """

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


def results_of(out: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Select the floating-point results of a model with two dims or more, without padding rows.

    A result belongs to the tokens of ``attention_mask`` (B, S) if its first two dims are equal to the mask's
    dims. In a decoder with an encoder, ``decoder_attention_mask`` is used.
    """
    named = out.items() if isinstance(out, Mapping) else enumerate(out if isinstance(out, tuple) else (out,))
    found = {}
    for name, x in named:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1:
            valid = _valid_rows(str(name), batch)
            fits = valid is not None and valid.shape == x.shape[:2]
            found[str(name)] = x[valid.bool()] if fits and valid is not None else x
    return found


def _valid_rows(name: str, batch: Mapping[str, Any]) -> Tensor | None:
    has_decoder = any(x.startswith("decoder_") for x in batch)
    of_decoder = has_decoder and not name.startswith("encoder")
    mask = batch.get("decoder_attention_mask" if of_decoder else "attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def objective(results: Mapping[str, Tensor]) -> Tensor:
    """Compute a scalar whose gradient in each result is random and of standard-normal size.

    A mean of squares would not work: it is constant for normalized rows, so its gradient would be only
    rounding.
    """
    total = torch.zeros(())
    for x in results.values():
        if x.requires_grad:
            index = torch.arange(x.numel(), dtype=torch.float64)
            weight = (torch.cos(index * 0.7310585) * 2**0.5).reshape(x.shape)
            total = total + (x * weight.to(x.dtype)).sum()
    return total


def run_step(
    call: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], *, backward: bool = True
) -> dict[str, Tensor]:
    """Run forward and optionally backward. Return the results, and leave gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        results = results_of(call(**batch), batch)
    if backward:
        objective(results).backward()  # type: ignore[no-untyped-call]
    return results


def take_step(
    call: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], *, backward: bool = True
) -> Outcome:
    """Run `run_step` and return its outcome. Parameters without a gradient are left out."""
    results = run_step(call, model, batch, backward=backward)
    gradients = {name: x.grad.double() for name, x in model.named_parameters() if x.grad is not None}
    return Outcome({name: x.detach().double() for name, x in results.items()}, gradients)


class _Promoted(TorchFunctionMode):
    """Mode that replaces requests for float32 by float64, for example in softmax, norms and positions."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return fn(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 throughout, even where a model requests float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promoted():
            yield
    finally:
        torch.set_default_dtype(before)


def differences(found: Outcome, exact: Outcome) -> tuple[float, float]:
    """Compute the norm of the difference over the norm: the largest of the results, and of all gradients.

    All gradients together have one norm. If only one outcome has a gradient, the other one counts as zero.
    """
    errors = [_relative([found.results.get(name)], [x]) for name, x in exact.results.items()]
    names = sorted({*found.gradients, *exact.gradients})
    gradients = [[x.gradients.get(name) for name in names] for x in (found, exact)]
    return max(errors, default=float("nan")), _relative(*gradients)


def _relative(found: list[Tensor | None], exact: list[Tensor | None]) -> float:
    difference = size = 0.0
    for x, y in zip(found, exact, strict=True):
        if x is not None and y is not None and x.shape != y.shape:
            return float("inf")
        like = x if x is not None else y
        assert like is not None, "a name of either side"
        x = torch.zeros_like(like) if x is None else x
        y = torch.zeros_like(like) if y is None else y
        difference += float((x - y).square().sum())
        size += float(y.square().sum())
    return (difference / size) ** 0.5 if size else float("inf") if difference else 0.0


def documents_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Number the documents of the tokens, (B, S). A document begins where positions restart.

    The result is None without positions.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    # Some models have positions for time, height and width. The first one follows the text.
    positions = positions[0] if positions.dim() == 3 else positions
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts.long().cumsum(1) - 1
