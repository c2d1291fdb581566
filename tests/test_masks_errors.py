"""What is said about masks that cannot be: expected, got, remedy. torch/test_call_errors.py has calls."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attnspan as a

IDS = np.array([0, 0, 1, 1])
_ONE_SPAN = np.zeros((1, 1, 1, 1, 2), np.int32)

AT_ONCE = [
    (lambda: a.window(-1), "window: left: expected 0 to 2147483647, got -1"),
    (lambda: a.window(2**31), "window: left: expected 0 to 2147483647, got 2147483648"),
    (lambda: a.window(1.5), "window: left: expected an int, got float"),
    (lambda: a.window(True), "window: left: expected an int, got bool"),
    (lambda: a.global_keys(-1), "global_keys: n: expected 0 to"),
    (lambda: a.segments(IDS, max_runs=0), "segments: max_runs: expected 1 to"),
    (lambda: a.segments(IDS.astype(float)), "segments: q_ids: expected an integer array, got float64"),
    (lambda: a.segments(torch.zeros(4)), "segments: q_ids: expected an integer array, got torch.float32"),
    (lambda: a.segments(IDS > 0), "expected an integer array, got bool"),
    (lambda: a.segments(IDS[None, None]), r"an array with 1 or 2 axes, got \(1, 1, 4\)"),
    (lambda: a.segments("0011"), "expected an integer array, got str"),
    (lambda: a.segments(IDS, padding_id="no"), "segments: padding_id: expected an int, got str"),
    (lambda: a.prefix(-2), "prefix: lengths: expected 0 to"),
    (lambda: a.key_padding(3, side="top"), 'key_padding: side: expected "right" or "left", got \'top\''),
    (lambda: a.key_padding(3, start=-1), "key_padding: start: expected 0 to"),
    (lambda: a.key_padding(3, start=4, stop=2), "stop: expected 4 to .* Pass the first key after the part"),
    (lambda: a.key_padding(IDS > 0), r"lengths: expected integers, got bool. Take keys\(valid\)"),
    (lambda: a.window(-1, -1), "window: left: expected 0 to .*, got -1. .*None for all keys of a side"),
    (lambda: a.window((3, 0)), r"window: left: expected an int, got tuple. Write window\(left, right\)"),
    (lambda: a.keys(IDS[None, None, None] > 0), r"one axis of keys, got \(1, 1, 1, 4\). .*mask\[:, 0, 0\]"),
    (lambda: a.keys(IDS), r"keys: valid: expected a bool array, got int64. Compare: .* mask != 0"),
    (
        lambda: a.keys(IDS[None, None] > 0),
        r"keys: valid: expected an array with 1 or 2 axes, got \(1, 1, 4\)",
    ),
    (lambda: a.keys(IDS > 0, max_runs=0), "keys: max_runs: expected 1 to"),
    (lambda: a.groups(IDS + 0.5), "groups: ids: expected an integer array"),
    (lambda: a.from_dense(IDS), "from_dense: visible: expected a bool array, got int64"),
    (lambda: a.from_dense(IDS > 0), r"with 2 or 3 or 4 axes, got \(4,\)"),
    (lambda: a.from_dense(IDS[None] > 0, max_runs=0), "from_dense: max_runs: expected 1 to"),
    (lambda: a.from_predicate(3), "from_predicate: fn: expected a function"),
    (lambda: a.from_predicate(print, max_runs=0), "from_predicate: max_runs: expected 1 to"),
    (lambda: a.from_predicate(print, max_runs=1.5), "from_predicate: max_runs: expected an int, got float"),
    (lambda: a.from_block_mask(SimpleNamespace(mask_mod=print), -1), "from_block_mask: max_runs: expected 1"),
    (lambda: a.from_block_mask(3), "from_block_mask: mask_mod: expected a function"),
    (lambda: a.spans(np.zeros((2, 2), int)), "Spans: expected bounds of shape"),
    (lambda: a.Spans(_ONE_SPAN, 3.5), "Spans: k_len: expected an int, got float"),
    (lambda: a.Spans(_ONE_SPAN, True), "Spans: k_len: expected an int, got bool"),
    (lambda: a.Spans(_ONE_SPAN, None), "Spans: k_len: expected an int, got NoneType"),
    (lambda: a.Spans(_ONE_SPAN, -1), "Spans: k_len: expected at least 0, got -1"),
    (lambda: a.segments([0], padding_id=True), "segments: padding_id: expected an int, got bool"),
    (lambda: a.segments([[0, 1], [2]]), "segments: q_ids: expected rows of one length"),
    (lambda: a.causal().spans(4, 4, like="cpu"), "like: expected an array, got str"),
]

WHEN_LOWERED = [
    (a.segments(np.zeros((3, 4), int)), {}, "q_ids: expected 1 or 2 along the batch axis, got 3"),
    (a.segments(IDS[:3], IDS), {}, "segments: q_ids: expected one entry per query row, 4, got 3"),
    (a.segments(IDS), {"q_index": np.array([0, 1, 2, 4])}, "q_index: expected indices below 4"),
    (a.documents([0, 3, 2]), {}, "cu_seqlens_q: expected ascending offsets that start at 0 and end at 4"),
    (a.documents([1, 4]), {}, "ascending offsets that start at 0"),
    (a.documents([0, -1, 4]), {}, "ascending offsets that start at 0"),
    (a.documents([0, 5]), {}, "end at 4 or before"),
    (a.documents([0, 4], [0, 5]), {}, "cu_seqlens_k: expected ascending offsets .* end at 4"),
    (a.prefix([-1, 2]), {}, "prefix: lengths: expected lengths of at least 0, got"),
    (a.prefix([-1], [0, 4]), {}, "prefix: lengths: expected lengths of at least 0, got"),
    (a.key_padding([5, 4]), {}, "key_padding: lengths: expected lengths of at least 0 and at most 4"),
    (a.key_padding(5), {}, "key_padding: expected a length of at least 0 and at most 4.*, got 5"),
    (a.key_padding(1, stop=5), {}, "start, stop: expected a part of the 4 keys, got keys 0 to 5"),
    (a.key_padding(1, start=5), {}, "start, stop: expected a part of the 4 keys, got keys 5 to 4"),
    (a.key_padding([3, 0], start=2), {}, "lengths: expected lengths of at least 0 and at most 2"),
    (a.keys(np.array([True, False, True, True]), 1), {}, "keys"),
    (a.keys(np.ones(3, bool)), {}, r"keys\(bool\[3\]\): expected arrays that describe 4 keys, got 3"),
    (a.cache([5, 4]), {}, "cache: lengths: expected lengths of at least 0 and at most 4"),
    (a.cache(2) & a.cache(3), {}, r"q_index: expected one default .* got one from cache\(2\) and another"),
    (a.cache([2, 2]) & a.documents([0, 4], [0, 4]), {}, "q_index: expected one default"),
    (a.from_dense(np.ones((1, 3, 4, 4), bool)), {}, "expected 1 along the heads axis, got 3. .*heads="),
    (
        a.from_predicate(lambda b, h, q, k: q > k and k > 2),
        {},
        r"from_predicate\(<lambda>\): .* Write it with &",
    ),
    (a.spans(np.full((1, 1, 4, 1, 2), 5)), {}, r"row 0: expected .* in \[0, 4\], got \(5, 5\). Clip"),
    (a.causal().prepare(3, 4), {}, r"prepared mask: expected .* = \(2, 1, 4, 4\), got \(1, 1, 3, 4\)"),
    (a.causal(), {"q_index": np.zeros(3, int)}, "q_index: expected one global index per query row, 4, got 3"),
    (a.causal(), {"q_index": np.zeros(4)}, "q_index: expected an integer array, got float64"),
    (a.causal(), {"q_index": np.full(4, 2**31)}, "q_index: expected int32 indices"),
    (a.causal(), {"k_index": np.array([0, 1, 1, 2])}, "k_index: expected strictly ascending"),
    (
        a.segments(IDS),
        {"q_index": IDS, "k_index": np.array([0, 1, 2, 4])},
        r"take_keys: expected indices in \[0, 4\)",
    ),
    (
        a.from_predicate(lambda b, h, q, k: q >= k),
        {"k_index": np.arange(4)},
        r"from_predicate\(<lambda>\): .* k_index alone",
    ),
]


@pytest.mark.parametrize(("make", "message"), AT_ONCE, ids=[x[1] for x in AT_ONCE])
def test_a_mask_that_cannot_be_is_refused_where_it_is_made(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(("mask", "options", "message"), WHEN_LOWERED, ids=[x[2] for x in WHEN_LOWERED])
def test_a_mask_that_does_not_fit_is_refused_where_it_is_lowered(mask, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mask.spans(4, 4, batch=2, **options)


@pytest.mark.parametrize("size", [8.0, (8,), torch.tensor(8), np.ones(1, int), None, "8", True], ids=repr)
def test_sizes_are_numbers(size):
    with pytest.raises(TypeError, match=r"_len: expected an int, got .* Pass a number"):
        a.causal().prepare(size, 8)
    with pytest.raises(TypeError, match=r"_len: expected an int, got .* Pass a number"):
        a.causal().prepare(8, size)
    assert a.causal().prepare(np.int64(8), 8).lowered.k_len == 8


def test_lists_are_taken_for_arrays():
    wanted = np.array([[True, False, True]])
    assert np.array_equal(a.keys([True, False, True]).spans(1, 3).dense()[0, 0], wanted)
    assert np.array_equal(a.from_dense(wanted.tolist()).spans(1, 3).dense()[0, 0], wanted)


BEYOND = [
    (
        lambda x: a.documents(x([0, 2**32 + 4])),
        "documents: cu_seqlens_q: expected at most 2147483647, got 4294967300",
    ),
    (lambda x: a.documents(x([0, 4]), x([0, 2**32 + 4])), "cu_seqlens_k: expected at most 2147483647"),
    (lambda x: a.key_padding(x([2**32 + 3, 2])), "key_padding: lengths: expected at most 2147483647"),
    (lambda x: a.cache(x([2**32 + 3, 2])), "cache: lengths: expected at most 2147483647"),
    (lambda x: a.prefix(x([2**32 + 3, 2])), "prefix: lengths: expected at most 2147483647"),
    (lambda x: a.prefix(x([2**32 + 3, 2]), x([0, 2, 4])), "prefix: lengths: expected at most 2147483647"),
    (lambda x: a.key_padding(x([-(2**32) + 3, 2])), "key_padding: lengths: .* got -4294967293"),
]


@pytest.mark.parametrize("make_array", [list, np.array, torch.tensor])
@pytest.mark.parametrize(("make", "message"), BEYOND, ids=[x[1] for x in BEYOND])
def test_values_beyond_int32_do_not_wrap(make, message, make_array):
    with pytest.raises(ValueError, match=message):
        make(make_array).spans(4, 4, batch=2)


@pytest.mark.parametrize("make", [a.key_padding, a.cache])
def test_traced_values_beyond_int32_are_illegal(make):
    run = torch.compile(lambda x: make(x).spans(4, 4, batch=2).bounds, fullgraph=True, backend="eager")
    assert run(torch.tensor([2**32 + 3, 2]))[0, 0, 0, 0].tolist() == [0, -1]


@pytest.mark.parametrize("sizes", [(2**31, 4), (4, 2**31), (-1, 4)])
def test_sizes_beyond_int32(sizes):
    with pytest.raises(ValueError, match=r"[qk]_len: expected 0 to 2147483647, got"):
        a.causal().spans(*sizes)


def test_explicit_rows_settle_what_two_defaults_cannot():
    both = a.cache(2) & a.cache(3)
    assert both.spans(1, 4, q_index=np.array([1])).bounds.tolist() == [[[[[0, 2]]]]]


def test_arrays_in_two_places():
    mask = a.segments(IDS) & a.groups(torch.zeros(4, dtype=torch.long, device="meta"))
    other = mask & a.groups(torch.zeros(4, dtype=torch.long))
    with pytest.raises(
        ValueError, match="arrays of one framework on one device, got torch on meta and torch on cpu"
    ):
        other.spans(4, 4)


def test_values_on_a_device_are_not_waited_for():
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    assert a.key_padding(lengths).spans(4, 4, batch=2).bounds.shape == (2, 1, 4, 1, 2)


def test_a_mask_over_keys_of_its_own_order_is_not_combined() -> None:
    some = a.causal().prepare(2, 2, q_index=np.array([5, 6]), k_index=np.array([3, 6]))
    for combine in (lambda: some & a.window(3), lambda: a.window(3) | some):
        with pytest.raises(ValueError, match=r"keys have indices of their own.*before one is prepared"):
            combine()


def test_numbers_of_numpy_are_numbers():
    assert a.Spans(_ONE_SPAN, np.int64(3)).k_len == 3
    mask = a.segments([0, 0, 1], padding_id=np.int32(1))
    assert mask.spans(3, 3).cost()[0, 0].tolist() == [2, 2, 0]
    assert a.segments([[]]).spans(0, 0).q_len == 0
