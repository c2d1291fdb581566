"""One workload measured with every peer, and the ceilings it is held against."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnspan.bench.samples import Ratio, Timing

__all__ = ["Ceilings", "Cell", "Run", "Workload"]

# Kinds of a ceiling end in the element type of their factors.
_SUFFIXES = {"float32": "_f32", "bfloat16": "_bf16", "float16": "_f16"}


@dataclass(frozen=True)
class Workload:
    """One attention problem that can be named, stored and run again.

    Args:
        name: Unique in its file.
        family: Group it is shown in, like "dense" or "documents".
        batch: B.
        q_heads: Query heads.
        kv_heads: Key/value heads; divides ``q_heads``.
        q_len: Queries.
        k_len: Keys.
        head_dim: D of queries and keys.
        v_dim: Dv of values.
        dtype: "float32", "bfloat16" or "float16".
        mask: Text in the syntax of `attnspan.parse`; or "corpus" for heavy-tailed documents.
        note: For people.

    Example:
        >>> Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()").label
        'tiny float32'
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
        """Name and dtype, for a row or an axis."""
        return f"{self.name} {self.dtype}"

    @property
    def sizes(self) -> str:
        """Heads, lengths and head dim in a few characters, like "8x2048 D64"."""
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        length = f"{self.q_len}" if self.q_len == self.k_len else f"{self.q_len}:{self.k_len}"
        dim = f"{self.head_dim}" if self.head_dim == self.v_dim else f"{self.head_dim}/{self.v_dim}"
        return f"{f'{self.batch}x' if self.batch > 1 else ''}{heads}x{length} D{dim}"


@dataclass(frozen=True)
class Run:
    """One peer at one workload.

    Args:
        peer: Name of the peer.
        reason: Why it cannot do the workload; then it has no figures. None where it ran.
        trace_seconds: Tracing on the host before the first call, where the peer traces.
        compile_seconds: First call less a warm call: compilation, packing, allocation.
        execute: Seconds per call, each waited for.
        pipelined: Seconds per call of many in a row, waited for once; None where calls are synchronous.
        dispatch: Seconds until a call returns, without waiting for its result; None where synchronous.
        peak_memory: Bytes above the inputs at the call's peak.
        utilisation: Busy share of the cores it may use, 0..1.
        energy_joules: Of one call, where the machine shows it.
        ratio: Against attnspan; None for attnspan itself and where nothing was timed.
        noisy: The interval of the ratio did not get narrow within the budget.
        error: Norm of the difference from attnspan's result over the norm of that result.
        note: What ran in truth, like the back end's name.

    Example:
        >>> Run("tokamax", reason="it is not installed").ran
        False
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
    energy_joules: float | None = None
    ratio: Ratio | None = None
    noisy: bool = False
    error: float | None = None
    note: str = ""

    @property
    def ran(self) -> bool:
        """Whether there are times."""
        return self.execute is not None

    @property
    def waiting(self) -> float | None:
        """Per-call time over pipelined time: far above 1, waiting for each call is what was measured."""
        if self.execute is None or self.pipelined is None:
            return None
        return self.execute.median / self.pipelined.median


@dataclass(frozen=True)
class Cell:
    """One workload in one mode, with every peer.

    Args:
        workload: What was computed.
        mode: "forward" or "forward+backward".
        pairs: Visible (query, key) pairs over all batch rows and query heads.
        flops: Floating-point operations over visible pairs only.
        bytes: Bytes that have to be read and written at least: inputs and results once.
        runs: attnspan first.
        device: "cpu" or "cuda".
        basis: Which times ratios and rates are of: "execute", or "pipelined" on asynchronous devices.

    Example:
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> runs = (Run("attnspan", execute=Timing((0.5,))), Run("tokamax", reason="it is not installed"))
        >>> cell = Cell(work, "forward", pairs=32768, flops=4e6, bytes=4e5, runs=runs)
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

    @property
    def label(self) -> str:
        """Workload, dtype and mode: unique in a file."""
        return f"{self.workload.label} {self.mode}"

    @property
    def ours(self) -> Run:
        """attnspan's run."""
        return self.runs[0]

    @property
    def peers(self) -> tuple[Run, ...]:
        """The others."""
        return self.runs[1:]

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte that has to move."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def noisy(self) -> bool:
        """Whether a ratio of the cell is uncertain."""
        return any(run.noisy for run in self.runs)

    def run(self, peer: str) -> Run | None:
        """The run of a peer by name, or None."""
        return next((run for run in self.runs if run.peer == peer), None)

    def timing(self, run: Run) -> Timing | None:
        """The times of a run that the cell's ratios are of."""
        return run.pipelined if self.basis == "pipelined" and run.pipelined else run.execute

    def seconds(self, run: Run) -> float | None:
        """Median seconds per call."""
        timing = self.timing(run)
        return timing.median if timing else None

    def flops_per_second(self, run: Run) -> float | None:
        """Useful FLOP/s: visible pairs only, whatever the peer computed besides."""
        seconds = self.seconds(run)
        return self.flops / seconds if seconds else None

    def bytes_per_second(self, run: Run) -> float | None:
        """Bytes that have to move, per second."""
        seconds = self.seconds(run)
        return self.bytes / seconds if seconds else None

    def seconds_per_pair(self, run: Run) -> float | None:
        """Seconds per visible pair: flat where cost grows with visible pairs only."""
        seconds = self.seconds(run)
        return seconds / self.pairs if seconds and self.pairs else None

    def shares(self, run: Run, ceilings: Ceilings) -> dict[str, float]:
        """Share of each ceiling that fits the dtype, by kind; empty where nothing was timed."""
        rate = self.flops_per_second(run)
        kinds = ceilings.kinds(self.workload.dtype)
        return {kind: rate / ceilings.flops[kind] for kind in kinds} if rate else {}

    def bandwidth_share(self, run: Run, ceilings: Ceilings) -> float | None:
        """Share of the measured read bandwidth."""
        rate = self.bytes_per_second(run)
        return rate / ceilings.read_bandwidth if rate and ceilings.read_bandwidth else None


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do, measured on it.

    Args:
        flops: FLOP/s by kind, like "fma_f32", "dot_bf16", "amx_bf16" or "matmul_f16".
        read_bandwidth: Bytes/s of reading a large buffer.
        notes: How each was measured, by kind.

    Example:
        >>> Ceilings({"fma_f32": 2e11, "dot_bf16": 4e11}, 1e10).kinds("bfloat16")
        ('dot_bf16',)
    """

    flops: dict[str, float]
    read_bandwidth: float
    notes: dict[str, str] = field(default_factory=dict)

    def kinds(self, dtype: str) -> tuple[str, ...]:
        """Ceilings for products of a dtype, lowest first; float32's where its own were not measured."""
        own = [kind for kind in self.flops if kind.endswith(_SUFFIXES.get(dtype, "?"))]
        found = own or [kind for kind in self.flops if kind.endswith("_f32")]
        return tuple(sorted(found, key=self.flops.__getitem__))

    def best(self, dtype: str) -> float | None:
        """The highest FLOP/s for a dtype."""
        kinds = self.kinds(dtype)
        return self.flops[kinds[-1]] if kinds else None

    def attainable(self, dtype: str, intensity: float) -> float | None:
        """The roofline: the lower of peak and intensity times bandwidth (Williams et al., CACM 52(4), 2009).

        Args:
            dtype: Of the factors.
            intensity: FLOP per byte.
        """
        best = self.best(dtype)
        return min(best, intensity * self.read_bandwidth) if best else None
