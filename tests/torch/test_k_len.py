"""A lowered mask that meets another number of keys raises, also where a compiler must not read k_len."""

import copy
import pickle
from typing import Any

import pytest
import torch
from covering import everything
from samples.torch_calls import OPERATOR_ERROR
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from attnspan import Prepared, causal, full, window
from attnspan.library import per_head, per_row
from attnspan.torch import attention

MISFIT = (
    r"mask: expected spans over k_len=8 keys \(as k\), got spans over {}. "
    "Lower the mask for these keys, or pass the layout of q, k and v"
)


def _inputs(k_len: int, q_len: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 2, q_len, 16), torch.randn(1, 2, k_len, 16)


def _attend(q: Tensor, k: Tensor, mask: Any, backend: str | None = None) -> Tensor:
    return attention(q, k, k, mask=mask, backend=backend)


def _lower(kind: str, k_len: int) -> Any:
    like = None if "numpy" in kind else torch.zeros(0)
    # The keys that are seen are the same for each k_len, so that the bounds alone are always plausible.
    prepared = window(2).prepare(8, k_len, q_index=torch.arange(4, 12).numpy(), like=like)
    return prepared if "prepared" in kind else prepared.lowered


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["prepared", "spans by numpy"])
def test_compiled_code_raises_the_whole_text(kind: str) -> None:
    compiled = torch.compile(_attend, fullgraph=True, backend="eager")
    q, k = _inputs(12)
    q.requires_grad_(kind == "prepared")
    mask = _lower(kind, 12)
    torch.testing.assert_close(compiled(q, k, mask), _attend(q, k, mask))
    q, k = _inputs(8)
    for other in (7, 9, 12):
        wrong = full().prepare(8, other, like=q) if other == 7 else _lower(kind, other)
        with pytest.raises(OPERATOR_ERROR, match=MISFIT.format(other)):
            compiled(q, k, wrong)
    if kind == "prepared":  # It waits for no value.
        assert torch.isfinite(compiled(q, k, full().prepare(8, 8, like=q), backend="math")).all()
        assert compiled(q, k, wrong, backend="math").isnan().all()


@pytest.mark.slow
def test_spans_that_a_compiled_function_makes_itself() -> None:
    def run(q: Tensor, k: Tensor, cut: int) -> Tensor:
        return _attend(q, k, causal().spans(q.shape[2], k.shape[2] - cut, like=q))

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    q, k = _inputs(9)
    torch.testing.assert_close(compiled(q, k, cut=0), run(q, k, cut=0))
    with pytest.raises(OPERATOR_ERROR, match=r"k_len=9 keys .* got spans over 8"):
        compiled(q, k, cut=1)


@pytest.mark.parametrize(
    "way",
    [
        *(copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))),
        lambda x: torch.utils._pytree.tree_map(lambda leaf: leaf, x),  # as FSDP and torch.export do
        lambda x: x.take_keys(torch.arange(9)).take_queries(torch.arange(8)),
    ],
    ids=["copy", "deepcopy", "pickle", "pytree", "take"],
)
def test_it_survives(way: Any) -> None:
    spans = way(full().spans(8, 9, like=torch.zeros(0)).lowered)
    with pytest.raises(OPERATOR_ERROR, match=MISFIT.format(9)):
        _attend(*_inputs(8), spans)
    assert spans.k_len == 9
    assert _attend(*_inputs(9), spans).shape == (1, 2, 8, 16)


@pytest.mark.slow
def test_exported_programs_check_it_too() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Prepared) -> Tensor:
            return attention(q, k, k, mask=mask)

    q, k = _inputs(12)
    keys = torch.export.Dim("keys", min=2, max=64)
    mask = causal().prepare(8, 12, like=q)
    shapes = {"q": None, "k": {2: keys}, "mask": [[None, None]]}
    program = torch.export.export(Block(), (q, k, mask), dynamic_shapes=shapes, strict=False).module()
    q, k = _inputs(9)
    mask = causal().prepare(8, 9, like=q)
    torch.testing.assert_close(program(q, k, mask), _attend(q, k, mask))
    with pytest.raises(OPERATOR_ERROR, match=r"k_len=9 keys .* got spans over 12"):
        program(q, k, full().prepare(8, 12, like=q))


_COMBINED: dict[str, Any] = {
    "alone": lambda mask: mask,
    "in an expression": lambda mask: mask & window(3),
    "per_head": lambda mask: per_head([mask, window(2)]),
    "per_row": lambda mask: per_row([mask]),
    "per_head in an expression": lambda mask: window(5) & per_head([window(2), mask | window(1)]),
    "rows": lambda mask: mask.lowered.take_queries(torch.arange(8).flip(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _COMBINED if everything() else ["per_head in an expression"])
def test_prepared_masks_alone_and_inside_of_others_are_one_program(kind: str) -> None:
    def run(q: Tensor, k: Tensor, mask: Any) -> Tensor:
        return _attend(q, k, _COMBINED[kind](mask))

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for k_len in (9, 13):
        q, k = _inputs(k_len)
        torch._dynamo.mark_dynamic(k, 2)
        mask = causal().prepare(8, k_len, like=q)
        torch.testing.assert_close(compiled(q, k, mask), run(q, k, mask))
    with pytest.raises(OPERATOR_ERROR, match=r"mask bounds: .* query 0|got spans over 12"):
        compiled(q, k, full().prepare(8, 12, like=q))
    assert counter.frame_count == 1
