"""The plan of a run: which implementations run an architecture, in which modes and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnspan_lab.bench.cells import OURS
from attnspan_lab.zoo.architecture import IMPLEMENTATIONS, LAYOUTS, MODES
from attnspan_lab.zoo.verdicts import compared_layout

__all__ = ["TOKENS", "Key", "Settings", "plan"]

#: Tokens per row. Results are compared at the first number. No number equals a width of a model.
TOKENS = (93, 131, 197)


@dataclass(frozen=True)
class Settings:
    """Settings of the run of an architecture.

    Args:
        layouts: Layouts to run, if the architecture has them.
        modes: Modes to run, some of `architecture.MODES`.
        backend: Backend of torch.compile.
        tokens: Tokens per row. The compiler sees each number as a new shape.
        full: Compile each implementation in each layout.
        seconds: Time to measure the steps of a cell. 0 measures no time.
    """

    layouts: tuple[str, ...] = LAYOUTS
    modes: tuple[str, ...] = MODES
    backend: str = "aot_eager"
    tokens: tuple[int, ...] = TOKENS
    full: bool = False
    seconds: float = 0.1


@dataclass(frozen=True)
class Key:
    """A cell to run. ``shapes`` is how many different numbers of tokens it is called with."""

    implementation: str
    mode: str
    layout: str
    shapes: int = 1


def plan(layouts: Sequence[str], settings: Settings) -> list[Key]:
    """List the cells of an architecture.

    Without the compiler, every attention runs in every layout. With the compiler, all attentions but eager
    run in one layout with several shapes. In the other layouts, attnspan runs with one shape.

    Args:
        layouts: Layouts of the architecture.
        settings: Settings of the run.

    Example:
        >>> [key.layout for key in plan(["plain", "padded"], Settings()) if key.shapes > 1]
        ['padded', 'padded', 'padded']
    """
    # The identity runs first, because it shows whether the model itself fails.
    names, shapes = ("identity", *(x for x in IMPLEMENTATIONS if x != "identity")), len(settings.tokens)
    eager = [Key(name, "eager", layout) for layout in layouts for name in names]
    compared = compared_layout(layouts)
    if settings.full or compared is None:
        compiled = [Key(name, "compiled", layout, shapes) for layout in layouts for name in names]
    else:
        compiled = [Key("identity", "compiled", compared)]
        compiled += [Key(x, "compiled", compared, shapes) for x in names if x not in ("identity", "eager")]
        compiled += [Key(OURS, "compiled", layout) for layout in layouts if layout != compared]
    return [key for key in eager + compiled if key.mode in settings.modes]
