"""The notebooks run, and the pictures that they hold are those that the library draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"


#: docs/howto/packed-gpt.md trains the same way in the ordinary run.
LONG = pytest.param("training", marks=pytest.mark.long)


def test_each_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"masks", "training"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masks", LONG])
def test_a_notebook_runs_and_holds_what_it_prints(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from notebooks import executed

    path = NOTEBOOKS / f"{name}.ipynb"
    kept, found = nbformat.read(path, as_version=4), executed(path)
    for old, new in zip(kept.cells, found.cells, strict=True):
        kinds = [[sorted(x.get("data", [])) for x in cell.get("outputs", [])] for cell in (old, new)]
        assert kinds[0] == kinds[1]
        if name == "masks":  # What a training prints depends on the machine.
            assert old.get("outputs") == new.get("outputs"), "run python docs/notebooks.py"
