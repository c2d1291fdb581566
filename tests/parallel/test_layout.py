"""Layouts: every row has one owner, counts are static, batches are sharded by the same rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.random_spans import any_spans
from torch.distributed.utils import _recursive_to
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from attnspan import Spans, causal, full, segments
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.parallel import Layout, PlanMismatchError
from attnspan.parallel.partition import chunk_size
from attnspan.parallel.rows import Marks, Rows, check_evidence

METHODS = ("balanced", "contiguous", "zigzag")


def check(layout: Layout, q_len: int, ranks: int, members: int, size: int) -> None:
    """All that a table of rows promises."""
    assert (layout.q_len, layout.ranks) == (q_len, ranks)
    assert layout.rows.dtype == np.int32
    groups = layout.rows.reshape(ranks // members, members, layout.planes, -1)
    owner = np.full((layout.planes, q_len), -1)
    for group, plane in np.ndindex(groups.shape[0], layout.planes):
        rows = groups[group, :, plane].reshape(-1)
        count = int((rows >= 0).sum())
        assert (rows[count:] == -1).all(), "padding is at the end of a group"
        assert (np.diff(rows[:count]) > 0).all(), "rows ascend, over the members of a group too"
        assert (owner[plane, rows[:count]] == -1).all(), "no row has two owners"
        owner[plane, rows[:count]] = group
    assert (owner >= 0).all(), "every row has an owner"
    for first in range(0, q_len, size):
        assert (owner[:, first : first + size] == owner[:, first : first + 1]).all(), "chunks stay whole"


@given(
    any_spans(square=True),
    st.integers(1, 6),
    st.integers(1, 3),
    st.none() | st.integers(1, 9),
    st.sampled_from(METHODS),
)
def test_every_row_has_one_owner(
    spans: Spans, groups: int, members: int, size: int | None, method: Any
) -> None:
    planes, heads, q_len = spans.bounds.shape[:3]
    given: dict[str, Any] = {"q_len": q_len, "ranks": groups * members, "members": members}
    given |= {"batch": planes, "heads": heads, "method": method, "rows_per_chunk": size}
    layout = Layout.of(spans, **given)
    assert layout.planes == planes
    check(layout, q_len, groups * members, members, size or chunk_size(q_len, groups))
    again = Layout.of(spans, **given)
    assert (again.rows == layout.rows).all()
    assert again.fingerprint == layout.fingerprint
    # Shapes are static: another mask has as many rows per rank.
    other = Layout.of(full(), **given)
    assert other.rows_per_rank == layout.rows_per_rank
    if other.rows.shape == layout.rows.shape and (other.rows == layout.rows).all():
        assert other.fingerprint == layout.fingerprint
    else:
        assert other.fingerprint != layout.fingerprint


def test_orders() -> None:
    def rows(**given: Any) -> list[list[int]]:
        return Layout.of(causal(), rows_per_chunk=1, **given).rows[:, 0].tolist()  # type: ignore[no-any-return]

    assert rows(q_len=7, ranks=3, method="contiguous") == [[0, 1, -1], [2, 3, -1], [4, 5, 6]]
    assert rows(q_len=8, ranks=2, method="zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows(q_len=5, ranks=1, method="zigzag") == [[0, 1, 2, 3, 4]]
    assert Layout.contiguous(5, ranks=3).rows[:, 0].tolist() == [[0, 1], [2, 3], [4, -1]]
    assert Layout.contiguous(5, ranks=3).is_natural
    for method in METHODS:
        check(Layout.of(causal(), q_len=5, ranks=9, method=method), 5, 9, 1, 1)  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.booleans(), st.booleans()
)
def test_unshard_undoes_shard(
    q_len: int, groups: int, members: int, dim: int, own: bool, torch_too: bool
) -> None:
    ranks, mask = groups * members, causal()
    if own:  # Batch rows have rows of their own, and are dimension 0.
        dim, mask = max(dim, 1), causal() & segments(np.array([np.arange(q_len) // n for n in (3, 4)]))
    layout = Layout.of(mask, q_len=q_len, ranks=ranks, members=members, batch=1 + own)
    assert layout.planes == 1 + own
    shape = [2, 3, 4]
    shape[dim] = q_len
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x = torch.from_numpy(whole) if torch_too else whole
    for at in (dim, dim - 3):
        parts = [layout.shard(x, rank, dim=at, fill=-5) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            assert type(part) is type(x)
            rows, valid = layout.rows[rank], layout.valid(rank)
            for plane in range(2):
                # (n, rest) of the batch row, or of all where batch rows share their rows.
                def pick(y: Any, plane: int = plane) -> np.ndarray:
                    y = np.asarray(y)
                    return np.moveaxis(y[plane], dim - 1, 0) if own else np.moveaxis(y, dim, 0)

                mine, there = plane % layout.planes, pick(part)
                assert (there[valid[mine]] == pick(whole)[rows[mine][valid[mine]]]).all()
                assert (there[~valid[mine]] == -5).all()
        if torch_too:  # Gradients pass.
            leaf = torch.from_numpy(whole).requires_grad_()
            layout.shard(leaf, 0, dim=at).sum().backward()
            assert leaf.grad.sum() == layout.valid(0).sum() * whole.size / q_len / layout.planes
        back = layout.unshard(parts, dim=at)
        assert type(back) is type(x)
        assert back.dtype == x.dtype
        assert np.asarray(back).tolist() == whole.tolist()


SMALL = Layout.contiguous(3, ranks=2)
TWO = Layout.of(segments(np.array([[0, 0, 1, 1], [0, 1, 1, 1]])), q_len=4, ranks=2, batch=2)


def test_a_batch_is_sharded_by_name() -> None:
    names = ("ids", "segment_ids", "labels", "shift_labels", "targets", "input_ids", "weights")
    batch = dict.fromkeys(names, torch.ones(1, 3, dtype=torch.int64))

    def filled(**given: Any) -> list[int]:
        found = SMALL.shard(batch, 1, **given)
        return [int(found[name][0, 1]) for name in names]

    assert filled() == [-1, -1, -100, -100, -100, 0, 0]
    assert filled(fill=7) == [7] * 7
    assert filled(fill=0) == [0] * 7
    assert filled(fill={"labels": 0, "input_ids": 9}) == [-1, -1, 0, -100, -100, 9, 0]
    rows = SMALL.shard(batch, 1)
    assert rows["q_index"].tolist() == [[2, -1]]
    assert rows["q_index"].dtype == torch.int64
    assert rows.marks == (SMALL.fingerprint, 1)
    arrays = TWO.shard({"x": np.arange(8).reshape(2, 4)}, 0)
    assert arrays["q_index"].tolist() == TWO.rows[0].tolist()
    assert type(arrays["q_index"]) is np.ndarray
    assert list(SMALL.shard({}, 0)) == ["q_index"]
    # A mask of labels, or their weights, would count padding if it were filled with -100.
    batch = {
        "label_mask": torch.ones(1, 3, dtype=torch.bool),
        "target_weights": np.ones((1, 3), np.float32),
        "labels": torch.ones(1, 3, dtype=torch.int8),
        # Routers of experts would count padding if its mask said that it is a token.
        "padding_mask": torch.zeros(1, 3, dtype=torch.bool),
        "attention_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    assert [x[0, 1].item() for x in SMALL.shard(batch, 1).values()] == [False, 0.0, -100, True, False, -1]
    assert SMALL.shard(batch, 1, fill={"padding_mask": False})["padding_mask"].tolist() == [[False, False]]


@pytest.mark.parametrize(
    ("x", "fill", "message"),
    [
        (torch.ones(1, 3, dtype=torch.uint8), None, "fill of labels: .* uint8, got -100.*int64"),
        (np.ones((1, 3), np.int8), 200, "a value of int8, got 200"),
        (np.ones((1, 3), np.int64), 1.5, "a value of int64, got 1.5"),
        (torch.ones(1, 3), "none", "a number, got 'none'"),
        (np.ones((1, 3), np.float32), 1j, "a value of float32, got 1j"),
        (torch.ones(1, 3), {"label": 0}, r"names of \['labels'\], got \['label'\]"),
    ],
)
def test_a_fill_that_an_array_cannot_hold(x: Any, fill: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SMALL.shard({"labels": x}, 1, fill=fill)


def test_rows_by_hand() -> None:
    rows = np.array([[[0, 2]], [[1, -2]]])
    layout = Layout(3, rows)
    assert layout.rows.dtype == np.int32
    assert layout.rows.tolist() == [[[0, 2]], [[1, -1]]]
    assert layout.fingerprint == Layout(3, layout.rows).fingerprint
    for changed, message in [
        ([[[0, 1]], [[1, 2]]], "each of 3 rows once"),
        ([[[0, -1]], [[1, -1]]], "each of 3 rows once"),
        ([[[0, 1]], [[3, -1]]], "each of 3 rows once"),
        ([[[0, 1], [0, 2]], [[2, -1], [0, -1]]], "each of 3 rows once"),
        ([[[1, 0]], [[2, -1]]], "ascending rows, -1 behind"),
        ([[[0, 1]], [[-1, 2]]], "ascending rows, -1 behind"),
    ]:
        with pytest.raises(OptionError, match=message):
            Layout(3, np.array(changed))
    for wrong in (rows[:, 0], rows.astype(float), rows.tolist()):
        with pytest.raises(ShapeError, match="ranks, batch elements, rows of a rank"):
            Layout(3, wrong)


#: What trainers do to a batch, and what is left as evidence: its marks, its q_index, or what is said of it.
MOVES: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "to": (lambda x: x.to("meta"), "marks"),
    "loader": (lambda x: next(iter(DataLoader([x], batch_size=None))), "marks"),
    "pin": (lambda x: pin_memory(x, None), "marks"),
    "marks alone": (lambda x: x.marks, "marks"),
    "accelerate": (lambda x: accelerate_operations().send_to_device(x, "meta"), "marks"),
    "accelerate, each": (lambda x: accelerate_operations().recursively_apply(torch.clone, x), "q_index"),
    "Trainer": (lambda x: type(x)({name: y.clone() for name, y in x.items()}), "q_index"),
    "FSDP": (lambda x: _recursive_to(x, torch.device("cpu"), False)[0], "q_index"),
    "comprehension": (lambda x: {name: y.clone() for name, y in x.items()}, "q_index"),
    "q_index alone": (lambda x: x["q_index"][0], "q_index"),
    "expanded": (lambda x: x["q_index"].expand(5, -1).int().numpy(), "q_index"),
    "each on a device": (lambda x: {name: y.to("meta") for name, y in x.items()}, "Take batch.marks"),
    "collated": (lambda x: default_collate([x, LATER.shard({"x": torch.ones(1, 3)}, 1)]), r"got \(2, 1, 2\)"),
    "collated on a device": (lambda x: default_collate([x]).to("meta"), "Take batch.marks"),
    "without q_index": (lambda x: {"x": x["x"]}, "got dict without marks and 'q_index'"),
    "nothing": (lambda _: None, "got none. Pass one of these"),
    "another word": (lambda _: "checked", "got 'checked'"),
    "a tensor": (lambda x: x["x"], "got Tensor"),
}
LATER = Layout(3, np.array([[[0, 2]], [[1, -1]]]))


def accelerate_operations() -> Any:
    return pytest.importorskip("accelerate.utils.operations")


@pytest.mark.parametrize("way", MOVES)
def test_what_trainers_do_to_a_batch_leaves_evidence_or_is_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.clone())
    move, kept = MOVES[way]
    moved, other = (move(one.shard({"x": torch.ones(1, 3)}, 1)) for one in (SMALL, LATER))
    given: Any = SMALL.rows[1], Marks(SMALL.fingerprint, 1)
    if kept not in ("marks", "q_index"):
        with pytest.raises((DtypeError, OptionError, ShapeError), match=kept):
            check_evidence(moved, *given)
        return
    check_evidence(moved, *given)
    wanted = f"rows of layout {SMALL.fingerprint}, got layout" if kept == "marks" else "got others in q_index"
    with pytest.raises(PlanMismatchError, match=wanted):
        check_evidence(other, *given)
    check_evidence("unchecked", *given)


def test_a_pickled_layout_is_the_layout_without_its_mask() -> None:
    layout = Layout.of(causal(), q_len=12, ranks=2)
    found = pickle.loads(pickle.dumps(layout))
    assert found.fingerprint == layout.fingerprint
    assert (found.rows == layout.rows).all()
    plan = found.plan(causal(), heads=(2, 1), strategy="ring")
    assert plan.facts == layout.plan(heads=(2, 1), strategy="ring").facts
    with pytest.raises(OptionError, match=r"mask: expected a mask, got None\. .*a pickled layout has none"):
        found.plan(heads=(2, 1))
    assert len(pickle.dumps(layout)) < 1000


def of(**given: Any) -> Layout:
    return Layout.of(**{"mask": causal(), "q_len": 4, "ranks": 2, **given})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: of(q_len=0), OptionError, "q_len: expected 1 to"),
        (lambda: of(ranks=4, members=3), OptionError, "members: expected a divisor of 4 ranks, got 3"),
        (lambda: of(tolerance=0.9), OptionError, "tolerance: expected a number of at least 1, got 0.9"),
        (lambda: of(heads=(4, 2)), DtypeError, "heads: expected an int, got tuple"),
        (lambda: of(method="greedy"), OptionError, "'balanced', 'contiguous' or 'zigzag', got 'greedy'"),
        (lambda: of(mask=causal().prepare(5, 5)), ShapeError, "4 rows and 4 keys, the whole problem"),
        (lambda: of(mask=segments(np.zeros((3, 4), int)), batch=2), ShapeError, "got 3"),
        (lambda: of(mask=torch.ones(4, 4)), DtypeError, "mask: expected"),
        (lambda: SMALL.shard(np.zeros((1, 4)), 0), ShapeError, r"3 rows along dimension 1, got \(1, 4\)"),
        (lambda: SMALL.shard(np.zeros((1, 3)), 2), OptionError, "rank: expected 0 to 1, got 2"),
        (lambda: SMALL.shard(np.zeros((1, 3)), True), DtypeError, "rank: expected an int, got bool"),
        (lambda: SMALL.shard([1, 2, 3], 0), DtypeError, "an array or a tensor, got list"),
        (lambda: SMALL.shard({"name": "x"}, 0), DtypeError, "shard: name: expected an array"),
        (lambda: SMALL.shard({"q_index": np.zeros((1, 3))}, 0), OptionError, "no entry 'q_index'"),
        (lambda: SMALL.unshard([np.zeros((1, 2))]), ShapeError, "2 parts, got 1"),
        (lambda: SMALL.unshard([np.zeros((1, 3))] * 2), ShapeError, "2 rows along dimension 1"),
        (lambda: TWO.shard(np.zeros((1, 4)), 0), ShapeError, "2 batch elements as dimension 0"),
        (lambda: TWO.shard(np.zeros((4, 2)), 0, dim=0), ShapeError, "2 batch elements as dimension 0"),
        (lambda: Layout.contiguous(-1, ranks=2), OptionError, "q_len"),
    ],
)
def test_errors_say_what_is_wrong(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
