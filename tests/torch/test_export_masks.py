"""Masks as inputs of exported programs, which meet other data and other lengths, and are saved.

tests/test_masks.py takes each mask apart and puts it together, as an export does.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import everything
from samples.lengths import PROBLEMS, Sizes
from test_dynamic_lengths import dynamic_shapes
from torch import Tensor, nn

import attnspan as a
from attnspan.torch import attention


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, mask: Any) -> Tensor:
        return attention(q, k, k, mask=mask)


def _ids(s: Sizes) -> Tensor:
    return torch.randint(0, 2, (s.batch, s.length)).cumsum(-1)


def _prepared(s: Sizes) -> a.Prepared:
    return (a.causal() & a.segments(_ids(s))).prepare(s.length, s.length, batch=s.batch)


FORMS: dict[str, Callable[[Sizes], Any]] = {
    "expression": lambda s: a.causal() & (a.segments(_ids(s)) | a.window(3)),
    "prepared": _prepared,
    "spans": lambda s: _prepared(s).lowered,
}


def _inputs(form: str, s: Sizes) -> tuple[Tensor, Tensor, Any]:
    return torch.randn(s.batch, 4, s.length, 8), torch.randn(s.batch, 2, s.length, 8), FORMS[form](s)


CELLS = [("prepared", "fixed"), ("spans", "varying"), ("expression", "not strict")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind"),
    [(x, y) for x in FORMS for y in ("fixed", "varying", "not strict")] if everything() else CELLS,
)
def test_a_mask_is_an_input_of_an_exported_program_that_is_saved(form: str, kind: str) -> None:
    inputs, stored = _inputs(form, PROBLEMS[0]), io.BytesIO()
    shapes = dynamic_shapes(inputs, _inputs(form, PROBLEMS[1])) if kind == "varying" else None
    program = torch.export.export(Attend(), inputs, dynamic_shapes=shapes, strict=kind != "not strict")
    torch.export.save(program, stored)
    stored.seek(0)
    for each in (program, torch.export.load(stored)):
        for s in PROBLEMS[1:3] if kind == "varying" else PROBLEMS[:1]:
            given = _inputs(form, s)
            torch.testing.assert_close(each.module()(*given), Attend()(*given))


def test_leaves_of_masks_have_names() -> None:
    paths, _ = torch.utils._pytree.tree_flatten_with_path(a.causal() & a.segments(torch.zeros(4).int()))
    assert [torch.utils._pytree.keystr(path) for path, _ in paths] == [".operands[1].q_ids"]
