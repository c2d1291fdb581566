"""benchmarks/context_parallel.py at a small size: who takes part is right, and figures are what they say."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cp_benchmark_jobs import OURS
from rich.console import Console
from worlds import world

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import context_parallel
from _cp_checks import why_wrong
from _cp_problem import head_tail

ONE = "1 rank x 2 threads"


DTYPES, CASES, MODES = (
    ("float32", "bfloat16"),
    ("causal", "documents"),
    ("forward", "forward+backward"),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    given = {"cases": CASES, "modes": MODES, "dtypes": DTYPES}
    # As it is when it comes out of the file of the ranks.
    results: dict[str, Any] = json.loads(json.dumps(world(2).run("cp_benchmark_jobs:call", given)[0]))
    for run in results["runs"]:
        context_parallel.judge(run)
    return results


def test_every_contestant_is_checked_and_timed_in_every_round(found: dict[str, Any]) -> None:
    assert len(found["runs"]) == len(CASES) * len(MODES) * len(DTYPES)
    for run in found["runs"]:
        causal_only = {"zigzag ring, ATen flash"} if run["case"] != "causal" else set()
        assert set(run["contestants"]) == {ONE, *OURS} - causal_only
        assert set(run["refused"]) == causal_only
        for name, entry in run["contestants"].items():
            kinds = {"out"} if run["mode"] == "forward" else {"out", "dq", "dk", "dv"}
            assert set(entry["errors"]) == set(entry["errors_to_one_rank"]) == kinds
            assert 0 < entry["errors"]["out"] < (1e-6 if run["dtype"] == "float32" else 1e-2), name
            assert [len(ranks) for ranks in entry["ranks"]] == [2, 2]
            assert all(seconds > 0 for seconds in entry["seconds"])


def test_phases_are_parts_of_a_call(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        for name, entry in run["contestants"].items():
            phases = entry["phases"]
            assert (phases["kernel"] > 0) == ("ATen" not in name)
            # Medians of each phase, so that they add up about, not exactly.
            assert (phases["waiting"] > 0) == (name != ONE), name
            assert all(sample[1] + sample[2] <= sample[0] for ranks in entry["ranks"] for sample in ranks)


def test_only_one_rank_works_where_one_is_said_to(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        for first, second in run["contestants"][ONE]["ranks"]:
            assert first[0] > 0
            assert second == [0.0] * 4


def test_bytes_are_those_of_the_plan(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        for entry in run["contestants"].values():
            if "planned_bytes" in entry:
                assert entry["received_bytes"] == entry["planned_bytes"]


def test_a_ring_and_a_gather_receive_all_keys_of_the_other_rank(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        keys = 2 * 64 * 2 * 16  # k and v, rows of the other rank, heads, D
        itemsize = 4 if run["dtype"] == "float32" else 2
        backward = run["mode"] != "forward"
        gather = run["contestants"]["all-gather + our kernel"]["received_bytes"]
        assert gather == keys * itemsize * (2 if backward else 1)
        if run["case"] == "causal":
            ring = run["contestants"]["zigzag ring, ATen flash"]["received_bytes"]
            # Keys go round twice, and their gradients, in float32, once all the way.
            assert ring == keys * itemsize * (2 if backward else 1) + (2 * keys * 4 if backward else 0)


def test_the_report_names_everyone_and_why_some_are_missing(found: dict[str, Any]) -> None:
    text = io.StringIO()
    context_parallel.report(found, Console(file=text, width=150))
    for words in (*OURS, ONE, "its kernel takes a causal flag"):
        assert words in text.getvalue()
    assert "(target at 16,384 rows: 90%)" in text.getvalue()


@pytest.mark.parametrize("name", OURS)
def test_rows_that_are_misplaced_end_the_run(name: str) -> None:
    for answer in world(2).run("cp_benchmark_jobs:misplaced", name):
        assert answer.startswith(f"{name}: out is off by")


@pytest.mark.long
def test_more_ranks_have_a_hybrid_and_longer_rings() -> None:
    given = {"ranks": 4, "only": (*OURS, "hybrid"), "modes": ("forward+backward",), "rounds": 1}
    [run] = world(4).run("cp_benchmark_jobs:call", given)[0]["runs"]
    assert next(iter(run["contestants"])) == "1 rank x 4 threads"
    assert set(run["contestants"]) == {"1 rank x 4 threads", "hybrid", *OURS}
    assert run["contestants"]["hybrid"]["strategy"] == "hybrid(2, 2)"


def test_rows_that_do_not_divide_are_for_us_alone() -> None:
    [run] = world(2).run("cp_benchmark_jobs:call", {"q_len": 129})[0]["runs"]
    assert set(run["refused"].values()) == {"129 rows are no multiple of 4"}
    assert set(run["contestants"]) == {ONE, *OURS[:4]}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "NotImplementedError: no backward on this device"),
        ("is wrong", "out is off by "),
    ],
)
def test_another_library_that_fails_is_reported_and_left_out(how: str, reason: str) -> None:
    for run in (one["runs"][0] for one in world(2).run("cp_benchmark_jobs:of_another_library", how)):
        assert list(run["contestants"]) == [ONE, "exchange"]
        assert run["refused"]["all-gather + our kernel"].startswith(reason)


@pytest.mark.parametrize("error", [5e-7, float("nan")])
def test_errors_beyond_those_of_torch_are_wrong(error: float) -> None:
    bounds = {"out": 1e-7, "dq": 1e-7}
    assert why_wrong({"out": 3e-7, "dq": 4e-7}, bounds) is None
    found = why_wrong({"out": 3e-7, "dq": error}, bounds)
    assert found is not None
    assert found.startswith(f"dq is off by {error:.2g}, and torch's own attention by 1e-07")


def test_efficiency_is_the_ratio_of_neighbours() -> None:
    rounds = {"one": [[2.0, 0.0], [4.0, 0.0], [6.0, 0.0]], "exchange": [[4.0, 2.0], [2.0, 5.0], [8.0, 1.0]]}
    entries = {
        name: {"ranks": [[[x, x / 2, x / 4, x] for x in ranks] for ranks in each]}
        for name, each in rounds.items()
    }
    run: dict[str, Any] = {"contestants": entries}
    context_parallel.judge(run)
    ours = run["contestants"]["exchange"]
    assert ours["seconds"] == [4.0, 5.0, 8.0]
    assert ours["efficiency"]["median"] == 0.75
    assert ours["efficiency"]["quartiles"] == (0.625, 0.75, 0.775)
    assert ours["phases"] == {"wall": 5.0, "kernel": 2.5, "waiting": 1.25, "cpu": 5.0, "rest": 1.25}
    assert run["contestants"]["one"]["times_ours"]["median"] == 0.75


def test_a_command_line_says_what_is_run() -> None:
    settings, path = context_parallel.settings_of(
        ["--q-len", "512", "--heads", "8/2", "--only", "ring, zigzag;auto", "--json", "x.json"]
    )
    assert (settings.q_len, settings.heads, settings.only) == (512, ((8, 2),), ("ring, zigzag", "auto"))
    assert path == Path("x.json")
    with pytest.raises(SystemExit):
        context_parallel.settings_of(["--ranks", "1"])


def test_chunks_from_both_ends() -> None:
    assert head_tail(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert head_tail(8, 1, 2).tolist() == [2, 3, 4, 5]
