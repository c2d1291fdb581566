"""The page: its sections in one template, with all scripts and styles inlined."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan_lab.bench.cells import OURS
from attnspan_lab.bench.results import Results
from attnspan_lab.console import NONE, bytes_text, percent, rate_text
from attnspan_lab.files import write_whole
from attnspan_lab.report.charts import Palette, Section
from attnspan_lab.report.figures import memory_section, ratio_section, roofline_section, scaling_sections
from attnspan_lab.report.steps import monitor_section, training_section
from attnspan_lab.report.tables import cards, cell_section, standing_section, target_section

if TYPE_CHECKING:
    import jinja2

__all__ = ["write_page", "write_sections"]

_MOST_NAMES = 4  # families in a title
_MEASURED = (
    "Every time is the median of raw samples, taken in turn with the peers' in one run; every ratio is the "
    "median over pairs, with an interval by order statistics."
)
_TRAINED = "How the loss fell, how fast the steps were, and where their time went."
_GLANCE = (
    "geometric means of the time of each cell's fastest peer over attnspan's. Above 1, attnspan is faster."
)


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
    sections = (
        target_section(results),
        standing_section(results),
        ratio_section(results, palette),
        roofline_section(results, palette),
        *scaling_sections(results, palette),
        memory_section(results, palette),
        training_section(results),
        monitor_section(results),
        cell_section(results),
    )
    write_sections(
        path,
        title=title or _title(results),
        lead=_TRAINED if results.monitor and not (results.cells or results.training) else _MEASURED,
        sections=sections,
        environment=results.environment,
        glance=_GLANCE,
        cards=cards(results),
        legend=[(peer, palette.color(peer)[1:]) for peer in (OURS, *palette.peers)],
        ceilings=results.roof,
        complete=results.complete,
    )


def write_sections(
    path: Path, *, sections: Sequence[Section | None], environment: dict[str, Any], **shown: Any
) -> None:
    """Write sections as one HTML file, atomically.

    Args:
        path: The file.
        sections: Sections, in order. None is left out.
        environment: Environment of the measurement.
        **shown: Other names of page.html.jinja: ``title`` and ``lead``, ``glance`` (the caption of the cards)
            and ``cards`` (name, value and notes of each), ``legend`` (peers and their colours), ``ceilings``
            of the machine, and ``complete``.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).
    """
    from plotly.offline import get_plotlyjs

    found = [section for section in sections if section is not None]
    charts = [chart for section in found for chart in section.charts]
    views = [chart.view for chart in charts if chart.view is not None]
    html = _template().render(
        **shown,
        sections=found,
        # The choices of each switch, in the order of the file.
        views={name: dict.fromkeys(getattr(x, name) for x in views) for name in ("device", "mode", "dtype")},
        facts=_facts(environment),
        # JSON that cannot close its script element.
        figures=json.dumps([{"data": x.data, "layout": x.layout} for x in charts], allow_nan=False).replace(
            "<", "\\u003c"
        ),
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
    gpu = results.environment.get("gpu")
    where = gpu["name"] if gpu else results.environment.get("cpu") or ""
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
