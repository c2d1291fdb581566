"""Simulated ranks: the figures of the same code on real sizes, lengths that fill rows, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from attnspan.parallel.choose import Call, evaluate
from attnspan.parallel.command import lowered, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan import Spans, causal
from attnspan.cli import main
from attnspan.errors import OptionError
from attnspan.parallel.chunks import Chunks
from attnspan.parallel.machine import Machine
from attnspan.parallel.partition import default_rows_per_chunk, partition
from attnspan.parallel.simulate import Setup, pack, sample_lengths, setups, simulate
from attnspan.parallel.strategy import Strategy

CALL = Call(q_heads=8, kv_heads=2, head_dim=64, v_dim=64)


def one(spans: Spans, setup: Setup, machine: Machine | None = None):  # type: ignore[no-untyped-def]
    return simulate(spans, CALL, machine or Machine(), [setup])[0]


def test_the_figures_are_those_of_the_partition_and_its_traffic() -> None:
    spans = pack(sample_lengths("lognormal", 5000, mean=200))
    machine = Machine(node_size=4)
    for setup in setups(8, CALL.q_heads, machine.node_size):
        found = one(spans, setup, machine)
        strategy = setup.strategy
        size = default_rows_per_chunk(5000, strategy.groups)
        part = partition(spans, 8, members=strategy.members, method=setup.method, rows_per_chunk=size)
        expected = evaluate(CALL, Chunks.of(spans, size), part, strategy, machine)
        assert found.balance == expected.balance
        assert found.received == expected.traffic.received().max()
        assert found.received_across == expected.traffic.total().received_across.max()
        assert found.received_mean == expected.traffic.received().mean()
        assert found.seconds == expected.prediction.seconds
        # Rows that somebody may see, from the dense mask.
        dense, worst = spans.dense()[0, 0], 0
        for group in range(strategy.groups):
            rows = part.group_rows(group)
            needed = dense[rows[rows >= 0]].any(0)
            needed[rows[rows >= 0]] = False
            worst = max(worst, int(needed.sum()))
        every = (strategy.groups - 1) * strategy.members * part.rows_per_rank
        assert found.rows == (worst if strategy.kind == "exchange" else every)
        assert found.rows_of_ring == every


def test_nothing_is_faster_than_its_lower_bounds() -> None:
    spans = pack(sample_lengths("pareto", 40_000, mean=500))
    for ranks in (8, 32):
        found = simulate(spans, CALL, Machine(), setups(ranks, CALL.q_heads, 8))
        for each in found:
            assert each.seconds >= each.compute_seconds * each.balance * (1 - 1e-9)
            assert each.seconds >= each.network_seconds * (1 - 1e-9)
            assert 0 < each.efficiency <= 1
        assert len({each.compute_seconds for each in found}) == 1
        dense_pairs = spans.cost().sum() * CALL.q_heads / ranks
        seconds = dense_pairs * 4 * 64 * (1 / 4e14 + 2.5 / 3e14)
        assert found[0].compute_seconds == pytest.approx(seconds)


def test_balance_of_causal_rows_in_order_is_nearly_two() -> None:
    spans = causal().spans(4096, 4096)
    assert one(spans, Setup(Strategy("ring", 1, 16), "contiguous")).balance == pytest.approx(
        2 - 1 / 16, rel=0.01
    )
    assert one(spans, Setup(Strategy("ring", 1, 16), "zigzag")).balance == pytest.approx(1, rel=0.01)


def test_setups_leave_out_what_the_heads_do_not_allow() -> None:
    names = [each.name for each in setups(16, 8, 8)]
    assert "ulysses" not in names
    assert "hybrid(8, r), balanced" in names
    assert [each.name for each in setups(8, 8, 8)][-1] == "ulysses"
    assert "hybrid(2, r), balanced" in [each.name for each in setups(16, 2, 8)]
    for each in setups(12, 8, 8):
        assert each.strategy.ranks == 12
        assert each.strategy.members in (1, 12)
    assert Setup(Strategy("ring", 2, 4), "zigzag").name == "hybrid(2, r, ring), zigzag"


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["lognormal", "pareto"]),
    tokens=st.integers(1, 200_000),
    mean=st.integers(17, 5000),
    seed=st.integers(0, 1000),
)
def test_drawn_lengths_fill_the_row_and_come_again(kind: str, tokens: int, mean: int, seed: int) -> None:
    lengths = sample_lengths(kind, tokens, mean=mean, seed=seed)
    assert lengths.sum() == tokens
    assert lengths.min() > 0
    assert (lengths[:-1] >= 16).all() or tokens < 16
    assert (sample_lengths(kind, tokens, mean=mean, seed=seed) == lengths).all()


@pytest.mark.parametrize(("kind", "share"), [("lognormal", 0.35), ("pareto", 0.35)])
def test_drawn_lengths_have_the_mean_and_a_heavy_tail(kind: str, share: float) -> None:
    lengths = sample_lengths(kind, 1 << 24, mean=1000)
    assert 600 < lengths.mean() < 1400
    tenth = np.sort(lengths)[-len(lengths) // 10 :]
    assert tenth.sum() > share * lengths.sum(), "a tenth of the documents has a large part of the tokens"
    assert np.median(lengths) < 0.5 * lengths.mean()


def test_packed_documents_are_causal_within_each() -> None:
    dense = pack(np.array([3, 2])).dense()[0, 0]
    expected = np.tril(np.ones((5, 5), bool))
    expected[3:, :3] = False
    assert (dense == expected).all()


def test_sizes_that_make_no_row_are_refused() -> None:
    with pytest.raises(OptionError, match="expected lognormal or pareto, got 'zipf'"):
        sample_lengths("zipf", 100)
    with pytest.raises(OptionError, match="a mean of more than 16, got 100 and 16"):
        sample_lengths("pareto", 100, mean=16)
    for text in ("", "0", "M", "-1", "4G", "1.5M"):
        with pytest.raises(OptionError, match="expected positive numbers"):
            tokens_of(text)
    assert tokens_of(" 2k") == 2048


def test_the_corpus_comes_from_whoever_knows_it() -> None:
    spans = lowered("corpus", 8, corpus=lambda tokens, seed: np.array([tokens - seed, seed]), mean=64, seed=3)
    assert (spans.bounds == pack(np.array([5, 3])).bounds).all()


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["attnspan", "simulate", *args])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_prints_tables_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Machine(name="a file").save(tmp_path / "machine.json")
    args = ("pareto", "--tokens", "16K,32K", "--ranks", "8,16", "--node-size", "4", "--mean", "300")
    files = ("--json", str(tmp_path / "out.json"), "--machine", str(tmp_path / "machine.json"))
    code, out, _ = run(monkeypatch, capfd, *args, *files)
    assert code == 0
    assert "pareto, 16,384 tokens" in out
    assert "pareto, 32,768 tokens" in out
    assert "hybrid(4, r), balanced" in out
    assert "predicted with a file (bfloat16" in out
    value = json.loads((tmp_path / "out.json").read_text())
    assert value["machine"]["node_size"] == 4
    assert {(each["tokens"], each["ranks"]) for each in value["outcomes"]} == {
        (16384, 8),
        (16384, 16),
        (32768, 8),
        (32768, 16),
    }


def test_the_command_says_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(monkeypatch, capfd, "causal", "--ranks", "few")
    assert code == 2
    assert "expected positive numbers, like 8 or, for tokens, 4M, got 'few'" in err
    missing = str(tmp_path / "missing" / "out.json")
    code, _, err = run(monkeypatch, capfd, "causal", "--tokens", "64", "--ranks", "2", "--json", missing)
    assert code == 2
    assert "expected a place that can be written" in err
