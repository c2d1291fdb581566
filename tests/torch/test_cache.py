"""Key-value caches: whatever comes in whatever pieces, the result is that of attention over the whole."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import relative_error
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import scaled_dot_product_attention

from attnspan import alibi, alibi_slopes
from attnspan.torch import RollingCache, StaticCache, attention
from attnspan.torch._cache import Cache
from attnspan.torch._cache_write import LOST, cache_write_op, write_anywhere

# Inductor's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

HEADS, KV_HEADS, DIM = 4, 2, 16


class Tokens:
    """Rows of random tokens, and what attention over each row as a whole gives, in float64 by plain torch."""

    def __init__(
        self, batch: int, length: int, *, v_dim: int = DIM, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, dim: int) -> Tensor:
            return torch.randn(batch, heads, length, dim, generator=generator).to(dtype)

        self.q, self.k, self.v = normal(HEADS, DIM), normal(KV_HEADS, DIM), normal(KV_HEADS, v_dim)
        self.batch, self.length = batch, length

    def expected(self, width: int | None = None, slopes: Tensor | None = None) -> Tensor:
        """(B, H, length, Dv) in float64; each token sees the last ``width`` ones, itself included."""
        return self._attend(torch.float64, width, slopes)

    def error(
        self,
        out: Tensor,
        width: int | None = None,
        slopes: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> float:
        """Relative error of the tokens of ``keep`` (B, length), all by default, as a multiple of torch's own.

        The worst token counts as well as all of them: one among a thousand would vanish in the norm.
        """
        keep = torch.ones(self.batch, self.length, dtype=torch.bool) if keep is None else keep
        wanted, theirs, ours = (
            x.transpose(1, 2)[keep].double().flatten(1)
            for x in (self.expected(width, slopes), self._attend(self.q.dtype, width, slopes), out)
        )
        assert len(wanted) > 0
        # Of a single key torch's attention makes no error at all; nobody is asked for less than rounding.
        rounding = torch.finfo(out.dtype).eps
        worst_of_ours, worst_of_theirs = ((x - wanted).norm(dim=-1).max() for x in (ours, theirs))
        worst = worst_of_ours / max(worst_of_theirs, rounding * wanted.norm(dim=-1).max())
        return max(relative_error(ours, wanted) / max(relative_error(theirs, wanted), rounding), float(worst))

    def _attend(self, dtype: torch.dtype, width: int | None, slopes: Tensor | None) -> Tensor:
        at = torch.arange(self.length)
        ago = at[:, None] - at
        visible = (ago >= 0) & (ago < (self.length if width is None else width))
        mask = torch.zeros(1, HEADS, self.length, self.length, dtype=dtype).masked_fill(~visible, -torch.inf)
        if slopes is not None:
            mask = mask - slopes.to(dtype)[:, None, None] * ago
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def chunk(self, x: Tensor, lengths: list[int], counts: list[int], n: int) -> Tensor:
        """The next tokens of each row at the end of (B, heads, n, dim), with NaN before them."""
        new = torch.full((*x.shape[:2], n, x.shape[3]), torch.nan, dtype=x.dtype)
        for b, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            new[b, :, n - count :] = x[b, :, start : start + count]
        return new


def feed(
    cache: Cache,
    tokens: Tokens,
    out: Tensor,
    counts: list[int],
    n: int,
    call: Callable[..., Tensor] | None = None,
) -> None:
    """One step of ragged chunks through the cache; the outputs of real tokens go into ``out``."""
    lengths = cache.lengths.tolist()
    q, k, v = (tokens.chunk(x, lengths, counts, n) for x in (tokens.q, tokens.k, tokens.v))
    given = None if counts == [n] * len(counts) else torch.tensor(counts)
    positions = cache.positions(n, given)
    found = (call or step)(cache, q, k, v, given)
    for b, (start, count) in enumerate(zip(lengths, counts, strict=True)):
        out[b, :, start : start + count] = found[b, :, n - count :]
        assert positions[b, n - count :].tolist() == list(range(start, start + count))
    assert torch.equal(cache.q_index(n), positions)
    assert cache.lengths.tolist() == [a + c for a, c in zip(lengths, counts, strict=True)]


def step(cache: Cache, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, **options: object) -> Tensor:
    if cache.layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    keys, values = cache.update(k, v, counts)
    mask = cache.mask(k.shape[1] if cache.layout == "bshd" else k.shape[2])
    out = attention(q, keys, values, mask=mask, layout=cache.layout, **options)
    return out.transpose(1, 2) if cache.layout == "bshd" else out


def ragged(generator: random.Random, cache: Cache, length: int, n: int) -> list[int]:
    return [min(generator.randint(0, n), length - start) for start in cache.lengths.tolist()]


def make(kind: str, batch: int = 2, size: int = 24, **options: object) -> Cache:
    if kind == "static":
        return StaticCache(batch, KV_HEADS, size, DIM, **options)
    return RollingCache(batch, KV_HEADS, 5, DIM, chunk=4, **options)


#: The kinds of caches, and how many keys a token sees through those that `make` makes.
WIDTH = {"static": None, "rolling": 5}
KINDS = tuple(WIDTH)


def test_a_thousand_steps_are_one_compilation_and_equal_to_the_whole() -> None:
    prompts, steps = [1, 40, 3, 77, 10, 64, 25, 100], 1000
    tokens = Tokens(8, 100 + steps)
    cache = StaticCache(8, KV_HEADS, tokens.length, DIM)
    out = torch.zeros_like(tokens.q)
    feed(cache, tokens, out, prompts, 100)
    place = cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.inference_mode():
        for _ in range(steps):
            feed(cache, tokens, out, [1] * 8, 1, compiled)
    assert counter.frame_count == 1
    assert place == (cache.keys.data_ptr(), cache.values.data_ptr(), cache.lengths.data_ptr())
    ends = torch.tensor(prompts) + steps
    assert torch.equal(cache.lengths, ends.int())
    assert tokens.error(out, keep=torch.arange(tokens.length) < ends[:, None]) < 2


@pytest.mark.parametrize("kind", KINDS)
def test_generated_code_writes_into_the_buffers(kind: str) -> None:
    torch._dynamo.reset()
    tokens = Tokens(2, 24)
    cache, out = make(kind), torch.zeros_like(tokens.q)
    place = cache.keys.data_ptr()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(20):
            feed(cache, tokens, out, [1, 1], 1, compiled)
        torch._dynamo.reset()
        arguments = (cache, *(x[:, :, 20:21] for x in (tokens.q, tokens.k, tokens.v)), None)
        _, codes = run_and_get_code(torch.compile(step, fullgraph=True), *arguments)
    assert counter.frame_count == 1
    assert cache.keys.data_ptr() == place
    assert tokens.error(out, WIDTH[kind], keep=torch.arange(24).expand(2, -1) < 20) < 2
    (code,) = codes
    body = code[code.index("def call") : code.index("def get_args")]
    slots = cache.keys.shape[2]
    assert f"(2, 2, {slots}, 16)" in body, "the check below must know the cache's shape"
    made = [line for line in body.splitlines() if "empty_strided" in line and f"{slots}, 16)" in line]
    assert not made, "no buffer of the cache's size is allocated"
    assert "copy_" not in body
    assert "clone" not in body


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_chunks_then_decoding(kind: str, dtype: torch.dtype, layout: str) -> None:
    generator = random.Random(1)
    tokens = Tokens(3, 90, v_dim=24, dtype=dtype)
    cache = make(kind, 3, 90, v_dim=24, dtype=dtype, layout=layout)
    out = torch.zeros(3, HEADS, 90, 24, dtype=dtype)
    with torch.no_grad():
        for _ in range(20):
            n = generator.randint(1, 4)
            feed(cache, tokens, out, ragged(generator, cache, 60, n), n)
        while min(cache.lengths.tolist()) < 90:
            feed(cache, tokens, out, [int(length < 90) for length in cache.lengths.tolist()], 1)
    assert tokens.error(out, WIDTH[kind]) < 2


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (1, 3), (7, 1), (4, 4), (3, 8)])
def test_the_ring_equals_a_window_over_many_rounds(window: int, chunk: int) -> None:
    generator = random.Random(window)
    tokens = Tokens(2, 200)
    cache = RollingCache(2, KV_HEADS, window, DIM, chunk=chunk)
    out = torch.zeros_like(tokens.q)
    while min(cache.lengths.tolist()) < 200:
        feed(cache, tokens, out, ragged(generator, cache, 200, chunk), chunk)
    assert tokens.error(out, window) < 2
    assert cache.keys.shape[2] == window + chunk - 1


@pytest.mark.parametrize("backend", ["math", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_position_biases_go_by_the_tokens_own_indices(kind: str, backend: str) -> None:
    generator = random.Random(2)
    slopes = torch.as_tensor(alibi_slopes(HEADS))
    tokens = Tokens(2, 40)
    cache, out = make(kind, size=40), torch.zeros_like(tokens.q)

    def biased(*arguments: object) -> Tensor:
        return step(*arguments, bias=alibi(slopes), backend=backend)  # type: ignore[arg-type]

    with torch.no_grad():
        while min(cache.lengths.tolist()) < 40:
            feed(cache, tokens, out, ragged(generator, cache, 40, 4), 4, biased)
    assert tokens.error(out, WIDTH[kind], slopes) < 2


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_are_taken_back(kind: str) -> None:
    generator = random.Random(3)
    tokens, wrong = Tokens(2, 80), Tokens(2, 80, seed=1)
    cache, out = make(kind, size=80), torch.zeros_like(tokens.q)
    with torch.no_grad():
        while min(cache.lengths.tolist()) < 80:
            lengths = cache.lengths.tolist()
            counts = [min(4, 80 - length) for length in lengths]
            accepted = [min(generator.randint(1, 4), count) for count in counts]
            feed(cache, wrong, torch.zeros_like(out), counts, 4)
            cache.truncate(cache.lengths - torch.tensor(counts))
            feed(cache, tokens, out, accepted, 4)
    assert tokens.error(out, WIDTH[kind]) < 2


def test_a_ring_gives_back_only_what_it_still_holds() -> None:
    cache, tokens = make("rolling"), Tokens(2, 40)
    out = torch.zeros_like(tokens.q)
    for _ in range(5):
        feed(cache, tokens, out, [4, 2], 4)  # 20 and 10 tokens in 8 slots, windows of 5
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_emptied_one_by_one(kind: str) -> None:
    tokens = Tokens(2, 24)
    cache, out = make(kind), torch.zeros_like(tokens.q)
    for _ in range(3):
        feed(cache, tokens, out, [4, 4], 4)
    cache.reset(torch.tensor([False, True]))
    assert cache.lengths.tolist() == [12, 0]
    out.zero_()
    for _ in range(3):
        feed(cache, tokens, out, [1, 4], 4)
    at = torch.arange(24)
    assert tokens.error(out, WIDTH[kind], keep=torch.stack([(at >= 12) & (at < 15), at < 12])) < 2
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]


def state(cache: Cache) -> list[Tensor]:
    return [x.clone() for x in cache.buffers()]


def same(before: list[Tensor], cache: Cache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, cache.buffers(), strict=True))


def _new(n: int, heads: int = KV_HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, heads, n, dim, dtype=dtype)


BAD_UPDATES = {
    "overflow": ((_new(3), _new(3)), ValueError, "row 1: expected room for 3 more tokens, got 6 of 8"),
    "too long": ((_new(9), _new(9)), ValueError, "k_new: expected at most 8 tokens, got 9.*max_len"),
    "count": ((_new(2), _new(2), torch.tensor([1, 3])), ValueError, r"counts\[1\]: expected 0 to 2.*got 3"),
    "negative count": ((_new(2), _new(2), torch.tensor([-1, 0])), ValueError, r"counts\[0\].*got -1"),
    "count shape": ((_new(2), _new(2), torch.tensor([1])), ValueError, r"counts: .*shape \(2,\), got"),
    "count dtype": ((_new(2), _new(2), torch.ones(2)), TypeError, "counts: expected integers"),
    "heads": ((_new(1, heads=3), _new(1)), ValueError, "k_new: expected batch 2, 2 heads and head dim 16"),
    "dim": ((_new(1), _new(1, dim=8)), ValueError, "v_new: expected batch 2"),
    "rank": ((_new(1)[0], _new(1)), ValueError, r"k_new: .*got shape \(2, 1, 16\)"),
    "lengths differ": ((_new(1), _new(2)), ValueError, "v_new: expected as many tokens as k_new, got 2"),
    "dtype": ((_new(1, dtype=torch.bfloat16), _new(1)), TypeError, "k_new: expected torch.float32"),
    "device": (
        (_new(1).to("meta"), _new(1)),
        ValueError,
        "k_new: expected device cpu, as the cache, got meta",
    ),
    "no tensor": (([[1.0]], _new(1)), TypeError, "k_new: expected a torch.Tensor, got list"),
    "gradient": ((_new(1), _new(1).requires_grad_()), ValueError, "without gradients.*no_grad"),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_a_refused_update_changes_nothing(name: str) -> None:
    arguments, kind, text = BAD_UPDATES[name]
    cache = StaticCache(2, KV_HEADS, 8, DIM)
    cache.update(_new(6), _new(6), torch.tensor([3, 6]))
    before = state(cache)
    with pytest.raises(kind, match=text):
        cache.update(*arguments)
    assert same(before, cache)


BAD_CALLS = {
    "mask": (lambda c: c.mask(9), ValueError, "mask: expected at most 8 query rows, got 9"),
    "truncate up": (lambda c: c.truncate(5), ValueError, r"lengths\[0\]: expected 0 to 3, .*got 5"),
    "truncate below": (lambda c: c.truncate(-1), ValueError, r"lengths\[0\]: expected 0 to 3, .*got -1"),
    "truncate shape": (lambda c: c.truncate(torch.tensor([1])), ValueError, "one entry per batch row"),
    "truncate dtype": (lambda c: c.truncate(torch.ones(2)), TypeError, "lengths: expected integers"),
    "reset dtype": (
        lambda c: c.reset(torch.tensor([1, 0])),
        TypeError,
        "rows: expected bool, got torch.int64",
    ),
    "reset shape": (lambda c: c.reset(torch.tensor([True])), ValueError, "reset: rows: expected one entry"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_other_refusals_change_nothing(name: str) -> None:
    call, kind, text = BAD_CALLS[name]
    cache = StaticCache(2, KV_HEADS, 8, DIM)
    cache.update(_new(6), _new(6), torch.tensor([3, 6]))
    before = state(cache)
    with pytest.raises(kind, match=text):
        call(cache)
    assert same(before, cache)


BAD_CACHES = {
    "size": (lambda: StaticCache(1, 1, 0, 8), ValueError, "max_len: expected 1 to"),
    "float": (lambda: StaticCache(1, 1, 8.0, 8), TypeError, "max_len: expected an int, got float"),
    "window": (lambda: RollingCache(1, 1, 0, 8), ValueError, "window: expected 1 to"),
    "chunk": (lambda: RollingCache(1, 1, 4, 8, chunk=0), ValueError, "chunk: expected 1 to"),
    "layout": (lambda: StaticCache(1, 1, 8, 8, layout="thd"), ValueError, "bhsd or bshd, got 'thd'"),
    "dtype": (lambda: StaticCache(1, 1, 8, 8, dtype=torch.int8), TypeError, "floating dtype, got torch.int8"),
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_caches_that_cannot_be(name: str) -> None:
    make_one, kind, text = BAD_CACHES[name]
    with pytest.raises(kind, match=text):
        make_one()


def test_a_mask_or_keys_that_are_shorter_than_the_cache() -> None:
    cache = StaticCache(2, KV_HEADS, 8, DIM)
    keys, values = cache.update(_new(6), _new(6))
    q = torch.ones(2, HEADS, 1, DIM)
    with pytest.raises(ValueError, match=r"cache.*at most 5, the number of keys"):
        attention(q, keys[:, :, :5], values[:, :, :5], mask=cache.mask(1))
    with pytest.raises(ValueError, match="spans over k_len=8 keys"):
        attention(q, keys, values, mask=cache.mask(1).prepare(1, 6, batch=2, like=q))


def test_a_ring_refuses_chunks_beyond_its_own() -> None:
    cache = RollingCache(2, KV_HEADS, 5, DIM, chunk=2)
    with pytest.raises(ValueError, match=r"at most 2 tokens, got 3\. Split the tokens into chunks"):
        cache.update(_new(3), _new(3))
    with pytest.raises(ValueError, match=r"at most 2 query rows, got 3\. Split"):
        cache.mask(3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_without_room_raises_and_writes_nothing(backend: str) -> None:
    tokens = Tokens(2, 12)
    cache, out = make("static", size=8), torch.zeros_like(tokens.q)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(8):
            feed(cache, tokens, out, [1, 1], 1, compiled)
        before = state(cache)
        with pytest.raises(ValueError, match="row 0: expected room for 1 more tokens, got 8 of 8"):
            feed(cache, tokens, out, [1, 1], 1, compiled)
    assert same(before, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_truncation_to_what_is_not_there_is_never_plausible(kind: str) -> None:
    cache = make(kind)
    cache.update(_new(4), _new(4))
    torch.compile(cache.truncate, fullgraph=True, backend="aot_eager")(torch.tensor([2, 5]))
    assert cache.lengths.tolist() == [2, LOST]
    q = torch.ones(2, HEADS, 1, DIM)
    with pytest.raises(
        ValueError, match=r"cache: lengths: expected lengths of at least 0|cache row 1: .*lost"
    ):
        attention(q, cache.keys, cache.values, mask=cache.mask(1))
    compiled = torch.compile(lambda: cache.mask(1).spans(1, cache.keys.shape[2], batch=2, like=q).bounds)
    assert compiled()[1, 0, 0, 0].tolist() == [0, -1], "illegal: NaN on devices, an error on CPU"
    with pytest.raises(ValueError, match=r"cache row 1: .*lost.*reset"):
        cache.update(_new(1), _new(1))
    cache.reset(torch.tensor([False, True]))
    cache.update(_new(1), _new(1))
    assert cache.lengths.tolist() == [3, 1]


def _arguments(seed: int, wrap: bool, counted: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    n, slots = int(torch.randint(1, 5, (), generator=generator)), 9

    def normal(length: int, dim: int) -> Tensor:
        return torch.randn(4, length, 2, dim, generator=generator).transpose(1, 2)

    lengths = torch.randint(0, 40 if wrap else slots - n + 1, (4,), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, n + 1, (4,), generator=generator) if counted else None
    return normal(slots, 3), normal(slots, 5), lengths, normal(n, 3), normal(n, 5), counts, wrap


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_what_other_devices_run_writes_the_same(wrap: bool, counted: bool) -> None:
    for seed in range(50):
        ours, theirs = _arguments(seed, wrap, counted), _arguments(seed, wrap, counted)
        cache_write_op(*ours)
        write_anywhere(*theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))


def test_other_devices_mark_rows_without_room_and_leave_them_alone() -> None:
    keys, values, _, k_new, v_new, _, _ = _arguments(0, False)
    n = k_new.shape[2]
    before = keys.clone(), values.clone()
    lengths = torch.tensor([9 - n, 9 - n + 1, 2, LOST], dtype=torch.int32)
    write_anywhere(keys, values, lengths, k_new, v_new, torch.tensor([n, n, n + 1, 0]), wrap=False)
    assert lengths.tolist() == [9, LOST, LOST, LOST]
    assert torch.equal(keys[0, :, 9 - n :], k_new[0])
    for cache, was in zip((keys, values), before, strict=True):
        assert torch.equal(cache[1:], was[1:])


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_opcheck(wrap: bool, counted: bool) -> None:
    torch.library.opcheck(cache_write_op, _arguments(0, wrap, counted))


def test_caches_made_or_used_in_inference_mode_serve_outside() -> None:
    with torch.inference_mode():
        cache = make("static")
        cache.update(_new(2), _new(2))
    assert not cache.keys.is_inference()
    with torch.no_grad():
        cache.update(_new(2).requires_grad_(), _new(2))
    cache.update(_new(2), _new(2))
    assert cache.lengths.tolist() == [6, 6]


def test_the_operator_refuses_gradients_too_and_counts_as_a_write() -> None:
    cache = make("static")
    arguments = (cache.keys, cache.values, cache.lengths)
    with pytest.raises(ValueError, match="without gradients"):
        cache_write_op(*arguments, _new(1).requires_grad_(), _new(1), None, False)
    q = torch.ones(2, HEADS, 1, DIM, requires_grad=True)
    keys, values = cache.update(_new(1), _new(1))
    loss = attention(q, keys, values, mask=cache.mask(1)).sum()
    cache.update(_new(1), _new(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Layer(torch.nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.update(k, v)
        return attention(q, keys, values, mask=self.cache.mask(q.shape[2]))


@pytest.mark.parametrize("kind", KINDS)
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
    assert layer.state_dict() == {}
    assert layer.cache.keys.dtype == torch.bfloat16
    assert layer.cache.lengths.dtype == torch.int32
    assert "kv_heads=2, slots=24" in repr(layer)


def test_the_code_of_the_page_runs_and_agrees_with_no_cache() -> None:
    page = (Path(__file__).parents[2] / "docs" / "caches.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/caches.md", "exec"), names)
    prompts, counts, generated, model = (names[name] for name in ("prompts", "counts", "generated", "model"))
    for b, count in enumerate(counts.tolist()):
        ids = torch.cat([prompts[b, 12 - count :], generated[b]])[None]
        for t in range(20):
            caches = [StaticCache(1, 2, 64, 16, layout="bshd") for _ in range(2)]
            with torch.no_grad():
                assert model(ids[:, : count + t], caches).argmax() == ids[0, count + t]
    assert names["rolling"][0].lengths.tolist() == [32, 27]
    assert names["cache"].lengths.tolist() == [4 + 3, 2 + 2]
    caches = [StaticCache(2, 2, 64, 16, layout="bshd") for _ in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(names["in_pieces"], model(prompts, caches, counts))
    k, before = names["k"], names["before"]
    keys = names["cache"].keys
    for b, nodes in enumerate([[0, 2, 4], [0, 1]]):
        assert torch.equal(keys[b, :, before[b] : before[b] + len(nodes)], k[b, :, nodes])
