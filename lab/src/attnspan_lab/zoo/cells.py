"""Results of the zoo: plain data that goes to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnspan_lab.bench.cells import Timing
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.files import read_results, write_json

__all__ = ["SCHEMA", "Cell", "Generation", "Row", "Speed", "ZooResults"]

SCHEMA = 1


@dataclass(frozen=True)
class Cell:
    """One architecture with one attention, mode and layout.

    Args:
        implementation: One of `architecture.IMPLEMENTATIONS`.
        mode: "eager" or "compiled" (fullgraph=True).
        layout: One of `architecture.LAYOUTS`.
        failed: None, or where it failed: "build", "run", "compile", "unused" (attnspan's operator never ran),
            "crash" or "time".
        reason: Why.
        backward: False where only the forward ran, for ``reason``.
        calls: Calls of attnspan's forward operator in a step.
        others: Calls of torch's own attention in a step.
        graphs: Compilations over ``shapes`` numbers of tokens.
        shapes: With how many numbers of tokens it was called.
        compile_seconds: Of the steps with these numbers of tokens, of which all but the compilation is short.
        output_error, gradient_error: Norm of the difference from float64 over the norm; None if not compared.
        ties: A choice of the model, such as of an expert, differs from float64's at each number of tokens.
        seconds: Of a step, of a tiny model.
        peak: Most bytes of torch's allocator during a step.
        largest: Shape of the largest new tensor of a step.
        pairs: Shapes of new tensors of which two dims change with the number of tokens, largest first; None
            if not looked for, or if nothing changes, as with images of one size.
        leaks: "" if no document sees another, else which; None if not probed.
    """

    implementation: str
    mode: str
    layout: str
    failed: str | None = None
    reason: str = ""
    backward: bool = True
    calls: int = 0
    others: int = 0
    graphs: int | None = None
    shapes: int = 1
    compile_seconds: float | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    ties: bool = False
    seconds: Timing | None = None
    peak: int | None = None
    largest: tuple[int, ...] = ()
    pairs: tuple[tuple[int, ...], ...] | None = None
    leaks: str | None = None

    @property
    def label(self) -> str:
        """Implementation, mode and layout."""
        return f"{self.implementation} {self.mode} {self.layout}"


@dataclass(frozen=True)
class Generation:
    """Greedy generation with left padding: whether the tokens are those of the eager implementation.

    Args:
        cache: "dynamic" or "static".
        equal: None where nothing could be compared, for ``reason``.
        reason: Why it is not equal, or was not compared.
        own: The eager implementation failed too.
    """

    cache: str
    equal: bool | None
    reason: str = ""
    own: bool = False


@dataclass(frozen=True)
class Row:
    """One architecture.

    Args:
        name, library, kind: As of `architecture.Architecture`.
        cells: What was run.
        generations: Of decoders.
        reason: Why there are no cells.
        seconds: That all of it took.
    """

    name: str
    library: str
    kind: str
    cells: tuple[Cell, ...] = ()
    generations: tuple[Generation, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    def cell(self, implementation: str, mode: str, layout: str) -> Cell | None:
        """The cell, or None."""
        wanted = (implementation, mode, layout)
        return next((x for x in self.cells if (x.implementation, x.mode, x.layout) == wanted), None)


@dataclass(frozen=True)
class Speed:
    """A training step, compiled, with attnspan and with SDPA.

    Args:
        name, library: Of the architecture.
        layout: Of the batch.
        tokens: Of a row, in the step that is timed.
        seconds: By implementation; sample i of one is paired with sample i of the other.
        ratio: SDPA's time over attnspan's.
        noisy: The ratio is uncertain.
        memory_tokens: Of a row, in the step whose memory is measured.
        peaks: Most resident bytes above those before the step, by implementation; each in its own process.
        reasons: What could not be measured, and why.
    """

    name: str
    library: str
    layout: str
    tokens: int
    seconds: dict[str, Timing] = field(default_factory=dict)
    ratio: Interval | None = None
    noisy: bool = False
    memory_tokens: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def memory_ratio(self) -> float | None:
        """SDPA's peak over attnspan's."""
        both = self.peaks.get("sdpa"), self.peaks.get("attnspan")
        return both[0] / both[1] if both[0] and both[1] else None


@dataclass(frozen=True)
class ZooResults:
    """All that one run found; the JSON file.

    Args:
        environment: Machine and versions.
        settings: Of the run: the compiler's backend, numbers of tokens, layouts.
        rows: By architecture.
        speed: By architecture.
        left_out: Architectures that are not run, and why.
        complete: False when it was stopped before the last architecture.
        speed_environment: Machine and versions of ``speed``.
        schema: Version of this layout.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    speed: tuple[Speed, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    speed_environment: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write the file, compressed if its name ends in ``.gz``; a reader sees the old one or the new one.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "zoo.json.gz"
            >>> ZooResults(rows=(Row("llama", "transformers", "decoder"),)).save(path)
            >>> ZooResults.load(path).rows[0].name
            'llama'
        """
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> ZooResults:
        """Read what `save` wrote.

        Raises:
            OptionError: The file is missing, not JSON, of another schema, or damaged.
        """
        remedy = "Run attnspan zoo again with this version"
        return read_results(cls, path, "a file of the zoo", schema=SCHEMA, remedy=remedy)
