"""Masks under torch.compile: one graph, no break, the spans of the eager lowering."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import numpy as np
import pytest
import torch
from mask_samples import BATCH, KEYS, SAMPLES

import attnspan as a

_COMBINED = {"segments, three runs", "documents", "causal cache", "prefix-LM in documents", "images in text"}


class Graphs:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, _inputs):
        self.count += 1
        return graph.forward


def _check_in_one_graph(samples, q_lens, **options):
    torch._dynamo.reset()
    tensors = {}
    arrays = [[tensors.setdefault(id(x), torch.from_numpy(x)) for x in sample.arrays] for sample in samples]

    @torch.compile(fullgraph=True, **options)
    def lower(q, arrays):
        masks = [sample.build(*x) for sample, x in zip(samples, arrays, strict=True)]
        return [mask.spans(q.shape[0], KEYS, batch=BATCH, like=q).bounds for mask in masks]

    for q_len in q_lens:
        got = lower(torch.zeros(q_len), arrays)
        for sample, bounds in zip(samples, got, strict=True):
            want = sample.mask().spans(q_len, KEYS, batch=BATCH).bounds
            np.testing.assert_array_equal(bounds.numpy(), want, err_msg=sample.name)


@pytest.mark.slow
def test_every_mask_lowers_in_one_graph_for_all_lengths():
    graphs = Graphs()
    # No array has one of these lengths: equal sizes would be taken for one and the same size.
    _check_in_one_graph(SAMPLES, (6, 9, 17), backend=graphs, dynamic=True)
    assert graphs.count == 1


def test_masks_lower_through_functionalisation():
    combined = [sample for sample in SAMPLES if sample.name in _COMBINED]
    assert len(combined) == len(_COMBINED)
    _check_in_one_graph(combined, (5,), backend="aot_eager")


def test_a_new_mask_at_every_step_is_one_compilation():
    torch._dynamo.reset()
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs)
    def step(q, ids, cu):
        mask = (a.causal() & a.segments(ids)) | (a.groups(ids - 2) & a.documents(cu))
        return mask.spans(q.shape[0], q.shape[0], like=q).bounds

    for seed in range(4):
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(np.sort(rng.integers(0, 6, 40)))
        cu = torch.from_numpy(np.concatenate([[0], np.sort(rng.integers(0, 40, 4)), [40]]))
        q = torch.zeros(40)
        mask = (a.causal() & a.segments(ids)) | (a.groups(ids - 2) & a.documents(cu))
        assert torch.equal(step(q, ids, cu), mask.spans(40, 40).bounds)
    assert graphs.count == 1


def test_lengths_may_be_dynamic():
    torch._dynamo.reset()
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs, dynamic=True)
    def step(q, ids):
        return (a.causal() & a.segments(ids)).spans(q.shape[0], q.shape[0], like=q).bounds

    for length in (5, 17, 64):
        ids = torch.arange(length) // 4
        assert torch.equal(
            step(torch.zeros(length), ids), (a.causal() & a.segments(ids)).spans(length, length).bounds
        )
    assert graphs.count == 1


def test_a_mask_made_outside_may_be_lowered_inside():
    torch._dynamo.reset()
    graphs = Graphs()
    lower = torch.compile(lambda q, mask: mask.spans(8, 8, like=q).bounds, fullgraph=True, backend=graphs)
    for seed in range(3):
        ids = torch.from_numpy(np.sort(np.random.default_rng(seed).integers(0, 3, 8)))
        mask = a.causal() & a.segments(ids)
        assert torch.equal(lower(torch.zeros(8), mask), mask.spans(8, 8).bounds)
        prepared = mask.prepare(8, 8)
        assert torch.equal(lower(torch.zeros(8), prepared), mask.spans(8, 8).bounds)
    # One for each kind of mask.
    assert graphs.count == 2


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
        return [x.spans(4, 4, batch=2, like=q).bounds for x in masks]

    ids, lengths, cu = torch.tensor([1, 0, 1, 2]), torch.tensor([3, 5]), torch.tensor([0, 3, 2])
    scattered, padded, *packed = lower(torch.zeros(4), ids, lengths, cu)
    marker = torch.tensor([0, -1])
    broken = (scattered == marker).all(-1).all(-1)
    assert broken[0, 0].tolist() == [True, False, True, False]
    assert (padded == marker).all(-1).all(-1)[:, 0].tolist() == [[False] * 4, [True] * 4]
    for bounds in packed:
        assert (bounds == marker).all()


@pytest.mark.parametrize(
    "mask", [a.from_dense(torch.ones(3, 3, dtype=torch.bool)), a.from_predicate(lambda b, h, q, k: q >= k)]
)
def test_masks_whose_runs_depend_on_data_say_so(mask):
    torch._dynamo.reset()
    lower = torch.compile(lambda q: mask.spans(3, 3, like=q).bounds, backend="eager")
    with pytest.raises(Exception, match=r"from_\w+: expected values: .* mask.prepare\(...\)"):
        lower(torch.zeros(3))
    prepared = mask.prepare(3, 3, like=torch.zeros(1))
    lower = torch.compile(lambda q: prepared.spans(3, 3, like=q).bounds, fullgraph=True, backend="eager")
    assert torch.equal(lower(torch.zeros(3)), prepared.lowered.bounds)
