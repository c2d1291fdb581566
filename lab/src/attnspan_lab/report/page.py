"""The page: its sections in one template, with all scripts and styles inlined."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan_lab.bench.cells import OURS, Ceilings
from attnspan_lab.bench.results import Results
from attnspan_lab.console import NONE, bytes_text, percent, rate_text
from attnspan_lab.files import write_whole
from attnspan_lab.report.charts import Palette, Section
from attnspan_lab.report.figures import memory_section, ratio_section, roofline_section, scaling_sections
from attnspan_lab.report.steps import monitor_section, training_section
from attnspan_lab.report.tables import Filtered, cards, cell_table, standing_section, target_section

if TYPE_CHECKING:
    import jinja2

__all__ = ["Page", "write_page"]

_MOST_NAMES = 4  # families in a title
_MEASURED = (
    "Every time is the median of raw samples, taken in turn with the peers' in one run; every ratio is the "
    "median over pairs, with an interval by order statistics."
)
_TRAINED = "How the loss fell, how fast the steps were, and where their time went."


def write_page(results: Results, path: Path, *, title: str = "") -> None:
    """Write one self-contained HTML file that shows all results.

    Sections without data are left out. For example, results with only `monitor` records give the page of a
    training.

    Args:
        results: The results.
        path: The file, which is written atomically. Its folder is created.
        title: Title of the page. Default: the measured families and the machine.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).

    Example:
        >>> import tempfile
        >>> page = Path(tempfile.mkdtemp()) / "page.html"
        >>> write_page(Results(environment={"cpu": "a machine"}), page)
        >>> "<title>attnspan on a machine</title>" in page.read_text(encoding="utf-8")
        True
    """
    palette = Palette(results.cells)
    found = (
        target_section(results),
        standing_section(results),
        ratio_section(results, palette),
        roofline_section(results, palette),
        *scaling_sections(results, palette),
        memory_section(results, palette),
        training_section(results),
        monitor_section(results),
    )
    sections = [section for section in found if section is not None]
    page = Page(
        title=title or _title(results),
        lead=_TRAINED if results.monitor and not (results.cells or results.training) else _MEASURED,
        sections=sections,
        environment=results.environment,
        glance="geometric means of the time of each cell's fastest peer over attnspan's. Above 1, attnspan "
        "is faster.",
        cards=cards(results),
        views=_views(sections),
        legend=[(OURS, "ours"), *((peer, palette.color(peer)[1:]) for peer in palette.peers)],
        table=cell_table(results),
        ceilings=results.roof,
        complete=results.complete,
    )
    page.write(path)


@dataclass(frozen=True)
class Page:
    """Contents of a page.

    Args:
        title, lead: Title and first sentence.
        sections: Sections, in order.
        environment: Environment of the measurement.
        glance: Caption of the cards.
        cards: Name, value and notes of each card.
        views: Choices of each switch of the charts.
        legend: Peers and their colours, for charts with a view.
        table: A long table with filters.
        ceilings: Ceilings of the machine.
        complete: With False, the page says that the measurement was stopped.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    environment: dict[str, Any]
    glance: str = ""
    cards: Sequence[tuple[str, str, list[str]]] = ()
    views: dict[str, list[str]] = field(default_factory=dict)
    legend: Sequence[tuple[str, str]] = ()
    table: Filtered | None = None
    ceilings: Ceilings | None = None
    complete: bool = True

    def write(self, path: Path) -> None:
        """Write one HTML file, atomically.

        Raises:
            ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).
        """
        from plotly.offline import get_plotlyjs

        charts = [chart for section in self.sections for chart in section.charts]
        shown = {item.name: getattr(self, item.name) for item in fields(self)}
        html = _template().render(
            **shown,
            facts=_facts(self.environment),
            figures=_script_data([{"data": chart.data, "layout": chart.layout} for chart in charts]),
            # A page without charts does not need the library.
            plotly=get_plotlyjs() if charts else "",
            style=_asset("page.css"),
            script=_asset("page.js"),
        )
        write_whole(path, html)


def _title(results: Results) -> str:
    """Make the title from the measured families and the machine."""
    families = list(dict.fromkeys(cell.workload.family for cell in results.cells))
    parts = families[:_MOST_NAMES] + (["more"] if len(families) > _MOST_NAMES else [])
    parts += ["training steps"] if results.training else []
    if results.monitor:
        parts.append(f"steps {results.monitor[0].step:,} to {results.monitor[-1].step:,} of a training")
    where = str(results.environment.get("cpu") or "")
    if results.environment.get("gpu"):
        where = str(results.environment["gpu"]["name"])
    return f"attnspan{': ' if parts else ''}{', '.join(parts)}{f' on {where}' if where else ''}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _template() -> jinja2.Template:
    import jinja2

    # Only the page's own code, which the template marks as safe, is not escaped.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"script_hash": _script_hash, "rate": rate_text, "percent": percent}
    return environment.from_string(_asset("page.html.jinja"))


def _script_hash(text: str) -> str:
    """Compute the hash of a script for the content policy, so that the page runs no other script."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _script_data(data: Any) -> str:
    """Write JSON that cannot close its script element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _views(sections: Iterable[Section]) -> dict[str, list[str]]:
    """List the choices of each switch, in the order of the file."""
    views = [chart.view for section in sections for chart in section.charts if chart.view is not None]
    names = ("device", "mode", "dtype")
    return {name: list(dict.fromkeys(getattr(view, name) for view in views)) for name in names}


def _facts(environment: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """List names and texts of the environment. Nested names are joined."""
    facts: list[tuple[str, str]] = []
    for name, value in environment.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            facts += _facts(value, f"{label}, ")
        elif isinstance(value, list | tuple):
            facts.append((label, ", ".join(_fact(name, item) for item in value) or NONE))
        else:
            facts.append((label, _fact(name, value)))
    return facts


def _fact(name: str, value: Any) -> str:
    if isinstance(value, int | float) and name.endswith("bytes"):
        return bytes_text(value)
    return NONE if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
