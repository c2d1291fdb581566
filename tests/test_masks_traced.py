"""Masks under torch.compile: what depends on values. tests/torch/test_dynamic_lengths.py has each mask."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import numpy as np
import pytest
import torch

import attnspan as a
import attnspan.torch


@pytest.mark.slow
def test_broken_promises_are_illegal_spans_when_traced():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def lower(q, ids, lengths, cu):
        masks = (
            a.causal() & (a.window(1) | a.segments(ids)),
            a.key_padding(lengths) & a.window(2),
            a.causal() & a.documents(cu),
            a.prefix(3, cu),
        )
        unsorted = a.causal().spans(4, 4, k_index=ids, q_index=cu[:1].expand(4)).bounds
        return [*[x.spans(4, 4, batch=2, like=q).bounds for x in masks], unsorted]

    ids, lengths, cu = torch.tensor([1, 0, 1, 2]), torch.tensor([3, 5]), torch.tensor([0, 3, 2])
    scattered, padded, *packed = lower(torch.zeros(4), ids, lengths, cu)
    marker = torch.tensor([0, -1])
    broken = (scattered == marker).all(-1).all(-1)
    assert broken[0, 0].tolist() == [True, False, True, False]
    assert (padded == marker).all(-1).all(-1)[:, 0].tolist() == [[False] * 4, [True] * 4]
    for bounds in packed:  # and where k_index does not ascend
        assert (bounds == marker).all()


_EVERY_THIRD = torch.arange(12) % 3 == 0
_FROM_VALUES = [
    lambda runs: a.from_dense(_EVERY_THIRD.expand(5, 12), max_runs=runs),
    lambda runs: a.from_predicate(lambda b, h, q, k: k % 3 == 0, max_runs=runs),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", _FROM_VALUES, ids=["from_dense", "from_predicate"])
def test_masks_whose_runs_depend_on_data_have_static_ones(make):
    def lower(q):
        return [make(runs).spans(5, 12, like=q).bounds for runs in (None, 6)]

    q, sizes = torch.zeros(3), ((8, 4), (6, 6))
    found = torch.compile(lower, fullgraph=True, backend="eager")(q)
    for bounds, want, (static, own) in zip(found, lower(q), sizes, strict=True):
        assert (bounds.shape, want.shape) == ((1, 1, 5, static, 2), (1, 1, 5, own, 2))
        assert torch.equal(bounds[:, :, :, :own], want)
        assert not bounds[:, :, :, own:].any()


@pytest.mark.slow
def test_more_runs_than_there_is_room_for():
    dense, predicate = (lambda q, make=make: make(3).spans(5, 12, like=q).bounds for make in _FROM_VALUES)
    for run in (dense, predicate, torch.compile(dense, fullgraph=True, backend="eager")):
        with pytest.raises(ValueError, match=r"at most max_runs=3 .*, got a query with 4. Pass max_runs=4"):
            run(torch.zeros(3))


@pytest.mark.slow
def test_rows_with_too_many_runs_stay_illegal_in_a_composition(monkeypatch):
    from attnspan.masks import encoding as _encoding
    from attnspan.torch.compile import _encode_device

    # As on a device, where nobody waits for the values.
    monkeypatch.setitem(_encoding._operators, "torch", _encode_device)
    checkered = torch.ones(4, 12, dtype=torch.bool)
    checkered[2] = torch.arange(12) % 2 == 0
    mask = a.causal() & (a.window(1) | a.from_dense(checkered, max_runs=3))
    lower = torch.compile(lambda q: mask.spans(4, 12, like=q).bounds, fullgraph=True, backend="eager")
    broken = (lower(torch.zeros(3)) == torch.tensor([0, -1])).all(-1).all(-1)
    assert broken[0, 0].tolist() == [False, False, True, False]


def test_a_program_traced_without_the_front_end_says_what_it_lacks(monkeypatch):
    from attnspan.masks import encoding as _encoding

    monkeypatch.setattr(_encoding, "_operators", {})
    mask = a.from_predicate(lambda b, h, q, k: q >= k)
    with torch._subclasses.FakeTensorMode(), pytest.raises(ValueError, match=r"Import attnspan\.torch first"):
        mask.spans(4, 4, like=torch.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_rows_that_a_prepared_mask_is_not_for_are_illegal_when_traced(framework):
    def lower(mask, rows):
        return (mask & a.causal()).spans(4, 8, batch=2, q_index=rows).bounds

    rows = np.array([[4, 5, 6, 7], [0, 5, 6, 3]])
    if framework == "jax":
        jax = pytest.importorskip("jax")
        pytest.importorskip("attnspan.jax")  # It registers masks as pytrees.
        convert, run = jax.numpy.asarray, jax.jit(lower)
    else:
        torch._dynamo.reset()
        convert, run = torch.from_numpy, torch.compile(lower, backend="eager", fullgraph=True)
    bounds = np.asarray(run(a.segments(convert(np.arange(8) // 6)).prepare(4, 8), convert(rows)))
    illegal = (bounds == (0, -1)).all((-2, -1))[:, 0]
    np.testing.assert_array_equal(illegal, rows != np.arange(4, 8))
    want = (a.segments(np.arange(8) // 6) & a.causal()).spans(4, 8).bounds
    np.testing.assert_array_equal(bounds[0], want[0])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_long_masks_are_evaluated_a_few_rows_at_a_time(dynamic, monkeypatch):
    monkeypatch.setattr("attnspan.masks.by_value.CHUNK_PAIRS", 50)
    seen = []

    def backend(graph, _inputs):
        seen.append(sum(node.target is torch.ops.attnspan.encode.default for node in graph.graph.nodes))
        return graph.forward

    def build(q, ids):
        mask = a.from_predicate(lambda b, h, i, j: ids[i] == ids[j])
        return mask.spans(q.shape[0], ids.shape[0], like=q).bounds

    lower = torch.compile(build, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (10, 8) if dynamic else (10,):
        ids = torch.arange(n) // 4
        want = a.segments(ids).spans(n, n).bounds
        got = lower(torch.zeros(n), ids)
        assert torch.equal(got[:, :, :, :1], want)
        assert not got[:, :, :, 1:].any()
    # The length of the symbolic one is not known to be large; a copy of the predicate is made for each chunk.
    assert seen == ([1] if dynamic else [2])
