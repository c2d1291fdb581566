"""What dropout drops: the definition, word by word, and what its users rely on."""

import math

import numpy as np
import pytest
import torch
from overflows import within_range
from torch._inductor import config as inductor_config

from attnspan import reference
from attnspan.call.dropout import dropout_seeds, kept, philox, scale_of_kept, split_seeds, threshold
from attnspan.call.options import Options
from attnspan.kernels import math as math_kernel
from attnspan.torch import attention
from attnspan.torch import dropout_seeds as seeds_of_torch

WORD = 2**32 - 1


def _philox(counter, key):
    """Philox4x32-10 as in Salmon et al. 2011, with integers of any size."""
    c, k = list(counter), list(key)
    for _ in range(10):
        even, odd = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(odd >> 32) ^ c[1] ^ k[0], odd & WORD, (even >> 32) ^ c[3] ^ k[1], even & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def _seed_of(seed, b, h):
    low, high, _, _ = _philox((b, h, 0, 1), (seed & WORD, seed >> 32 & WORD))
    return low | high << 32


def _keeps(p, seed, q_index, k_index):
    """The definition for one pair; `seed` is that of the batch row and head."""
    r0, r1, _, _ = _philox((q_index & WORD, 0, 0, 0), (seed & WORD, seed >> 32 & WORD))
    key = k_index & WORD
    x = ((key >> 5) << 4 | (key & 15)) ^ r0
    x = ((x ^ x >> 16) * 0x7FEB352D) & WORD
    x = ((x ^ x >> 15) + r1) & WORD
    x = (x * 0x846CA68B) & WORD
    x ^= x >> 16
    number = x >> 16 if key & 16 else x & 0xFFFF
    return number >= min(65535, round(p * 65536))


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_words_published_with_it(counter, key, want):
    """The known answers of Random123, the authors' own code."""
    assert tuple(_philox(counter, key)) == want
    for make in (np.array, torch.tensor):
        words = philox([make([c]) for c in counter], [make([k]) for k in key])
        assert tuple(int(word[0]) for word in words) == want


INDICES = np.array([0, 1, 15, 16, 17, 31, 32, 33, 1000, 2**31 - 1, -1, -(2**31)])


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_definition(seed, dtype, convert):
    seeds = split_seeds(convert(np.array(seed)), convert(np.arange(2)[:, None]), convert(np.arange(3)[None]))
    assert tuple(seeds.shape) == (2, 3)
    want = [[_seed_of(seed, b, h) for h in range(3)] for b in range(2)]
    assert [[s & 2**64 - 1 for s in row] for row in seeds.tolist()] == want
    assert dropout_seeds(seed, 2, 3).dtype == np.int64
    assert dropout_seeds(seed, 2, 3).tolist() == seeds.tolist()
    index = convert(INDICES.astype(dtype)[None])
    got = kept(0.3, seeds, index, index)
    assert tuple(got.shape) == (2, 3, len(INDICES), len(INDICES))
    for b, h, i, j in np.ndindex(*got.shape):
        assert bool(got[b, h, i, j]) == _keeps(0.3, want[b][h], int(INDICES[i]), int(INDICES[j]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("lanes", [1, *(pytest.param(x, marks=pytest.mark.long) for x in (None, 256))])
def test_generated_code_is_the_definition(lanes):
    """At every number of heads that vectors leave over; the first is a constant, the others a symbol."""
    torch._dynamo.reset()
    with inductor_config.patch({"cpp.simdlen": lanes}):
        compiled = torch.compile(lambda seed, x: seeds_of_torch(seed, *x.shape), fullgraph=True)
        for heads in (4, *range(5, 41)):
            for seed in (0, 77, -1, 2**63 - 1, -(2**63)):
                seeds = compiled(torch.tensor(seed), torch.zeros(2, heads))
                assert np.array_equal(seeds, dropout_seeds(seed, 2, heads))


@pytest.mark.slow
def test_no_word_leaves_int64():
    """Compiled C++ leaves the overflow of a product undefined."""
    index = torch.from_numpy(INDICES)[None]

    def words(seed):
        return kept(0.3, seeds_of_torch(seed, 2, 33), index, index)

    compiled = torch.compile(words, fullgraph=True, backend=within_range)
    for seed in (0, -1, 2**63 - 1, 0x0123456789ABCDEF):
        compiled(torch.tensor(seed))


@pytest.mark.parametrize("p", [1e-9, 2**-16, 0.01, 0.1, 0.25, 0.5, 0.9, 1 - 2**-16, 1 - 1e-9])
def test_rates_are_multiples_of_two_to_the_minus_16(p):
    assert threshold(p) == min(65535, round(p * 65536))
    assert scale_of_kept(p) * (1 - threshold(p) / 65536) == pytest.approx(1, abs=1e-15)


ROWS, KEYS = 512, 512


def _pattern(p, seed=3, batch=2, heads=4, q_index=None, k_index=None):
    q_index = np.arange(ROWS)[None] if q_index is None else q_index
    k_index = np.arange(KEYS)[None] if k_index is None else k_index
    return kept(p, dropout_seeds(seed, batch, heads), q_index, k_index)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_keep_rate(p):
    rate = 1 - threshold(p) / 65536
    keep = _pattern(p)
    for one in (keep, keep[0], keep[:, 0], keep[..., ::2], keep[..., 16::32], keep[:, :, ::32]):
        sigma = math.sqrt(rate * (1 - rate) / one.size)
        assert abs(one.mean() - rate) < 4 * sigma
    # Over rows and over keys too: their means scatter as those of independent draws do, no less and no more.
    for axis, count in ((3, KEYS), (2, ROWS)):
        means = keep.mean(axis)
        ratio = means.var() / (rate * (1 - rate) / count)
        # The variance of n means, each nearly normal with some kurtosis, is off by this much.
        kurtosis = (1 - 6 * rate * (1 - rate)) / (rate * (1 - rate) * count)
        assert abs(ratio - 1) < 4 * math.sqrt((2 + kurtosis) / means.size)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pairs_are_independent(p):
    keep, index, rate = _pattern(p), np.arange(ROWS)[None], 1 - threshold(p) / 65536
    # Of two heads, batch rows, counters (b, h) and (h, b), and seeds.
    pairs = [(keep[:, 1:], keep[:, :-1]), (keep[1:], keep[:-1]), (keep[:1, 1:2], keep[1:, :1])]
    pairs += [(keep, _pattern(p, seed=seed)) for seed in (4, 3 + 2**32)]
    for shift in (2**16, 2**20, 2**30):
        pairs += [(keep, _pattern(p, **{name: index + shift})) for name in ("q_index", "k_index")]
    halves = np.arange(KEYS) & 16 == 0  # one hash serves both halves of a pair
    for apart in (1, 2, 8, 15, 16, 17, 32, 48, 64, 128, 256):
        pairs += [(keep[..., apart:], keep[..., :-apart]), (keep[:, :, apart:], keep[:, :, :-apart])]
        pairs += [(keep[:, :, apart:, apart:], keep[:, :, :-apart, :-apart])]
        pairs += [(np.roll(keep[..., halves], apart - 1, axis=-1), keep[..., ~halves])]
    for one, other in pairs:
        both = (one & other).mean() - rate * (one.mean() + other.mean()) + rate**2
        assert abs(both) / (rate * (1 - rate)) < 4 / math.sqrt(one.size)


def test_a_shard_drops_what_the_whole_drops():
    rng = np.random.default_rng(0)
    keys, rows = rng.permutation(KEYS)[:70], np.stack([rng.permutation(ROWS)[:100] for _ in range(2)])
    part = kept(0.3, dropout_seeds(3, 2, 4)[:, 1:3], rows, keys[None])
    for b, whole in enumerate(_pattern(0.3)[:, 1:3]):
        np.testing.assert_array_equal(part[b], whole[:, rows[b]][..., keys])


@pytest.mark.parametrize("seed", [torch.tensor(9), torch.tensor(dropout_seeds(9, 2, 4))], ids=["one", "each"])
def test_the_oracle_and_the_math_backend_drop_the_same(seed):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, *size, 4, generator=generator, dtype=torch.float64) for size in ((4, 6), (2, 40)))
    v = torch.eye(40, dtype=torch.float64).expand(2, 2, -1, -1)
    bounds = torch.tensor([0, 40], dtype=torch.int32).expand(1, 1, 6, 1, 2).contiguous()
    options = Options(dropout_p=0.4, dropout_seed=seed)
    weights, _ = math_kernel.forward(q, k, v, bounds, scale=0.5, options=options)
    plain, _ = math_kernel.forward(q, k, v, bounds, scale=0.5)
    as_arrays = options._replace(dropout_seed=seed.numpy())
    exact, _ = reference.forward(q, k, v, bounds.numpy(), 0.5, as_arrays)
    at = np.ndindex(2, 4, 6, 40)
    want = torch.tensor([_keeps(0.4, _seed_of(9, b, h), 34 + i, j) for b, h, i, j in at]).view(plain.shape)
    for got in (weights, torch.from_numpy(exact)):
        torch.testing.assert_close(got, want * plain * scale_of_kept(0.4), rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_a_rate_below_2_to_the_minus_17_drops_nothing(backend):
    x = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(1))
    out = attention(x, x, x, dropout_p=7e-6, dropout_seed=torch.tensor(3), backend=backend)
    assert torch.equal(out, attention(x, x, x, backend=backend))
