"""torch.func.vmap over queries, masks, options and modules: equal to a loop, in one call of the kernel."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from samples import lengths
from samples.lengths import Sizes
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

import attnspan as a
from attnspan.kernels import cpu
from attnspan.torch import Attention, StaticCache, attention, dropout_seeds

pytestmark = pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")

CALLS, BATCH, HEADS, LENGTH, DIM = 3, 2, 2, 8, 8
_generator = torch.Generator().manual_seed(0)
_IDS = torch.randint(0, 3, (CALLS, BATCH, LENGTH), generator=_generator).sort().values
_LENGTHS = torch.randint(0, LENGTH + 1, (CALLS, BATCH), generator=_generator)

#: Arrays that are mapped over, and the mask that each call makes of its parts: each mask that reads an array.
MASKS: dict[str, tuple[list[Tensor], Callable[..., a.Mask | a.Spans]]] = {}
for x in lengths.MASKS:
    each = [x.arrays(Sizes(BATCH, LENGTH, parts=3)) for _ in range(CALLS)]
    if x.function in a.masks.__all__ and each[0]:
        MASKS[x.name] = [torch.stack(parts) for parts in zip(*each, strict=True)], partial(x.build, LENGTH)
MASKS |= {
    "both sides": ([_LENGTHS], lambda x: a.key_padding(x, side="left") & a.prefix(x)),
    "from_dense, any runs": ([(_IDS[..., None] == _IDS[:, :, None])[:, :, None]], a.from_dense),
    "from_predicate": ([torch.arange(CALLS)], lambda x: a.from_predicate(lambda b, h, q, k: q >= k + x)),
    "bounds": (
        [torch.stack([a.window(i).spans(LENGTH, LENGTH, like=_IDS).bounds for i in range(CALLS)])],
        lambda x: a.Spans(x, LENGTH),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_each_call(name: str) -> None:
    arrays, make = MASKS[name]
    q = torch.randn(CALLS, BATCH, HEADS, LENGTH, DIM, generator=_generator)

    def attend(q: Tensor, *arrays: Tensor) -> Tensor:
        return attention(q, q, q, mask=make(*arrays))

    def gradient(q: Tensor, *arrays: Tensor) -> Tensor:
        return torch.func.grad(lambda q: attend(q, *arrays).square().sum())(q)

    for function in (attend, gradient):
        want = torch.stack([function(*each) for each in zip(q, *arrays, strict=True)])
        torch.testing.assert_close(vmap(function)(q, *arrays), want)


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


def _calls() -> float:
    return sum(x["calls"] for x in cpu.counters().values())


def _assert_as_a_loop(function: Callable[..., Any], arrays: list[Tensor], dims: list[int | None]) -> None:
    """One call of the kernel, and one for all gradients; both as those of a loop."""

    def loss(*arrays: Tensor) -> Tensor:
        out, lse = function(*arrays)
        return out.square().sum() + lse.sin().sum()

    floating = tuple(i for i, x in enumerate(arrays) if x.is_floating_point())
    for mapped, calls in ((function, 1), (grad(loss, floating), 2)):
        start = _calls()
        found = vmap(mapped, in_dims=tuple(dims))(*arrays)
        assert cpu.core is None or _calls() - start == calls
        each = [
            mapped(*(x if at is None else x.select(at, i) for x, at in zip(arrays, dims, strict=True)))
            for i in range(CALLS)
        ]
        for got, *want in zip(found, *each, strict=True):
            torch.testing.assert_close(got, torch.stack(want), rtol=1e-5, atol=1e-5)


def _randn(*shape: int) -> Tensor:
    return torch.randn(CALLS, *shape, generator=_generator)


#: What is mapped over, or shared, and the options that each call makes of it.
OPTIONS: dict[str, tuple[Tensor, Callable[[Tensor], dict[str, Any]]]] = {
    "nothing": (_randn(1), lambda x: {}),
    "sinks": (_randn(HEADS), lambda x: {"sinks": x}),
    "slopes": (_randn(HEADS), lambda x: {"bias": a.alibi(x)}),
    "slopes of rows": (_randn(BATCH, HEADS), lambda x: {"bias": a.alibi(x)}),
    "table": (_randn(HEADS, 7), lambda x: {"bias": a.relative(x)}),
    "dense": (_randn(BATCH, HEADS, LENGTH, LENGTH), lambda x: {"bias": x}),
    "dense of heads": (_randn(HEADS, 1, LENGTH), lambda x: {"bias": x}),
    "dense of all": (_randn(LENGTH, LENGTH), lambda x: {"bias": x}),
    "seed": (torch.arange(CALLS), lambda x: {"dropout_p": 0.4, "dropout_seed": x}),
    "seeds": (
        torch.stack([dropout_seeds(torch.tensor(i), BATCH, HEADS) for i in range(CALLS)]),
        lambda x: {"dropout_p": 0.4, "dropout_seed": x},
    ),
    "indices": (
        torch.arange(CALLS)[:, None] + torch.arange(LENGTH),
        lambda x: {"q_index": x, "bias": a.alibi([0.5, 0.25]), "softcap": 5.0},
    ),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_each_call(name: str, shared: bool) -> None:
    array, make = OPTIONS[name]
    q, kv = _randn(BATCH, HEADS, LENGTH, DIM), _randn(BATCH, 1, LENGTH, DIM)

    def attend(q: Tensor, kv: Tensor, array: Tensor) -> Any:
        return attention(q, kv, kv, mask=a.causal(), return_lse=True, **make(array))

    array = array[1] if shared else array.movedim(0, -1)
    # A shared axis of queries or keys, and mapped axes in other places.
    _assert_as_a_loop(attend, [q.movedim(0, 2), kv[0], array], [2, None, None if shared else -1])


def test_indices_and_sinks_of_each_call_go_one_after_the_other() -> None:
    q, sinks, index = _randn(BATCH, HEADS, LENGTH, DIM), _randn(HEADS), OPTIONS["indices"][0]

    def attend(q: Tensor, sinks: Tensor, index: Tensor) -> Tensor:
        return attention(q, q, q, mask=a.causal(), sinks=sinks, q_index=index, bias=a.alibi([0.5, 0.25]))

    want = torch.stack([attend(*x) for x in zip(q, sinks, index, strict=True)])
    torch.testing.assert_close(vmap(attend)(q, sinks, index), want)


def test_transforms_nest() -> None:
    q, bias = torch.randn(2, CALLS, 1, HEADS, LENGTH, DIM, generator=_generator), _randn(LENGTH)[0]

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        return attention(q, q, q, mask=a.window(3), bias=bias[None])

    nested = vmap(vmap(attend, (0, None)), (0, None))
    looped = lambda q, bias: torch.stack([attend(x, bias) for x in q.flatten(0, 1)])  # noqa: E731
    results = []
    for call in (nested, looped):
        loss = lambda *x, call=call: call(*x).square().sum()  # noqa: E731
        results.append([call(q, bias), *grad(loss, (0, 1))(q, bias)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x.flatten(), y.flatten(), rtol=1e-5, atol=1e-5)


def test_an_ensemble_is_one_call() -> None:
    models = [Attention(mask=a.causal(), sinks=torch.nn.Parameter(x)) for x in _randn(HEADS)]
    state, q = stack_module_state(models), _randn(BATCH, HEADS, LENGTH, DIM)[0]
    start = _calls()
    found = vmap(lambda *state: functional_call(models[0], state, (q, q, q)))(*state)
    assert cpu.core is None or _calls() - start == 1
    torch.testing.assert_close(found, torch.stack([m(q, q, q) for m in models]))


@pytest.mark.slow
def test_a_compiled_program_encodes_mapped_masks() -> None:
    q, visible = _randn(BATCH, HEADS, LENGTH, DIM), _randn(BATCH, 1, LENGTH, LENGTH) > 0
    function = vmap(lambda q, visible: attention(q, q, q, mask=a.from_dense(visible, max_runs=4)))
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, visible), function(q, visible))
