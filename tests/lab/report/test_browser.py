"""The page in a real browser: what it draws, sorts, filters and loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from browser import ARGUMENTS, find_browser
from covering import few
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from sample_results import monitor, sample_results
from test_page import hostile_results

from attnspan_lab.bench.results import Results
from attnspan_lab.report import write_page

pytestmark = pytest.mark.slow

# Everything that a chart is made of: bars, points, lines, areas, texts.
MARKS = ".point path, path.point, path.js-line, path.js-fill, .textpoint text"

SCROLL_AND_READ = """async (marks) => {
  const found = [];
  for (const holder of document.querySelectorAll("figure:not([hidden]) .chart")) {
    holder.scrollIntoView();
    while (!holder.querySelector("svg.main-svg")) await new Promise(requestAnimationFrame);
    found.push({
      title: holder.parentElement.querySelector("b").textContent,
      note: holder.parentElement.querySelector("small").textContent,
      marks: holder.querySelectorAll(marks).length,
      x_title: holder.querySelector(".xtitle")?.textContent ?? "",
      y_title: holder.querySelector(".ytitle")?.textContent ?? "",
      row_names: holder.querySelectorAll(".textpoint text, .ytick text").length,
    });
  }
  return found;
}"""


@dataclass(frozen=True)
class Chart:
    """What a browser drew."""

    title: str
    note: str
    marks: int
    x_title: str
    y_title: str
    row_names: int


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser(os.environ)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_page(sample_results(), made / "all.html")
    write_page(hostile_results(), made / "hostile.html")
    write_page(Results(monitor=monitor()), made / "monitor.html")
    write_page(Results(environment={"cpu": "one"}), made / "bare.html")
    return made


@dataclass
class Window:
    """An open page, and everything it complained of or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def all_drawn(self) -> list[Chart]:
        """Scroll past everything; what the charts that are shown have drawn by then."""
        return [Chart(**found) for found in self.page.evaluate(SCROLL_AND_READ, MARKS)]

    def drawn(self, holder: Locator) -> Locator:
        """A chart that was scrolled to."""
        holder.scroll_into_view_if_needed()
        holder.locator("svg.main-svg").first.wait_for()
        return holder

    @property
    def first_ratios(self) -> Locator:
        """The first chart of ratios that is shown, drawn."""
        return self.drawn(self.page.locator("#ratios .chart:visible").first)


@contextmanager
def window_of(
    browser: Browser, folder: Path, name: str, width: int = 1280, **options: Any
) -> Iterator[Window]:
    """Open a page; by the end its console is empty, and nothing was fetched but the file itself."""
    window = Window(browser.new_page(viewport={"width": width, "height": 900}, **options))
    page = window.page
    page.on("console", lambda message: window.complaints.append(message.text))
    page.on("pageerror", lambda error: window.complaints.append(str(error)))
    page.on("dialog", lambda dialog: window.complaints.append(dialog.message))
    page.on("request", lambda request: window.requests.append(request.url))
    page.goto((folder / f"{name}.html").as_uri())
    yield window
    assert window.complaints == []
    assert [url for url in window.requests if not url.startswith(("data:", "blob:"))] == [
        page.url.split("#")[0]
    ]
    page.close()


@pytest.fixture
def open_page(browser: Browser, folder: Path) -> Iterator[Callable[..., Window]]:
    with ExitStack() as stack:
        yield lambda name="all", width=1280, **options: stack.enter_context(
            window_of(browser, folder, name, width, **options)
        )


@pytest.fixture(scope="module")
def visit(browser: Browser, folder: Path) -> Iterator[Window]:
    """One visit to the large page, for tests that leave it as they found it, or use a part of their own."""
    with window_of(browser, folder, "all") as window:
        yield window


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"#controls input[name='{name}'][value='{value}'] + span").click()


@pytest.mark.slow
def test_every_chart_has_marks_and_titles(open_page) -> None:
    window = open_page()
    choices = [("forward+backward", "bfloat16"), ("forward", "float32")]
    for mode, dtype in few(choices, 1):
        choose(window.page, "mode", mode)
        choose(window.page, "dtype", dtype)
        shown = window.all_drawn()
        assert len(shown) > 25
        for chart in shown:
            assert chart.marks > 0, chart
            assert chart.x_title, chart
            # Rows with names need no title for their axis; every other axis has one.
            assert chart.y_title or chart.row_names, chart
        assert {chart.note for chart in shown[:20]} == {f"{mode}, {dtype}"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["monitor", "hostile", pytest.param("bare", marks=pytest.mark.long)])
def test_smaller_pages_draw_what_they_have(open_page, name: str) -> None:
    window = open_page(name)
    shown = window.all_drawn()
    assert bool(shown) == (name != "bare")
    assert all(chart.marks for chart in shown), shown
    assert window.page.evaluate("window.hacked") is None
    assert window.page.locator("img, .chart a[href]").count() == 0
    if name == "hostile":
        labels = " ".join(window.first_ratios.locator(".yaxislayer-above text").all_text_contents())
        assert '<img src=x onerror="window.hacked=1">' in labels


def test_bars_stand_where_the_ratios_say(visit: Window) -> None:
    bars = visit.first_ratios.evaluate(
        """(holder) => {
          const traces = holder.querySelectorAll(".trace.bars");
          const boxes = (index) => [...traces[index].querySelectorAll(".point")]
            .map((point) => point.querySelector("path").getBoundingClientRect());
          const one = holder.querySelector(".shapelayer path").getBoundingClientRect();
          return [...holder.data].filter((trace) => trace.type === "bar").map((trace, index) => ({
            peer: trace.meta.peer,
            ratios: trace.x.map((length, i) => trace.base[i] + length),
            ends: boxes(index).map((box) => [box.left, box.right]),
            one: (one.left + one.right) / 2,
          }));
        }"""
    )
    work = sample_results().cells[0].workload.name
    cells = [cell for cell in sample_results().cells if cell.workload.name == work and cell.mode == "forward"]
    assert bars[0]["peer"] == "sdpa-flash"
    assert bars[0]["ratios"][0] == pytest.approx(cells[0].peers[0].ratio.median)
    for bar in bars:
        for ratio, (left, right) in zip(bar["ratios"], bar["ends"], strict=True):
            near, far = (left, right) if ratio > 1 else (right, left)
            assert near == pytest.approx(bar["one"], abs=1.5)
            assert (far > bar["one"]) == (ratio > 1)


def test_a_peer_can_be_hidden_everywhere(visit: Window) -> None:
    bars = visit.first_ratios.locator(".trace.bars .point")
    expect(bars).to_have_count(16)
    choose(visit.page, "peer", "jax")
    expect(bars).to_have_count(12)
    choose(visit.page, "peer", "jax")
    expect(bars).to_have_count(16)


@pytest.mark.slow
def test_switches_move_to_what_was_measured(browser: Browser, folder: Path) -> None:
    cell, *_ = cells = sample_results().cells
    kept = [c for c in cells if (c.workload.name, c.mode) == (cell.workload.name, "forward")]
    elsewhere = replace(cell, device="cuda", workload=replace(cell.workload, dtype="float16"))
    write_page(Results(cells=(*kept, elsewhere)), folder / "holes.html")
    page = browser.new_page()
    page.goto((folder / "holes.html").as_uri())
    notes = page.locator("#ratios figure:visible small")
    choose(page, "dtype", "bfloat16")
    assert notes.all_inner_texts() == ["forward, bfloat16"]
    # A choice without cells moves to one that has some.
    choose(page, "device", "cuda")
    assert notes.all_inner_texts() == ["forward, float16, cuda"]
    assert page.locator("#controls input[name=dtype]:checked").get_attribute("value") == "float16"
    assert page.locator("#controls input[name=dtype][value=bfloat16]").is_disabled()
    page.close()


def test_nothing_covers_a_chart_and_a_button_saves_it(visit: Window) -> None:
    holder = visit.first_ratios
    holder.hover()
    assert holder.locator(".modebar-btn").count() == 0
    with visit.page.expect_download() as saved:
        holder.locator("xpath=..").locator("button.save").click()
    assert saved.value.suggested_filename.startswith("attnspan-")
    assert saved.value.suggested_filename.endswith(".png")


@pytest.mark.slow
def test_legends_overlap_nothing(open_page) -> None:
    window = open_page("monitor")
    holder = window.drawn(window.page.locator(".chart:has(.legend), .chart").first)
    boxes = holder.evaluate(
        """(holder) => [".legend", ".gridlayer"].map((name) => {
          const box = holder.querySelector(name).getBoundingClientRect();
          return [box.top, box.bottom];
        })"""
    )
    (_, legend_bottom), (plot_top, _) = boxes
    assert legend_bottom <= plot_top + 1


def test_charts_are_drawn_when_they_come_near(visit: Window) -> None:
    assert visit.first_ratios.is_visible()
    drawn = visit.page.locator(".chart:has(svg.main-svg)")
    assert drawn.count() < visit.page.locator(".chart:visible").count() / 2


def column(page: Page, table: str, name: str) -> list[str]:
    return page.evaluate(
        """([table, name]) => {
          const rows = [...document.querySelector(table).rows];
          const index = [...rows[0].cells].findIndex((cell) => cell.textContent === name);
          return rows.slice(1).map((row) => row.cells[index].dataset.value ?? "");
        }""",
        [table, name],
    )


@pytest.mark.long
def test_headings_sort_and_keep_missing_figures_last(visit: Window) -> None:
    page = visit.page
    for name in ("time", "ratio", "memory"):
        heading = page.locator("#cell-table th", has_text=name).first
        for direction in ("ascending", "descending"):
            heading.locator("button").click()
            assert heading.get_attribute("aria-sort") == direction
            found = column(page, "#cell-table", name)
            figures = [float(text) for text in found if text]
            assert len(figures) > 100
            assert figures == sorted(figures, reverse=direction == "descending")
            assert found[: len(figures)] == [text for text in found if text]
    page.locator("#cell-table th button", has_text="workload").click()
    names = page.locator("#cell-table tbody th").evaluate_all("cells => cells.map(c => c.firstChild.data)")
    grid = [name for name in names if name.startswith("grid-full-d64-")]
    in_order = [f"grid-full-d64-s{length}" for length in (128, 1024, 4096, 16384)]
    assert list(dict.fromkeys(grid)) == in_order, "words sort as people read numbers"


def test_the_filter_narrows_and_counts(visit: Window) -> None:
    page = visit.page
    results = sample_results()
    runs = [(cell, run) for cell in results.cells for run in cell.runs]
    visible = page.locator("#cell-table tbody tr:visible")
    assert visible.count() == len(runs)
    page.locator("#filters select[name=state]").select_option("noisy")
    wanted = sum(run.noisy for _, run in runs)
    assert visible.count() == wanted
    assert page.locator("#count").inner_text() == f"{wanted} of {len(runs)} rows"
    page.locator("#filters select[name=state]").select_option("")
    page.locator("#filters input").fill("LONG-2048 flex")
    wanted = sum(cell.workload.name == "long-2048" and run.peer == "flex" for cell, run in runs)
    assert visible.count() == wanted > 0
    page.locator("#filters input").press("Enter")
    assert visible.count() == wanted
    page.locator("#filters input").fill("nothing is called so")
    assert visible.count() == 0
    page.locator("#filters input").fill("")


# What reaches beyond the window, and is not in a part that scrolls by itself.
BEYOND = """() => [...document.querySelectorAll("body *")]
  .filter((item) => item.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter((item) => !item.closest(".scroll, svg, .skip, [hidden]"))
  .map((item) => item.outerHTML.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["hostile", "all", "monitor", "bare"], 1))
def test_a_phone_scrolls_in_one_direction(open_page, name: str) -> None:
    window = open_page(name, 390, is_mobile=True, has_touch=True, device_scale_factor=2)
    window.all_drawn()
    for width in (390, 320):
        window.page.set_viewport_size({"width": width, "height": 800})
        assert window.page.evaluate(BEYOND) == []
        assert window.page.evaluate("document.documentElement.scrollWidth") == width


def luminance(color: str) -> float:
    channels = [int(part) / 255 for part in color[color.index("(") + 1 : color.index(")")].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", few(["dark", "light"], 1))
def test_both_themes_are_complete(open_page, scheme: str) -> None:
    window = open_page(color_scheme=scheme)
    window.drawn(window.page.locator("#speed .chart:visible").first)

    def style(selector: str, name: str) -> str:
        return window.page.locator(selector).first.evaluate(f"item => getComputedStyle(item).{name}")

    paper = style("body", "backgroundColor")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for selector in ("body", "h2", ".faint", "nav a", ".badge", ".card dt", "caption", "th button"):
        # WCAG 2.2, 1.4.3: 4.5 for text, 3 for what is drawn.
        assert contrast(style(selector, "color"), paper) >= 4.5, selector
    for selector in (".xtick text", ".xtitle", ".ytitle"):
        assert contrast(style(selector, "fill"), paper) >= 4.5, selector
    for swatch in window.page.locator(".swatch").all():
        assert contrast(swatch.evaluate("item => getComputedStyle(item).backgroundColor"), paper) >= 2.4


def test_the_theme_follows_the_reader(open_page) -> None:
    page = open_page("bare", color_scheme="light").page
    html = page.locator("html")
    page.emulate_media(color_scheme="dark")
    expect(html).to_have_attribute("data-theme", "dark")
    page.locator("#theme").click()
    expect(html).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="light")
    page.locator("#theme").click()
    expect(html).to_have_attribute("data-theme", "dark")


@pytest.mark.long
def test_paper_gets_every_chart_in_light_and_in_its_width(open_page) -> None:
    page = open_page("hostile", color_scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(page.locator("figure:not([hidden]) .chart:not(:has(svg.main-svg))")).to_have_count(0)
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    widths = page.locator(".chart:visible svg.main-svg").evaluate_all(
        "charts => charts.map(c => c.clientWidth)"
    )
    assert max(widths) <= 660
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.pdf().startswith(b"%PDF")


def test_a_missing_browser_fails_only_where_one_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    for required in ({"CI": "1"}, {"ATTNSPAN_REQUIRE_BROWSER": "1"}):
        with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
            find_browser({"PATH": "/nowhere", **required})
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        find_browser({"PATH": "/nowhere"})
    with pytest.raises(pytest.skip.Exception, match="no browser: /nowhere/chrome not found"):
        find_browser(
            {**os.environ, "CI": "", "ATTNSPAN_REQUIRE_BROWSER": "", "ATTNSPAN_BROWSER": "/nowhere/chrome"}
        )
