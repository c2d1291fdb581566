"""benchmarks/context_parallel.py at a small size: who takes part is right, and figures are what they say."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from worlds import mesh, world

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
