"""Results of the zoo as dataclasses, which are stored as JSON."""

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
    """Result of one architecture with one attention, mode and layout.

    Args:
        implementation: One of `architecture.IMPLEMENTATIONS`.
        mode: "eager" or "compiled" (fullgraph=True).
        layout: One of `architecture.LAYOUTS`.
        failed: None, or the kind of failure: "build", "run", "compile", "unused" (attnspan's operator never
            ran), "crash" or "time".
        reason: Reason of the failure.
        backward: False if only the forward pass ran. ``reason`` says why.
        calls: Calls of attnspan's forward operator in a step.
        others: Calls of torch's own attention in a step.
        graphs: Number of compilations over ``shapes`` different numbers of tokens.
        shapes: How many different numbers of tokens the model was called with.
        compile_seconds: Time of the steps with these numbers of tokens. Almost all of it is compilation.
        output_error, gradient_error: Norm of the difference from float64 over the norm. None if not compared.
        ties: A choice of the model, such as the choice of an expert, differs from float64's choice at each
            number of tokens.
        seconds: Time of a step of a tiny model.
        peak: Peak bytes of torch's allocator during a step.
        largest: Shape of the largest new tensor of a step.
        pairs: Shapes of new tensors with two dims that change with the number of tokens, largest first. None
            if not searched, or if nothing changes, as for images of one size.
        leaks: "" if no document sees another, or else a description. None if not probed.
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
    """Comparison of greedy generation with left padding against the eager implementation.

    Args:
        cache: "dynamic" or "static".
        equal: Whether the tokens are equal. None if they were not compared.
        reason: Reason why the tokens differ or were not compared.
        own: Whether the eager implementation failed as well.
    """

    cache: str
    equal: bool | None
    reason: str = ""
    own: bool = False


@dataclass(frozen=True)
class Row:
    """Results of one architecture.

    Args:
        name, library, kind: Fields of `architecture.Architecture`.
        cells: Results of the cells.
        generations: Results of generation, for decoders.
        reason: Reason why there are no cells.
        seconds: Total time.
    """

    name: str
    library: str
    kind: str
    cells: tuple[Cell, ...] = ()
    generations: tuple[Generation, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    def cell(self, implementation: str, mode: str, layout: str) -> Cell | None:
        """Return a cell, or None if there is none."""
        wanted = (implementation, mode, layout)
        return next((x for x in self.cells if (x.implementation, x.mode, x.layout) == wanted), None)


@dataclass(frozen=True)
class Speed:
    """Comparison of a compiled training step with attnspan and with SDPA.

    Args:
        name, library: Name and library of the architecture.
        layout: Layout of the batch.
        tokens: Tokens per row in the timed step.
        seconds: Times by implementation. Samples with the same index are pairs.
        ratio: SDPA's time over attnspan's.
        noisy: The interval of the ratio is too wide.
        memory_tokens: Tokens per row in the step whose memory is measured.
        peaks: Peak of resident bytes above the bytes before the step, by implementation, each in its own
            process.
        reasons: Missing measurements and their reasons.
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
        """SDPA's peak memory over attnspan's."""
        both = self.peaks.get("sdpa"), self.peaks.get("attnspan")
        return both[0] / both[1] if both[0] and both[1] else None


@dataclass(frozen=True)
class ZooResults:
    """Results of one run of the zoo, stored as a JSON file.

    Args:
        environment: Machine and versions.
        settings: Settings of the run: the compiler's backend, numbers of tokens, layouts.
        rows: Results by architecture.
        speed: Timed steps by architecture.
        left_out: Architectures that are not run, and the reasons.
        complete: False if the run was stopped before the last architecture.
        speed_environment: Machine and versions of ``speed``.
        schema: Version of the file format.
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
        """Write the file atomically. It is compressed if its name ends in ``.gz``.

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
        """Read a file that `save` wrote.

        Raises:
            OptionError: The file is missing or damaged, is not JSON, or has another schema.
        """
        remedy = "Run attnspan zoo again with this version"
        return read_results(cls, path, "a file of the zoo", schema=SCHEMA, remedy=remedy)
