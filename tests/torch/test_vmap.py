"""Masks whose arrays are mapped over by torch.func.vmap, against a loop."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import attnspan as a
from attnspan.torch import StaticCache, attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning"),
]

CALLS, BATCH, HEADS, LENGTH, DIM = 3, 2, 2, 6, 8
_generator = torch.Generator().manual_seed(0)


def _random(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, (CALLS, *shape), generator=_generator)


_IDS = _random(3, BATCH, LENGTH).sort().values
_LENGTHS = _random(LENGTH + 1, BATCH)
_DENSE = _random(2, BATCH, 1, LENGTH, LENGTH) > 0

#: The array that is mapped over, and the mask that each call makes of its part.
MASKS: dict[str, tuple[Tensor, Callable[[Tensor], a.Mask | a.Spans]]] = {
    "segments": (_IDS, lambda x: a.causal() & a.segments(x)),
    "segments of one row": (_IDS[:, 0], a.segments),
    "groups": (_IDS, lambda x: a.causal() | a.groups(x)),
    "documents": (torch.tensor([[0, 2, 6], [0, 3, 6], [0, 1, 5]]), a.documents),
    "both sides": (_LENGTHS, lambda x: a.key_padding(x, side="left") & a.prefix(x)),
    "cache": (_LENGTHS, lambda x: a.causal() & a.cache(x)),
    "from_dense": (_DENSE, a.from_dense),
    "from_dense, max_runs": (_DENSE[:, 0, 0], lambda x: a.from_dense(x, max_runs=4)),
    "from_predicate": (torch.arange(CALLS), lambda x: a.from_predicate(lambda b, h, q, k: q >= k + x)),
    "bounds": (
        torch.stack([a.window(i).spans(LENGTH, LENGTH, like=_IDS).bounds for i in range(CALLS)]),
        lambda x: a.Spans(x, LENGTH),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_each_call(name: str) -> None:
    array, make = MASKS[name]
    q = torch.randn(CALLS, BATCH, HEADS, LENGTH, DIM, generator=_generator)

    def attend(q: Tensor, array: Tensor) -> Tensor:
        return attention(q, q, q, mask=make(array))

    def gradient(q: Tensor, array: Tensor) -> Tensor:
        return torch.func.grad(lambda q: attend(q, array).square().sum())(q)

    for function in (attend, gradient):
        want = torch.stack([function(q[i], array[i]) for i in range(CALLS)])
        torch.testing.assert_close(vmap(function)(q, array), want)


def test_a_cache_is_no_buffer_of_several_calls() -> None:
    cache = StaticCache(BATCH, HEADS, LENGTH, DIM)
    new = torch.zeros(CALLS, BATCH, HEADS, 1, DIM)
    with pytest.raises(
        ValueError, match=r"cache: update under vmap: .*Make the vmapped axis part of the batch"
    ):
        vmap(lambda new: cache.update(new, new)[0])(new)
    with pytest.raises(ValueError, match=r"cache: update under vmap"):
        vmap(lambda counts: cache.update(new[0], new[0], counts=counts)[0])(torch.ones(CALLS, BATCH).int())
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("lowered", [False, True])
def test_stacked_masks_name_what_can_be_mapped_over(lowered: bool) -> None:
    masks = [a.segments(ids).prepare(LENGTH, LENGTH, batch=BATCH) for ids in _IDS]
    stacked = torch.utils._pytree.tree_map(
        lambda *x: torch.stack(x), *((x.lowered if lowered else x) for x in masks)
    )
    q = torch.ones(CALLS, BATCH, HEADS, LENGTH, DIM)
    with pytest.raises(ValueError, match=r"Spans: k_len: expected one number, .*vmap.*spans\(bounds\)"):
        vmap(lambda q, mask: attention(q, q, q, mask=mask))(q, stacked)
    bounds = stacked.bounds if lowered else stacked.lowered.bounds
    found = vmap(lambda q, bounds: attention(q, q, q, mask=a.spans(bounds)))(q, bounds)
    torch.testing.assert_close(found, torch.stack([attention(*[q[0]] * 3, mask=x) for x in masks]))
