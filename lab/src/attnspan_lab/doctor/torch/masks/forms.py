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
from attnspan_lab.doctor.names import shown_code
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.words import counted, error_text

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.recording.attention_call import Attention

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
        more.append((f"keys{shown_code(said.padding)}", keys(said.mask)))
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
    # The first query of a causal mask sees one key, which is no prefix.
    if q_len == 1 or bool((first > k_len - q_len + 1).any()):
        yield "causal() | prefix(lengths)", causal() | prefix(first)


def present(call: Attention, **changes: Any) -> Tensor:
    """Compute a call of torch's function again, without dropout, also with other arguments."""
    return F.scaled_dot_product_attention(**_fixed(call) | changes)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Compute the norm of the difference over the norm, without NaN (queries that see nothing)."""
    both = found.isfinite() & wanted.isfinite()
    a, b = found[both].double(), wanted[both].double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call of torch's function."""
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _fixed(call: Attention) -> dict[str, Any]:
    """Read the arguments of a call, without dropout and gradients."""
    return {k: x.detach() if isinstance(x, Tensor) else x for k, x in call.given.items()} | {"dropout_p": 0.0}


def _result(text: str, call: Attention, mask: Mask | None = None, bias: Bias | None = None) -> Tensor:
    """Compute the result of a form on a call's operands. Only attnspan's forms have a mask or a bias."""
    if text in (_PLAIN, _TORCH):
        return present(call, attn_mask=None, is_causal=text == _TORCH)
    given = _fixed(call)
    operands = (given[x] for x in ("query", "key", "value"))
    return attention(*operands, mask=mask, scale=given.get("scale"), bias=bias)


def _error_of(text: str, call: Attention, mask: Mask | None) -> float:
    """Compute the error of a form on a call. Written-out calls with equal pairs have equal results."""
    if call.given:
        return distance(_result(text, call, mask), present(call))
    assert call.visible is not None
    ones, sizes = torch.ones_like(call.visible), call.visible.shape[1:]
    shown = ones.tril()  # torch counts from the first key, and has no sinks.
    if mask is not None:
        shown = torch.as_tensor(mask.spans(*sizes, batch=len(ones), like=ones).dense()).any(1)
    equal = torch.equal(shown.expand_as(ones), call.visible) and (mask is not None or call.keys is None)
    return 0.0 if equal else float("inf")


@dataclass
class Forms:
    """The forms that replace the dense mask of one line in all its calls, and those that do not.

    Args:
        holding: Code of each form whose results equal the present ones in every call with the mask so far.
            None before the first call.
        failing: The largest error of each form that does not.
        masks: Mask of each form that does not depend on a batch.
        calls: Number of calls with the mask on which the forms were tried.
        others: Number of other calls of the line, which have no mask of pairs.
        refused: For each form, the number of the other calls whose results it changes, and the largest error.
        error: The largest error of the forms that hold.
        written: Attention is written out, so the forms are compared by the pairs that they hide.
        untried: The reason if no form could be tried.
    """

    holding: list[str] | None = None
    failing: dict[str, float] = field(default_factory=dict)
    masks: dict[str, Mask] = field(default_factory=dict)
    calls: int = 0
    others: int = 0
    refused: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: float = 0.0
    written: bool = False
    untried: str = ""

    def add(self, call: Attention) -> None:
        """Try the forms on one more call."""
        if why := _why_untried(call):
            self.untried = why
            return
        self.calls += 1
        self.written = not call.given
        try:
            errors = dict(_errors(call))
        except Exception as error:
            self.untried = f"the trial raises {error_text(error, 120)}"
            return
        assert call.visible is not None
        candidates = _candidates(call.visible, call.step.said)
        self.masks |= {x: mask for x, mask in candidates if not _DATA.search(x)}
        equal = [text for text, error in errors.items() if _is_equal(error, call)]
        self.error = max([self.error, *(errors[x] for x in equal)])
        for text in (*(self.holding or ()), *errors):
            if text not in equal:
                self.failing[text] = max(self.failing.get(text, 0.0), errors.get(text, float("inf")))
        self.holding = [x for x in (equal if self.holding is None else self.holding) if x in equal]

    def add_other(self, call: Attention) -> None:
        """Try the forms that hold on another call of the line, which has no mask of pairs."""
        unlike = not call.given and (call.mask_biases or not call.same_in_heads)
        if self.holding and (call.visible is None or unlike):
            self.untried = "the doctor cannot tell which pairs another call of this line shows"
        if call.visible is None or unlike:
            return
        self.others += 1
        masks = {_PLAIN: None, _TORCH: None, **dict(_candidates(call.visible, call.step.said)), **self.masks}
        for text in self.holding or ():
            try:
                error = _error_of(text, call, masks[text.removeprefix("mask=")])
            except Exception:  # The mask needs data that this batch does not have, or does not fit.
                error = float("inf")
            if not _is_equal(error, call):
                many, most = self.refused.get(text, (0, 0.0))
                self.refused[text] = many + 1, max(most, error)

    @property
    def remedy(self) -> str:
        """Text of the remedy: the forms that hold, or that there is none."""
        said = [x for x in (self.holding or ()) if not self.untried]
        everywhere = [x for x in said if x not in self.refused]
        texts = _passed(everywhere or said)
        if not texts:
            return "Keep the mask: the doctor knows no shorter form with the same results"
        if everywhere or not said:
            return texts
        calls, others = counted(self.calls, "call"), counted(self.others, "other call")
        return f"In the {calls} with this mask alone, and not in the {others} of this line: {texts}"

    @property
    def tried(self) -> str:
        """Text of the trials."""
        if self.untried:
            return f"no shorter form was tried: {self.untried}"
        everywhere = [x for x in (self.holding or ()) if x not in self.refused]
        calls = counted(self.calls + (self.others if everywhere else 0), "call")
        held = f"results of {calls} differ by at most {self.error:.1e}"
        held = f"they hide the same pairs in {calls}" if self.written else held
        failed = [f"{x}: {_off(error)}" for x, error in self.failing.items() if x not in (self.holding or ())]
        for text, (many, error) in self.refused.items():
            of = f"{many} of {counted(self.calls + self.others, 'call')} of this line"
            by = "" if error == float("inf") else f", by {error:.1e}"
            failed.append(f"{text}: it would change results of {of}{by}")
        return "; ".join(([f"these forms: {held}"] if self.holding else []) + failed)


def _passed(forms: list[str]) -> str:
    """Write how to pass the forms."""
    if _PLAIN in forms:
        return f"Pass {_PLAIN}"
    texts = [f"Pass {_TORCH}"] * (_TORCH in forms)
    ours = [x for x in forms if x != _TORCH]
    return ". Or: ".join([*texts, *(f"Pass {x} to attnspan.torch.attention" for x in ours[:1])])


def _is_equal(error: float, call: Attention) -> bool:
    return error <= _ROUNDINGS * torch.finfo(call.dtype).eps


def _is_trained(call: Attention) -> bool:
    """Whether a mask's numbers are parameters. Zeros of today say nothing about other steps."""
    return getattr(call.given.get("attn_mask"), "requires_grad", False)


def _why_untried(call: Attention) -> str:
    """Write why no form can be tried on a call, or ""."""
    if call.visible is None:
        return "it is too large"
    if not call.same_in_heads:
        return "its heads, or groups of tokens such as windows, hide different pairs"
    if _is_trained(call) and not call.mask_biases:
        return "the mask requires a gradient, so training changes it"
    if not call.given and call.mask_biases:
        return "numbers are added to scores of visible pairs, outside of an attention function"
    return ""


def _off(error: float) -> str:
    infinite = error == float("inf")
    return "hides other pairs in some calls" if infinite else f"results would differ by {error:.1e}"


def _errors(call: Attention) -> Iterator[tuple[str, float]]:
    """Yield the error of each form on a call's own q, k and v."""
    assert call.visible is not None
    fixed = not call.mask_sources
    found = [x for x in forms(call.visible, call.step.said) if fixed or _DATA.search(x[0])][:2]
    names = [text for text, _ in found]
    if not call.given:  # Written out: the mask adds nothing else.
        for text in [_TORCH] * (fixed and "causal()" in names) + [f"mask={x}" for x in names]:
            yield text, _error_of(text, call, dict(found).get(text.removeprefix("mask=")))
        return
    wanted = present(call)
    if fixed and not call.mask_biases:
        for text in [_PLAIN] * (names[:1] == ["full()"]) + [_TORCH]:
            yield text, distance(_result(text, call), wanted)
    shape = call.given["query"].shape
    if len(shape) != 4:
        return
    for name, bias in _biases(call.given["attn_mask"], shape) if call.mask_biases else [("", None)]:
        for text, mask in found if "relative" in name or not _is_trained(call) else ():
            shown = ", ".join(filter(None, ("" if text == "full()" and name else f"mask={text}", name)))
            yield shown, distance(_result(shown, call, mask, bias), wanted)


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
