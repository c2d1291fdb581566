"""Key-value caches: whatever comes in whatever pieces, the result is that of attention over the whole."""

import random

import pytest
import torch
from cached_tokens import DIM, HEADS, KINDS, KV_HEADS, WIDTH, Tokens, feed, make, ragged, step
from covering import everything, few
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from attnspan import global_keys, window
from attnspan.errors import OptionError
from attnspan.torch import StaticCache, attention
from attnspan.torch._cache_rows import CacheRows as Cache

# Inductor's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.mark.slow
def test_a_thousand_steps_are_one_compilation_and_equal_to_the_whole() -> None:
    # Thirty in the short run.
    prompts, steps = [1, 40, 3, 10], 1000 if everything() else 30
    tokens = Tokens(4, 40 + steps)
    cache = StaticCache(4, KV_HEADS, tokens.length, DIM)
    out = torch.zeros_like(tokens.q)
    feed(cache, tokens, out, prompts, 40)
    place = cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.inference_mode():
        for _ in range(steps):
            feed(cache, tokens, out, [1] * 4, 1, compiled)
    assert counter.frame_count == 1
    assert place == (cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr())
    ends = torch.tensor(prompts) + steps
    assert torch.equal(cache.lengths, ends.int())
    assert tokens.error(out, keep=torch.arange(tokens.length) < ends[:, None]) < 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_generated_code_writes_into_the_buffers_and_reads_positions_first(kind: str) -> None:
    """RoPE: what follows from positions is used before the write, and once more after it."""

    @torch.no_grad()
    def rotated(cache: Cache, q: Tensor, k: Tensor) -> Tensor:
        angles = cache.positions(1)[:, None, :, None].float()
        keys, values = cache.update(k * angles.cos(), k)
        return attention(q * angles.cos(), keys, values, mask=cache.mask(1))

    torch.manual_seed(0)
    q, k = torch.randn(9, 2, HEADS, 1, DIM), torch.randn(9, 2, KV_HEADS, 1, DIM)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(rotated, fullgraph=True, backend=counter)
    ours, theirs = make(kind), make(kind)
    place, slots = ours.keys.data_ptr(), ours.keys.shape[2]
    found, (code,) = run_and_get_code(compiled, ours, q[0], k[0])
    torch.testing.assert_close(found, rotated(theirs, q[0], k[0]))
    for i in range(1, 9):
        torch.testing.assert_close(compiled(ours, q[i], k[i]), rotated(theirs, q[i], k[i]))
    assert counter.frame_count == 1
    assert ours.keys.data_ptr() == place
    body = code[code.index("def call") : code.index("def get_args")]
    assert f"(2, 2, {slots}, 16)" in body, "the check below must know the cache's shape"
    made = [line for line in body.splitlines() if "empty_strided" in line and f"{slots}, 16)" in line]
    assert not made, "no buffer of the cache's size is allocated"
    assert ".copy_(" not in body
    assert "clone" not in body


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS if everything() else ["rolling"])
def test_compiled_chunks_of_many_lengths_and_caches_of_many_layers(kind: str) -> None:
    generator = random.Random(5)
    tokens = [Tokens(2, 10, seed=seed) for seed in range(2)]
    caches = [make(kind, size=10) for _ in tokens]
    outs = [torch.zeros_like(row.q) for row in tokens]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)

    def counted(cache: Cache, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None) -> Tensor:
        return compiled(cache, q, k, v, torch.full((2,), k.shape[2]) if counts is None else counts)

    with torch.no_grad():
        while min(caches[0].lengths.tolist()) < 10:
            n = generator.randint(1, 4)
            counts = ragged(generator, caches[0], 10, n)
            for cache, row, out in zip(caches, tokens, outs, strict=True):
                feed(cache, row, out, counts, n, counted)
    # The first length, any length, and one token.
    assert counter.frame_count <= 3
    assert all(row.error(out, WIDTH[kind]) < 2 for row, out in zip(tokens, outs, strict=True))


def test_a_ring_gives_back_only_what_it_still_holds() -> None:
    cache, tokens = make("rolling"), Tokens(2, 40)
    out = torch.zeros_like(tokens.q)
    for _ in range(5):
        feed(cache, tokens, out, [4, 2], 4)  # 20 and 10 tokens in 8 slots, 5 keys for each query
    with pytest.raises(ValueError, match=r"truncate: lengths\[0\]: expected 16 to 20.*got 15"):
        cache.truncate(torch.tensor([15, 8]))
    assert cache.lengths.tolist() == [20, 10]
    cache.truncate(torch.tensor([16, 6]))
    # A second step back would need what the tokens taken back had overwritten, though lengths look harmless.
    feed(cache, tokens, out, [1, 1], 1)
    with pytest.raises(ValueError, match=r"lengths\[0\]: expected 16 to 17.*got 15"):
        cache.truncate(torch.tensor([15, 7]))
    cache.truncate(0)
    assert cache.lengths.tolist() == [0, 0]
    feed(cache, tokens, out, [4, 4], 4)
    assert tokens.error(out, 5, keep=torch.arange(40).expand(2, -1) < 4) < 2


def test_rows_of_a_ring_whose_window_is_gone_see_nothing() -> None:
    cache, tokens = make("rolling"), Tokens(2, 40)
    out = torch.zeros_like(tokens.q)
    feed(cache, tokens, out, [2, 4], 4)
    assert cache.mask(4).lowered.cost()[:, 0].tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    for _ in range(3):
        feed(cache, tokens, out, [4, 4], 4)
    cache.truncate(torch.tensor([10, 12]))  # Tokens 6 to 13, and 8 to 15, have been in the 8 slots.
    feed(cache, tokens, out, [1, 1], 1)
    assert cache.mask(4).lowered.cost()[:, 0].tolist() == [[0, 0, 0, 5], [0, 0, 0, 5]]
    # What was overwritten is no matter to a row that begins anew.
    cache.reset()
    feed(cache, tokens, out, [4, 4], 4)
    assert cache.mask(4).lowered.cost()[:, 0].tolist() == [[1, 2, 3, 4]] * 2


def test_a_ring_that_keeps_the_first_tokens() -> None:
    cache, tokens = make("sinks"), Tokens(2, 40)  # 3 and 8 slots, 5 keys for each query
    out = torch.zeros_like(tokens.q)
    for _ in range(5):
        feed(cache, tokens, out, [4, 1], 4)
    assert cache.k_index.tolist() == [[0, 1, 2, 19, 12, 13, 14, 15, 16, 17, 18], [0, 1, 2, 3, 4, *[-1] * 6]]
    mask = cache.mask(2)
    assert mask | global_keys(3) is mask
    assert global_keys(1) | mask is mask
    with pytest.raises(OptionError, match=r"at most the 3 first tokens.*got 4\. Make the cache with keep=4"):
        mask | global_keys(4)
    with pytest.raises(OptionError, match="keys that are 0"):
        mask | window(2)
    with pytest.raises(ValueError, match=r"truncate: lengths\[0\]: expected 16 to 20.*got 15"):
        cache.truncate(torch.tensor([15, 4]))
    cache.truncate(torch.tensor([2, 4]))  # Rows can go back to their first tokens, which are still there.
    for _ in range(8):
        feed(cache, tokens, out, [4, 4], 4)
    keep = torch.arange(40) < torch.tensor([[34], [36]])
    assert tokens.error(out, WIDTH["sinks"], keep=keep) < 2


class Layer(torch.nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.update(k, v)
        return attention(q, keys, values, mask=self.cache.mask(q.shape[2]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_a_model_with_a_cache_is_exported(kind: str) -> None:
    tokens = Tokens(2, 24)
    layer = Layer(make(kind))
    first = tuple(x[:, :, :1] for x in (tokens.q, tokens.k, tokens.v))
    with torch.no_grad():
        program = torch.export.export(layer, first)
        module, out = program.module(), torch.zeros_like(tokens.q)
        assert layer.cache.lengths.tolist() == [0, 0], "to export is not to run"
        for t in range(24):
            out[:, :, t : t + 1] = module(*(x[:, :, t : t + 1] for x in (tokens.q, tokens.k, tokens.v)))
    assert tokens.error(out, WIDTH[kind]) < 2


def test_a_model_moves_its_caches_and_does_not_save_them() -> None:
    layer = Layer(make("static")).to(torch.bfloat16)
    new = torch.ones(2, KV_HEADS, 2, DIM, dtype=torch.bfloat16)
    keys, values = layer.cache.update(new, new)
    assert keys.data_ptr() == layer.cache.keys.data_ptr()
    assert values.data_ptr() == layer.cache.values.data_ptr()
    assert layer.state_dict() == {}
    assert layer.cache.keys.dtype == torch.bfloat16
    assert layer.cache.lengths.dtype == torch.int32
    assert "kv_heads=2, slots=24" in repr(layer)
