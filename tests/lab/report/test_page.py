"""What stands in the page, read as text: no browser is needed here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sample_results import CEILINGS, monitor, sample_results, training

import attnspan_lab
from attnspan_lab.bench.cells import Run, verdicts
from attnspan_lab.bench.results import Evaluation, Results
from attnspan_lab.bench.standings import standings
from attnspan_lab.report import write_page
from attnspan_lab.report.steps import monitor_section

HOSTILE = '<img src=x onerror="window.hacked=1">"\'</script><script>window.hacked=1</script>{{ 7 * 7 }} %{x}'
SECTIONS = {
    "grid", "standing", "ratios", "roofline", "speed", "scaling", "memory", "training", "monitor",
    "cells", "environment",
}  # fmt: skip
STYLE = Path(attnspan_lab.__file__).parent / "report" / "page.css"
NAMED_COLOR = re.compile(r"@[a-z]+\d?")


class Page(HTMLParser):
    """Tags with their attributes, and the text of some of them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style" and data.strip():
            self.words.append(data.strip())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.tags
            if name == tag and all(attrs.get(key.replace("_", "-")) == value for key, value in wanted.items())
        ]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def figures(self) -> list[dict[str, Any]]:
        return json.loads(next(script for script in self.scripts if script.startswith("[")))


def page_of(results: Results, folder: Path) -> Page:
    path = folder / "new" / "page.html"
    write_page(results, path)
    assert [item.name for item in path.parent.iterdir()] == ["page.html"]
    return Page(path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(sample_results(), tmp_path_factory.mktemp("page"))


def sections(page: Page) -> set[str]:
    return {attrs["id"] or "" for attrs in page.all("section")}


def test_every_section_has_its_place_and_its_link(page: Page) -> None:
    assert sections(page) == SECTIONS
    assert {(attrs["href"] or "").removeprefix("#") for attrs in page.all("a")} == SECTIONS | {"content"}


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        (Results(), set()),
        (Results(environment={"cpu": "one"}), {"environment"}),
        (Results(ceilings=CEILINGS), {"environment"}),
        (Results(monitor=monitor(3)), {"monitor"}),
        (Results(training=training()), {"training"}),
        (replace(sample_results(), ceilings=None, training=(), monitor=()),
         SECTIONS - {"roofline", "training", "monitor"}),
    ],
)  # fmt: skip
def test_sections_without_data_are_absent(results: Results, wanted: set[str], tmp_path: Path) -> None:
    found = page_of(results, tmp_path)
    assert sections(found) == wanted
    assert bool(found.all("form", id="controls")) == bool(results.cells)
    assert bool(found.all("table", id="cell-table")) == bool(results.cells)
    assert bool(found.all("dl", **{"class": "cards"})) == bool(results.cells or results.training)


def test_a_training_shows_its_loss_first_and_then_its_speed(tmp_path: Path) -> None:
    records = monitor(120)
    results = Results(monitor=records, evaluations=(Evaluation(0, 5.6), Evaluation(120, 2.9)))
    section = monitor_section(results)
    assert section is not None
    loss, speed, *_ = section.charts
    assert (loss.title, speed.title) == ("Loss", "Tokens per second")
    assert loss.alt.endswith("at last; held out 5.600 at first, 2.900 at last.")
    raw, smooth, held_out = loss.data
    assert raw["y"] == [record.loss for record in records]
    assert smooth["x"] == raw["x"]
    assert smooth["y"][60] == sorted(raw["y"][54:67])[6]
    assert (held_out["x"], held_out["y"]) == ([0, 120], [5.6, 2.9])
    few = monitor_section(Results(monitor=records[:3]))
    assert few is not None
    assert [trace["y"] for trace in few.charts[0].data] == [raw["y"][:3]]
    unknown = monitor_section(Results(monitor=tuple(replace(record, loss=None) for record in records)))
    assert unknown is not None
    assert unknown.charts[0].title == "Tokens per second"


def test_every_run_of_every_cell_is_a_row(page: Page) -> None:
    results = sample_results()
    runs = [(cell, run) for cell in results.cells for run in cell.runs]
    rows = [attrs for attrs in page.all("tr") if "data-peer" in attrs]
    assert [(row["data-mode"], row["data-dtype"], row["data-peer"]) for row in rows] == [
        (cell.mode, cell.workload.dtype, run.peer) for cell, run in runs
    ]
    states = [row["data-state"] for row in rows]
    assert states.count("could not run") == sum(run.reason is not None for _, run in runs) > 0
    assert states.count("noisy") == sum(run.noisy for _, run in runs) > 0
    said = verdicts(results.cells)
    faster = [run for cell, run in runs if said.get((cell.label, run.peer)) == "behind" and not run.noisy]
    assert states.count("faster than attnspan") == len(faster) > 0
    noisy = sum(run.noisy for _, run in runs) + sum(cell.noisy for cell in results.training)
    assert page.words.count("noisy") == noisy + 1  # and the choice in the filter
    for cell, run in runs:
        assert cell.workload.name in page.words
        assert run.reason is None or run.reason in page.words


def test_headlines_are_the_figures_of_the_results(page: Page) -> None:
    for standing in standings(sample_results().cells):
        if standing.peer is None:
            at = page.words.index(standing.view.label)
            assert page.words[at + 1] == f"{standing.mean:.2f}x"
            assert page.words[at + 2].startswith(
                f"{standing.count('ahead')} of {len(standing.ratios)} cells ahead"
            )


def test_the_machine_is_described_in_words(page: Page) -> None:
    facts = dict(zip(page.words, page.words[1:], strict=False))
    assert facts["memory bytes"] == "16.0 GiB"
    assert facts["load average"] == "0.1235, 0.5"
    assert facts["versions, torch"] == "2.13.0+cpu"
    assert facts["versions, tokamax"] == "-"
    assert facts["reading memory"] == "18.4 GB/s"


def test_no_share_is_above_the_peak(tmp_path: Path) -> None:
    low = replace(CEILINGS, flops={kind: peak / 2 for kind, peak in CEILINGS.flops.items()})
    found = page_of(replace(sample_results(), ceilings=low), tmp_path)
    assert "up to 100 % of the measured peak" in found.text or "up to 9" in found.text
    assert not re.search(r"1[0-9][1-9] % of the", json.dumps(found.figures))
    assert any(word.startswith("the fastest sample of attnspan at ") for word in found.words)


def test_columns_that_no_run_has_are_absent(page: Page, tmp_path: Path) -> None:
    assert "in a row" not in page.words
    results = sample_results()
    cell = results.cells[0]
    queued = replace(cell.ours, pipelined=cell.ours.execute)
    found = page_of(replace(results, cells=(replace(cell, runs=(queued, *cell.peers)),)), tmp_path)
    assert "in a row" in found.words


@pytest.mark.parametrize(
    ("results", "title"),
    [
        (sample_results(), "attnspan: grid, documents, decode, long, training steps, steps 1 to 120 of a "
         "training on Intel Xeon (a made-up one)"),
        (Results({"cpu": "c", "gpu": {"name": "g"}}, monitor=monitor(3)),
         "attnspan: steps 1 to 3 of a training on g"),
        (Results(), "attnspan"),
    ],
)  # fmt: skip
def test_each_page_has_its_own_title(results: Results, title: str, tmp_path: Path) -> None:
    found = page_of(results, tmp_path)
    assert found.words[0] == found.words[found.words.index(title, 1)] == title
    write_page(results, tmp_path / "named.html", title="<mine>")
    assert "<title>&lt;mine&gt;</title>" in (tmp_path / "named.html").read_text(encoding="utf-8")


def test_nothing_points_outside(page: Page) -> None:
    for tag, attrs in page.tags:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            value = attrs.get(name) or ""
            assert value.startswith(("#", "data:,")) or not value, (tag, value)
    style = next(attrs for attrs in page.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy")
    assert (style["content"] or "").startswith("default-src 'none'; script-src 'sha256-")
    assert "@import" not in page.text
    assert "url(" not in STYLE.read_text()


def hostile_results() -> Results:
    """Every string that comes from outside is an attack."""
    results = sample_results()
    cell = results.cells[0]
    work = replace(cell.workload, name=HOSTILE, family=HOSTILE, mask=HOSTILE, note=HOSTILE)
    peers = [replace(run, peer=HOSTILE, note=HOSTILE) for run in cell.peers if run.ran][:1]
    runs = (replace(cell.ours, note=HOSTILE), *peers, Run(f"{HOSTILE} 2", reason=HOSTILE))
    longer = replace(work, name=f"{HOSTILE} 2", q_len=256, k_len=256)
    cells = tuple(replace(cell, workload=problem, runs=runs) for problem in (work, longer))
    steps = replace(results.training[1], attention=HOSTILE, note=HOSTILE)
    ceilings = replace(CEILINGS, flops={"<b>_f32": 2e11}, notes={"<b>_f32": HOSTILE})
    return Results(
        environment={HOSTILE: HOSTILE, "nested": {"list": [HOSTILE]}},
        ceilings=ceilings,
        cells=cells,
        training=(steps,),
        monitor=results.monitor[:3],
    )


def test_strings_are_data_and_never_markup(tmp_path: Path, page: Page) -> None:
    found = page_of(hostile_results(), tmp_path)
    assert not found.all("img")
    assert len(found.all("script")) == len(page.all("script")) == 3
    assert not any("window.hacked" in script and not script.startswith("[") for script in found.scripts)
    assert "{{ 7 * 7 }}" in found.text
    # A chart takes tags for markup: it gets none.
    for text in every_string(found.figures):
        assert "<img" not in text
        assert "<script" not in text


def every_string(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [text for name, item in value.items() if name != "meta" for text in every_string(item, name)]
    if isinstance(value, list):
        return [text for item in value for text in every_string(item, key)]
    return [value] if isinstance(value, str) else []


def test_charts_are_what_plotly_knows(page: Page) -> None:
    from plotly.graph_objects import Figure

    assert len(page.figures) == len(page.all("div", **{"class": "chart"})) > 50
    for figure in page.figures:
        plain = json.loads(NAMED_COLOR.sub("#123456", json.dumps(figure)))
        assert plain["data"]
        Figure(plain)


def test_colors_of_charts_are_names_of_the_style_sheet(page: Page) -> None:
    style = STYLE.read_text()
    used = {name[1:] for figure in page.figures for name in NAMED_COLOR.findall(json.dumps(figure))}
    light, dark = style.split(':root[data-theme="dark"]')[:2]
    for name in used:
        assert f"--{name}:" in light, name
        assert f"--{name}:" in dark.split("}")[0], name


def test_peers_beyond_the_palette_still_differ() -> None:
    from attnspan_lab.report.charts import Palette

    cell = sample_results().cells[0]
    run = next(run for run in cell.peers if run.ran)
    peers = tuple(replace(run, peer=f"peer-{index}") for index in range(14))
    palette = Palette([replace(cell, runs=(cell.ours, *peers))])
    styles = {(palette.color(run.peer), palette.symbol(run.peer)) for run in (cell.ours, *peers)}
    assert len(styles) == 15
    assert "tokamax" not in Palette(sample_results().cells).peers, "it never ran"


def test_readers_without_eyes_find_their_way(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for _, attrs in page.tags:
        for target in (attrs.get("aria-labelledby") or "").split():
            assert target in ids
    assert all(
        attrs.get("role") == "img" and attrs.get("aria-label")
        for attrs in page.all("div", **{"class": "chart"})
    )
    assert len(page.all("caption")) == len(page.all("table")) == 4
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.all("th"))
    assert page.all("html", lang="en")


def test_an_incomplete_measurement_says_so(tmp_path: Path, page: Page) -> None:
    assert "incomplete" not in page.words
    assert "incomplete" in page_of(replace(sample_results(), complete=False), tmp_path).words


def test_a_page_without_charts_leaves_plotly_out(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(Results(environment={"cpu": "one"}), path)
    assert path.stat().st_size < 50_000
    write_page(Results(monitor=monitor(3)), path)
    assert path.stat().st_size > 1_000_000


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("the old page")
    bad = replace(monitor(1)[0], utilisation=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write_page(Results(monitor=(bad,)), path)
    assert path.read_text() == "the old page"
    assert list(tmp_path.iterdir()) == [path]
