"""The ordinary run leaves out cells, and no pair of values."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from covering import SWITCH, covering

FACTORS = {"three small": (3, 3, 3), "one large": (40, 7, 3, 2), "two": (5, 4), "one": (6,), "none": ()}


def _held(rows, strength):
    return {
        (some, tuple(row[i] for i in some))
        for row in rows
        for some in combinations(range(len(row)), min(strength, len(row)))
    }


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("name", FACTORS)
def test_nothing_is_left_out_of_few_rows(name: str, strength: int) -> None:
    sizes = FACTORS[name]
    rows = list(product(*map(range, sizes)))
    taken = [rows[i] for i in covering(rows, strength)]
    assert _held(taken, strength) == _held(rows, strength)
    assert len(taken) == len(set(taken))
    if strength < len(sizes):
        least = 1
        for size in sorted(sizes)[-strength:]:
            least *= size
        assert len(taken) <= 1.5 * least


MODULE = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize(("b", "c"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("d", "xyz")
def test_pairs(a, b, c, d):
    assert True

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(5))
def test_once(a, b):
    assert True

@pytest.mark.long
def test_long():
    assert True
"""


@pytest.mark.slow
@pytest.mark.parametrize(("run", "counts"), [("", (9, 5, 0)), ("--all", (27, 15, 1))])
def test_each_run_has_its_cells(tmp_path: Path, run: str, counts: tuple[int, ...]) -> None:
    here = Path(__file__).parent
    (tmp_path / "test_sample.py").write_text(MODULE)
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-c", str(here.parent / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path), *run.split()],
        env={name: x for name, x in os.environ.items() if name != SWITCH} | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.partition("::")[2].partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    assert tuple(map(found.count, ("test_pairs", "test_once", "test_long"))) == counts, done.stdout
