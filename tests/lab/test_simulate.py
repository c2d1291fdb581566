"""Simulated ranks: the figures of the same code on real sizes, lengths that fill rows, and the command."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnspan import causal, documents
from attnspan.errors import OptionError
from attnspan.parallel import Layout, Strategy
from attnspan_lab.machine import Machine
from attnspan_lab.simulate import Setup, pack, sample_lengths, setups, simulate, tokens_of

SIZES: dict[str, Any] = {"heads": (8, 2), "head_dim": 64}
MACHINE = Machine("measured here", "bfloat16", 4e14, 3e14, 2e11, 2.5e10, 1e-5, 4)


def one(mask, tokens, setup, machine=None):
    return simulate(mask, tokens, [setup], machine=machine, **SIZES)[0]


@pytest.mark.slow
def test_the_figures_are_those_of_a_layout_and_its_plan():
    mask = pack(sample_lengths("lognormal", 5000, mean=200))
    dense = np.asarray(mask.spans(5000, 5000).dense())[0, 0]
    for setup in setups(8, 8, 4):
        found, strategy = one(mask, 5000, setup, MACHINE), setup.strategy
        given: dict[str, Any] = {"ranks": 8, "members": strategy.members, "method": setup.method}
        layout = Layout.of(mask, q_len=5000, **given)
        plan = layout.plan(strategy=strategy, **SIZES)
        cost = plan.cost(node_size=4)
        phases = (*cost.forward.values(), *cost.backward.values())
        assert found.balance == cost.balance
        assert found.received == cost.received().max()
        assert found.received_mean == cost.received().mean()
        assert found.received_across == sum(x.received_across for x in phases).max()  # type: ignore[union-attr]
        assert found.memory == cost.memory.max()
        assert found.seconds == MACHINE.predict(cost, plan.sizes).seconds
        every = (strategy.groups - 1) * strategy.members * layout.rows_per_rank
        worst = every
        if strategy.kind == "exchange":  # Rows that somebody may see, from the dense mask.
            groups = layout.rows[:, 0].reshape(strategy.groups, -1)
            worst = max(
                dense[rows].any(0).sum() - dense[rows].any(0)[rows].sum()
                for rows in (x[x >= 0] for x in groups)
            )
        assert (found.rows, found.rows_of_ring) == (worst, every)
        without = one(mask, 5000, setup)
        times = (without.seconds, without.compute_seconds, without.network_seconds, without.bound)
        assert times == (None,) * 4, "no rates, no times"
        assert without.received == found.received


def test_nothing_is_faster_than_its_lower_bounds():
    mask = pack(sample_lengths("pareto", 40_000, mean=500))
    pairs = float(np.asarray(mask.spans(40_000, 40_000).cost()).sum()) * 8
    for ranks in (8, 32):
        for found in simulate(mask, 40_000, setups(ranks, 8, 8), machine=MACHINE, **SIZES):
            assert found.seconds is not None
            assert found.compute_seconds == pytest.approx(pairs / ranks * 4 * 64 * (1 / 4e14 + 2.5 / 3e14))
            assert found.seconds >= found.compute_seconds * found.balance * (1 - 1e-9)
            assert found.network_seconds is not None
            assert found.seconds >= found.network_seconds * (1 - 1e-9)


def test_setups_leave_out_what_the_heads_do_not_allow():
    names = [each.name for each in setups(16, 8, 8)]
    assert "ulysses" not in names
    assert "hybrid(8, r), balanced" in names
    assert [each.name for each in setups(8, 8, 8)][-1] == "ulysses"
    assert {each.strategy.members for each in setups(12, 8, 8)} == {1, 4}
    assert {each.strategy.members for each in setups(9, 8, 8)} == {1}
    assert Setup(Strategy("ring", 2, 4), "zigzag").name == "hybrid(2, r, ring), zigzag"


@given(
    st.sampled_from(["lognormal", "pareto"]),
    st.integers(1, 200_000),
    st.integers(17, 5000),
    st.integers(0, 99),
)
def test_drawn_lengths_fill_the_row_and_come_again(kind, tokens, mean, seed):
    lengths = sample_lengths(kind, tokens, mean=mean, seed=seed)
    assert (lengths.sum(), (lengths[:-1] >= 16).all(), lengths.min() > 0) == (tokens, True, True)
    assert (sample_lengths(kind, tokens, mean=mean, seed=seed) == lengths).all()


@pytest.mark.parametrize("kind", ["lognormal", "pareto"])
def test_drawn_lengths_have_the_mean_and_a_heavy_tail(kind):
    lengths = sample_lengths(kind, 1 << 24, mean=1000)
    assert 600 < lengths.mean() < 1400
    assert np.median(lengths) < 0.5 * lengths.mean()
    longest = np.sort(lengths)[-len(lengths) // 10 :]
    assert longest.sum() > 0.35 * lengths.sum(), "a tenth of the documents has a large part of the tokens"
    expected = (causal() & documents([0, 3, 5])).spans(5, 5).dense()
    assert (pack(np.array([3, 2])).spans(5, 5).dense() == expected).all()


def test_sizes_that_make_no_row_are_refused():
    with pytest.raises(OptionError, match="expected 'lognormal' or 'pareto', got 'zipf'"):
        sample_lengths("zipf", 100)
    with pytest.raises(OptionError, match="a mean above 16, got 100 and 16"):
        sample_lengths("pareto", 100, mean=16)
    for text in ("", "0", "M", "-1", "4G", "1.5M", "1,2"):
        with pytest.raises(OptionError, match="--tokens: expected"):
            tokens_of(text)
    assert [tokens_of(x) for x in (" 2k", "4M", "100")] == [2048, 4 << 20, 100]


def test_the_command_prints_tables_and_writes_json(attnspan, tmp_path):
    replace(MACHINE, name="a file").save(tmp_path / "machine.json")
    args = ("pareto", "--tokens", "16K,32K", "--ranks", "8,16", "--node-size", "4", "--mean", "300")
    files = ("--json", str(tmp_path / "out.json"), "--machine", str(tmp_path / "machine.json"))
    code, out, _ = attnspan("simulate", *args, *files, columns=160)
    assert code == 0
    for words in ("pareto, 16,384 tokens", "pareto, 32,768", "hybrid(4, r), balanced", "Rates: a file"):
        assert words in out
    value = json.loads((tmp_path / "out.json").read_text())
    assert value["machine"]["node_size"] == 4
    sizes = {(each["tokens"], each["ranks"]) for each in value["outcomes"]}
    assert sizes == {(16384, 8), (16384, 16), (32768, 8), (32768, 16)}
    seconds = {f"{each['seconds'] * 1e3:.3g}"[:4] for each in value["outcomes"]}
    assert any(x in out for x in seconds)


def test_80_columns_are_enough_and_times_need_rates(attnspan):
    code, out, _ = attnspan("simulate", "corpus", "--tokens", "8K", "--ranks", "16")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    names = " ".join(setup.name for setup in setups(16, 32, 8))
    assert all(word in out for word in names.split()), "no word is cut"
    assert "No predicted times: pass --machine" in out
    assert "predicted: " not in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("causal", "--ranks", "few"), "--ranks: expected positive numbers"),
        (("causal", "--tokens", "1G"), "--tokens: expected positive numbers"),
        (("casual",), "casual"),
        (("causal", "--machine", "no/such.json"), "no such file"),
    ],
)
def test_the_command_says_what_it_cannot_do(attnspan, args, words):
    code, _, err = attnspan("simulate", *args)
    assert code == 2
    assert words in err
