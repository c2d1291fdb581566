"""The site of `make docs`: strict, whole, and used as a reader uses it, in a browser."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/lab/report"), str(ROOT / "docs")]

pytest.importorskip("mkdocs")

import hooks  # noqa: E402
from browser import ARGUMENTS, find_browser  # noqa: E402
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort, PluginError  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402
from test_public_names import MODULES  # noqa: E402

pytestmark = pytest.mark.slow

SECTIONS = ["Start", "Migrate", "How-to", "Masks and options", "Reference", "Concepts", "Benchmarks"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    gc.disable()  # A sixth of the time.
    build(settings(folder))
    gc.enable()
    return folder


def settings(folder: Path, **changes: Any) -> Any:
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    return load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changes)


# The machine may be busy.
expect.set_options(timeout=20_000)

# The reference.


@pytest.mark.slow
def test_every_public_name_has_an_anchor(site: Path) -> None:
    assert hooks.missing_names(site) == []
    assert len(hooks.public()) > 600


def test_the_reference_knows_every_public_module() -> None:
    known = {*hooks.MODULES, *itertools.chain(*hooks.inner_modules().values()), hooks.NAMES_OF_TORCH}
    assert {name for name in MODULES if hooks.names_of(name)} == known


def test_what_the_pages_import_is_in_the_reference(site: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    modules = re.findall(r"^(?:from|import) (attnspan(?:\.[\w.]+)?)(?: |$)", text, re.MULTILINE)
    assert set(modules) <= set(hooks.MODULES)
    lab = re.findall(r"^from (attnspan_lab[\w.]*) import (\w+)$", text, re.MULTILINE)
    anchors = hooks.ANCHOR.findall((site / "reference/lab.html").read_text(encoding="utf-8"))
    assert {".".join(x) for x in lab} <= set(anchors)


@pytest.mark.slow
def test_a_name_that_is_left_out_is_found(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site / "reference", tmp_path / "reference")
    page = tmp_path / "reference" / "torch.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace('id="attnspan.torch.wrap"', ""), encoding="utf-8")
    assert hooks.missing_names(tmp_path) == ["attnspan.torch.wrap"]
    with pytest.raises(PluginError, match=r"attnspan\.torch\.wrap"):
        hooks.on_post_build(settings(tmp_path))


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](b.md#nowhere)", "[x](../nowhere.md)"])
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# A\n\n{link}\n", encoding="utf-8")
    (tmp_path / "docs" / "b.md").write_text("# B\n", encoding="utf-8")
    (tmp_path / "docs" / "assets").mkdir()
    (tmp_path / "docs" / "assets" / "site.css").write_text("", encoding="utf-8")
    changes = {"docs_dir": str(tmp_path / "docs"), "nav": ["a.md", "b.md"], "hooks": [], "plugins": []}
    with pytest.raises(Abort):
        build(settings(tmp_path / "site", **changes))


def test_links_by_file_names_show_titles(site: Path) -> None:
    text = (site / "library.html").read_text(encoding="utf-8")
    assert '<a href="masks.html">Masks</a>' in text
    assert ".md</a>" not in text
    assert '<a href="../benchmarks.html">How we measure</a>' in (site / "figures/index.html").read_text()


def test_a_notebook_is_a_page_with_its_pictures_and_a_file(site: Path) -> None:
    text = (site / "notebooks/masks.html").read_text(encoding="utf-8")
    assert text.count('src="data:image/svg+xml') == 4
    assert "query 31 sees keys from, to: [[22, 32]]" in text
    assert (site / "notebooks/masks.ipynb").exists()
    assert 'href="notebooks/masks.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_links_into_the_repository_become_pages_or_text(site: Path) -> None:
    training = (site / "training.html").read_text(encoding="utf-8")
    assert 'href="sources/examples/train/config.html"' in training
    assert (site / "sources/examples/train/config.html").exists()
    assert "../" not in re.sub(
        r'(href|src|base)="[^"]*"|"base": *"[^"]*"', "", (site / "performance.html").read_text()
    )


# The browser.


class Quiet(SimpleHTTPRequestHandler):
    """A server without a log."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser(os.environ)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Browser, address: str, site: Path) -> Callable[..., Any]:
    few_words = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    del few_words["docs"][1:]

    @contextmanager
    def opened(name: str, width: int = 1280, search: bool = False, **options: Any) -> Iterator[Page]:
        """Open a page; by the end its console is empty, and nothing was asked of another machine."""
        complaints, requests = [], []
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        if not search:  # Each page that opens would read the words of all pages, for a second.
            page.route("**/search_index.json", lambda route: route.fulfill(json=few_words))
        page.goto(f"{address}/{name}")
        yield page
        assert complaints == []
        assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
        page.close()

    return opened


@pytest.mark.slow
def test_a_reader_clicks_from_the_start_to_a_name(visit: Callable[..., Any]) -> None:
    with visit("index.html") as page:
        tabs = page.locator(".md-tabs__link")
        assert [text.strip() for text in tabs.all_inner_texts()] == SECTIONS
        tabs.filter(has_text="Migrate").click()
        expect(page.locator("h1")).to_contain_text("Migrate")
        page.locator("article").get_by_role("link", name="FlexAttention").first.click()
        expect(page.locator("h1")).to_contain_text("From FlexAttention")
        tabs.filter(has_text="How-to").click()
        page.locator("article").get_by_role("link", name="My own GPT with packed documents").click()
        expect(page.locator("h1")).to_contain_text("My own GPT")
        tabs.filter(has_text="Reference").click()
        page.locator("article").get_by_role("link", name="attnspan.torch", exact=True).click()
        page.locator(".md-nav--secondary").get_by_role("link", name="StaticCache").first.click()
        assert page.url.endswith("torch.html#attnspan.torch.StaticCache")
        expect(page.locator("[id='attnspan.torch.StaticCache']").first).to_be_in_viewport()


@pytest.mark.slow
def test_every_page_of_the_navigation_opens(visit: Callable[..., Any], site: Path) -> None:
    with visit("index.html") as page:
        links = page.locator(".md-nav--primary a.md-nav__link").evaluate_all(
            "links => links.map(a => a.href)"
        )
        names = {link.partition("#")[0] for link in links}
        assert len(names) > 50
        for name in sorted(names):
            answer = page.request.get(name)
            assert answer.ok, name
            assert answer.text().count("<h1") == 1, name


@pytest.mark.slow
def test_the_search_finds_a_name_and_a_subject(visit: Callable[..., Any]) -> None:
    with visit("index.html", search=True) as page:
        for words, name in [("RollingCache", "reference/torch"), ("prefix trees", "howto/prefix-trees")]:
            page.locator(".md-search__input").fill(words)
            page.keyboard.press("End")  # It reads its field when a key is let go.
            expect(page.locator(f".md-search-result__link[href*='{name}.html']").first).to_be_visible()


@pytest.mark.slow
def test_dark_and_light_follow_the_reader_and_the_button(visit: Callable[..., Any]) -> None:
    for scheme, first, second in [("light", "default", "slate"), ("dark", "slate", "default")]:
        with visit("masks.html", color_scheme=scheme) as page:
            body = page.locator("body")
            expect(body).to_have_attribute("data-md-color-scheme", first)
            page.locator("label[for^=__palette]:visible").click()
            expect(body).to_have_attribute("data-md-color-scheme", second)


# What reaches beyond the window, and is not in a part that scrolls by itself.
BEYOND = """() => [...document.querySelectorAll("article *")]
  .filter((item) => item.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter((item) => !item.closest("pre, .md-typeset__scrollwrap, .highlight"))
  .map((item) => item.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "masks",
        "switch/flex",
        "reference/torch",
        "performance",
        "library",
        "howto/packed-gpt",
        "notebooks/masks",
        "notebooks/training",
    ],
)
def test_a_phone_scrolls_in_one_direction(visit: Callable[..., Any], name: str) -> None:
    with visit(f"{name}.html", 390, is_mobile=True, has_touch=True) as page:
        assert page.evaluate(BEYOND) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_a_phone_has_its_menu(visit: Callable[..., Any]) -> None:
    with visit("index.html", 390, is_mobile=True, has_touch=True) as page:
        menu = page.locator(".md-nav--primary")
        page.locator(".md-header label[for=__drawer]").tap()
        menu.locator("label.md-nav__title:visible", has_text="Start").tap()  # back to the sections
        menu.get_by_role("link", name="How-to", exact=True).tap()
        expect(page.locator("h1")).to_contain_text("How-to")


@pytest.mark.slow
def test_code_stands_side_by_side_where_there_is_room(visit: Callable[..., Any]) -> None:
    tops = "sides => [...sides.children].map(x => x.getBoundingClientRect().top)"
    with visit("switch/sdpa.html") as page:
        left, right = page.locator(".sides").first.evaluate(tops)
        assert left == right
    with visit("switch/sdpa.html", 390) as page:
        left, right = page.locator(".sides").first.evaluate(tops)
        assert left < right
