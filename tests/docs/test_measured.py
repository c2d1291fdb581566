"""Pages of benchmarks show what their raw files hold, and each raw file that they name may be cited."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("attnspan_lab")
sys.path.append(str(Path(__file__).parents[2] / "docs"))

import measured

from attnspan_lab.bench.cited import reasons_not_to_cite
from attnspan_lab.bench.results import Results

ROOT = Path(__file__).parents[2]
RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted(FOLDER.glob("*.md"))]
NAMED = re.compile(r"results/([\w-]+\.json\.gz)")
CITED = sorted(
    {row.file for row in measured.ROWS}
    | {name for page in PAGES for name in NAMED.findall(page.read_text(encoding="utf-8"))}
)


@pytest.mark.parametrize("machine", measured.MACHINES, ids=lambda x: x.name)
def test_a_page_of_a_machine_shows_its_raw_files(machine):
    written = (FOLDER / f"{machine.name}.md").read_text(encoding="utf-8")
    assert written == measured.page(machine), "run python docs/measured.py"


def test_readme_shows_its_raw_files():
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert written == measured.readme(), "run python docs/measured.py"


def test_each_page_of_a_machine_is_generated():
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *(x.name for x in measured.MACHINES)}


@pytest.mark.parametrize("file", CITED)
def test_a_raw_file_that_a_page_names_may_be_cited(file):
    assert reasons_not_to_cite(Results.load(RESULTS / file)) == []
