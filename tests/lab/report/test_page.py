"""What stands in the page, read as text: no browser is needed here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from sample_results import CEILINGS, monitor, sample_results, training

import attnspan_lab
from attnspan_lab.bench.cells import Run, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.standings import standings
from attnspan_lab.report import write_page

HOSTILE = '<img src=x onerror="window.hacked=1">"\'</script><script>window.hacked=1</script>{{ 7 * 7 }} %{x}'
SECTIONS = {"grid", "standing", "ratios", "roofline", "speed", "scaling", "memory", "training", "monitor"}
SECTIONS |= {"cells", "environment"}
STYLE = (Path(attnspan_lab.__file__).parent / "report" / "page.css").read_text()
NAMED_COLOR = re.compile(r"@[a-z]+\d?")


class Page(HTMLParser):
    """Tags with their attributes, and words."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.scripts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.cdata_elem == "script":
            self.scripts.append(data)
        elif self.cdata_elem != "style" and data.strip():
            self.words.append(data.strip())

    def all(self, tag, **wanted):
        return [x for name, x in self.tags if name == tag and wanted.items() <= x.items()]

    @property
    def figures(self):
        return json.loads(self.scripts[0])


def page_of(results, folder):
    path = folder / "new" / "page.html"
    write_page(results, path)
    assert [item.name for item in path.parent.iterdir()] == ["page.html"]
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return page_of(sample_results(), tmp_path_factory.mktemp("page"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("results", "wanted", "title"),
    [
        (sample_results(), SECTIONS, "attnspan: grid, documents, decode, long, training steps, "
         "steps 1 to 120 of a training on Intel Xeon (a made-up one)"),
        (Results(), set(), "attnspan"),
        (Results({"cpu": "c", "gpu": {"name": "g"}}), {"environment"}, "attnspan on g"),
        (Results(ceilings=CEILINGS), {"environment"}, "attnspan"),
        (Results(monitor=monitor(3)), {"monitor"}, "attnspan: steps 1 to 3 of a training"),
        (Results(training=training()), {"training"}, "attnspan: training steps"),
        (Results(cells=sample_results().cells, complete=False),
         SECTIONS - {"roofline", "training", "monitor", "environment"},
         "attnspan: grid, documents, decode, long"),
    ],
)  # fmt: skip
def test_sections_are_there_with_their_links_or_absent_without_data(results, wanted, title, tmp_path):
    found = page_of(results, tmp_path)
    assert {x["id"] for x in found.all("section")} == wanted
    assert {x["href"].removeprefix("#") for x in found.all("a")} == wanted | {"content"}
    assert found.words[0] == found.words[found.words.index(title, 1)] == title
    for tag, name, there in (
        ("form", {"id": "controls"}, results.cells),
        ("table", {"id": "cell-table"}, results.cells),
        ("dl", {"class": "cards"}, results.cells or results.training),
    ):
        assert bool(found.all(tag, **name)) == bool(there)
    assert ("incomplete" in found.words) == (not results.complete)
    # Only a page with charts has Plotly in it.
    assert (len("".join(found.scripts)) > 1_000_000) == bool(found.figures)
    write_page(results, tmp_path / "named.html", title="<mine>")
    assert "<title>&lt;mine&gt;</title>" in (tmp_path / "named.html").read_text(encoding="utf-8")


def test_a_training_shows_its_loss_first_and_then_its_speed(tmp_path):
    records = monitor(120)
    results = Results(monitor=records, evaluations=sample_results().evaluations)
    found = page_of(results, tmp_path)
    loss, speed, *_ = found.all("div", role="img")
    assert loss["aria-label"].startswith("Loss: training 5.500 at first")
    assert loss["aria-label"].endswith("at last; held out 5.600 at first, 2.900 at last.")
    assert speed["aria-label"].startswith("Tokens per second")
    raw, smooth, held_out = found.figures[0]["data"]
    assert raw["y"] == [record.loss for record in records]
    assert smooth["y"][60] == sorted(raw["y"][54:67])[6], "the running median"
    assert (held_out["x"], held_out["y"]) == ([0, 120], [5.6, 2.9])
    few = page_of(Results(monitor=records[:3]), tmp_path / "few")
    assert [trace["y"] for trace in few.figures[0]["data"]] == [raw["y"][:3]]
    unknown = Results(monitor=tuple(replace(record, loss=None) for record in records))
    first = page_of(unknown, tmp_path / "unknown").all("div", role="img")[0]
    assert first["aria-label"].startswith("Tokens per second")


@pytest.mark.slow
def test_every_run_of_every_cell_is_a_row_and_headlines_are_its_totals(page, tmp_path):
    results = sample_results()
    runs = [(cell, run) for cell in results.cells for run in cell.runs]
    rows = [attrs for attrs in page.all("tr") if "data-peer" in attrs]
    assert [(row["data-mode"], row["data-dtype"], row["data-peer"]) for row in rows] == [
        (cell.mode, cell.workload.dtype, run.peer) for cell, run in runs
    ]
    states, said = [row["data-state"] for row in rows], verdicts(results.cells)
    faster = [run for cell, run in runs if said.get((cell.label, run.peer)) == "behind" and not run.noisy]
    assert states.count("could not run") == sum(run.reason is not None for _, run in runs) > 0
    assert states.count("noisy") == sum(run.noisy for _, run in runs) > 0
    assert states.count("faster than attnspan") == len(faster) > 0
    assert all(run.reason is None or run.reason in page.words for _, run in runs)
    for standing in (x for x in standings(results.cells) if x.peer is None):
        at = page.words.index(standing.view.label)
        counted = f"{standing.count('ahead')} of {len(standing.ratios)} cells ahead"
        assert page.words[at + 1] == f"{standing.mean:.2f}x"
        assert page.words[at + 2].startswith(counted)
    # A column that no run has a value for is absent.
    assert "in a row" not in page.words
    cell = results.cells[0]
    queued = replace(cell, runs=(replace(cell.ours, pipelined=cell.ours.execute), *cell.peers))
    assert "in a row" in page_of(replace(results, cells=(queued,)), tmp_path).words


@pytest.mark.slow
def test_the_machine_is_described_in_words_and_no_run_exceeds_it(page, tmp_path):
    facts = dict(zip(page.words, page.words[1:], strict=False))
    wanted = {"memory bytes": "16.0 GiB", "load average": "0.1235, 0.5", "versions, tokamax": "-"}
    assert (
        wanted | {"versions, torch": "2.13.0+cpu", "reading memory": "18.4 GB/s"}
    ).items() <= facts.items()
    low = replace(CEILINGS, flops={kind: peak / 9 for kind, peak in CEILINGS.flops.items()})
    found = page_of(replace(sample_results(), ceilings=low), tmp_path)
    assert any(word.startswith("the fastest sample of flex at ") for word in found.words)
    assert not re.search(r"1[0-9][1-9] % of the", json.dumps(found.figures))
    # A page that cannot be written leaves the old one.
    path = tmp_path / "old" / "page.html"
    path.parent.mkdir()
    path.write_text("the old page")
    bad = replace(monitor(1)[0], utilisation=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write_page(Results(monitor=(bad,)), path)
    assert path.read_text() == "the old page"
    assert list(path.parent.iterdir()) == [path]


def hostile_results():
    """Every string that comes from outside is an attack."""
    results = sample_results()
    cell = results.cells[0]
    work = replace(cell.workload, name=HOSTILE, family=HOSTILE, mask=HOSTILE, note=HOSTILE)
    peers = [replace(run, peer=HOSTILE, note=HOSTILE) for run in cell.peers if run.ran][:1]
    runs = (replace(cell.ours, note=HOSTILE), *peers, Run(f"{HOSTILE} 2", reason=HOSTILE))
    longer = replace(work, name=f"{HOSTILE} 2", q_len=256, k_len=256)
    return Results(
        environment={HOSTILE: HOSTILE, "nested": {"list": [HOSTILE]}},
        ceilings=replace(CEILINGS, flops={"<b>_f32": 2e11}, notes={"<b>_f32": HOSTILE}),
        cells=tuple(replace(cell, workload=problem, runs=runs) for problem in (work, longer)),
        training=(replace(results.training[1], attention=HOSTILE, note=HOSTILE),),
        monitor=results.monitor[:3],
    )


def test_strings_are_data_and_nothing_points_outside(tmp_path, page):
    found = page_of(hostile_results(), tmp_path)
    assert not found.all("img")
    assert len(found.all("script")) == len(page.all("script")) == 3
    assert not any("window.hacked" in script for script in found.scripts[1:])
    assert any("{{ 7 * 7 }}" in word for word in found.words)
    # A chart takes tags for markup: it gets none.
    for figure in found.figures:
        for trace in figure["data"]:
            trace.pop("meta", None)
        assert "<img" not in json.dumps(figure)
    for tag, attrs in page.tags:
        for name in {"src", "href", "action", "srcset", "data", "poster"} & attrs.keys():
            assert attrs[name].startswith(("#", "data:,")), (tag, attrs)
    policy = next(x for x in page.all("meta") if x.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'; script-src 'sha256-")
    assert "url(" not in STYLE


def _luminance(color):
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_charts_are_plotlys_in_colours_that_both_themes_have_and_that_can_be_read(page):
    from plotly.graph_objects import Figure

    assert len(page.figures) == len(page.all("div", role="img")) > 50
    for figure in page.figures:
        plain = json.loads(NAMED_COLOR.sub("#123456", json.dumps(figure)))
        assert plain["data"]
        Figure(plain)
    bars = page.figures[int(page.all("div", role="img")[0]["data-chart"])]["data"]
    (cell, *_), flash = sample_results().cells, next(x for x in bars if x["meta"]["peer"] == "sdpa-flash")
    assert flash["base"][0] + flash["x"][0] == pytest.approx(cell.run("sdpa-flash").ratio.median)
    used = {name[1:] for name in NAMED_COLOR.findall(json.dumps(page.figures))}
    # WCAG 2.2, 1.4.3: 4.5 for text, and about 3 for graphics.
    least = dict.fromkeys(used - {"paper", "grid", "line"}, 2.4) | dict.fromkeys(
        ("ink", "faint", "accent"), 4.5
    )
    for theme in re.findall(r"\{\n(  color-scheme.*?)\}", STYLE, re.DOTALL):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6});", theme))
        assert used <= colors.keys()
        for name, contrast in least.items():
            dark, bright = sorted((_luminance(colors[name]), _luminance(colors["paper"])))
            assert (bright + 0.05) / (dark + 0.05) >= contrast, name


def test_peers_beyond_the_palette_still_differ(tmp_path):
    cell = sample_results().cells[0]
    run = next(run for run in cell.peers if run.ran)
    peers = tuple(replace(run, peer=f"peer-{index}") for index in range(14))
    found = page_of(Results(ceilings=CEILINGS, cells=(replace(cell, runs=(cell.ours, *peers)),)), tmp_path)
    roofline = next(x for x in found.figures if x["layout"]["xaxis"]["title"]["text"] == "FLOP per byte")
    looks = {(x["marker"]["color"], *x["marker"]["symbol"]) for x in roofline["data"] if "marker" in x}
    assert len(looks) == 15


def test_readers_without_eyes_find_their_way(page):
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    named = [x["aria-labelledby"] for _, x in page.tags if x.get("aria-labelledby")]
    assert {target for x in named for target in x.split()} <= set(ids)
    assert all(x["aria-label"] for x in page.all("div", role="img"))
    assert len(page.all("caption")) == len(page.all("table")) == 4
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.all("th"))
    assert page.all("html", lang="en")
