"""Numbers that multiply q, k and the scores, followed from the projections to the softmax."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, is_installed, place_here
from attnspan_lab.doctor.scales import UNKNOWN, Factor, Scale, are_bare, faulty, scale_finding
from attnspan_lab.doctor.torch.masks.forms import arguments
from attnspan_lab.doctor.torch.masks.hiding_values import highest_hiding
from attnspan_lab.doctor.torch.recording.calls import Call, Step, contracted
from attnspan_lab.doctor.torch.recording.lineage import JOINS

__all__ = ["scale_findings"]

_TIMES = ("mul", "rmul", "imul", "multiply")
_BY = ("div", "truediv", "itruediv", "true_divide", "divide")
_SUMS = ("add", "radd", "iadd", "sub", "isub", "where", "masked_fill")
_PRODUCTS = ("matmul", "rmatmul", "bmm", "mm", "einsum", "baddbmm")
_NORMS = ("layer_norm", "rms_norm", "normalize", "group_norm", "batch_norm", "instance_norm")
_MODULES = ("multi_head_attention_forward", "native_multi_head_attention")
#: Places of the scale in the arguments of kernels.
_SCALES_AT = {"attnspan.attention.default": 4, "flex_attention": 5}
_COPIES = {
    *("get", "getitem", "reshape", "view", "view_as", "transpose", "permute", "flatten", "unflatten", "t"),
    *("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "contiguous", "to", "float", "half"),
    *("bfloat16", "double", "type", "type_as", "clone", "detach", "expand", "expand_as", "repeat", "flip"),
    *("repeat_interleave", "squeeze", "unsqueeze", "narrow", "select", "swapaxes", "swapdims", "movedim"),
    *("neg", "negative", "pad", "dropout", "view_as_complex", "view_as_real", "roll", "index_select"),
}


@dataclass(frozen=True)
class _Made:
    """Origin of a tensor, back to its projection.

    Attributes:
        factors: Numbers that multiplied it.
        width: Width of the projection's input, or 0 without a projection.
        parameter: It is a copy of a parameter.
        learned: It depends on a parameter.
        free: A norm or a learned factor changed it.
        dim: Head dim. Only scores have one.
        widths: Widths of the model that belong to scores.
        is_bare: q and k of these scores are projections, and neither of them contains a scale.
        is_biased: A bias or a softcap changed these scores.
    """

    factors: tuple[Factor, ...] = ()
    width: int = 0
    parameter: bool = False
    learned: bool = False
    free: bool = False
    dim: int = 0
    widths: tuple[int, ...] = ()
    is_bare: bool = False
    is_biased: bool = False


_PARAMETER, _LEARNED, _NOTHING = _Made(parameter=True, learned=True), _Made(learned=True), _Made()


class _Scales(TorchFunctionMode):
    """Follows factors through a step, and collects the scale of each attention call."""

    def __init__(self, softmaxes: Collection[Place]) -> None:
        super().__init__()
        self.softmaxes = softmaxes
        self.made = WeakTensorKeyDictionary()
        self.found: dict[Place, list[tuple[Scale, bool]]] = defaultdict(list)
        self.has_learned_bias = False  # As in T5, whose projections contain the scale.

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(fn, "__name__", "").strip("_")
        out = fn(*args, **kwargs)
        given, outs = (list(filter(_is_number, tree_leaves(x))) for x in ((args, kwargs), out))
        if given and outs:
            made = self._made(fn, name, args, kwargs, given, outs[0])
            self.made.update(dict.fromkeys(outs, made))
        return out

    def _of(self, x: Any) -> _Made:
        if not isinstance(x, Tensor):
            return _NOTHING
        found: _Made | None = self.made.get(x)  # type: ignore[no-untyped-call]
        return found or (_PARAMETER if isinstance(x, nn.Parameter) else _NOTHING)

    def _made(self, fn: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], out: Tensor) -> _Made:
        first, learned = self._of(given[0]), any(self._of(x).learned for x in given)
        other = replace(_NOTHING, learned=learned)
        if name in _COPIES:
            return first
        if name == "tanh" and first.dim:  # A softcap.
            return replace(first, is_biased=True)
        if name in (*_TIMES, *_BY) and len(args) > 1:
            return self._times(args[0], args[1], divides=name in _BY)
        if name in (*_SUMS, *JOINS):
            return self._sum(given) or other
        if name in _NORMS:
            return replace(first, free=True, learned=learned)
        if name in ("linear", "addmm"):
            return replace(_LEARNED, width=given[name == "addmm"].shape[-1])
        if name in _PRODUCTS and len(given) > 1:
            return self._product(name, given[-2:], args, kwargs, out) or other
        if name == "softmax" and first.dim and place_here() in self.softmaxes:
            self._note(first)
        elif name == "scaled_dot_product_attention":
            of = arguments(args, kwargs)
            self.has_learned_bias |= self._of(of.get("attn_mask")).learned
            self._call(of["query"], of["key"], of.get("scale"), of["query"].shape[-1])
        elif (place := _SCALES_AT.get(str(fn), 99)) < len(args):
            self._call(args[0], args[1], args[place], args[0].shape[-1])
        elif name in _MODULES and len(args) > 4 and args[0] is not args[1]:
            self._call(args[0], args[1], None, args[3] // args[4])
        return _NOTHING if first.dim else other  # The maximum or the softmax of scores.

    def _times(self, x: Any, y: Any, *, divides: bool) -> _Made:
        for a, b in ((x, y),) if divides else ((x, y), (y, x)):
            value = self._number(b)
            if isinstance(a, Tensor) and value:
                factor, made = Factor(1 / value if divides else value, place_here()), self._of(a)
                return replace(made, factors=(*made.factors, factor))
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return _LEARNED
        a, b = (x, y) if x.numel() >= y.numel() else (y, x)
        # Rotations multiply by fixed numbers for each dim. Norms have one number for each vector.
        free = self._of(b).learned or b.shape[-1:] == (1,)
        return replace(self._of(a), free=self._of(a).free or free)

    def _number(self, x: Any) -> float | None:
        if isinstance(x, Tensor):
            return float(x) if x.numel() == 1 and not x.is_complex() and not self._of(x).learned else None
        return float(x) if isinstance(x, (int, float)) else None

    def _sum(self, given: list[Tensor]) -> _Made | None:
        """Join tensors: rotated halves, cached keys, or scores with a mask or a bias."""
        scores = next((x for x in given if self._of(x).dim), None)
        if scores is not None:
            made, more = self._of(scores), [x for x in given if not self._of(x).dim]
            self.has_learned_bias |= any(self._of(x).learned for x in more)
            return replace(made, is_biased=made.is_biased or not all(map(_is_mask, more)))
        found = {self._of(x) for x in given if self._of(x).learned and not self._of(x).parameter}
        return found.pop() if len(found) == 1 else None

    def _product(self, name: str, pair: list[Tensor], args: Any, kwargs: Any, out: Tensor) -> _Made | None:
        """Describe a projection, or the scores of two projections."""
        (a, b), inner = map(self._of, pair), pair[0].shape[-1]
        if name == "einsum":
            dim = contracted(args[0], 0, pair[0].dim())
            if dim is None:
                return None
            inner = pair[0].shape[dim]
        if a.parameter or b.parameter:
            return replace(_LEARNED, width=inner)
        if not (a.learned and b.learned) or a.dim or b.dim:
            return None
        own = kwargs.get("alpha", 1) if name == "baddbmm" else 1
        made = self._scores(pair[0], pair[1], own, inner, out.shape[1] if out.dim() == 4 else 1)
        return replace(made, is_biased=name == "baddbmm")

    def _scores(self, q: Tensor, k: Tensor, own: float, dim: int, heads: int) -> _Made:
        """Describe the product of q and k."""
        a, b = self._of(q), self._of(k)
        factors = (*a.factors, *b.factors, *((Factor(own, place_here()),) if own != 1 else ()))
        sizes = [float(x.float().square().mean()) ** 0.5 for x in (q, k)]
        is_bare = are_bare((a.width, b.width), sizes, dim)
        widths = (a.width, dim * heads)
        return _Made(factors, free=a.free or b.free, learned=True, dim=dim, widths=widths, is_bare=is_bare)

    def _call(self, q: Tensor, k: Tensor, scale: Any, dim: int) -> None:
        """Note a call of a function that scales the product of q and k."""
        own = dim**-0.5 if scale is None else float(scale)
        self._note(self._scores(q, k, own, dim, q.shape[1] if q.dim() == 4 else 1))

    def _note(self, made: _Made) -> None:
        place = place_here()
        if place is not None and not made.free:
            scale = Scale(made.factors, made.dim, made.widths, place, made.is_bare)
            self.found[place].append((scale, made.is_biased))


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _is_mask(x: Tensor) -> bool:
    return x.is_floating_point() and bool(((x == 0) | (x <= highest_hiding(x))).all())


def scale_findings(step: Step, coverage: Coverage, done: set[Place]) -> Iterator[Finding]:
    """Yield calls whose scores have another scale than usual, and not one of the scales that may be a choice.

    Args:
        step: The step.
        coverage: Collects the checks.
        done: Lines that have a finding.
    """
    seen, topic = _Scales(step.lines), "scale of scores"
    step.again(mode=seen)
    if step.calls and not seen.found:
        coverage.absent(topic, UNKNOWN)
    for place, calls in seen.found.items():
        if place in done or is_installed(place.file):
            continue
        coverage.made(topic, "numbers were followed from the projections to the softmax")
        scales, biased = zip(*calls, strict=True)
        scale = faulty(scales, learned_bias=seen.has_learned_bias)
        if scale is not None:
            done.add(place)
            tried = "not tried: the scores have a bias or a softcap" if any(biased) else _tried(step, scale)
            yield scale_finding(scale, tried)


def _tried(step: Step, scale: Scale) -> str:
    """Run the step with the usual scale at a line, and say by how much results change."""
    ratio = scale.usual / scale.total

    def scaled(call: Call) -> Tensor | None:
        if call.place != scale.place:
            return None
        if not call.is_torchs:
            return call.result_of(scores=call.rows * ratio)
        return call.result_of(scale=(call.given.get("scale") or call.rows.shape[-1] ** -0.5) * ratio)

    change = step.differs(step.again(replace=scaled))
    said = f"with the usual scale at this line, results of the model change by {change:.1e} (relative). "
    return f"{said}The change does not show which scale is right" if change else ""
