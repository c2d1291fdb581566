"""What is said about masks that cannot be: expected, got, remedy. torch/test_call_errors.py has calls."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples.library import LIBRARY
from samples.masks import SAMPLES

import attnspan as a
from attnspan import library as lib
from attnspan.base.arrays import Arrays
from attnspan.errors import DtypeError, OptionError, ShapeError

IDS = np.array([0, 0, 1, 1])
ONE_SPAN = np.zeros((1, 1, 1, 1, 2), np.int32)
EVERY = a.from_predicate(lambda b, h, q, k: q >= k)


def low(mask: a.Mask, **options: Any) -> a.Prepared:
    return mask.spans(4, 4, **{"batch": 2, **options})


def _of_a_written_order() -> a.Prepared:
    order = np.array([0, 2, 1, 3])
    mask = lib.reordered(a.causal(), order)
    order[:] = 0
    return low(mask)


# One mask of each class that users make, and what no field of it may be.
LEAVES = {type(x).__name__: x for y in [*SAMPLES, *LIBRARY] for x in y.mask().leaves()}
LEAVES |= {"from_dense": a.from_dense([[True]]), "from_predicate": EVERY}
MADE_BY_FUNCTIONS = {"global_rows", "prefix_documents"}
FIELDS = [
    (mask, field.name)
    for name, mask in LEAVES.items()
    for field in fields(mask)
    if name not in MADE_BY_FUNCTIONS
]
NEVER = [object(), 1.5, True, np.array(["x"]), np.zeros((1,) * 6)]


@pytest.mark.parametrize(("mask", "field"), FIELDS, ids=[f"{type(x).__name__}.{y}" for x, y in FIELDS])
def test_a_field_that_cannot_be_is_named(mask: a.Mask, field: str) -> None:
    fits = {"width": 1.5, "causal": True, "earlier": True}.get(field)
    for bad in [*(x for x in NEVER if x is not fits), *([0, 2**31] if field == "max_runs" else [])]:
        text = rf"^{type(mask).__name__}: ({field}: )?expected .+, got .+\. [A-Z].*\.$"
        with pytest.raises((DtypeError, OptionError, ShapeError), match=text):
            replace(mask, **{field: bad})


REFUSED = {
    OptionError: [
        (lambda: a.window(-1, -1), "left: expected 0 to 2147483647, got -1. .*None for all keys of a side"),
        (lambda: a.window(2**31), "window: left: expected 0 to 2147483647, got 2147483648"),
        (lambda: a.global_keys(-1), "global_keys: n: expected 0 to"),
        (lambda: a.prefix(-2), "prefix: lengths: expected 0 to"),
        (lambda: a.key_padding(3, side="top"), 'key_padding: side: expected "right" or "left", got \'top\''),
        (lambda: a.key_padding(3, start=-1), "key_padding: start: expected 0 to"),
        (lambda: a.key_padding(3, start=4, stop=2), "stop: expected 4 to .* Pass the first key after"),
        (lambda: a.from_block_mask(SimpleNamespace(mask_mod=print), -1), "from_block_mask: max_runs: expect"),
        (lambda: a.Spans(ONE_SPAN, -1), "Spans: k_len: expected at least 0, got -1"),
        # When they are lowered.
        (lambda: low(a.segments(IDS), q_index=np.array([0, 1, 2, 4])), "q_index: expected indices below 4"),
        (lambda: low(a.documents([0, 3, 2])), "cu_seqlens_q: expected ascending offsets that start at 0 and"),
        (lambda: low(a.documents([1, 4])), "ascending offsets that start at 0"),
        (lambda: low(a.documents([0, -1, 4])), "ascending offsets that start at 0"),
        (lambda: low(a.documents([0, 5])), "end at 4 or before, .* pass layout='bshd'"),
        (lambda: low(a.documents([0, 4], [0, 5])), "cu_seqlens_k: expected ascending offsets .* end at 4"),
        (lambda: low(a.prefix([-1, 2])), "prefix: lengths: expected lengths of at least 0, got"),
        (lambda: low(a.prefix([-1], [0, 4])), "prefix: lengths: expected lengths of at least 0, got"),
        (lambda: low(a.key_padding([5, 4])), "lengths of at least 0 and at most 4, .* pass layout='bshd'"),
        (lambda: low(a.key_padding(5)), "expected a length of at least 0 and at most 4.*, got 5"),
        (lambda: low(a.key_padding(1, stop=5)), "expected a part of the 4 keys, got keys 0 to 5"),
        (lambda: low(a.key_padding(1, start=5)), "expected a part of the 4 keys, got keys 5 to 4"),
        (lambda: low(a.key_padding([3, 0], start=2)), "expected lengths of at least 0 and at most 2"),
        (lambda: low(a.keys([True, False, True, True], 1)), "keys: expected at most max_runs=1 runs"),
        (lambda: low(a.cache([5, 4])), "cache: lengths: expected lengths of at least 0 and at most 4"),
        (lambda: low(a.cache(2) & a.cache(3)), r"q_index: .* got one from cache\(2\) and another"),
        (lambda: low(a.cache([2, 2]) & a.documents([0, 4], [0, 4])), "q_index: expected one default"),
        (
            lambda: low(a.from_predicate(lambda b, h, q, k: q > k and k > 2)),
            r"<lambda>\): .* Write it with &",
        ),
        (lambda: low(a.spans(np.full((1, 1, 4, 1, 2), 5))), r"query 0: .* in \[0, 4\], got \(5, 5\). Clip"),
        (lambda: low(a.causal(), q_index=np.full(4, 2**31)), "q_index: expected int32 indices"),
        (lambda: low(a.causal(), k_index=np.array([0, 1, 1, 2])), "k_index: expected strictly ascending"),
        (lambda: low(a.segments(IDS), q_index=IDS, k_index=np.array([0, 1, 2, 4])), r"indices in \[0, 4\)"),
        (lambda: low(EVERY, k_index=np.arange(4)), r"from_predicate\(<lambda>\): .* k_index alone"),
        (lambda: a.causal().spans(2**31, 4), "q_len: expected 0 to 2147483647, got 2147483648"),
        (lambda: a.causal().spans(4, 2**31), "k_len: expected 0 to 2147483647, got 2147483648"),
        (lambda: a.causal().spans(-1, 4), "q_len: expected 0 to 2147483647, got -1"),
        # The library's.
        (lambda: lib.dilated(4, 0), "dilated: dilation: expected 1 to"),
        (
            lambda: low(lib.shared_prefix([0, 2, 4], [0, 2])),
            "prefix_of: expected numbers of documents, 0 to 1",
        ),
        (
            lambda: lib.tree([-1, 2, 0]),
            r"tree: parents: expected a parent before each .*, got 2 for node 1\.",
        ),
        (lambda: lib.tree([[-1, 0], [-1, 1]]), "got 1 for node 1 of batch element 1"),
        (lambda: lib.tree([-1, 0, 1], depth=2), "tree: depth: expected at least 3, got 2"),
        (lambda: low(lib.tree([-1, 0], prefix=[1, 3])), "tree: prefix: lengths: .* at least 0 and at most 2"),
        (lambda: lib.tree([-1, 0, 0], prefix=3).spans(3, 5), "at most 2, got 3"),
        (lambda: lib.natten((4, 4), (3, 5)), r"kernel: expected at most the canvas \(4, 4\), got \(3, 5\)"),
        (lambda: lib.natten(8, 3, dilation=3), r"canvas \(8,\) with its dilation, got \(3,\) times \(3,\)"),
        (lambda: lib.natten(8, 3, stride=4), "natten: stride: expected at most 3, the kernel, got 4"),
        (lambda: lib.natten((2**16, 2**16), 3), "number of tokens: expected 1 to 2147483647, got 4294967296"),
        (
            lambda: lib.sta((6, 6), (4, 4), (4, 2)),
            r"sta: canvas: expected multiples of the tile \(4, 2\), got",
        ),
        (
            lambda: lib.tiled_natten((4, 6), 3, 4),
            r"tile_order: canvas: expected multiples of the tile \(4, 4\)",
        ),
        (
            lambda: lib.morton_natten(6, 3),
            r"morton_order: canvas: expected one power of two .*, got \(6, 6\)",
        ),
        (lambda: low(lib.flamingo([3, 3], 2)), "flamingo: positions: expected strictly ascending places"),
        (
            lambda: low(lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2)),
            "selected_blocks: chosen: expected numbers of blocks of keys, below 2, or negative for none",
        ),
        (
            lambda: low(lib.per_row([a.cache(2), a.full()]), k_index=np.array([0, 1, 2, 3])),
            "q_index: expected q_index, because its default differs from mask to mask",
        ),
        (
            lambda: lib.per_head([a.cache([2]), a.cache([1])]).spans(1, 2, heads=2),
            "q_index: expected one default q_index for all masks",
        ),
        (lambda: lib.per_document(a.cache(3), [0, 3]), "a mask that depends only on indices, got cache"),
        (lambda: lib.reordered(a.causal(), [0, 2, 2]), r"reordered: order: expected a permutation of 0\.\.2"),
        (_of_a_written_order, r"reordered: order: expected a permutation of 0\.\.3"),
        (lambda: lib.global_sliding(1, [True, False, True]).spans(3, 3), "at most max_runs=1 runs"),
    ],
    DtypeError: [
        (lambda: a.window((3, 0)), r"window: left: expected an int, got tuple. Write window\(left, right\)"),
        (lambda: a.segments(torch.zeros(4)), "q_ids: expected an integer array, got torch.float32"),
        (lambda: a.segments(IDS > 0), "expected an integer array, got bool"),
        (lambda: a.key_padding(IDS > 0), r"lengths: expected integers, got bool. Use keys\(valid\)"),
        (lambda: a.keys(IDS), r"keys: valid: expected a bool array, got int64. Compare: .* mask != 0"),
        (lambda: a.from_dense(IDS), "from_dense: visible: expected a bool array, got int64"),
        (lambda: a.from_block_mask(3), "from_block_mask: mask_mod: expected a function"),
        (lambda: a.Spans(ONE_SPAN, 3.5), "Spans: k_len: expected an int, got float"),
        (lambda: a.Spans(ONE_SPAN, True), "Spans: k_len: expected an int, got bool"),
        (lambda: a.Spans(ONE_SPAN, None), "Spans: k_len: expected an int, got NoneType"),
        (lambda: a.Spans(np.zeros((1, 1, 4, 1, 2)), 3), "Spans: expected an int32 array, got float64"),
        (lambda: a.Spans([[0, 1]], 3), "Spans: expected an int32 array, got list"),
        (lambda: low(a.causal(), q_index=np.zeros(4)), "q_index: expected an integer array, got float64"),
        (lambda: low(a.causal(), like="cpu"), "like: expected an array, got str"),
        (lambda: lib.global_sliding(1, np.arange(4)), "tokens: expected a bool array, got int64"),
        (lambda: lib.per_row([]), "per_row: expected a list of masks, got none"),
        (lambda: lib.per_head([a.causal(), None]), "per_head: expected masks, got NoneType"),
    ],
    ShapeError: [
        (lambda: a.segments([[0, 1], [2]]), "segments: q_ids: expected rows of one length"),
        (lambda: a.segments(IDS[None, None]), r"an array with 1 or 2 axes, got \(1, 1, 4\)"),
        (lambda: a.keys(IDS[None, None, None] > 0), r"one axis of keys, got \(1, 1, 1, 4\).*mask\[:, 0, 0\]"),
        (lambda: a.from_dense(IDS > 0), r"with 2 or 3 or 4 axes, got \(4,\)"),
        (lambda: a.spans(np.zeros((2, 2), int)), r"Spans: expected bounds of shape .*, got \(2, 2\)"),
        (
            lambda: low(a.segments(np.zeros((3, 4), int))),
            "q_ids: expected 1 or 2 along the batch axis, got 3",
        ),
        (
            lambda: low(a.segments(IDS[:3], IDS)),
            "segments: q_ids: expected one entry for each query, 4, got 3",
        ),
        (lambda: low(a.keys(np.ones(3, bool))), r"keys\(bool\[3\]\): .* that describe 4 keys, got 3"),
        (lambda: low(a.from_dense(np.ones((1, 3, 4, 4), bool))), "1 along the heads axis, got 3. .*heads="),
        (lambda: low(a.causal().prepare(3, 4)), r"expected .* = \(2, 1, 4, 4\), got \(1, 1, 3, 4\)"),
        (
            lambda: low(a.causal(), q_index=IDS[:3]),
            "q_index: expected one global index for each query, 4, got",
        ),
        (
            lambda: lib.shared_prefix([0, 2, 4], [0]),
            "prefix_of: expected one number for each document, 2, got 1",
        ),
        (lambda: lib.tree([]), "tree: parents: expected at least one node"),
        (lambda: low(lib.block_diffusion(4, 2)), r"block_diffusion\(4, 2\): .* describe 4 keys, got 8"),
        (lambda: lib.natten((4, 4), (3, 3, 3)), "natten: kernel: expected 2 sizes, one for each axis, got 3"),
        (lambda: lib.natten((), ()), "natten: canvas: expected at least one axis, got none"),
        (lambda: low(lib.natten((4, 4), 3)), r"natten\(\(4, 4\), \(3, 3\)\): .* describe 4 keys, got 16"),
        (lambda: low(lib.flamingo([0, 3], 3)), r"flamingo\(int64\[2\], 3\): .* describe 4 keys, got 6"),
        (
            lambda: lib.vision_cross_attention(np.zeros((3, 3), int), 2),
            r"vision_cross_attention: intervals: expected shape \(n, 2\) or \(B, n, 2\), n at least 1",
        ),
        (
            lambda: lib.selected_blocks(np.zeros((1, 1, 2, 0), int), 2),
            r"selected_blocks: chosen: expected \(B\|1, H\|1, query blocks, k\), none of them 0",
        ),
        (lambda: low(lib.per_row([a.full()] * 3)), "per_row: expected 1 or 2 along the batch axis, got 3"),
        (lambda: low(lib.per_row([a.segments(IDS), a.segments(IDS[:3])])), r"describe 4 keys, got 3"),
        (lambda: lib.per_document(a.segments(IDS), [0, 3]), "a mask without arrays for keys, got segments"),
        (
            lambda: lib.batchify(a.segments(IDS), 5),
            "batchify: expected arrays that describe 5 keys, got segme",
        ),
    ],
}
CASES = [(kind, *case) for kind, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("kind", "make", "message"), CASES, ids=[x[2] for x in CASES])
def test_a_mask_that_cannot_be_is_refused(kind, make, message):
    with pytest.raises(kind, match=message):
        make()


UNREADABLE = {
    "parents": lambda: low(lib.tree(np.array([-1, 0, 1, 3]), depth=3)),
    "depth": lambda: low(lib.tree(np.array([-1, 0, 1, 2]), depth=3)),
    "parents below -1": lambda: low(lib.tree(np.array([-1, 0, 1, -2]), depth=3)),
    "prefix_of": lambda: low(lib.shared_prefix([0, 2, 4], [0, 2])),
    "positions": lambda: low(lib.flamingo([3, 3], 2)),
    "chosen": lambda: low(lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2)),
}


@pytest.mark.parametrize("build", UNREADABLE.values(), ids=UNREADABLE)
def test_illegal_where_nothing_can_be_read(build, monkeypatch):
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    spans = build()
    monkeypatch.undo()
    assert (spans.bounds[0, 0, 3] == [0, -1]).all()
    with pytest.raises(OptionError, match=r"got \(0, -1\)"):
        spans.validate()


def test_depth_is_needed_where_parents_cannot_be_read(monkeypatch):
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    with pytest.raises(OptionError, match="tree: depth: expected the number of nodes on the longest path"):
        lib.tree(np.array([-1, 0]))


@pytest.mark.parametrize("size", [8.0, (8,), torch.tensor(8), np.ones(1, int), None, "8", True], ids=repr)
def test_sizes_are_numbers(size):
    for sizes in ((size, 8), (8, size)):
        with pytest.raises(TypeError, match=r"_len: expected an int, got .* Pass a number"):
            a.causal().prepare(*sizes)
    assert a.causal().prepare(np.int64(8), 8).lowered.k_len == 8


BEYOND = [
    (lambda x: a.documents(x([0, 2**32 + 4])), "cu_seqlens_q: expected at most 2147483647, got 4294967300"),
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
        low(make(make_array))


@pytest.mark.parametrize("make", [a.key_padding, a.cache])
def test_traced_values_beyond_int32_are_illegal(make):
    run = torch.compile(lambda x: low(make(x)).bounds, fullgraph=True, backend="eager")
    assert run(torch.tensor([2**32 + 3, 2]))[0, 0, 0, 0].tolist() == [0, -1]


@pytest.mark.parametrize("make", [a.segments, a.groups, lambda ids: a.segments(ids, ids)])
def test_ids_beyond_32_bits_do_not_become_equal_in_jax(make):
    """JAX would keep the low halves: two documents became one."""
    jax = pytest.importorskip("jax")
    mask, like = make(np.array([0, 0, 2**32, 2**32])), jax.numpy.zeros(1)
    want = [[0, 2], [0, 2], [2, 4], [2, 4]]
    assert low(mask).bounds[0, 0, :, 0].tolist() == want
    for lower in (lambda x: low(mask, like=x).bounds, jax.jit(lambda x: low(mask, like=x).bounds)):
        with pytest.raises(ValueError, match=r"ids: expected ids of int32, .*, got larger ids\. Renumber"):
            lower(like)
    with jax.enable_x64(True):
        assert low(mask, like=like).bounds[0, 0, :, 0].tolist() == want


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_large_unsigned_ids_are_not_negative(convert):
    ids = convert(np.array([5, 5, 2**63 + 7, 2**63 + 7], np.uint64))
    assert low(a.groups(ids)).bounds[0, 0, :, 0].tolist() == [[0, 2], [0, 2], [2, 4], [2, 4]]
    padded = low(a.segments(ids, padding_id=2**63 + 7))
    assert padded.cost()[0, 0].tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("number", "seen"), [(2**32 - 1, [2, 2, 0, 0]), (-1, [2, 2, 2, 2]), (2**40, [2, 2, 2, 2])]
)
def test_padding_of_the_largest_id_in_32_bits(number, seen):
    """JAX compares ids as int32, where 2^32 - 1 is -1."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("attnspan.jax")
    ids = np.array([5, 5, 2**32 - 1, 2**32 - 1], np.uint32)
    for given in (ids, jax.numpy.asarray(ids), torch.from_numpy(ids)):
        bounds = np.asarray(low(a.segments(given, padding_id=number)).bounds)
        assert (bounds[0, 0, :, 0, 1] - bounds[0, 0, :, 0, 0]).tolist() == seen
    traced = jax.jit(lambda x: low(a.segments(x, padding_id=number), like=x).bounds)(jax.numpy.asarray(ids))
    assert (traced[0, 0, :, 0, 1] - traced[0, 0, :, 0, 0]).tolist() == seen


def test_explicit_rows_settle_what_two_defaults_cannot():
    both = a.cache(2) & a.cache(3)
    assert both.spans(1, 4, q_index=np.array([1])).bounds.tolist() == [[[[[0, 2]]]]]


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
