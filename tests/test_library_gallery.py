"""Every mask of the library has a picture, an entry in docs/library.md and a definition in the samples."""

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from samples.library import LIBRARY

import attnspan
from attnspan import library

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))

import pictures  # noqa: E402


def _is_mask(name):
    value = getattr(library, name)
    if inspect.isclass(value):
        return issubclass(value, attnspan.Mask)
    return inspect.signature(value).return_annotation == "Mask"


MASKS = [name for name in library.__all__ if _is_mask(name)]
#: Folder of docs/images -> by name, what draws its pictures.
DRAWN = {
    ".": pictures.README,
    "concepts": pictures.CONCEPTS,
    "library": {name: lambda name=name: pictures.draw(name) for name in pictures.GALLERY},
}
PICTURES = [(folder, name) for folder, names in DRAWN.items() for name in names]
#: What shows a picture: its page, and how.
SHOWN = {
    ".": (DOCS.parent / "README.md", "docs/images/{0}.svg"),
    "concepts": (DOCS / "concepts/pictures.md", "(../images/concepts/{0}.svg)"),
    "library": (DOCS / "library.md", "| ![{0}](images/library/{0}.svg) | `{1}` |"),
}


def test_each_mask_has_a_definition_an_entry_and_a_picture():
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    assert [name for name in library.__all__ if f"`{name}(" not in page] == []
    assert set(pictures.GALLERY) == set(MASKS) <= {sample.function for sample in LIBRARY}
    for folder in ("concepts", "library"):
        kept = {path.stem for path in (pictures.IMAGES / folder).iterdir()}
        assert kept == set(DRAWN[folder]), "a picture is left over, or lacks"
    # In an <img>, text does not take its colour from the page.
    assert [x for x in pictures.IMAGES.rglob("*.svg") if "currentColor" in x.read_text("utf-8")] == []


@pytest.mark.parametrize(("folder", "name"), PICTURES)
def test_a_picture_is_that_of_its_data(folder, name):
    written = (pictures.IMAGES / folder / f"{name}.svg").read_text(encoding="utf-8")
    assert written == DRAWN[folder][name](), "run python docs/pictures.py"
    page, how = SHOWN[folder]
    assert how.format(name, pictures.GALLERY.get(name, [""])[0]) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MASKS)
def test_it_is_read_and_shown_by_the_names_of_masks(name):
    (text, rows, keys), mask = pictures.GALLERY[name], pictures.mask_of(name)
    sizes = {"batch": 1 + (name == "per_row"), "heads": 1 + (name == "per_head")}
    read, meant = (x.spans(rows, keys, **sizes).dense() for x in (attnspan.parse(text), mask))
    np.testing.assert_array_equal(read, meant)
    called = set(re.findall(r"([a-z_]+)\(", repr(mask)))
    assert called <= {*vars(attnspan), *vars(library), "global_rows", "prefix_documents"}, repr(mask)
