"""benchmarks/context_parallel.py at a small size: who takes part is right, and figures are what they say."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from worlds import mesh, ranks, world

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _cp_ranks
import context_parallel
from _cp_checks import why_wrong
from _cp_problem import head_tail

pytestmark = pytest.mark.slow

#: Contestants that compile for seconds are left out.
OURS = ("exchange", "ring, zigzag", "ulysses", "auto", "all-gather + our kernel", "zigzag ring, ATen flash")
SMALL: dict[str, Any] = {
    "q_len": 128,
    "rounds": 2,
    "ranks": 2,
    "cases": ("causal",),
    "dtypes": ("float32",),
    "heads": ((4, 2),),
    "head_dims": (16,),
    "modes": ("forward+backward",),
    "only": OURS,
    "calibrate": 0.0,
}


ONE, GATHER, RING = "1 rank x 2 threads", "all-gather + our kernel", "zigzag ring, ATen flash"
CASES, MODES, DTYPES = ("causal", "documents"), ("forward", "forward+backward"), ("float32", "bfloat16")


def call(**given: Any) -> list[dict[str, Any]]:
    """The runs with these settings, on a rank."""
    settings = _cp_ranks.Settings(**{**SMALL, **given})
    return _cp_ranks.run(settings, mesh(settings.ranks))["runs"]  # type: ignore[no-any-return]


def spoil(prepare: Any, how: str) -> Any:
    """A contestant that raises, or mistakes whose rows it has."""

    def prepared(*given: Any) -> Any:
        if how == "raises":
            try:
                raise NotImplementedError("no backward\n on this device")
            except NotImplementedError as error:
                raise RuntimeError("compilation failed") from error
        ready = prepare(*given)
        return type(ready)(ready.call, ready.rows.roll(1), ready.about)

    return prepared


def call_with_spoiled(name: str, how: str, may_fail: bool, only: tuple[str, ...]) -> list[dict[str, Any]]:
    """The runs of some contestants, of which one is spoiled."""
    known = _cp_ranks.contestants

    def contestants(ranks: int, machine: Any) -> list[Any]:
        found = known(ranks, machine)
        for each in found:
            if each.name == name:  # They may be frozen.
                object.__setattr__(each, "prepare", spoil(each.prepare, how))
                object.__setattr__(each, "may_fail", may_fail)
        return found

    with patch.object(_cp_ranks, "contestants", contestants):
        return call(only=only)


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    # As they are when they come out of the file of the ranks.
    found = json.loads(json.dumps(world(2).run(call, cases=CASES, modes=MODES, dtypes=DTYPES)[0]))
    for run in found:
        context_parallel.judge(run)
    return found  # type: ignore[no-any-return]


def test_every_contestant_is_checked_and_timed_in_every_round(runs: list[dict[str, Any]]) -> None:
    assert len(runs) == len(CASES) * len(MODES) * len(DTYPES)
    for run in runs:
        causal_only = {RING} if run["case"] != "causal" else set()
        assert set(run["contestants"]) == {ONE, *OURS} - causal_only
        assert set(run["refused"]) == causal_only
        for name, entry in run["contestants"].items():
            kinds = {"out"} if run["mode"] == "forward" else {"out", "dq", "dk", "dv"}
            assert set(entry["errors"]) == set(entry["errors_to_one_rank"]) == kinds
            assert 0 < entry["errors"]["out"] < (1e-6 if run["dtype"] == "float32" else 1e-2), name
            assert [len(ranks) for ranks in entry["ranks"]] == [2, 2]
            assert all(seconds > 0 for seconds in entry["seconds"])
            assert (entry["phases"]["kernel"] > 0) == (name != RING)
            assert (entry["phases"]["waiting"] > 0) == (name != ONE), name
            for first, second in entry["ranks"]:
                assert first[1] + first[2] <= first[0], "phases are parts of a call"
                assert (second == [0.0] * 4) == (name == ONE), "only one rank works where it says so"


def test_bytes_are_those_of_the_plan_or_all_keys_of_the_other_rank(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        keys, itemsize = 2 * 64 * 2 * 16, 4 if run["dtype"] == "float32" else 2
        passes = 2 if run["mode"] != "forward" else 1
        # Keys go round once in each pass; a ring's gradients, in float32, once all the way.
        expected = {
            GATHER: keys * itemsize * passes,
            RING: keys * itemsize * passes + 2 * keys * 4 * (passes - 1),
        }
        for name, entry in run["contestants"].items():
            if name != ONE:
                assert entry["received_bytes"] == entry.get("planned_bytes", expected.get(name)), name


def test_the_report_names_everyone_and_why_some_are_missing(runs: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    context_parallel.report({"runs": runs}, Console(file=text, width=150))
    for words in (*OURS, ONE, "its kernel supports only a causal flag", "(target at 16,384 rows: 90%)"):
        assert words in text.getvalue()


@pytest.mark.parametrize("name", OURS)
@ranks(2)
def test_rows_that_are_misplaced_end_the_run(name: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(name)}: out has the error"):
        call_with_spoiled(name, "is wrong", False, (name,))


@pytest.mark.parametrize(
    ("how", "reason"),
    [("raises", "NotImplementedError: no backward on this device"), ("is wrong", "out has the error ")],
)
@ranks(2)
def test_another_library_that_fails_is_reported_and_left_out(how: str, reason: str) -> None:
    (run,) = call_with_spoiled(GATHER, how, True, (GATHER, "exchange"))
    assert list(run["contestants"]) == [ONE, "exchange"]
    assert run["refused"][GATHER].startswith(reason)


@pytest.mark.long
@ranks(4)
def test_more_ranks_have_a_hybrid_and_longer_rings() -> None:
    [run] = call(ranks=4, only=(*OURS, "hybrid"), rounds=1)
    assert set(run["contestants"]) == {"1 rank x 4 threads", "hybrid", *OURS}
    assert run["contestants"]["hybrid"]["strategy"] == "hybrid(2, 2)"


@ranks(2)
def test_rows_that_do_not_divide_are_for_us_alone() -> None:
    [run] = call(q_len=129)
    assert set(run["refused"].values()) == {"129 rows are not divisible by 4"}
    assert set(run["contestants"]) == {ONE, *OURS[:4]}


@pytest.mark.parametrize("error", [5e-7, float("nan")])
def test_errors_beyond_those_of_torch_are_wrong(error: float) -> None:
    bounds = {"out": 1e-7, "dq": 1e-7}
    assert why_wrong({"out": 3e-7, "dq": 4e-7}, bounds) is None
    found = why_wrong({"out": 3e-7, "dq": error}, bounds)
    assert found == f"dq has the error {error:.2g}, torch's own attention 1e-07"


def test_efficiency_is_the_ratio_of_neighbours() -> None:
    rounds = {"one": [[2.0, 0.0], [4.0, 0.0], [6.0, 0.0]], "exchange": [[4.0, 2.0], [2.0, 5.0], [8.0, 1.0]]}
    samples = {
        name: [[[x, x / 2, x / 4, x] for x in ranks] for ranks in each] for name, each in rounds.items()
    }
    run: dict[str, Any] = {"contestants": {name: {"ranks": ranks} for name, ranks in samples.items()}}
    context_parallel.judge(run)
    ours = run["contestants"]["exchange"]
    assert ours["seconds"] == [4.0, 5.0, 8.0]
    assert (ours["efficiency"]["median"], run["contestants"]["one"]["times_ours"]["median"]) == (0.75, 0.75)
    assert tuple(ours["efficiency"]["quartiles"]) == (0.625, 0.75, 0.775)
    assert ours["phases"] == {"wall": 5.0, "kernel": 2.5, "waiting": 1.25, "cpu": 5.0, "rest": 1.25}


def test_a_command_line_says_what_is_run() -> None:
    arguments = ["--q-len", "512", "--heads", "8/2", "--only", "ring, zigzag;auto", "--json", "x.json"]
    settings, path = context_parallel.settings_of(arguments)
    assert (settings.q_len, settings.heads, settings.only) == (512, ((8, 2),), ("ring, zigzag", "auto"))
    assert path == Path("x.json")
    with pytest.raises(SystemExit):
        context_parallel.settings_of(["--ranks", "1"])
    assert [head_tail(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
