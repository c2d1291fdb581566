"""What is said about masks that cannot be: expected, got, remedy. torch/test_call_errors.py has calls."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples.mistaken_objects import MASKS
from samples.mistakes import Mistake, check, error_of, rows

import attnspan as a
from attnspan import library as lib
from attnspan.base.arrays import Arrays
from attnspan.errors import OptionError

IDS = np.array([0, 0, 1, 1])
BLOCKS = SimpleNamespace(mask_mod=print)
ONE_SPAN = np.zeros((1, 1, 1, 1, 2), np.int32)
EVERY = a.from_predicate(lambda b, h, q, k: q >= k)


def low(mask: a.Mask, **options: Any) -> a.Prepared:
    return mask.spans(4, 4, **{"batch": 2, **options})


def of_a_written_order() -> a.Prepared:
    order = np.array([0, 2, 1, 3])
    mask = lib.reordered(a.causal(), order)
    order[:] = 0
    return low(mask)


MISTAKES = [
    (row, x) for row in rows(MASKS) for x in ([list, np.array, torch.tensor] if "x(" in row.code else [list])
]


@pytest.mark.parametrize(("mistake", "x"), MISTAKES, ids=lambda x: getattr(x, "__name__", None) or repr(x))
def test_a_mask_that_cannot_be_is_refused(mistake: Mistake, x: Any) -> None:
    check(error_of(eval(f"lambda: {mistake.code}", {**globals(), "x": x})), mistake)


UNREADABLE = {
    "parents": lambda: lib.tree(np.array([-1, 0, 1, 3]), depth=3),
    "depth": lambda: lib.tree(np.array([-1, 0, 1, 2]), depth=3),
    "parents below -1": lambda: lib.tree(np.array([-1, 0, 1, -2]), depth=3),
    "prefix_of": lambda: lib.shared_prefix([0, 2, 4], [0, 2]),
    "positions": lambda: lib.flamingo([3, 3], 2),
    "chosen": lambda: lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2),
}


@pytest.mark.parametrize("build", UNREADABLE.values(), ids=UNREADABLE)
def test_illegal_where_nothing_can_be_read(build, monkeypatch):
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    spans = low(build())
    with pytest.raises(OptionError, match="tree: depth: expected the number of nodes on the longest path"):
        lib.tree(np.array([-1, 0]))
    monkeypatch.undo()
    assert (spans.bounds[0, 0, 3] == [0, -1]).all()
    with pytest.raises(OptionError, match=r"got \(0, -1\)"):
        spans.validate()


@pytest.mark.parametrize("other", [a.causal(), a.key_padding([1, 4]), a.window(1) | a.segments([0, 1, 1, 2])])
def test_an_illegal_row_is_illegal_in_every_expression(other):
    broken = a.segments(np.array([1, 0, 1, 2]))
    masks = broken & other, other | broken, (other | broken) & a.window(3), other & broken | a.prefix(2)
    for mask in masks:
        bounds = np.asarray(low(mask).bounds)
        assert (bounds[:, :, [0, 2]] == [0, -1]).all()
        a.Spans(bounds[:, :, [1, 3]], 4).validate()
        with pytest.raises(ValueError, match=r"\(0, -1\) marks a query whose mask data are wrong"):
            mask.prepare(4, 4, batch=2)


@pytest.mark.parametrize("size", [8.0, (8,), torch.tensor(8), np.ones(1, int), None, "8", True], ids=repr)
def test_sizes_are_numbers(size):
    for sizes in ((size, 8), (8, size)):
        with pytest.raises(TypeError, match=r"_len: expected an int, got .* Pass a number"):
            a.causal().prepare(*sizes)
    assert a.causal().prepare(np.int64(8), 8).lowered.k_len == 8


@pytest.mark.slow
def test_traced_values_beyond_int32_are_illegal():
    masks = a.key_padding, a.cache
    run = torch.compile(lambda x: [low(y(x)).bounds for y in masks], fullgraph=True, backend="eager")
    for bounds in run(torch.tensor([2**32 + 3, 2])):
        assert bounds[0, 0, 0, 0].tolist() == [0, -1]


@pytest.mark.parametrize("make", [a.segments, a.groups, lambda ids: a.segments(ids, ids)])
def test_ids_beyond_32_bits_do_not_become_equal_in_jax(make):
    """JAX would keep the low halves: two documents became one."""
    jax = pytest.importorskip("jax")
    mask, like = make(np.array([0, 0, 2**32, 2**32])), jax.numpy.zeros(1)
    want = [[0, 2], [0, 2], [2, 4], [2, 4]]
    assert low(mask).bounds[0, 0, :, 0].tolist() == want
    with pytest.raises(ValueError, match=r"ids: expected ids of int32, .*, got larger ids\. Renumber"):
        low(mask, like=like)
    with jax.enable_x64(True):
        assert low(mask, like=like).bounds[0, 0, :, 0].tolist() == want


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_large_unsigned_ids_are_not_negative(convert):
    ids = convert(np.array([5, 5, 2**63 + 7, 2**63 + 7], np.uint64))
    assert low(a.groups(ids)).cost()[0, 0].tolist() == [2, 2, 2, 2]
    assert low(a.segments(ids, padding_id=2**63 + 7)).cost()[0, 0].tolist() == [2, 2, 0, 0]


def test_padding_of_the_largest_id_in_32_bits():
    """JAX compares ids as int32, where 2^32 - 1 is -1."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("attnspan.jax")
    ids, most = np.array([5, 5, 2**32 - 1, 2**32 - 1], np.uint32), 2**32 - 1

    def lower(x):
        return [low(a.segments(x, padding_id=y), like=x).lowered for y in (most, -1, 2**40)]

    ways = (ids, lower), (torch.from_numpy(ids), lower), (jax.numpy.asarray(ids), jax.jit(lower))
    for given, run in ways:
        found = [np.asarray(spans.cost())[0, 0].tolist() for spans in run(given)]
        assert found == [[2, 2, 0, 0], [2, 2, 2, 2], [2, 2, 2, 2]]


def test_arrays_in_two_places():
    mask = a.segments(IDS) & a.groups(torch.zeros(4, dtype=torch.long, device="meta"))
    other = mask & a.groups(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="one framework on one device, got torch on meta and torch on cpu"):
        low(other)


def test_values_on_a_device_are_not_waited_for():
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    assert low(a.key_padding(lengths)).bounds.shape == (2, 1, 4, 1, 2)


def test_lists_and_numbers_of_numpy_are_taken():
    wanted = np.array([[True, False, True]])
    for mask in (a.keys([True, False, True]), a.from_dense(wanted.tolist())):
        assert np.array_equal(mask.spans(1, 3).dense()[0, 0], wanted)
    assert a.Spans(ONE_SPAN, np.int64(3)).k_len == 3
    mask = a.segments([0, 0, 1], padding_id=np.int32(1))
    assert mask.spans(3, 3).cost()[0, 0].tolist() == [2, 2, 0]
    assert a.segments([[]]).spans(0, 0).q_len == 0
