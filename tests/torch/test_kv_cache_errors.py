"""Key-value caches: what they refuse, on every device, and the operator that writes into them."""

from typing import Any

import pytest
import torch
from cached_tokens import DIM, HEADS, KINDS, KV_HEADS, Tokens, feed, make, step
from covering import few
from samples.mistaken_objects import CACHES, NEW_CACHES
from samples.mistakes import Mistake, check, error_of, rows
from torch import Tensor

from attnspan.torch import PagedCache, RollingCache, StaticCache, attention
from attnspan.torch._cache_rows import CacheRows as Cache
from attnspan.torch._cache_write import LOST, cache_append_op, write_anywhere

# Inductor's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def state(cache: Cache) -> list[Tensor]:
    return [x.clone() for x in cache.buffers()]


def same(before: list[Tensor], cache: Cache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, cache.buffers(), strict=True))


def _new(n: int, heads: int = KV_HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, heads, n, dim, dtype=dtype)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mistake", rows(CACHES), ids=repr)
def test_a_refused_call_changes_nothing(mistake: Mistake, paged: bool) -> None:
    if paged:
        cache: Cache = PagedCache(6, 3, KV_HEADS, DIM, batch=2, max_len=8)
        cache.reserve([8, 8])
    else:
        cache = StaticCache(2, KV_HEADS, 8, DIM)
    cache.update(_new(6), _new(6), torch.tensor([3, 6]))
    before = state(cache)
    check(error_of(eval(f"lambda c: {mistake.code}", {"torch": torch, "new": _new}), cache), mistake)
    assert same(before, cache)


def test_tokens_that_lie_in_the_cache_itself() -> None:
    cache = StaticCache(1, KV_HEADS, 8, 4)
    new = torch.arange(6.0)[:, None].expand(1, KV_HEADS, 6, 4)
    cache.update(new, new)
    cache.truncate(1)
    cache.update(cache.keys[:, :, :5], cache.values[:, :, :5])
    for x in (cache.keys, cache.values):
        assert x[0, :, :, 0].tolist() == [[0, 0, 1, 2, 3, 4, 0, 0]] * 2


@pytest.mark.parametrize("mistake", rows(NEW_CACHES), ids=repr)
def test_caches_that_cannot_be(mistake: Mistake) -> None:
    check(error_of(eval(f"lambda: {mistake.code}", globals())), mistake)


def test_a_mask_or_keys_that_are_shorter_than_the_cache() -> None:
    cache = StaticCache(2, KV_HEADS, 8, DIM)
    keys, values = cache.update(_new(6), _new(6))
    q = torch.ones(2, HEADS, 1, DIM)
    with pytest.raises(ValueError, match=r"cache.*at most 5"):
        attention(q, keys[:, :, :5], values[:, :, :5], mask=cache.mask(1))
    with pytest.raises(ValueError, match="spans over k_len=8 keys"):
        attention(q, keys, values, mask=cache.mask(1).prepare(1, 6, batch=2, like=q))


def test_a_ring_refuses_chunks_beyond_its_own() -> None:
    cache = RollingCache(2, KV_HEADS, 4, DIM, chunk=2)
    with pytest.raises(ValueError, match=r"at most 2 tokens, got 3\. Split the tokens into chunks"):
        cache.update(_new(3), _new(3))
    with pytest.raises(ValueError, match=r"at most 2 queries, got 3\. Split"):
        cache.mask(3)


@pytest.mark.slow
def test_a_compiled_step_without_room_raises_and_writes_nothing() -> None:
    tokens = Tokens(2, 12)
    cache, out = make("static", size=8), torch.zeros_like(tokens.q)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        feed(cache, tokens, out, [7, 7], 7)
        feed(cache, tokens, out, [1, 1], 1, compiled)
        before = state(cache)
        with pytest.raises(ValueError, match="element 0: expected room for 1 more tokens, got 8 of 8"):
            feed(cache, tokens, out, [1, 1], 1, compiled)
    assert same(before, cache)


# Dynamo itself makes an instance of each autograd function that it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_a_compiled_truncation_to_what_is_not_there_is_never_plausible(kind: str) -> None:
    cache = make(kind)
    cache.update(_new(4), _new(4))
    torch.compile(cache.truncate, fullgraph=True, backend="eager")(torch.tensor([2, 5]))
    assert cache.lengths.tolist() == [2, LOST]
    q = torch.ones(2, HEADS, 1, DIM)
    with pytest.raises(ValueError, match=r"cache: lengths: expected lengths of at least 0|element 1: .*lost"):
        attention(q, cache.keys, cache.values, mask=cache.mask(1))
    # What a device does, which reads no value: NaN in that row, and in no other.
    attend = torch.compile(attention, fullgraph=True, backend="eager")
    out = attend(q, cache.keys, cache.values, mask=cache.mask(1), backend="math")
    assert out.isnan().all(-1).all(1).flatten().tolist() == [False, True]
    with pytest.raises(ValueError, match=r"element 1: .*lost.*reset"):
        cache.update(_new(1), _new(1))
    cache.reset(torch.tensor([False, True]))
    cache.update(_new(1), _new(1))
    assert cache.lengths.tolist() == [3, 1]
    torch.compile(cache.reorder, fullgraph=True, backend="eager")(torch.tensor([1, 2]))
    assert cache.lengths.tolist() == [1, LOST]
    torch.compile(cache.reset, fullgraph=True, backend="eager")(torch.tensor([0, 0]))
    assert cache.lengths.tolist() == [LOST, LOST], "a number that is there twice"


def _arguments(seed: int, keep: int, counted: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    n, slots = int(torch.randint(1, 5, (), generator=generator)), 9

    def normal(length: int, dim: int) -> Tensor:
        return torch.randn(4, length, 2, dim, generator=generator).transpose(1, 2)

    lengths = torch.randint(
        0, 40 if keep < slots else slots - n + 1, (4,), generator=generator, dtype=torch.int32
    )
    counts = torch.randint(0, n + 1, (4,), generator=generator) if counted else None
    return normal(slots, 3), normal(slots, 5), lengths, normal(n, 3), normal(n, 5), counts, keep


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "counted"), [(3, True), pytest.param(9, False, marks=pytest.mark.long)])
def test_opcheck(keep: int, counted: bool) -> None:
    torch.library.opcheck(cache_append_op, _arguments(0, keep, counted))


@pytest.mark.parametrize("keep", [0, 3, 9])
@pytest.mark.parametrize("counted", [False, True])
def test_what_other_devices_run_writes_the_same(keep: int, counted: bool) -> None:
    for seed in range(20):
        ours, theirs = _arguments(seed, keep, counted), _arguments(seed, keep, counted)
        assert torch.equal(cache_append_op(*ours), write_anywhere(*theirs))
        assert all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))


def test_other_devices_leave_rows_without_room_alone_and_all_without_memory(monkeypatch: Any) -> None:
    keys, values, _, k_new, v_new, _, _ = _arguments(0, 9)
    n = k_new.shape[2]
    before = keys.clone(), values.clone()
    lengths = torch.tensor([9 - n, 9 - n + 1, 2, LOST], dtype=torch.int32)
    call = keys, values, lengths, k_new, v_new, torch.tensor([n, n, n + 1, 0]), 9
    take, calls = torch.where, []

    def where(*given: Any) -> Any:
        calls.append(given[1].dim() == 4 if isinstance(given[1], Tensor) else False)
        if calls[-1] and sum(calls) == 2:
            raise torch.OutOfMemoryError
        return take(*given)

    monkeypatch.setattr(torch, "where", where)
    with pytest.raises(torch.OutOfMemoryError):
        write_anywhere(*call)
    monkeypatch.undo()
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    assert write_anywhere(*call).tolist() == [9, LOST, LOST, LOST]
    assert torch.equal(keys[0, :, 9 - n :], k_new[0])
    for cache, was in zip((keys, values), before, strict=True):
        assert torch.equal(cache[1:], was[1:])


@pytest.mark.parametrize("kind", ["static", "rolling", "paged"])
def test_caches_made_moved_or_used_in_inference_mode_serve_outside(kind: str) -> None:
    with torch.inference_mode():
        paged = PagedCache(8, 2, KV_HEADS, DIM, batch=2, max_len=8, dtype=torch.bfloat16)
        cache = (paged if kind == "paged" else make(kind, dtype=torch.bfloat16)).float()
        paged.reserve([6, 6])
        cache.update(_new(2), _new(2))
    assert not any(x.is_inference() for x in cache.buffers())
    with torch.no_grad():
        cache.update(_new(2).requires_grad_(), _new(2))
    cache.update(_new(2), _new(2))
    assert cache.lengths.tolist() == [6, 6]


def test_gradients_are_refused_compiled_too_and_a_write_counts_as_one() -> None:
    cache = make("static")
    arguments = (cache.keys, cache.values, cache.lengths)
    with pytest.raises(ValueError, match="without gradients"):
        cache_append_op(*arguments, _new(1).requires_grad_(), _new(1), None, 24)
    with pytest.raises(RuntimeError, match="without gradients"):
        torch.compile(cache.update, fullgraph=True, backend="eager")(_new(1), _new(1).requires_grad_())
    assert cache.lengths.tolist() == [0, 0]
    q = torch.ones(2, HEADS, 1, DIM, requires_grad=True)
    keys, values = cache.update(_new(1), _new(1))
    loss = attention(q, keys, values, mask=cache.mask(1)).sum()
    cache.update(_new(1), _new(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
