"""The site of `make docs`: one strict build, what the hooks add to it, and a phone that opens its pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/lab/report"), str(ROOT / "docs")]

pytest.importorskip("mkdocs")

import hooks  # noqa: E402
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort, PluginError  # noqa: E402


def settings(folder: Path, **changes: Any) -> Any:
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    return load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changes)


# `make docs` runs the same build in CI.
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(settings(folder := tmp_path_factory.mktemp("site")))
    return folder


#: Of each thing that the hooks add: a page of the site, and what it then holds.
ADDED = [
    ("library", '<a href="masks.html">Masks</a>'),
    ("figures/index", '<a href="../benchmarks.html">How we measure</a>'),
    ("notebooks/masks", "query 31 sees keys from, to: [[22, 32]]"),
    ("notebooks/masks", 'src="data:image/svg+xml'),
    ("training", 'href="sources/examples/train/config.html"'),
    ("sources/examples/train/config", "<h1"),
]


@pytest.mark.long
def test_the_strict_build_has_every_name_and_what_the_hooks_add(site: Path, tmp_path: Path) -> None:
    assert hooks.missing_names(site) == []
    assert all(text in (site / f"{page}.html").read_text(encoding="utf-8") for page, text in ADDED)
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0]: entry.get("tags", []) for entry in index["docs"]}
    terms = settings(site).extra["search_terms"]
    assert {page: found[page.replace(".md", ".html")] for page in terms} == terms
    words = re.split(index["config"]["separator"], "mask=causal() & documents(cu_q), torch.compile.")
    assert words[:6] == ["mask", "causal", "&", "documents", "cu_q", "torch.compile"]
    shutil.copytree(site / "reference", tmp_path / "reference")
    page = tmp_path / "reference" / "torch.html"
    page.write_text(
        page.read_text(encoding="utf-8").replace('id="attnspan.torch.wrap"', ""), encoding="utf-8"
    )
    with pytest.raises(PluginError, match=r"attnspan\.torch\.wrap"):
        hooks.on_post_build(settings(tmp_path))


def test_the_reference_knows_every_module_that_pages_import() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert set(re.findall(r"^(?:from|import) (attnspan(?:\.[\w.]+)?)(?: |$)", text, re.M)) <= {*hooks.MODULES}


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](b.md#nowhere)", "[x](../nowhere.md)"])
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    docs = tmp_path / "docs"
    for name, text in {"a.md": f"# A\n\n{link}\n", "b.md": "# B\n", "assets/site.css": ""}.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")
    changes = {"docs_dir": str(docs), "nav": ["a.md", "b.md"], "hooks": [], "plugins": []}
    with pytest.raises(Abort):
        build(settings(tmp_path / "site", **changes))


# What reaches beyond the window, and is not in a part that scrolls by itself.
BEYOND = """() => [...document.querySelectorAll("article *")]
  .filter((item) => item.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter((item) => !item.closest("pre, .md-typeset__scrollwrap, .highlight, p:has(> img)"))
  .map((item) => item.outerHTML.slice(0, 80))"""


@pytest.mark.long
def test_a_phone_scrolls_in_one_direction(site: Path) -> None:
    from browser import a_browser

    with a_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 900}, is_mobile=True)
        for name in ("index", "masks", "switch/flex", "reference/torch", "library", "notebooks/training"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate(BEYOND) == [], name
