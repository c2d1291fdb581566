"""Which rows and keys a mask is for, where it was prepared, came as spans, or is made of several."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnspan as a
from attnspan import torch as at
from attnspan.library import global_sliding, per_head, per_row, selected_blocks
from attnspan.parallel import Layout

ROWS = np.array([2, 5, 0])


def test_indices_given_to_a_prepared_mask_are_refused() -> None:
    prepared = a.causal().prepare(3, 6)
    for lower in (prepared.spans, prepared.prepare):
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask, .*take_queries"):
            lower(3, 6, q_index=ROWS)
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask"):
            lower(3, 2, q_index=ROWS, k_index=np.array([0, 3]))


def test_a_mask_over_keys_of_its_own_order_is_not_combined() -> None:
    some = a.causal().prepare(2, 2, q_index=np.array([5, 6]), k_index=np.array([3, 6]))
    for combine in (lambda: some & a.window(3), lambda: a.window(3) | some):
        with pytest.raises(ValueError, match=r"keys have other indices.*before you prepare one"):
            combine()


@pytest.mark.parametrize("way", ["spans", "prepare"])
@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_what_is_prepared_is_not_written_into(way: str, convert: Any) -> None:
    given = {"q_index": convert(np.arange(2, 5)), "k_index": convert(np.arange(6))}
    mask = getattr(a.causal() & a.segments(convert(np.zeros(6, int))), way)(3, 6, **given)
    for x in (mask.lowered.bounds, mask.q_index, mask.k_index):
        if way == "prepare" and isinstance(x, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                x[...] = 0
    for x in given.values():
        x[...] = 0
    assert mask.q_index.tolist() == [[2, 3, 4]]
    assert mask.k_index.tolist() == [list(range(6))]


OTHER_ROWS = "q_index of a prepared mask: expected the queries that it was prepared for"


#: Masks whose rows are not the last of 16 keys.
OTHERS = {
    "cache": a.cache(np.array([8, 12])),
    "prepared cache": a.cache(np.array([8, 12])).prepare(8, 16, batch=2),
    "documents": a.documents(np.array([0, 4, 8]), np.array([0, 8, 16])),
    "per_row": per_row([a.causal(), a.causal() & a.cache(np.array([9]))]),
}


@pytest.mark.parametrize("join", [lambda x, y: x & y, lambda x, y: y & x, lambda x, y: x | y])
@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_are_the_last_of_the_keys_are_these_alone(name: str, join: Any) -> None:
    want, last = join(a.window(3), a.causal()).spans(8, 16).dense(), np.arange(8, 16)
    for prepared in (a.window(3).prepare(8, 16), a.window(3).prepare(8, 16, q_index=last)):
        with pytest.raises(ValueError, match=OTHER_ROWS):
            join(prepared, OTHERS[name]).spans(8, 16, batch=2)
        for same in (None, last):
            joined = join(prepared, a.causal()).spans(8, 16, q_index=same)
            np.testing.assert_array_equal(joined.dense(), want)


@pytest.mark.parametrize("wrap", [lambda x: per_row([x, x]), lambda x: per_head([x, x])])
def test_a_mixture_of_prepared_masks_has_their_rows(wrap: Any) -> None:
    sizes = {"q_len": 8, "k_len": 16, "batch": 2, "heads": 2}
    mask = wrap(a.causal().prepare(8, 16))
    np.testing.assert_array_equal(mask.spans(**sizes).dense(), wrap(a.causal()).spans(**sizes).dense())
    with pytest.raises(ValueError, match=OTHER_ROWS):
        (mask & a.cache(np.array([8, 12]))).spans(**sizes)


def test_default_rows_of_a_mixture() -> None:
    masks = [a.causal() & a.cache(3), a.causal()]
    rows, heads = per_row(masks).spans(2, 5, batch=2), per_head(masks).spans(2, 5, heads=2)
    assert rows.bounds[:, 0, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 4], [0, 5]]]
    assert heads.bounds[0, :, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 2], [0, 3]]]


def test_keys_that_are_left_do_not_move_the_rows() -> None:
    prepared, some = a.causal().prepare(4, 8), np.arange(4)
    with pytest.raises(ValueError, match=OTHER_ROWS):
        (prepared & a.window(3)).spans(4, 4, k_index=some)
    found, want = (
        (x & a.window(3)).spans(4, 4, k_index=some, q_index=np.arange(4, 8)) for x in (prepared, a.causal())
    )
    np.testing.assert_array_equal(found.bounds, want.bounds)


def test_spans_describe_rows_as_they_come() -> None:
    padding, cache = a.key_padding(6), a.causal() & a.cache(np.array([8, 12]))
    want = (padding & cache).spans(8, 16, batch=2).bounds
    for bare in (a.spans(padding.spans(8, 16)), a.spans(padding.spans(8, 16).bounds)):
        np.testing.assert_array_equal((bare & cache).spans(8, 16, batch=2).bounds, want)


def test_what_is_counted_from_the_first_key_says_nothing_of_rows_before_it() -> None:
    before = global_sliding(1, 2).spans(1, 4, q_index=np.array([-1]))
    assert before.dense()[0, 0].tolist() == [[True, True, False, False]]
    none = selected_blocks(np.full((1, 1, 1, 1), -(2**30)), 4).spans(4, 8, q_index=np.arange(4))
    assert none.cost().sum() == 0


def _locked(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


#: Of spans: an array that can be written, and one that shows its values but may refuse writes.
SHOWN: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "a read-only view": lambda x: (x, _locked(x.view())),
    "an owner with a view that can be written": lambda x: (x.view(), _locked(x)),
    "broadcast": lambda x: (x, np.broadcast_to(x, (2, *x.shape[1:]))),
    "a tensor by DLPack": lambda x: (x, np.from_dlpack(torch.from_numpy(x))),
    "the caller's own": lambda x: (x, x),
}


@pytest.mark.parametrize("name", SHOWN)
def test_values_decide_whatever_an_array_allows(name: str) -> None:
    wide, narrow = a.causal().spans(8, 8).bounds, (a.causal() & a.window(1)).spans(8, 8).bounds
    writable, shown = SHOWN[name](np.array(wide))
    could, batch = shown.flags.writeable, len(shown)
    q = torch.randn(batch, 1, 8, 16)

    def out(mask: a.Mask) -> torch.Tensor:
        return at.attention(q, q, q, mask=mask)

    made = [a.Prepared(a.Spans(shown, 8)), a.Prepared(a.Spans(shown, 8)) & a.full()]
    fixed = [made[0].prepare(8, 8, batch=batch), made[1].spans(8, 8, batch=batch)]
    layout = Layout.of(made[0], q_len=8, ranks=2, batch=batch)
    plan = layout.plan(heads=(1, 1), strategy="exchange", batch=batch)
    assert shown.flags.writeable == could  # The caller's own array stays as it was.
    old, new = out(a.causal()), out(a.causal() & a.window(1))
    for mask in (*made, *fixed, pickle.loads(pickle.dumps(made[0]))):
        assert torch.equal(out(mask), old)
    writable[...] = narrow
    for mask, want in zip((*made, *fixed), (new, new, old, old), strict=True):
        assert torch.equal(out(mask), want)
    for each in (plan, layout.plan(heads=(1, 1), strategy="exchange", batch=batch)):
        assert (each.bounds == wide).all()


def test_prepare_shares_no_memory_with_a_prepared_mask() -> None:
    given = a.causal().spans(4, 4, q_index=np.arange(4), k_index=np.arange(4))
    arrays = [np.array(x) for x in (given.lowered.bounds, given.q_index, given.k_index)]
    mask = a.Prepared(a.Spans(arrays[0], 4), *arrays[1:])
    bare = a.Prepared(a.Spans(arrays[0], 4), arrays[1])
    kept = [mask.prepare(4, 4), mask.spans(4, 4, k_index=np.arange(4)), (bare & a.full()).spans(4, 4)]
    for x in arrays:
        x[...] = 7
    for each in kept:
        assert (each.bounds == given.lowered.bounds).all()
        assert (each.q_index == given.q_index).all()
        assert each.k_index is None or (each.k_index == given.k_index).all()


def test_keys_that_differ_by_batch_row_are_lowered_row_by_row() -> None:
    index, q = torch.tensor([[0, 1, 4], [2, 3, 5]]), torch.randn(2, 1, 3, 8)
    mask = a.causal() & a.window(1)
    text = r"k_index: expected \(k_len,\), for all .* attnspan.spans\(bounds\)"
    with pytest.raises(ValueError, match=text):
        at.attention(q, q, q, mask=mask, k_index=index)
    each = [mask.spans(3, 3, k_index=row).bounds for row in index]
    out = at.attention(q, q, q, mask=a.spans(torch.cat(each)))
    for b, row in enumerate(index):
        one = q[b, None]
        assert torch.equal(out[b, None], at.attention(one, one, one, mask=mask, k_index=row))


def test_a_layout_of_masks_by_head_or_with_two_default_rows() -> None:
    by_head = per_head([a.causal(), a.window(2)])
    with pytest.raises(ValueError, match=r"per_head: .* pass heads= to"):
        Layout.of(by_head, q_len=8, ranks=2)
    layout = Layout.of(by_head, q_len=8, ranks=2, heads=2)
    assert (layout._source.mask.bounds == by_head.spans(8, 8, heads=2).bounds).all()  # type: ignore[union-attr]
    two = a.cache(8) & a.cache([8, 7])
    with pytest.raises(
        ValueError, match=r"q_index: .* For Layout\.of, pass mask\.prepare\(q_len, k_len, q_index"
    ):
        Layout.of(two, q_len=8, ranks=2, batch=2)
    layout = Layout.of(two.prepare(8, 8, batch=2, q_index=np.arange(8)), q_len=8, ranks=2, batch=2)
    assert layout._source.mask.lowered.cost().sum() == 8 * 8 + 8 * 7  # type: ignore[union-attr]
