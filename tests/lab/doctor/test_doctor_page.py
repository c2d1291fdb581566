"""The page of a diagnosis in a real browser: findings first, charts drawn, nothing loaded, no complaint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnspan_lab.doctor import Diagnosis, Finding, Place
from attnspan_lab.doctor.page import write_page

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from browser import a_browser, draw_all, opened

HOSTILE = "<script>alert(1)</script> & [bold]"


def diagnosis() -> Diagnosis:
    place = Place(__file__, 1, "forward")
    facts = {
        "eager": {
            "attention calls": 2,
            "sites": [["m.py:3", "aten.sdpa", "2"]],
            "largest tensor": 4096,
            "mask": ["10", "11"],
        },
        "compiled": {
            "graphs": 1,
            "breaks": 1,
            "recompiles": 0,
            "compile seconds": 1.5,
            "step seconds": [1.6, 0.1],
            "timeline": [("forward", 10.0, 11.2, True, 7), (HOSTILE, 11.3, 11.6, False, 5)],
        },
    }
    findings = (
        Finding("leak", f"Documents see each other {HOSTILE}", (place,), (HOSTILE,)),
        Finding("graph-break", "A break", (place,), tried=HOSTILE, count=3),
    )
    plain = {"compile": "none", "checkpoint": "none", "order": "inside", "result": ""}
    cells = (plain, {**plain, "compile": "whole", "checkpoint": "full", "result": HOSTILE})
    return Diagnosis(f"m.py:factory: {HOSTILE}", findings, facts, {"cpu": "one"}, cells, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "found.html"
    write_page(diagnosis(), path)
    with a_browser() as browser, opened(browser, path, width) as page:
        if dark:
            page.click("#theme")
        headings = page.locator("h2").all_inner_texts()
        assert headings[:2] == ["1. leak", "2. graph-break"]
        assert headings[2:] == ["Measured", "Timeline", "Mask", "Features", "Machine"]
        assert "test_doctor_page.py:1" in page.locator("#finding-1").inner_text()
        assert HOSTILE in page.locator("#finding-1").inner_text()
        assert "m.py:3" in page.locator("#measured").inner_text()
        assert len(draw_all(page)) == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
