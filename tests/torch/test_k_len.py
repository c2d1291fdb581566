"""A lowered mask that meets another number of keys raises, also where a compiler must not read k_len."""

import copy
import pickle
from typing import Any

import pytest
import torch
from covering import everything, few
from samples.torch_calls import OPERATOR_ERROR
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from attnspan import Prepared, Spans, causal, full, window
from attnspan.library import per_head, per_row
from attnspan.torch import attention

MISFIT = (
    r"mask: expected spans over k_len=8 keys \(as k\), got spans over {}. "
    "Lower the mask for these keys, or pass the layout of q, k and v"
)


def _inputs(k_len: int, q_len: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 2, q_len, 16), torch.randn(1, 2, k_len, 16)


def _attend(q: Tensor, k: Tensor, mask: Any) -> Tensor:
    return attention(q, k, k, mask=mask)


def _lower(kind: str, k_len: int) -> Any:
    like = None if "numpy" in kind else torch.zeros(0)
    # The keys that are seen are the same for each k_len, so that the bounds alone are always plausible.
    prepared = window(2).prepare(8, k_len, q_index=torch.arange(4, 12).numpy(), like=like)
    return prepared if "prepared" in kind else prepared.lowered


OTHERS = ["spans", "prepared by numpy"] if everything() else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prepared", "spans by numpy", *OTHERS])
def test_compiled_code_raises_the_whole_text(kind: str) -> None:
    backend = "aot_eager" if everything() or kind == "prepared" else "eager"
    compiled = torch.compile(_attend, fullgraph=True, backend=backend)
    q, k = _inputs(12)
    q.requires_grad_(kind == "prepared")
    mask = _lower(kind, 12)
    torch.testing.assert_close(compiled(q, k, mask), _attend(q, k, mask))
    q, k = _inputs(8)
    for other in (7, 9, 12):
        with pytest.raises(OPERATOR_ERROR, match=MISFIT.format(other)):
            compiled(q, k, full().prepare(8, other, like=q) if other == 7 else _lower(kind, other))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_math_backend_gives_nan() -> None:
    def run(q: Tensor, k: Tensor, mask: Any) -> Tensor:
        return attention(q, k, k, mask=mask, backend="math")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    q, k = _inputs(8)
    assert torch.isfinite(compiled(q, k, full().prepare(8, 8, like=q))).all()
    for other in (7, 12):
        assert compiled(q, k, full().prepare(8, other, like=q)).isnan().all()


@pytest.mark.slow
def test_spans_that_a_compiled_function_makes_itself() -> None:
    def run(q: Tensor, k: Tensor, cut: int) -> Tensor:
        spans = causal().spans(q.shape[2], k.shape[2] - cut, like=q)
        return attention(q, k, k, mask=spans)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    q, k = _inputs(9)
    torch.testing.assert_close(compiled(q, k, cut=0), run(q, k, cut=0))
    with pytest.raises(OPERATOR_ERROR, match=r"k_len=9 keys .* got spans over 8"):
        compiled(q, k, cut=1)


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


def test_dtensors_have_their_own(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, k = (distribute_tensor(x, mesh, [Shard(0)]) for x in _inputs(8))
        compiled = torch.compile(_attend, fullgraph=True, backend="aot_eager")
        like = torch.zeros(0)
        assert torch.isfinite(compiled(q, k, full().prepare(8, 8, like=like)).to_local()).all()
        with pytest.raises(OPERATOR_ERROR, match=MISFIT.format(7)):
            compiled(q, k, full().prepare(8, 7, like=like))
    finally:
        torch.distributed.destroy_process_group()


def test_it_survives() -> None:
    spans = full().spans(8, 9, like=torch.zeros(0)).lowered
    others: dict[str, Spans] = {
        "copy": copy.copy(spans),
        "deepcopy": copy.deepcopy(spans),
        "pickle": pickle.loads(pickle.dumps(spans)),
        # What FSDP and torch.export do with arguments.
        "pytree": torch.utils._pytree.tree_map(lambda leaf: leaf, spans),
        "take": spans.take_keys(torch.arange(9)).take_queries(torch.arange(8)),
    }
    counter = CompileCounter()
    compiled = torch.compile(_attend, fullgraph=True, backend=counter)
    for way, other in others.items():
        for attend in (compiled, _attend):
            with pytest.raises(OPERATOR_ERROR, match=MISFIT.format(9)):
                attend(*_inputs(8), other)
        assert other.k_len == 9, way
        assert _attend(*_inputs(9), other).shape == (1, 2, 8, 16)
    assert counter.frame_count <= 2  # those that were taken have other strides


_COMBINED: dict[str, Any] = {
    "alone": lambda mask: mask,
    "in an expression": lambda mask: mask & window(3),
    "per_head": lambda mask: per_head([mask, window(2)]),
    "per_row": lambda mask: per_row([mask]),
    "per_head in an expression": lambda mask: window(5) & per_head([window(2), mask | window(1)]),
    "rows": lambda mask: mask.lowered.take_queries(torch.arange(8).flip(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(_COMBINED, 3))
def test_prepared_masks_alone_and_inside_of_others_are_one_program(kind: str) -> None:
    def run(q: Tensor, k: Tensor, mask: Any) -> Tensor:
        return attention(q, k, k, mask=_COMBINED[kind](mask))

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for k_len in (9, 13, 17):
        q, k = _inputs(k_len)
        torch._dynamo.mark_dynamic(k, 2)
        mask = causal().prepare(8, k_len, like=q)
        torch.testing.assert_close(compiled(q, k, mask), run(q, k, mask))
    with pytest.raises(OPERATOR_ERROR, match=r"mask bounds: .* query 0|got spans over 12"):
        compiled(q, k, full().prepare(8, 12, like=q))
    assert counter.frame_count == 1
