"""benchmarks/context_parallel.py at a small size: who takes part is right, and figures are what they say."""

import io
import json
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

pytestmark = pytest.mark.slow

#: Contestants that compile for seconds are left out.
OURS = ("exchange", "ring, zigzag", "ulysses", "auto", "all-gather + our kernel", "zigzag ring, ATen flash")
ONE, GATHER, RING = "1 rank x 2 threads", *OURS[-2:]
SMALL: dict[str, Any] = {"q_len": 128, "rounds": 2, "ranks": 2, "dtypes": ("float32",), "heads": ((4, 2),)}
SMALL |= {"head_dims": (16,), "modes": ("forward+backward",), "only": OURS, "calibrate": 0.0}


def call(**given: Any) -> list[dict[str, Any]]:
    """The runs with these settings, on a rank."""
    settings = _cp_ranks.Settings(**{"cases": ("causal",), **SMALL, **given})
    return _cp_ranks.run(settings, mesh(settings.ranks))["runs"]  # type: ignore[no-any-return]


def test_contestants_are_right_and_receive_what_was_planned() -> None:
    # As they are when they come out of the file of the ranks.
    runs = json.loads(json.dumps(world(2).run(call, cases=("causal", "documents"))[0]))
    for run in runs:
        context_parallel.judge(run)
        causal_only = {RING} if run["case"] != "causal" else set()
        assert set(run["contestants"]) == {ONE, *OURS} - causal_only
        assert set(run["refused"]) == causal_only
        keys = 2 * 64 * 2 * 16 * 4
        # Keys go round once in each pass; a ring's gradients, in float32, once all the way.
        expected = {GATHER: 2 * keys, RING: 4 * keys}
        for name, entry in run["contestants"].items():
            assert set(entry["errors"]) == {"out", "dq", "dk", "dv"}
            assert 0 < entry["errors"]["out"] < 1e-6, name
            assert all(seconds > 0 for seconds in entry["seconds"])
            for first, second in entry["ranks"]:
                assert first[1] + first[2] <= first[0], "phases are parts of a call"
                assert (second == [0.0] * 4) == (name == ONE), "only one rank works where it says so"
            if name != ONE:
                assert entry["received_bytes"] == entry.get("planned_bytes", expected.get(name)), name
    text = io.StringIO()
    context_parallel.report({"runs": runs}, Console(file=text, width=150))
    for words in (*OURS, ONE, "its kernel supports only a causal flag", "(target at 16,384 rows: 90%)"):
        assert words in text.getvalue()


@pytest.mark.parametrize("may_fail", [False, True])
@ranks(2)
def test_a_contestant_with_misplaced_rows_ends_the_run_unless_it_is_another_library(may_fail: bool) -> None:
    known = _cp_ranks.contestants

    def contestants(ranks: int, machine: Any) -> list[Any]:
        (each,) = (x for x in known(ranks, machine) if x.name == GATHER)
        prepare = each.prepare

        def misplaced(*given: Any) -> Any:
            ready = prepare(*given)
            return type(ready)(ready.call, ready.rows.roll(1), ready.about)

        object.__setattr__(each, "prepare", misplaced)  # They may be frozen.
        object.__setattr__(each, "may_fail", may_fail)
        return [x if x.name != GATHER else each for x in known(ranks, machine)]

    with patch.object(_cp_ranks, "contestants", contestants):
        if may_fail:
            (run,) = call(only=(GATHER, "exchange"))
            assert list(run["contestants"]) == [ONE, "exchange"]
            assert run["refused"][GATHER].startswith("out has the error ")
        else:
            with pytest.raises(AssertionError, match=r"^all-gather \+ our kernel: out has the error"):
                call(only=(GATHER,))


def test_efficiency_is_the_ratio_of_neighbours() -> None:
    rounds = {"one": [[2.0, 0.0], [4.0, 0.0], [6.0, 0.0]], "exchange": [[4.0, 2.0], [2.0, 5.0], [8.0, 1.0]]}
    samples = {
        name: [[[x, x / 2, x / 4, x] for x in ranks] for ranks in each] for name, each in rounds.items()
    }
    run: dict[str, Any] = {"contestants": {name: {"ranks": ranks} for name, ranks in samples.items()}}
    context_parallel.judge(run)
    ours = run["contestants"]["exchange"]
    assert (ours["seconds"], ours["efficiency"]["median"]) == ([4.0, 5.0, 8.0], 0.75)
    assert ours["phases"] == {"wall": 5.0, "kernel": 2.5, "waiting": 1.25, "cpu": 5.0, "rest": 1.25}
