"""Shorter forms of a mask. A form is offered only after its result equals the present one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnspan import Bias, Mask, alibi, causal, full, keys, prefix, relative, segments, window
from attnspan.torch import attention
from attnspan_lab.doctor.declared import Declared
from attnspan_lab.doctor.words import counted

if TYPE_CHECKING:
    from attnspan_lab.doctor.attention_call import Attention

__all__ = ["Form", "Forms", "arguments", "distance", "forms", "present"]

_ROUNDINGS = 256  # largest relative error that counts as equal, in roundings of the dtype
_TORCH = "is_causal=True, without attn_mask"
# A mask that is made from data of the batch has a form with data: other batches hide other pairs.
_DATA = re.compile(r"segments|keys|prefix")
_PLAIN = "no mask at all: it hides nothing"
Form = tuple[str, Mask]


def forms(visible: Tensor, said: Declared) -> Iterator[Form]:
    """Yield masks of attnspan that show exactly the visible pairs, the shortest first, with their code.

    Args:
        visible: Visible pairs, bool (B, Sq, Sk).
        said: Facts of the batch, from which document ids and padding are taken.
    """
    batch, q_len, k_len = visible.shape
    for text, mask in _candidates(visible, said):
        try:
            shown = mask.spans(q_len, k_len, batch=batch, like=visible).dense()
        except ValueError:
            continue  # Arrays of the batch do not fit the keys of this call.
        if torch.equal(torch.as_tensor(shown).any(1).expand(visible.shape), visible):
            yield text, mask


def _candidates(visible: Tensor, said: Declared) -> Iterator[Form]:
    q_len, k_len = visible.shape[1:]
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    left = int(distance.expand_as(visible)[visible].max()) if bool(visible.any()) else 0
    bases: list[Form] = [("causal()", causal())]
    if 0 <= left < k_len - 1:
        bases.append((f"window({left})", window(left)))
    more: list[Form] = []
    if said.documents is not None:
        more.append((f"segments({said.ids})", segments(said.documents)))
    valid = visible.any(1)
    if said.mask is not None and said.mask.shape == valid.shape:
        sign = "==" if "padding" in said.padding else "!="
        more.append((f"keys({said.padding} {sign} 0)", keys(said.mask)))
    elif not bool(valid.all()):
        more.append(("keys(valid)", keys(valid)))
    if q_len > 1:  # One query sees all keys under causal(), which also holds for more queries.
        yield "full()", full()
    yield from bases
    for text, mask in more:
        yield text, mask
        yield from ((f"{name} & {text}", base & mask) for name, base in bases)
    if len(more) == 2:
        (a, x), (b, y) = more
        yield f"{a} & {b}", x & y
        yield from ((f"{name} & {a} & {b}", base & x & y) for name, base in bases)
    first = visible[:, 0].sum(-1)
    yield "causal() | prefix(lengths)", causal() | prefix(first)


def present(call: Attention) -> Tensor:
    """Compute the present result of a call of torch's function again, without dropout."""
    args, kwargs = _without_dropout(*call.given)  # type: ignore[misc]
    return F.scaled_dot_product_attention(*args, **kwargs)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Compute the norm of the difference over the norm, without NaN (queries that see nothing)."""
    both = found.isfinite() & wanted.isfinite()
    a, b = found[both].double(), wanted[both].double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call of torch's function."""
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _is_trained(call: Attention) -> bool:
    """Whether a mask's numbers are parameters. Zeros of today say nothing about other steps."""
    mask = arguments(*call.given).get("attn_mask") if call.given is not None else None
    return isinstance(mask, Tensor) and mask.requires_grad


def _without_dropout(args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
    given = arguments(args, kwargs) | {"dropout_p": 0.0}
    return (), {k: x.detach() if isinstance(x, Tensor) else x for k, x in given.items()}


@dataclass
class Forms:
    """The forms that replace the dense mask of one line in all its calls, and those that do not.

    Args:
        holding: Code of each form whose results equal the present ones in every call so far. None before
            the first call.
        failing: The largest error of each form that does not.
        calls: Number of calls on which the forms were tried.
        error: The largest error of the forms that hold.
        written: Attention is written out, so the forms are compared by the pairs that they hide.
        untried: The reason if no form could be tried.
    """

    holding: list[str] | None = None
    failing: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    error: float = 0.0
    written: bool = False
    untried: str = ""

    def add(self, call: Attention, said: Declared) -> None:
        """Try the forms on one more call."""
        if call.visible is None or not call.same_in_heads:
            self.untried = "its heads hide different pairs" if call.visible is not None else "it is too large"
            return
        if _is_trained(call) and not call.mask_biases:
            self.untried = "the mask requires a gradient, so training changes it"
            return
        if call.given is None and call.mask_biases:
            self.untried = "the bias is added to scores outside of an attention function"
            return
        self.calls += 1
        self.written = call.given is None
        try:
            errors = dict(_errors(call, said))
        except (RuntimeError, ValueError, TypeError) as error:
            self.untried = f"the trial raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return
        eps = torch.finfo(call.dtype).eps
        equal = [text for text, error in errors.items() if error <= _ROUNDINGS * eps]
        self.error = max([self.error, *(errors[x] for x in equal)])
        for text in (*(self.holding or ()), *errors):
            if text not in equal:
                self.failing[text] = max(self.failing.get(text, 0.0), errors.get(text, float("inf")))
        self.holding = [x for x in (equal if self.holding is None else self.holding) if x in equal]

    @property
    def remedy(self) -> str:
        """Text of the remedy: the forms that hold, or that there is none."""
        said = [x for x in (self.holding or ()) if not self.untried]
        ours = [x for x in said if x not in (_TORCH, _PLAIN)]
        if _PLAIN in said:
            return f"Pass {_PLAIN}"
        texts = [f"Pass {_TORCH}"] * (_TORCH in said)
        texts += [f"Pass {x} to attnspan.torch.attention" for x in ours[:1]]
        return ". Or: ".join(texts) or "Keep the mask: the doctor knows no shorter form with the same results"

    @property
    def tried(self) -> str:
        """Text of the trials."""
        if self.untried:
            return f"no shorter form was tried: {self.untried}"
        calls = counted(self.calls, "call")
        held = f"results of {calls} differ by at most {self.error:.1e}"
        held = f"they hide the same pairs in {calls}" if self.written else held
        failed = [f"{x}: {_off(error)}" for x, error in self.failing.items() if x not in (self.holding or ())]
        return "; ".join(([f"these forms: {held}"] if self.holding else []) + failed)


def _off(error: float) -> str:
    infinite = error == float("inf")
    return "hides other pairs in some calls" if infinite else f"results would differ by {error:.1e}"


def _errors(call: Attention, said: Declared) -> Iterator[tuple[str, float]]:
    """Yield the error of each form on a call's own q, k and v."""
    assert call.visible is not None
    fixed = not call.mask_sources
    found = [x for x in forms(call.visible, said) if fixed or _DATA.search(x[0])][:2]
    if call.given is None:  # Written out: equal pairs have equal results, because the mask adds nothing else.
        square = call.visible.shape[1] == call.visible.shape[2] and call.keys is None  # torch has no sinks.
        if fixed and square and any(text == "causal()" for text, _ in found):
            yield _TORCH, 0.0
        yield from ((f"mask={text}", 0.0) for text, _ in found)
        return
    wanted, (_, given) = present(call), _without_dropout(*call.given)
    plain = {k: x for k, x in given.items() if k != "attn_mask"}
    if not call.mask_biases:
        for text, options in ((_PLAIN, {}), (_TORCH, {"is_causal": True})):
            error = distance(F.scaled_dot_product_attention(**{**plain, **options}), wanted)
            if fixed and (text == _TORCH or (found[:1] and found[0][0] == "full()")):
                yield text, error
    operands = [given[x] for x in ("query", "key", "value")]
    biases = list(_biases(given["attn_mask"], operands[0].shape)) if call.mask_biases else [("", None)]
    for name, bias in biases:
        if _is_trained(call) and "relative" not in name:
            continue
        for text, mask in found if operands[0].dim() == 4 else ():
            shown = ", ".join(filter(None, ("" if text == "full()" and name else f"mask={text}", name)))
            ours = attention(*operands, mask=mask, scale=given.get("scale"), bias=bias)
            yield shown, distance(ours, wanted)


def _biases(x: Tensor, shape: torch.Size) -> Iterator[tuple[str, Bias]]:
    """Yield biases of attnspan with the values of a dense bias, if it depends only on the distance."""
    bias = x.expand(*shape[:2], *x.shape[-2:])[0].float()
    q_len, k_len = bias.shape[-2:]
    if k_len < 3 or (x.dim() == 4 and x.shape[0] > 1 and bool((x != x[:1]).any())):
        return
    slopes = bias[:, -1, 1] - bias[:, -1, 0]
    if bool(slopes.isfinite().all()):
        yield "bias=alibi(slopes)", alibi(slopes)
    if q_len == k_len:
        # The last query has every distance to earlier keys, and the first query every distance to later keys.
        table = torch.cat([bias[:, -1], bias[:, 0, 1:]], 1)
        yield "bias=relative(table)", relative(table.clamp(min=-9e3))
