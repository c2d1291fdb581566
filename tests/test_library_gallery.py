"""Every mask of the library has a picture, an entry in docs/library.md and a definition beside it."""

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from samples.library import LIBRARY

import attnspan
from attnspan import library
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.files import read_json

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "library.md").read_text(encoding="utf-8")
sys.path.append(str(DOCS))

import pictures  # noqa: E402

FUNCTIONS = sorted(library.__all__)


def _is_mask(name):
    value = getattr(library, name)
    if inspect.isclass(value):
        return issubclass(value, attnspan.Mask)
    return inspect.signature(value).return_annotation == "Mask"


MASKS = [name for name in FUNCTIONS if _is_mask(name)]


def test_what_is_public_is_listed():
    defined = {
        name
        for name, value in vars(library).items()
        if callable(value) and value.__module__.startswith("attnspan.library") and name[0] != "_"
    }
    assert defined == set(library.__all__)
    assert len(MASKS) > 20


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_page_names_it(name):
    assert f"`{name}(" in PAGE


@pytest.mark.parametrize("name", MASKS)
def test_it_has_a_definition(name):
    assert any(sample.function == name for sample in LIBRARY), f"add {name} to tests/samples/library.py"


@pytest.mark.parametrize("name", pictures.README)
def test_the_pictures_of_readme_are_those_of_their_data(name):
    drawn = (pictures.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == pictures.README[name](), "write it again: python docs/pictures.py"
    assert f"docs/images/{name}.svg" in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_picture_marks_every_wide_interval():
    drawn = pictures.bars_picture()
    ratios = [
        Interval(**run["ratio"])
        for cell in read_json(pictures.RESULTS / pictures._MEASURED)["cells"]
        for run in cell["runs"]
        if run["ratio"] and cell["mode"] == "forward"
    ]
    assert len(ratios) == len(re.findall(r"[\d.]+x(?: ~)?</text>", drawn)) - 7  # numbers of the axis
    assert sum(ratio.width > 0.04 for ratio in ratios) == drawn.count("x ~</text>") > 0


@pytest.mark.parametrize("name", pictures.CONCEPTS)
def test_the_pictures_of_concepts_are_those_of_their_masks(name):
    written = (DOCS / "images" / "concepts" / f"{name}.svg").read_text(encoding="utf-8")
    assert written == pictures.CONCEPTS[name](), "run python docs/pictures.py"
    assert f"(../images/concepts/{name}.svg)" in (DOCS / "concepts" / "pictures.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", MASKS)
def test_it_has_a_picture_which_is_that_of_its_row(name):
    written = (DOCS / "images" / "library" / f"{name}.svg").read_text(encoding="utf-8")
    assert written == pictures.draw(name), "run python docs/pictures.py"
    assert len(written) < 20_000
    assert f"| ![{name}](images/library/{name}.svg) | `{pictures.GALLERY[name][0]}` |" in PAGE


def test_no_picture_is_left_over():
    files = {path.stem for path in (DOCS / "images" / "library").iterdir()}
    assert files == set(pictures.GALLERY) == set(MASKS)
    assert {path.stem for path in (DOCS / "images" / "concepts").iterdir()} == set(pictures.CONCEPTS)


@pytest.mark.parametrize("name", MASKS)
def test_it_is_read_and_shown_by_the_names_of_masks(name):
    (text, rows, keys), mask = pictures.GALLERY[name], pictures.mask_of(name)
    sizes = {"batch": 1 + (name == "per_row"), "heads": 1 + (name == "per_head")}
    read, meant = (x.spans(rows, keys, **sizes).dense() for x in (attnspan.parse(text), mask))
    np.testing.assert_array_equal(read, meant)
    names = {*vars(attnspan), *vars(library), "global_rows", "prefix_documents"}
    called = set(re.findall(r"([a-z_]+)\(", repr(mask)))
    assert called <= names, repr(mask)
