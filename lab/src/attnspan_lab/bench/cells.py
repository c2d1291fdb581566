"""Measurements of one workload with every peer, and the machine's ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from attnspan_lab.bench.statistics import Interval, Samples, discoveries

__all__ = ["OURS", "Ceilings", "Cell", "Run", "Timing", "Workload", "verdicts"]

OURS = "attnspan"

# The name of a ceiling's kind ends in the element type of the factors.
_SUFFIXES = {"float32": "_f32", "bfloat16": "_bf16", "float16": "_f16"}


@dataclass(frozen=True)
class Timing(Samples):
    """Seconds per call, one number per sample. Each sample consists of ``calls`` consecutive calls."""

    calls: int = 1


@dataclass(frozen=True)
class Workload:
    """One attention problem with a name, which can be stored and run again.

    Args:
        name: Name, unique in its file.
        family: Group in tables, such as "dense" or "documents".
        batch, q_heads, kv_heads, q_len, k_len, head_dim, v_dim: Sizes; ``kv_heads`` divides ``q_heads``.
        dtype: "float32", "bfloat16" or "float16".
        mask: Mask in the syntax of `attnspan.parse`, with ``packed(n)`` and ``corpus(seed)`` as well.
        note: Comment.

    Example:
        >>> Workload("tiny", "dense", 1, 8, 2, 64, 64, 32, 32, "float32", "full()").sizes
        '8/2x64 D32'
    """

    name: str
    family: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    dtype: str
    mask: str
    note: str = ""

    @property
    def label(self) -> str:
        """Name and dtype."""
        return f"{self.name} {self.dtype}"

    @property
    def sizes(self) -> str:
        """Short text of heads, lengths and head dim."""

        def either(a: int, b: int, mark: str) -> str:
            return f"{a}" if a == b else f"{a}{mark}{b}"

        heads, length = either(self.q_heads, self.kv_heads, "/"), either(self.q_len, self.k_len, ":")
        dim = either(self.head_dim, self.v_dim, "/")
        return f"{f'{self.batch}x' if self.batch > 1 else ''}{heads}x{length} D{dim}"


@dataclass(frozen=True)
class Run:
    """Measurements of one peer on one workload.

    Args:
        peer: Name of the peer.
        reason: Reason why the peer cannot run the workload, or None if it ran.
        trace_seconds: Time to trace on the host before the first call, if the peer traces.
        compile_seconds: First call minus a warm call: compilation, packing, allocation.
        execute: Seconds per call, with synchronization after each call.
        pipelined: Seconds per call of several calls with one synchronization at the end. None if calls are
            synchronous or caches were emptied.
        dispatch: Seconds until a call returns, without waiting for its result. None if calls are synchronous.
        peak_memory: Peak memory of a call above its inputs, in bytes.
        utilisation: Processor time over wall time and threads. Threads that spin while they wait count as
            busy.
        ratio: The peer's time over attnspan's. None for attnspan itself and without timing.
        noisy: The ratio's interval is wider than requested.
        error: Norm of the difference from attnspan's result over the norm of attnspan's result.
        note: Description of the code that ran, such as the backend's name.
    """

    peer: str
    reason: str | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    execute: Timing | None = None
    pipelined: Timing | None = None
    dispatch: Timing | None = None
    peak_memory: int | None = None
    utilisation: float | None = None
    ratio: Interval | None = None
    noisy: bool = False
    error: float | None = None
    note: str = ""

    @property
    def ran(self) -> bool:
        """Whether the run has times."""
        return self.execute is not None

    @property
    def waiting(self) -> float | None:
        """Per-call time over pipelined time. Far above 1, the per-call time is mostly waiting."""
        both = self.execute is not None and self.pipelined is not None
        return self.execute.median / self.pipelined.median if both else None  # type: ignore[union-attr]


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of the machine: the best of several rounds.

    Args:
        flops: FLOP/s by kind, such as "fma_f32", "dot_bf16", "amx_bf16" or "matmul_f16".
        read_bandwidth: Bytes/s of reading a large buffer.
        notes: Method of measurement, by kind.
        spread: (highest - lowest) / highest over the rounds of the probe, by kind.

    Example:
        >>> Ceilings({"fma_f32": 2e11, "dot_bf16": 4e11}, 1e10).best("bfloat16")
        ('dot_bf16', 400000000000.0)
    """

    flops: dict[str, float]
    read_bandwidth: float
    notes: dict[str, str] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)

    def best(self, dtype: str) -> tuple[str, float] | None:
        """Return the highest ceiling for products of a dtype, or float32's if the dtype was not measured."""
        own = {kind: rate for kind, rate in self.flops.items() if kind.endswith(_SUFFIXES.get(dtype, "?"))}
        found = own or {kind: rate for kind, rate in self.flops.items() if kind.endswith("_f32")}
        return max(found.items(), key=lambda item: item[1], default=None)

    def attainable(self, dtype: str, intensity: float) -> float | None:
        """Compute the roofline (Williams et al., CACM 52(4), 2009) at an intensity in FLOP per byte."""
        best = self.best(dtype)
        return min(best[1], intensity * self.read_bandwidth) if best else None

    def lifted(self, cells: Iterable[Cell]) -> Ceilings:
        """Raise the ceilings to the fastest sample of any run, so that no run exceeds its ceiling."""
        flops, notes = dict(self.flops), dict(self.notes)
        for cell in cells:
            best = replace(self, flops=flops).best(cell.workload.dtype)
            for run in cell.runs:
                fastest = min((s for t in (run.execute, run.pipelined) if t for s in t.samples), default=0.0)
                if best and fastest and cell.flops / fastest > flops[best[0]]:
                    flops[best[0]] = cell.flops / fastest
                    notes[best[0]] = f"the fastest sample of {run.peer} at {cell.label}: above the probe's"
        return replace(self, flops=flops, notes=notes)


@dataclass(frozen=True)
class Cell:
    """Measurements of one workload in one mode, with every peer.

    Args:
        workload: The attention problem.
        mode: "forward" or "forward+backward".
        pairs: Visible (query, key) pairs over all batch elements and query heads.
        flops: Floating-point operations over visible pairs only.
        bytes: Minimum memory traffic: inputs are read once, and results are written once.
        runs: The runs, attnspan first.
        device: "cpu" or "cuda".
        basis: Times for ratios and rates: "execute", or "pipelined" on asynchronous devices.
        cold: Caches were emptied before each sample.

    Example:
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> cell = Cell(work, "forward", 32768, 4e6, 4e5, (Run("attnspan", execute=Timing((0.5,))),))
        >>> cell.flops_per_second(cell.ours), cell.intensity
        (8000000.0, 10.0)
    """

    workload: Workload
    mode: str
    pairs: int
    flops: float
    bytes: float
    runs: tuple[Run, ...]
    device: str = "cpu"
    basis: str = "execute"
    cold: bool = False

    @property
    def label(self) -> str:
        """Workload, dtype and mode. The label is unique in a file."""
        return f"{self.workload.label} {self.mode}{', cold' if self.cold else ''}"

    @property
    def ours(self) -> Run:
        """attnspan's run."""
        return self.runs[0]

    @property
    def peers(self) -> tuple[Run, ...]:
        """All runs except attnspan's."""
        return self.runs[1:]

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of minimum traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the interval of at least one ratio is too wide."""
        return any(run.noisy for run in self.runs)

    def run(self, peer: str) -> Run | None:
        """Return the run of a peer, or None."""
        return next((run for run in self.runs if run.peer == peer), None)

    def timing(self, run: Run) -> Timing | None:
        """Return the times of a run that ratios are computed from."""
        return run.pipelined if self.basis == "pipelined" and run.pipelined else run.execute

    def seconds(self, run: Run) -> float | None:
        """Return the median seconds per call."""
        timing = self.timing(run)
        return timing.median if timing else None

    def flops_per_second(self, run: Run) -> float | None:
        """Return useful FLOP/s. Only visible pairs count as work."""
        seconds = self.seconds(run)
        return self.flops / seconds if seconds else None

    def seconds_per_pair(self, run: Run) -> float | None:
        """Return seconds per visible pair. The value is constant if cost depends only on visible pairs."""
        seconds = self.seconds(run)
        return seconds / self.pairs if seconds and self.pairs else None

    def share(self, run: Run, ceilings: Ceilings | None) -> float | None:
        """Return the share of the dtype's highest ceiling in `Results.roof`, from 0 to 1."""
        rate, best = self.flops_per_second(run), ceilings.best(self.workload.dtype) if ceilings else None
        return rate / best[1] if rate and best else None

    def bandwidth_share(self, run: Run, ceilings: Ceilings | None) -> float | None:
        """Return the share of the measured read bandwidth. None if the data came faster, from a cache."""
        seconds = self.seconds(run)
        share = self.bytes / seconds / ceilings.read_bandwidth if seconds and ceilings else None
        return share if share is not None and share <= 1 else None


def verdicts(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    """Judge each ratio of a table: attnspan is "ahead" or "behind", or the ratio is "open".

    The test is corrected for the number of ratios, see `attnspan_lab.bench.statistics.discoveries`.

    Args:
        cells: All cells of the table.

    Returns:
        The verdicts by (label of the cell, name of the peer).

    Example:
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> run = Run("sdpa", ratio=Interval.of([1.2] * 9))
        >>> verdicts([Cell(work, "forward", 1, 1.0, 1.0, (Run("attnspan"), run))])
        {('tiny float32 forward', 'sdpa'): 'ahead'}
    """
    found = [(cell.label, run.peer, run.ratio) for cell in cells for run in cell.peers if run.ratio]
    real = discoveries([ratio.p for _, _, ratio in found])
    return {
        (label, peer): ("ahead" if ratio.median > 1 else "behind") if is_real else "open"
        for (label, peer, ratio), is_real in zip(found, real, strict=True)
    }
