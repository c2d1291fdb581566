"""Measured rates of a machine, and the time that a call would need on it.

A prediction is arithmetic on pairs, bytes and a few figures. It tells what dominates; it is no measurement.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from attnspan.errors import expect
from attnspan.parallel.auto import Prediction
from attnspan.parallel.cost import Cost, Floats, Phase, Sizes
from attnspan_lab.files import from_plain, read_json, write_json

__all__ = ["Machine", "flops_of"]

_VARIABLE = "ATTNSPAN_MACHINE"


@dataclass(frozen=True)
class Machine:
    """The rates that a prediction needs, as `calibrate` measures them.

    Attributes:
        name: Whose figures they are; said wherever a prediction is shown.
        dtype: Element type that the rates hold for.
        forward_flops, backward_flops: Attention of one rank, FLOP/s over visible pairs.
        bandwidth_within, bandwidth_across: What one rank receives, while it sends as much, from ranks of its
            node and from other nodes, bytes/s.
        latency: What a collective takes that moves nothing, s.
        node_size: Ranks of a node.

    Raises:
        OptionError: A figure is not positive and finite.
    """

    name: str
    dtype: str
    forward_flops: float
    backward_flops: float
    bandwidth_within: float
    bandwidth_across: float
    latency: float
    node_size: int

    def __post_init__(self) -> None:
        for each in fields(self):
            value, remedy = getattr(self, each.name), "Measure it with Machine.calibrate()"
            if each.type == "str":
                fits, wanted = isinstance(value, str), "a text"
            else:
                kind, wanted = int if each.type == "int" else (int, float), "a positive, finite figure"
                fits = isinstance(value, kind) and 0 < value < math.inf
            expect(fits, f"Machine: {each.name}", wanted, repr(value), remedy)

    @classmethod
    def default(cls) -> Machine | None:
        """The file that the environment variable ATTNSPAN_MACHINE names, or None.

        Raises:
            OptionError: The variable names a file that cannot be used.
        """
        path = os.environ.get(_VARIABLE)
        return cls.load(path) if path else None

    @classmethod
    def calibrate(cls, group: Any = None, **options: Any) -> Machine:
        """Measure attention and the network, on all ranks of a group at once; all get the same figures.

        Args:
            group: A process group of torch.distributed; None: the default one.
            **options: ``dtype`` ("float32"), ``head_dim`` (128), ``seconds`` to spend (2.0), ``node_size``
                (LOCAL_WORLD_SIZE, as torchrun sets it), ``device`` (what the group's engine works on).

        Raises:
            OptionError: There is no process group, or it has one rank only.
        """
        from attnspan_lab.calibrate import calibrate

        return calibrate(group, **options)

    def save(self, path: Path | str) -> None:
        """Write the figures as JSON; a reader sees the old file or the new one."""
        write_json(Path(path), self, indent=1)

    @classmethod
    def load(cls, path: Path | str) -> Machine:
        """Read what `save` wrote.

        Raises:
            OptionError: The file is missing, or is something else.
        """
        return from_plain(cls, read_json(Path(path), "the figures of a machine"), str(path))

    def predict(self, cost: Cost, sizes: Sizes) -> Prediction:
        """The time of one call, forward and backward.

        The exchange and the ring overlap with compute; scatter and gather do not. Links within and across
        nodes work at the same time, both directions of each too, and nobody shares one. A ring's steps are
        taken to cost the same; where a mask makes some heavier, a real ring is slower than this.
        """
        work = flops_of(cost.pairs, head_dim=sizes.head_dim, v_dim=sizes.v_dim)
        rates, directions = (self.forward_flops, self.backward_flops), (cost.forward, cost.backward)
        spent = dict.fromkeys(("compute", "exchange", "scatter and gather"), 0.0)
        seconds, least, away = 0.0, 0.0, np.zeros(len(cost.pairs))
        for flops, rate, phases in zip(work, rates, directions, strict=True):
            compute, network, exposed = flops / rate, np.zeros(len(flops)), np.zeros(len(flops))
            for name, phase in phases.items():
                overlaps = name not in ("scatter", "gather")
                sums = network if overlaps else exposed
                sums += self._seconds(phase) + self.latency * (cost.parts if overlaps else 1)
            # Work in equal parts: while one is computed the next ones travel; a ring's first part is there.
            first = 0.0 if cost.strategy.kind == "ring" else network / cost.parts
            last = compute / cost.parts * (network > 0)
            total = np.maximum(compute + first, network + last) + exposed
            slowest = int(total.argmax())
            for name, x in zip(spent, (compute, network, exposed), strict=True):
                spent[name] += float(x[slowest])
            seconds += float(total.max())
            least += float(compute.mean())
            away += network + exposed
        return Prediction(seconds, least, float(away.max()), max(spent, key=lambda name: spent[name]))

    def _seconds(self, phase: Phase) -> Floats:
        received, sent, received_across, sent_across = phase
        within = np.maximum(received - received_across, sent - sent_across) / self.bandwidth_within
        across = np.maximum(received_across, sent_across) / self.bandwidth_across
        return np.asarray(np.maximum(within, across), np.float64)

    def __str__(self) -> str:
        rates = f"{self.forward_flops / 1e12:.3g} and {self.backward_flops / 1e12:.3g} TFLOP/s"
        links = f"{self.bandwidth_within / 1e9:.3g} and {self.bandwidth_across / 1e9:.3g} GB/s"
        return f"{self.name} ({self.dtype}, {rates}; {links} in nodes of {self.node_size} and across)"


def flops_of(pairs: Floats, *, head_dim: int, v_dim: int) -> tuple[Floats, Floats]:
    """FLOPs of attention over visible pairs, forward and backward.

    Two products forward (q k, p v), five backward (q k again, dout v, and one each for dq, dk, dv).

    Example:
        >>> flops_of(np.array([1.0]), head_dim=64, v_dim=64)
        (array([256.]), array([640.]))
    """
    return 2 * pairs * (head_dim + v_dim), 2 * pairs * (3 * head_dim + 2 * v_dim)
