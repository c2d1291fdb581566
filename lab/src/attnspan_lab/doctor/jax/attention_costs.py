"""Findings on the attention calls of a watched step: avoidable costs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.captured_arrays import given_pairs, longest_form
from attnspan_lab.doctor.jax.hlo import Program, dims_of
from attnspan_lab.doctor.jax.mask_forms import form_of, instead_of
from attnspan_lab.doctor.jax.subject import JaxSubject
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, is_float
from attnspan_lab.doctor.jax.watch import HIDDEN, Attention
from attnspan_lab.doctor.words import counted, for_long

__all__ = ["costs"]

_DTYPES = {
    "bool": "pred",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "s32",
    "int8": "s8",
}


def costs(calls: list[Attention], program: Program, subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield avoidable costs of the calls of each line. ``program`` is the compiled step."""
    for site in grouped(calls, lambda x: (x.places[:1], x.kind)).values():
        call, many = site[0], len(site)
        # The scores of one query grow only linearly with the length.
        stored = [x for x in site if x.visible is None or x.visible.shape[1] > 1]
        if call.kind == "written out" and stored:
            yield _unfused(stored, subject, batch)
        yield from _dense(site, program, subject, batch)
        copies = [x for y in site for z in y.operands if (x := z.repeated()) is not None]
        if copies:
            yield _copied(copies, call, program)
        wide = [x for y in site for x in y.operands if x.upcast is not None]
        if wide:
            what = f"Attention runs in {wide[0].array.dtype}, wider than the arrays it gets"
            text = f"{bytes_text(sum(x.bytes for x in wide))} in {len(wide)} operands per step"
            at = (wide[0].upcast, *call.places[:1])
            yield finding("upcast", what, at, text, count=many)


def _unfused(site: list[Attention], subject: JaxSubject, batch: Any) -> Finding:
    """Describe the scores that the calls of a line store."""
    call, sizes = site[0], dict(x.scores for x in site)
    taken = bytes_text(sum(x.scores[1] for x in site))
    shapes = f"shapes {', '.join(map(str, sizes))} take {taken} in all"
    shapes = shapes if len(sizes) > 1 else f"shape {call.scores[0]} take {bytes_text(call.scores[1])} each"
    growing = [x.scores[1] // _pairs(x) for x in site if _grows(x, subject.size(batch))]
    what = f"The scores of all pairs of {'tokens' if growing else 'a query and a key'} are stored here"
    said = (
        f"{counted(len(site), 'call')} a step; scores of {shapes}",
        for_long(max(growing)) if growing else "",
    )
    more = {"remedy": instead_of(subject, batch, site), "count": len(site), "call": call}
    case = "unfused.dropout" if any(x.dropout for x in site) else "unfused"
    return finding(case, what, call.places[:2], *said, **more)


def _pairs(call: Attention) -> int:
    return prod(sorted(call.scores[0])[-2:]) if call.visible is None else prod(call.visible.shape[1:])


def _grows(call: Attention, size: tuple[int, int] | None) -> bool:
    """Whether queries and keys are the batch's tokens. Blocks and fixed latents do not grow with them."""
    if size is None or not all(x.data for x in call.operands[:2]):
        return False
    # Attention may leave out the last token, as in tokens[:, :-1].
    return call.visible is not None and {*call.visible.shape[1:]} <= {size[1], size[1] - 1}


def _dense(site: list[Attention], program: Program, subject: JaxSubject, batch: Any) -> Iterator[Finding]:
    """Yield the dense mask of the calls of one line, if the step gets, captures or stores it."""
    users = [x for x in site if x.pairs]
    call, masks = site[0], [x for y in users for x in y.pairs]
    if not masks:
        return
    shape = call.scores[0]
    size = (sorted(shape)[-2], sorted(shape)[-1]) if call.visible is None else call.visible.shape[1:]
    mask, places, said = masks[0], masks[0].places[:1], _stored(masks[0], shape, program)
    remedy = tried = ""
    used, given = next(((x, y) for x in masks if (y := given_pairs(x, size))), (mask, None))
    if given is not None:
        mask, places = given
        said = f"is {'captured by' if mask.name == 'constant' else 'an argument of'} the step"
        remedy, tried = _shorter(site, mask, subject, batch)
    if not said:
        return
    case = "dense-mask.loop" if call.depth else "dense-mask"
    shown, numbers = "An array", ""
    if _is_bias(used, beyond=(0, 1)):
        case, shown, numbers = "dense-mask.bias", "An array of a bias", _numbers(used, size)
    what = f"{shown} with an entry for each pair of tokens, shape {np.shape(mask.array)}, {said}"
    text = f"{bytes_text(mask.bytes)}; used by {counted(len(users), 'call')} a step"
    if _grows(call, subject.size(batch)):
        text += f"; {for_long(mask.bytes // prod(sorted(np.shape(mask.array))[-2:]))}"
    places, more = (*places[:1], *users[0].places[:2]), {"remedy": remedy, "tried": tried}
    yield finding(case, what, places, text, numbers, call=call, count=len(users), **more)


def _shorter(site: list[Attention], mask: Value, subject: JaxSubject, batch: Any) -> tuple[str, str]:
    """Write the mask that shows the same pairs in all calls of a line, and what the trial gave.

    An argument of the batch may hide other pairs in the next batch, so no mask is offered for it.
    """
    shown = [x.visible for x in site if x.visible is not None and not x.by_head]
    found = {form_of(subject, batch, x) for x in shown} if len(shown) == len(site) else set()
    biases = any(_is_bias(x) for y in site for x in y.pairs)
    if biases or mask.name != "constant" or len(found) != 1 or not (form := found.pop()):
        return "", ""
    longest = longest_form(mask.array)
    # A window may be longer than this batch. Then the call shows the pairs of causal().
    form = form if not longest.startswith("window") else form.replace("causal()", longest)
    remedy = f"Pass mask={form} to attnspan.jax.attention"
    square = all(x.shape[1] == x.shape[2] for x in shown)
    if form == "causal()" and square:
        remedy = f"Pass is_causal=True, without mask, to jax.nn.dot_product_attention. Or: {remedy}"
    return remedy, f"this form: it hides the same pairs in {counted(len(site), 'call')}"


def _is_bias(mask: Value, beyond: tuple[int, ...] = (0,)) -> bool:
    """Whether a mask does more than hide pairs: it has other numbers for visible pairs than these."""
    shown = np.asarray(mask.array, np.float64) if is_float(mask.array) else np.zeros(1)
    return not np.isin(shown[shown > HIDDEN], beyond).all()


def _numbers(bias: Value, size: tuple[int, ...]) -> str:
    """Say if the numbers of a bias (..., Sq, Sk) depend only on the head and on the distance."""
    x = np.asarray(bias.array, np.float64)
    one = x.ndim < 4 or (x.ndim == 4 and x.shape[0] == 1)
    if not one or x.shape[-2:] != (*size,) or x.shape[-2] != x.shape[-1]:
        return ""
    is_table = bool((x[..., 1:, 1:] == x[..., :-1, :-1]).all())
    return "in this batch, its numbers depend only on the distance between query and key" if is_table else ""


def _copied(copies: list[Value], call: Attention, program: Program) -> Finding:
    first = copies[0]
    size = sum(x.bytes for x in copies)
    grown = f"{first.distinct:,} numbers become {first.size:,}; {bytes_text(size)} per step"
    found = [x for x in program.at(first.places) if x.size == first.size]
    stored = f"the compiled program stores it: {found[0]}" if found else ""
    what = "Keys or values are repeated for query heads that share them"
    places = (*first.places[:1], *call.places[:2])
    return finding("kv-copy", what, places, grown, stored, count=len(copies), call=call)


def _stored(mask: Value, scores: tuple[int, ...], program: Program) -> str:
    """Say where the memory of a mask is, or "" if XLA computes it inside of other loops."""
    dims = dims_of(np.shape(mask.array))
    dtype = _DTYPES.get(str(mask.array.dtype), "")
    # A bias of the shape and dtype of the scores cannot be told from them.
    if dtype != "pred" and dims == dims_of(scores):
        return ""
    found = (x for x in program.at(mask.places) if x.name != "parameter")
    made = any((x.dims, x.dtype) == (dims, dtype) for x in found)
    return "is made in the step and stored" if made else ""
