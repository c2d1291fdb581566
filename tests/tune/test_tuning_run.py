"""One search after the other: kept at once, within the time, and only if the machine was quiet."""

from __future__ import annotations

from fake_target import FakeTarget

from attnspan.tune.cases import Case
from attnspan.tune.entry import Entry
from attnspan.tune.neighbours import Neighbours, busy_seconds
from attnspan.tune.run import Outcome, tune


def case(length: int, dtype: str = "float32", head_dim: int = 64) -> Case:
    return Case("forward", dtype, 2, length, length, head_dim, "causal")


CASES = [case(length) for length in (64, 128, 256, 512)]


def run(target: FakeTarget, cases: list[Case], budget: float = 100.0) -> tuple[Outcome, list[Entry]]:
    kept: list[Entry] = []
    outcome = tune(
        target,
        cases,
        seconds=1.0,
        budget=budget,
        keep=kept.append,
        meter=target.meter,
        watch=target.watch,
    )
    assert outcome.entries == kept
    return outcome, kept


def test_every_case_is_searched_and_recorded() -> None:
    outcome, kept = run(FakeTarget(), CASES)
    assert [str(entry.key) for entry in kept] == [
        f"fake forward any float32 D=64 S<={length} half" for length in (64, 128, 256, 512)
    ]
    for entry in kept:
        assert entry.accepted
        assert entry.config == {"block": 2}
        assert [failure.error for failure in entry.failures] == ["ValueError: block 3 is illegal"]
        assert entry.problem["mask"] == "causal"
        assert entry.problem["neighbours"] == 0
        assert entry.gain is not None
        assert entry.gain.ratio.median == 2
        assert entry.gain.failures == 1
    assert not outcome.unreached
    assert not outcome.interrupted


def test_what_cannot_be_run_is_named_and_the_rest_goes_on() -> None:
    outcome, kept = run(FakeTarget(), [case(64, "float16"), case(64, head_dim=13), CASES[1]])
    assert len(kept) == 1
    assert [reason for _, reason in outcome.refused] == ["it takes no float16", "MemoryError: 13 is too much"]


def test_no_case_begins_after_the_time() -> None:
    target = FakeTarget()
    outcome, kept = run(target, CASES, budget=0.5)
    assert 1 <= len(kept) < 4
    assert outcome.unreached == CASES[len(kept) :]
    assert target.now < 0.5 + 0.2


def test_the_last_case_has_what_time_is_left() -> None:
    for budget in (1.0, 1.2, 1.4):
        target = FakeTarget()
        target.candidates = 2000
        outcome, kept = run(target, CASES, budget)
        assert len(kept) >= 2
        assert outcome.unreached
        assert target.now < budget + 0.25


def test_an_interrupt_keeps_what_was_found() -> None:
    target = FakeTarget()
    target.interrupt_at = CASES[2]
    outcome, kept = run(target, CASES)
    assert outcome.interrupted
    assert [entry.problem["k_len"] for entry in kept] == [64, 128]
    assert outcome.unreached == CASES[2:]


def test_a_find_beside_busy_neighbours_is_recorded_and_not_used() -> None:
    target = FakeTarget()
    target.others = 0.7
    _, (entry,) = run(target, CASES[:1])
    assert not entry.accepted
    assert entry.config == {"block": 0}
    assert entry.contender == {"block": 2}
    assert entry.reason == "busy machine: other processes used 0.7 processors meanwhile"
    assert entry.problem["neighbours"] == 0.7
    assert entry.gain is not None
    assert not entry.gain.accepted
    assert entry.gain.ratio.median == 1
    assert entry.gain.tuned == entry.gain.default


def test_this_process_is_no_neighbour_of_itself() -> None:
    busy, own, clock = iter([5.0, 9.0]), iter([1.0, 4.5]), iter([0.0, 2.0])
    assert Neighbours(busy.__next__, own.__next__, clock.__next__).processors() == 0.25
    seconds = busy_seconds()
    assert seconds is None or seconds > 0
