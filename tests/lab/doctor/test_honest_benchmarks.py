"""Dishonest benchmarks get the right finding at the right line. Honest ones get none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import BENCHMARKS, laps
from typer.testing import CliRunner

from attnspan_lab.bench.statistics import Interval
from attnspan_lab.cli import build_app
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.timing import examine_benchmark, judge


def examine(source: str, folder: Path) -> tuple[tuple, dict[str, Any]]:
    """Examine a script. Return its findings and facts."""
    path = folder / "bench.py"
    path.write_text(source)
    findings, facts = examine_benchmark(str(path), seconds=0.03, limit=12)
    return merged(findings), facts


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_mistakes_are_found(name, tmp_path):
    kind, source, _ = BENCHMARKS[name]
    findings, _ = examine(source, tmp_path)
    marked = [i for i, line in enumerate(source.splitlines(), 1) if line.endswith("# here")]
    assert findings[0].kind == kind
    assert [x.line for x in findings[0].places[:1]] == marked[:1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_honest_benchmarks_are_right(name, tmp_path):
    findings, _ = examine(BENCHMARKS[name].healthy, tmp_path)
    assert [x.what for x in findings if x.fails(limited=False) or x.kind == BENCHMARKS[name].kind] == []


def test_a_first_touch_is_named(tmp_path):
    source = """
import time, mmap
pages = mmap.mmap(-1, 64 << 20)
start = time.perf_counter()
time.sleep(0)
for i in range(0, 64 << 20, 4096):
    pages[i] = 1
print(time.perf_counter() - start)
"""
    (finding, *_), _ = examine(source, tmp_path)
    assert finding.kind == "first-call-counted"
    assert any("page faults in the first run" in x for x in finding.evidence), finding


@pytest.mark.slow
def test_the_command_shows_both_numbers(tmp_path):
    (tmp_path / "bench.py").write_text(BENCHMARKS["processor time in nanoseconds"].sick)
    made = CliRunner().invoke(build_app(), ["doctor", "--timing", "--", "python", str(tmp_path / "bench.py")])
    assert made.exit_code == 1
    assert all(x in made.output for x in ("processor-clock", "your samples", "again, warm", "printed"))


def test_timing_takes_a_script():
    made = CliRunner().invoke(build_app(), ["doctor", "--timing", "patients:well_fused"])
    assert "attnspan doctor --timing -- python bench.py" in str(made.exception)


def test_other_shapes_are_other_calls(tmp_path):
    timed = laps("x.sum()", "max").replace("\n", "\n    ")
    source = (
        f"import time\nimport numpy as np\nwhole = np.ones(64)\nfor n in (16, 32):\n    x = whole[:n]{timed}"
    )
    _, facts = examine(source, tmp_path)
    assert [x["amount"] for x in facts["regions"]] == ["9 samples"] * 2


@pytest.mark.slow
def test_a_wait_that_is_not_called_is_named(tmp_path):
    sick = BENCHMARKS["the last result is not waited for"].healthy
    (finding, *_), _ = examine(sick.replace("jax.block_until_ready(out)", "out.block_until_ready"), tmp_path)
    assert finding.kind == "not-waited"
    assert any("names a function that waits" in x for x in finding.evidence)


def test_a_busy_machine_may_take_no_time_for_calls_in_a_row():
    each, none = (Interval(x, x / 2, x, 9, 0.96, 1.0) for x in (2e-3, 0.0))
    again = SimpleNamespace(each=each, in_a_row=none, returned=1.0)
    timed: Any = SimpleNamespace(again=again, count=1, times=[2e-3], compiled=[0.0], region=[], body=None)
    assert list(judge._waiting(timed)) == []
