"""What the masks of the library refuse, and what they make illegal where they cannot read it."""

import numpy as np
import pytest

import attnspan as a
from attnspan import library as lib
from attnspan.arrays import Arrays
from attnspan.errors import DtypeError, OptionError, ShapeError

REFUSED = {
    OptionError: [
        (lambda: lib.dilated(4, 0), "dilated: dilation: expected 1 to"),
        (
            lambda: lib.shared_prefix([0, 2, 4], [0, 2]).spans(4, 4),
            "shared_prefix: prefix_of: expected numbers of documents, 0 to 1",
        ),
        (
            lambda: lib.tree([-1, 2, 0]),
            r"tree: parents: expected a parent before each node, or -1 for a root, got 2 for node 1\.",
        ),
        (lambda: lib.tree([[-1, 0], [-1, 1]]), "got 1 for node 1 of batch row 1"),
        (lambda: lib.tree([-1, 0, 1], depth=2), "tree: depth: expected at least 3, got 2"),
        (
            lambda: lib.tree([-1, 0], prefix=np.array([1, 3])).spans(2, 4, batch=2),
            "tree: prefix: lengths: expected lengths of at least 0 and at most 2",
        ),
        (
            lambda: lib.natten((4, 4), (3, 5)),
            r"natten: kernel: expected at most the canvas \(4, 4\), got \(3, 5\)",
        ),
        (
            lambda: lib.natten(8, 3, dilation=3),
            r"natten: kernel: expected at most the canvas \(8,\) with its dilation, got \(3,\) times \(3,\)",
        ),
        (lambda: lib.natten(8, 3, stride=4), "natten: stride: expected at most 3, the kernel, got 4"),
        (
            lambda: lib.natten((2**16, 2**16), 3),
            "canvas: number of tokens: expected 1 to 2147483647, got 4294967296",
        ),
        (
            lambda: lib.sta((6, 6), (4, 4), (4, 2)),
            r"sta: canvas: expected multiples of the tile \(4, 2\), got \(6, 6\)",
        ),
        (
            lambda: lib.tiled_natten((4, 6), 3, 4),
            r"tile_order: canvas: expected multiples of the tile \(4, 4\), got \(4, 6\)",
        ),
        (
            lambda: lib.morton_natten(6, 3),
            r"morton_order: canvas: expected one power of two for all axes, got \(6, 6\)",
        ),
        (
            lambda: lib.flamingo([3, 3], 2).spans(4, 4),
            "flamingo: positions: expected strictly ascending places of the images in the text",
        ),
        (
            lambda: lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2).spans(4, 4),
            "selected_blocks: chosen: expected numbers of blocks of keys, below 2, or negative for none",
        ),
        (
            lambda: lib.per_row([a.cache(2), a.full()]).spans(1, 2, batch=2, k_index=np.array([0, 3])),
            "q_index: expected the rows' global indices, which differ from mask to mask",
        ),
        (
            lambda: lib.per_head([a.cache(np.array([2])), a.cache(np.array([1]))]).spans(1, 2, heads=2),
            "q_index: expected one default for the rows' indices",
        ),
        (
            lambda: lib.per_document(a.cache(3), [0, 3]),
            "per_document: expected a mask that follows from indices alone, got cache",
        ),
        (lambda: lib.reordered(a.causal(), [0, 2, 2]), r"reordered: order: expected a permutation of 0\.\.2"),
    ],
    DtypeError: [
        (
            lambda: lib.global_sliding(1, np.arange(4)),
            "global_sliding: tokens: expected a bool array, got int64",
        ),
        (lambda: lib.per_row([]), "per_row: expected a list of masks, got none"),
        (lambda: lib.per_head([a.causal(), None]), "per_head: expected masks, got NoneType"),
    ],
    ShapeError: [
        (
            lambda: lib.shared_prefix([0, 2, 4], [0]),
            "shared_prefix: prefix_of: expected one number per document, 2, got 1",
        ),
        (lambda: lib.tree([]), "tree: parents: expected at least one node"),
        (
            lambda: lib.block_diffusion(4, 2).spans(6, 6),
            r"block_diffusion\(4, 2\): expected arrays that describe 6 keys, got 8",
        ),
        (lambda: lib.natten((4, 4), (3, 3, 3)), "natten: kernel: expected 2 sizes, one for each axis, got 3"),
        (lambda: lib.natten((), ()), "natten: canvas: expected at least one axis, got none"),
        (
            lambda: lib.natten((4, 4), 3).spans(15, 15),
            r"natten\(\(4, 4\), \(3, 3\)\): expected arrays that describe 15 keys, got 16",
        ),
        (
            lambda: lib.flamingo([0, 3], 2).spans(4, 5),
            r"flamingo\(int64\[2\], 2\): expected arrays that describe 5 keys, got 4",
        ),
        (
            lambda: lib.vision_cross_attention(np.zeros((3, 3), int), 2),
            r"vision_cross_attention: intervals: expected shape \(n, 2\) or \(B, n, 2\), n at least 1",
        ),
        (
            lambda: lib.selected_blocks(np.zeros((1, 1, 2, 0), int), 2),
            r"selected_blocks: chosen: expected \(B\|1, H\|1, row blocks, k\), none of them 0",
        ),
        (
            lambda: lib.per_row([a.causal(), a.full()]).spans(2, 2, batch=3),
            "per_row: expected 1 or 3 along the batch axis, got 2",
        ),
        (
            lambda: lib.per_row([a.segments([0, 1]), a.segments([0, 1, 2])]).spans(2, 2, batch=2),
            r"segments\(int64\[3\]\): expected arrays that describe 2 keys, got 3",
        ),
        (
            lambda: lib.per_document(a.segments([0, 0, 1]), [0, 3]),
            "per_document: expected a mask without arrays for keys, got segments",
        ),
        (
            lambda: lib.batchify(a.segments([0, 0, 1]), 4),
            "batchify: expected arrays that describe 4 keys, got segments",
        ),
    ],
}
CASES = [(kind, *case) for kind, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("kind", "call", "message"), CASES, ids=[case[2] for case in CASES])
def test_refused(kind, call, message):
    with pytest.raises(kind, match=message):
        call()


UNREADABLE = {
    "parents": lambda: lib.tree(np.array([-1, 0, 1, 3]), depth=3).spans(4, 4),
    "depth": lambda: lib.tree(np.array([-1, 0, 1, 2]), depth=3).spans(4, 4),
    "parents below -1": lambda: lib.tree(np.array([-1, 0, 1, -2]), depth=3).spans(4, 4),
    "prefix_of": lambda: lib.shared_prefix([0, 2, 4], [0, 2]).spans(4, 4),
    "positions": lambda: lib.flamingo([3, 3], 2).spans(4, 4),
    "chosen": lambda: lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2).spans(4, 4),
}


@pytest.mark.parametrize("build", UNREADABLE.values(), ids=UNREADABLE)
def test_illegal_where_nothing_can_be_read(build, monkeypatch):
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    spans = build()
    monkeypatch.undo()
    assert (spans.bounds[0, 0, 3] == [0, -1]).all()
    with pytest.raises(OptionError, match=r"got \(0, -1\)"):
        spans.validate()


def test_marked_tokens_in_too_many_runs_are_refused():
    with pytest.raises(OptionError, match="keys: expected rows of at most max_runs=1 runs"):
        lib.global_sliding(1, np.array([True, False, True])).spans(3, 3)


def test_a_row_before_the_first_key_is_no_global_one():
    assert lib.global_sliding(1, 2).spans(1, 4, q_index=np.array([-1])).dense()[0, 0].tolist() == [
        [True, True, False, False]
    ]


def test_no_block_is_any_negative_number():
    chosen = np.full((1, 1, 1, 1), -(2**30))
    spans = lib.selected_blocks(chosen, 4).spans(4, 8, q_index=np.arange(4))
    assert spans.cost().sum() == 0


def test_depth_is_needed_where_parents_cannot_be_read(monkeypatch):
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    with pytest.raises(OptionError, match="tree: depth: expected the number of nodes on the longest path"):
        lib.tree(np.array([-1, 0]))


def test_spans_larger_than_the_mask_are_named():
    with pytest.warns(a.SpansLargerThanMask, match="up to 1025 runs"):
        lib.dilated(1024, 2).spans(2048, 2048)


def test_default_rows_of_a_mixture():
    mask = lib.per_row([a.causal() & a.cache(3), a.causal()])
    assert mask.spans(2, 5, batch=2).bounds[:, 0, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 4], [0, 5]]]
    both = lib.per_head([a.causal() & a.cache(3), a.causal()])
    with pytest.raises(OptionError, match="at most 2, got 3"):
        lib.tree([-1, 0, 0], prefix=3).spans(3, 5)
    assert both.spans(2, 5, heads=2).bounds[0, :, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 2], [0, 3]]]
