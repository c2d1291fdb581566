"""Every strategy on real ranks gives what one process alone gives: outputs, lse and all gradients."""

import functools
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import everything, few
from hypothesis import given
from hypothesis import strategies as st
from placed import attend, place
from samples.parallel import CROSS_MASKS, HEADS, MASKS, OPTIONS, Case, Results, exact, pairs, unsharded
from torch import Tensor
from worlds import named, world
from worlds import ranks as on_ranks

from attnspan.parallel import Strategy
from attnspan.torch import SlowPathWarning

#: Norm-wise, of float32 results; those of one process are up to 3e-7 from float64.
FLOAT32 = 2e-6
#: Low precision: errors pooled over cases, by how much those of ranks may exceed those of one process. Of the
#: few numbers that are sinks and slopes, who rounds better is luck.
FACTOR, FACTOR_OF_FEW, FEW = 1.05, 1.3, 2000
#: Root mean square of a rounding to float32, relative to the number: errors are even within half a unit in
#: the last place, which is at most eps times the number.
ROUNDING = torch.finfo(torch.float32).eps / math.sqrt(12)

STRATEGIES = {
    2: ("exchange", "ring", "ulysses", "auto"),
    3: ("exchange", "ring", "ulysses", "auto"),
    4: ("exchange", "ring", "ulysses", "hybrid(2, 2)", "hybrid(2, 2, ring)", "auto"),
    8: ("exchange", "ring", "ulysses", "hybrid(2, 4)", "hybrid(4, 2)", "hybrid(2, 4, ring)"),
}
WORLDS = (
    [(ranks, strategy) for ranks in (2, 3, 4) for strategy in STRATEGIES[ranks]]
    if everything()
    # The ordinary run has each strategy, each number of ranks and each kind of hybrid.
    else [(2, "auto"), (2, "exchange"), (3, "ring"), *((4, x) for x in STRATEGIES[4][2:5])]
)
EIGHT = [pytest.param(8, strategy, marks=pytest.mark.long) for strategy in STRATEGIES[8]]
ALONE = [(1, "exchange"), (1, "ring"), (1, "ulysses")]
LENGTHS = (1, 3, 37, 101, 257)  # Ranks without rows, too.
PARTITIONS = ("balanced", "contiguous", "zigzag")


def assemble(case: Case, parts: Sequence[dict[str, Any]]) -> Results:
    """The whole results from those of all ranks; each row must be there once, padding must be nothing."""
    whole = {name: torch.empty_like(x) for name, x in unsharded(case).items() if name in parts[0]}
    for kind, length, names in (
        ("rows", case.length, ("out", "lse", "dq")),
        ("keys", case.keys, ("dk", "dv")),
    ):
        assert len({part[kind].shape for part in parts}) == 1, "equal static counts"
        planes = parts[0][kind].shape[0]
        for row in range(case.batch):
            held = torch.cat([part[kind][row % planes] for part in parts])
            assert torch.equal(held[held >= 0].sort().values, torch.arange(length)), f"{kind} of {case}"
            for part in parts:
                at = part[kind][row % planes]
                for name in (name for name in names if name in part):
                    whole[name][row][:, at[at >= 0]] = part[name][row][:, at >= 0]
                    if name != "lse":
                        assert (part[name][row][:, at < 0] == 0).all(), f"{name} of padding in {case}"
    for name in (name for name in whole if name.startswith("parameter")):
        whole[name] = torch.stack([part[name] for part in parts]).sum(0)
    return whole


def distance(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference; -inf, the lse of rows without keys, must agree."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite), "finite in other places"
    assert torch.equal(got[~finite].double(), expected[~finite].double())
    return float((got[finite].double() - expected[finite].double()).norm())


def merges(strategy: str, ranks: int) -> int:
    """How often a row's result is merged with that of other keys, and rounded to float32."""
    if strategy == "auto":  # It chooses one of the others.
        return ranks - 1
    found = Strategy.parse(strategy, ranks)
    return found.groups - 1 if found.kind == "ring" else 0


def assert_parity(case: Case, parts: Sequence[dict[str, Any]]) -> None:
    alone, true = unsharded(case), exact(case)
    for name, got in assemble(case, parts).items():
        size = float(true[name][true[name].isfinite()].norm())
        if name not in ("out", "lse", "dv"):
            # Sums whose terms may cancel, to nothing where each row sees one key; those of dv do not.
            size = max(size, float(true["dv"].norm()) / 4)
        if name.startswith("parameter"):
            # The sum over ranks is as exact as its terms, which are larger than it where they cancel.
            size = max(size, float(torch.stack([part[name] for part in parts]).norm()))
        # One process may itself be further from the truth where they cancel: then that is the measure.
        allowed = max(rounding(case, name) * size, 3 * distance(alone[name], true[name]))
        for what, other in (("one process", alone), ("float64", true)):
            off = distance(got, other[name])
            assert off <= allowed, (
                f"{name}: {off:.3g} from {what}, allowed {allowed:.3g} of {size:.3g} in {case}"
            )


def rounding(case: Case, name: str) -> float:
    """Of a float32 result. Most distances share the ends of a table: a head's pairs are summed there."""
    pairs = case.batch * case.length * case.keys
    in_table = name == "parameter 0" and case.option in ("relative", "deep relative", "t5", "all")
    return max(FLOAT32, 2**-24 * pairs**0.5) if in_table else FLOAT32


def attend_all(cases: list[Case], plainly: bool = False) -> list[dict[str, Any]]:
    """Forward and backward of many cases on a rank, each named if it fails; plainly where no kernel runs."""
    found = []
    with warnings.catch_warnings():
        if plainly:
            warnings.simplefilter("ignore", SlowPathWarning)
        for case in cases:
            with named(case):
                found.append(attend(place(case), case))
    return found


def attended(
    ranks: int, cases: list[Case], plainly: bool = False
) -> Iterator[tuple[Case, Sequence[dict[str, Any]]]]:
    """Each case with what each of that many ranks has of its results."""
    by_rank = world(ranks).run(attend_all, cases, plainly)
    return zip(cases, zip(*by_rank, strict=True), strict=True)


def check(ranks: int, cases: list[Case], plainly: bool = False) -> None:
    """Run cases on that many ranks and hold them to one process alone."""
    for case, parts in attended(ranks, cases, plainly):
        assert_parity(case, parts)


def _with_members(case: Case, ranks: int) -> Case:
    own = 1 if case.strategy == "auto" else Strategy.parse(case.strategy, ranks).members
    return replace(case, members=case.members or own)


@functools.cache
def grid(ranks: int, strategy: str) -> list[Case]:
    """Each pair of mask, heads, option and the rest occurs. The ordinary run has each in each strategy."""
    factors: dict[str, Sequence[Any]] = {
        "strategy": [strategy] if everything() else STRATEGIES[4][:5],
        "mask": list(MASKS),
        "option": list(OPTIONS),
        "heads": HEADS,
        "length": LENGTHS if everything() else LENGTHS[:4],
        "partition": PARTITIONS,
        "dims": ((16, 16), (8, 24)),
        "rows_per_chunk": (None, 4),
        "members": (1, 0),  # a layout for single ranks, or for the strategy's members
        "layout": ("bhsd", "bshd"),
        "return_lse": (True, False),
    }
    # What a mask meets matters to the kernel, which has tests of its own: the long run's.
    two = [(a, b) for a, b in itertools.combinations(range(len(factors)), 2) if a and (a, b) != (1, 5)]
    by_chance = [] if everything() else [(0, 1), *two]
    rows = [dict(zip(factors, row, strict=True)) for row in pairs(factors.values(), without=by_chance)]
    if strategy == "auto":  # What is chosen is one of the others.
        rows = [{**row, "strategy": "auto"} for row in rows[::6]]
    return [_with_members(Case(**row), ranks) for row in rows if row["strategy"] == strategy]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), WORLDS)
def test_all_pairs_of_masks_heads_options_and_lengths(ranks: int, strategy: str) -> None:
    check(ranks, grid(ranks, strategy))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "exchange"), (3, "ring"), (4, "hybrid(2, 2, ring)")])
def test_parts_of_rows_with_large_biases_merge(ranks: int, strategy: str) -> None:
    cases = [
        # A head_dim that only framework code takes too.
        Case(mask=mask, option="deep relative", heads=(4, 2), dims=dims, strategy=strategy)
        for mask, dims in (("full", (16, 16)), ("causal", (16, 16)), ("causal", (264, 8)))
    ]
    for case, parts in attended(ranks, cases, plainly=True):
        true = exact(case)
        for name, got in assemble(case, parts).items():
            size = float(true[name].norm()) if name in ("out", "lse", "dv") else float(true["dv"].norm())
            assert distance(got, true[name]) <= FLOAT32 * size, (name, distance(got, true[name]) / size)


@pytest.mark.parametrize(("ranks", "strategy"), [*ALONE, *EIGHT])
def test_one_rank_and_eight(ranks: int, strategy: str) -> None:
    check(ranks, grid(ranks, strategy) if everything() else grid(ranks, strategy)[::8])


def each_mask(**given: Any) -> list[Case]:
    """A case of each mask, with options and heads in turn."""
    options = ["none", "softcap", "sinks", "alibi", "relative", "dropout", "all"]
    return [
        Case(mask=mask, option=options[i % 7], heads=HEADS[i % 5], **given) for i, mask in enumerate(MASKS)
    ]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "dims"), [("float64", (16, 16)), ("float32", (264, 8))], ids=str)
@pytest.mark.parametrize(("ranks", "strategy"), few([x for x in WORLDS if x[1] != "auto"], 2))
def test_where_no_kernel_runs(ranks: int, strategy: str, dtype: str, dims: tuple[int, int]) -> None:
    # float64 and wide heads on this machine; everything on a device without a kernel.
    cases = each_mask(strategy=strategy, dtype=dtype, dims=dims)
    cases = cases if everything() else cases[WORLDS.index((ranks, strategy)) % 4 :: 4]
    check(ranks, cases, plainly=True)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("ranks", "strategy"), few(WORLDS, 2))
def test_low_precision_is_no_worse_than_one_process(ranks: int, strategy: str, dtype: str) -> None:
    cases = each_mask(strategy=strategy, dtype=dtype, length=101)[:: 1 if everything() else 3]
    ours: dict[str, list[Tensor]] = {}
    alone: dict[str, list[Tensor]] = {}
    for case, parts in attended(ranks, cases):
        true, single = exact(case), unsharded(case)
        for name, got in assemble(case, parts).items():
            seen = true[name].isfinite()
            assert torch.equal(got.isfinite(), seen), f"{name} in {case}"
            # Pooled in units of each result's norm, lest one case outweigh all others.
            scale = true[name][seen].norm().clamp_min(1e-30)
            kind = name.split()[0]
            ours.setdefault(kind, []).append((got[seen].double() - true[name][seen]) / scale)
            alone.setdefault(kind, []).append((single[name][seen].double() - true[name][seen]) / scale)
    for kind in ours:
        got, beside = (torch.cat([x.flatten() for x in errors[kind]]) for errors in (ours, alone))
        allowed = (FACTOR if len(got) > FEW else FACTOR_OF_FEW) * float(beside.norm())
        # Results of several keys are merged in float32, in units of their norm: lse, itself in float32,
        # cannot be as exact as where one process sums all keys.
        allowed = math.hypot(allowed, ROUNDING * math.sqrt(len(cases) * merges(strategy, ranks)))
        assert float(got.norm()) <= allowed, f"{kind}: error {got.norm():.3g}, allowed {allowed:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), few(WORLDS[1:], 2))
def test_cross_attention(ranks: int, strategy: str) -> None:
    options, first = list(OPTIONS), WORLDS.index((ranks, strategy))
    cases = []
    for i, mask in enumerate(CROSS_MASKS):
        lengths = [(37, 101), (101, 37), (41, 3), (3, 41)]
        for length, k_len in lengths if everything() else [lengths[(first + i) % 4]]:
            option = options[i % len(options)]
            cases.append(Case(mask=mask, length=length, k_len=k_len, option=option, strategy=strategy))
    check(ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@on_ranks(lambda ranks: ranks)
def test_the_same_call_gives_the_same_bits(ranks: int) -> None:
    for strategy in (strategy for each, strategy in WORLDS if each == ranks):
        case = Case(mask="spans per head", option="all", length=101, strategy=strategy, heads=(5, 1))
        first, second = (attend(place(case), case) for _ in range(2))
        for name in first:
            assert torch.equal(first[name], second[name]), f"{name} of {case}"


@st.composite
def any_case(draw: st.DrawFn) -> tuple[int, Case]:
    ranks, strategy = draw(st.sampled_from(WORLDS))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    k_len = draw(st.one_of(st.none(), st.integers(1, 120)))
    case = Case(
        mask=draw(st.sampled_from(list(MASKS) if k_len is None else CROSS_MASKS)),
        option=draw(st.sampled_from(list(OPTIONS))),
        heads=(kv_heads * group, kv_heads),
        length=draw(st.integers(1, 120)),
        k_len=k_len,
        batch=draw(st.integers(1, 3)),
        dims=(draw(st.sampled_from((8, 16, 20))), draw(st.sampled_from((8, 16, 20)))),
        seed=draw(st.integers(0, 100)),
        strategy=strategy,
        partition=draw(st.sampled_from(PARTITIONS)),
        rows_per_chunk=draw(st.one_of(st.none(), st.integers(1, 40))),
        layout=draw(st.sampled_from(("bhsd", "bshd"))),
        return_lse=draw(st.booleans()),
    )
    return ranks, case


@pytest.mark.long
@given(any_case())
def test_any_combination(drawn: tuple[int, Case]) -> None:
    ranks, case = drawn
    check(ranks, [case])
