"""Figures of a finished run: graphs, the share of attention, and an interleaved comparison with SDPA."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from attnspan.train.config import TrainConfig
from attnspan.train.packing import Batch
from attnspan.train.step import Stepper

__all__ = ["AttentionShare", "Comparison", "Graphs", "attention_share", "compare", "step_times"]

_SDPA = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
# Names of the operators that do attention, as the profiler sees them.
_OPERATORS = {
    "attnspan": (
        "attnspan::forward",
        "attnspan::backward",
        "attnspan::sharded_forward",
        "attnspan::sharded_backward",
    ),
    "sdpa": _SDPA,
    "sdpa-documents": _SDPA,
}


@dataclass(frozen=True)
class Graphs:
    """What the compiler has done in this process so far.

    Args:
        compiled: Graphs compiled.
        breaks: Graph breaks.

    Example:
        >>> now = Graphs.now()
        >>> (Graphs.now() - now) == Graphs(0, 0)
        True
    """

    compiled: int
    breaks: int

    @classmethod
    def now(cls) -> Graphs:
        """Read torch's counters.

        Example:
            >>> Graphs.now().compiled >= 0
            True
        """
        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))

    def __sub__(self, earlier: Graphs) -> Graphs:
        return Graphs(self.compiled - earlier.compiled, self.breaks - earlier.breaks)


@dataclass(frozen=True)
class AttentionShare:
    """Time inside the attention operators, forward and backward, over a few profiled steps.

    Over ranks it is the first one's time, in which it also waits for the others, and the work of all.

    Args:
        share: Of the wall time of the steps, 0..1.
        seconds: Inside the operators, s.
        flops: What the operators of all ranks computed in that time, visible pairs only.

    Example:
        >>> AttentionShare(share=0.25, seconds=2.0, flops=4e9).flops_per_second
        2000000000.0
    """

    share: float
    seconds: float
    flops: float

    @property
    def flops_per_second(self) -> float:
        """Speed inside the operators, FLOP/s."""
        return self.flops / self.seconds if self.seconds else 0.0


def attention_share(stepper: Stepper, batches: Sequence[Batch]) -> AttentionShare:
    """Profile training steps and add up the time of their attention operators.

    Args:
        stepper: A warm model; its weights change by the steps, which all of its ranks take together.
        batches: One per step.

    Example:
        >>> from attnspan.train.packing import Corpus, pack_once
        >>> config = TrainConfig(dim=16, layers=1, hidden=16, seq_len=8, compile=False, dtype="float32")
        >>> batches = pack_once(Corpus.from_documents([[1, 2]], end=3, num_bytes=2), seq_len=8, batch_size=1)
        >>> 0 < attention_share(Stepper(config, vocab_size=4), batches).share < 1
        True
    """
    # The profiler's own chatter on stderr; it reads this at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    flops = 0.0
    start = time.perf_counter()
    watch = profile(activities=[ProfilerActivity.CPU], acc_events=True) if stepper.ranks.is_first else None
    with watch or nullcontext():
        for batch in batches:
            flops += stepper.step(batch, stepper.config.steps - 1).flops.attention
        wall = time.perf_counter() - start
    if watch is None:
        return AttentionShare(0.0, 0.0, flops)
    names = _OPERATORS[stepper.config.attention]
    # Operators nest (the public one calls the kernel), so each counts its own time only.
    spent = sum(event.self_cpu_time_total for event in watch.key_averages() if event.key in names) / 1e6
    return AttentionShare(spent / wall, spent, flops)


@dataclass(frozen=True)
class Comparison:
    """Step times of both attentions, taken in turn on the same batches.

    Args:
        attnspan: Seconds of each step, by all ranks.
        sdpa: Seconds of each step, by one rank with the threads of all.
        one_rank: The same with attnspan; empty for a job of one rank.

    Example:
        >>> comparison = Comparison([1.0, 1.0, 1.0], [2.0, 3.0, 2.5])
        >>> comparison.ratio, comparison.spread
        (2.5, (2.0, 3.0))
    """

    attnspan: list[float]
    sdpa: list[float]
    one_rank: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Median step of one rank over that of all, both with attnspan; None for a job of one rank."""
        return median(self.one_rank) / median(self.attnspan) if self.one_rank else None

    @property
    def ratio(self) -> float:
        """Median step of sdpa over median step of attnspan: above 1, attnspan is faster."""
        return median(self.sdpa) / median(self.attnspan)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the ratios of neighbouring steps."""
        ratios = [b / a for a, b in zip(self.attnspan, self.sdpa, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        return low, high


def compare(trained: Stepper, batches: Iterator[Batch], rounds: int) -> Comparison:
    """Time the same steps with attnspan and with SDPA, A B A B, from the same weights, compiled alike.

    Args:
        trained: Model to start from; it is left as it is.
        batches: Source of ``rounds`` batches, and one more for compilation.
        rounds: Steps of each, 2 or more.

    Example:
        >>> from attnspan.train.packing import Corpus, PackedStream
        >>> config = TrainConfig(dim=16, layers=1, hidden=16, seq_len=8, compile=False, dtype="float32")
        >>> corpus = Corpus.from_documents([[1, 2]], end=3, num_bytes=2)
        >>> stream = PackedStream(corpus, seq_len=8, batch_size=1, seed=0)
        >>> compare(Stepper(config, vocab_size=4), stream, rounds=2).ratio > 0
        True
    """
    seconds = step_times(trained, batches, rounds, ("attnspan", "sdpa"))
    return Comparison(seconds["attnspan"], seconds["sdpa"])


def step_times(
    trained: Stepper, batches: Iterator[Batch], rounds: int, kinds: Iterable[str]
) -> dict[str, list[float]]:
    """Seconds of the same steps with several kinds of attention, A B C A B C, from the same weights.

    Args:
        trained: Model to start from; it is left as it is.
        batches: Source of ``rounds`` batches, and one more for compilation.
        rounds: Steps of each kind.
        kinds: Values of `TrainConfig.attention`.

    Returns:
        For each kind the seconds of its steps, in the order of the batches.

    Example:
        >>> from attnspan.train.packing import Corpus, PackedStream
        >>> config = TrainConfig(dim=16, layers=1, hidden=16, seq_len=8, compile=False, dtype="float32")
        >>> corpus = Corpus.from_documents([[1, 2]], end=3, num_bytes=2)
        >>> stream = PackedStream(corpus, seq_len=8, batch_size=1, seed=0)
        >>> times = step_times(Stepper(config, vocab_size=4), stream, 2, ("attnspan", "sdpa-documents"))
        >>> [(kind, len(seconds)) for kind, seconds in times.items()]
        [('attnspan', 2), ('sdpa-documents', 2)]
    """
    rivals = {kind: _copy(trained, replace(trained.config, attention=kind)) for kind in kinds}
    batch = next(batches)
    for rival in rivals.values():
        rival.warm_up(batch)
        rival.step(batch, trained.config.steps - 1)
    seconds: dict[str, list[float]] = {kind: [] for kind in rivals}
    for _, batch in zip(range(rounds), batches, strict=False):
        for kind, rival in rivals.items():
            seconds[kind].append(rival.step(batch, trained.config.steps - 1).seconds)
    return seconds


def _copy(trained: Stepper, config: TrainConfig) -> Stepper:
    with torch.random.fork_rng(devices=[]):
        stepper = Stepper(config, trained.vocab_size)
    stepper.model.load_state_dict(trained.model.state_dict())
    return stepper
