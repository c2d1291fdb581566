"""The page in a real browser: what it draws, sorts, filters and loads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from browser import a_browser, draw_all, opened
from playwright.sync_api import expect
from sample_results import monitor, sample_results
from test_page import hostile_results

from attnspan_lab.bench.results import Results
from attnspan_lab.report import write_page

pytestmark = pytest.mark.slow
SAMPLE = sample_results()


@pytest.fixture(scope="module")
def browser():
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    elsewhere = replace(SAMPLE.cells[0], device="cuda")
    write_page(replace(SAMPLE, cells=(*SAMPLE.cells, elsewhere)), made / "all.html")
    write_page(hostile_results(), made / "hostile.html")
    write_page(Results(monitor=monitor()), made / "monitor.html")
    return made


@pytest.fixture
def page(browser, folder):
    with opened(browser, folder / "all.html") as found:
        yield found


def choose(page, name, value):
    page.locator(f"#controls input[name='{name}'][value='{value}'] + span").click()


def test_charts_are_drawn_when_they_come_near_and_follow_the_switches(page):
    first = page.locator("#ratios .chart:visible").first
    first.scroll_into_view_if_needed()
    bars = first.locator(".trace.bars .point")
    expect(bars).to_have_count(16)
    assert page.locator(".chart:has(svg.main-svg)").count() < page.locator(".chart:visible").count() / 2
    choose(page, "peer", "jax")
    expect(bars).to_have_count(12)
    choose(page, "peer", "jax")
    expect(bars).to_have_count(16)
    choose(page, "mode", "forward+backward")
    choose(page, "dtype", "bfloat16")
    shown = draw_all(page)
    assert len(shown) > 15
    assert all(x["marks"] and x["axes"] for x in shown), shown
    notes = page.locator("#ratios figure:visible small")
    assert set(notes.all_inner_texts()) == {"forward+backward, bfloat16"}
    # A choice without cells moves to one that has some.
    choose(page, "device", "cuda")
    assert notes.all_inner_texts() == ["forward, float32, cuda"]
    assert page.locator("#controls input[name=dtype][value=bfloat16]").is_disabled()
    # Nothing covers a chart, and a button saves it.
    first = page.locator("#ratios figure:visible").first
    assert first.locator(".modebar-btn").count() == 0
    with page.expect_download() as saved:
        first.locator("button.save").click()
    assert saved.value.suggested_filename.startswith("attnspan-")


@pytest.mark.parametrize("name", ["monitor", "hostile"])
def test_smaller_pages_draw_what_they_have(browser, folder, name):
    with opened(browser, folder / f"{name}.html") as page:
        shown = draw_all(page)
        assert shown
        assert all(x["marks"] for x in shown), shown
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, .chart a[href]").count() == 0
        holder = page.locator(".chart:has(.legend)").first
        legend, plot = (holder.locator(x).first.bounding_box() for x in (".legend", ".gridlayer"))
        assert legend["y"] + legend["height"] <= plot["y"] + 1, "the legend covers nothing"


def test_the_table_sorts_and_its_filter_counts(page):
    for name in ("time", "ratio"):
        heading = page.locator("#cell-table th", has_text=name).first
        for direction in ("ascending", "descending"):
            heading.locator("button").click()
            assert heading.get_attribute("aria-sort") == direction
            column = heading.evaluate("x => x.cellIndex + 1")
            cells = page.locator(f"#cell-table tbody tr > :nth-child({column})")
            found = cells.evaluate_all("cells => cells.map(x => x.dataset.value ?? '')")
            figures = [float(text) for text in found if text]
            assert figures == sorted(figures, reverse=direction == "descending")
            assert found[: len(figures)] == [text for text in found if text], "missing ones are last"
    page.locator("#cell-table th button", has_text="workload").click()
    names = page.locator("#cell-table tbody th").evaluate_all("cells => cells.map(c => c.firstChild.data)")
    grid = [x for x in dict.fromkeys(names) if x.startswith("grid-full") and x.endswith("-d64")]
    # As people read numbers.
    assert grid == [f"grid-full-s{length}-d64" for length in (128, 1024, 4096, 16384)]
    runs = page.locator("#cell-table tbody tr").count()
    visible = page.locator("#cell-table tbody tr:visible")
    page.locator("#filters select[name=state]").select_option("noisy")
    noisy = sum(run.noisy for cell in (*SAMPLE.cells, SAMPLE.cells[0]) for run in cell.runs)
    expect(visible).to_have_count(noisy)
    assert page.locator("#count").inner_text() == f"{noisy} of {runs} rows"
    page.locator("#filters select[name=state]").select_option("")
    page.locator("#filters input").fill("LONG-window flex")
    page.locator("#filters input").press("Enter")
    expect(visible).to_have_count(8)


def test_a_phone_scrolls_in_one_direction(browser, folder):
    phone = {"is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    # Not `opened`: in charts that are so narrow, Plotly complains of its own labels at times.
    with closing(browser.new_page(viewport={"width": 390, "height": 900}, **phone)) as page:
        page.goto((folder / "hostile.html").as_uri())
        draw_all(page)
        for width in (390, 320):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_theme_follows_the_reader_and_paper_is_light_and_complete(browser, folder):
    with opened(browser, folder / "monitor.html", color_scheme="light") as page:
        html = page.locator("html")
        page.emulate_media(color_scheme="dark")
        expect(html).to_have_attribute("data-theme", "dark")
        page.locator("#theme").click()
        expect(html).to_have_attribute("data-theme", "light")
        page.locator("#theme").click()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(page.locator(".chart:not(:has(svg.main-svg))")).to_have_count(0)
        expect(html).to_have_attribute("data-theme", "light")
        widths = page.locator(".chart svg.main-svg").evaluate_all("charts => charts.map(c => c.clientWidth)")
        assert max(widths) <= 660
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        expect(html).to_have_attribute("data-theme", "dark")
        assert page.pdf().startswith(b"%PDF")
