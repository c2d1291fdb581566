"""Measured rates of a machine, and predicted times of attention calls.

A prediction is computed from pairs, bytes and a few measured rates. It shows which part dominates, but it is
not a measurement.
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
    """Rates for a prediction, as `calibrate` measures them.

    Attributes:
        name: Name of the measured machine, shown with each prediction.
        dtype: Element type of the rates.
        forward_flops, backward_flops: Attention of one rank, in FLOP/s over visible pairs.
        bandwidth_within, bandwidth_across: Bytes/s that one rank receives from its own node and from other
            nodes, while it sends the same amount.
        latency: Seconds of a collective that moves no data.
        node_size: Number of ranks per node.

    Raises:
        OptionError: A rate is not positive and finite.
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
                kind, wanted = int if each.type == "int" else (int, float), "a positive, finite number"
                fits = isinstance(value, kind) and 0 < value < math.inf
            expect(fits, f"Machine: {each.name}", wanted, repr(value), remedy)

    @classmethod
    def default(cls) -> Machine | None:
        """Load the file that the environment variable ATTNSPAN_MACHINE names. None if it is not set.

        Raises:
            OptionError: The variable names a file that cannot be used.
        """
        path = os.environ.get(_VARIABLE)
        return cls.load(path) if path else None

    @classmethod
    def calibrate(cls, group: Any = None, *, head_dim: int = 128, **options: Any) -> Machine:
        """Measure attention and the network on all ranks of a group at once.

        All ranks get the same rates.

        Args:
            group: A process group of torch.distributed, or None for the default group.
            head_dim: Head dim of the measured attention.
            **options: ``dtype`` ("float32"), ``seconds`` to spend (2.0), ``node_size``
                (LOCAL_WORLD_SIZE, which torchrun sets), ``device`` (the device of the group's backend).

        Raises:
            OptionError: There is no process group, or it has only one rank.
        """
        from attnspan_lab.calibrate import calibrate

        found = calibrate(group, head_dim=head_dim, **options)
        # Rates of pairs give rates of FLOPs.
        forward, backward = flops_of(np.array(found.pop("pairs")), head_dim=head_dim, v_dim=head_dim)
        return cls(forward_flops=float(forward[0]), backward_flops=float(backward[1]), **found)

    def save(self, path: Path | str) -> None:
        """Write the rates as JSON. Readers see the old file or the complete new one."""
        write_json(Path(path), self, indent=1)

    @classmethod
    def load(cls, path: Path | str) -> Machine:
        """Read a file that `save` wrote.

        Raises:
            OptionError: The file is missing or has another content.
        """
        return from_plain(cls, read_json(Path(path), "the rates of a machine"), str(path))

    def predict(self, cost: Cost, sizes: Sizes) -> Prediction:
        """Predict the time of one call, forward and backward.

        The prediction assumes the following. The exchange and the ring overlap with compute, but scatter and
        gather do not. Links within and across nodes work at the same time, in both directions, and no other
        job uses them. All steps of a ring cost the same. If the mask makes some steps heavier, a real ring is
        slower than predicted.
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
            # Assume equal parts: while one is computed, the next ones travel. A ring's first part is local.
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
    """Count the FLOPs of attention over visible pairs, forward and backward.

    The forward pass has two products: q k and p v. The backward pass has five: q k again, dout v, and one
    each for dq, dk and dv.

    Example:
        >>> flops_of(np.array([1.0]), head_dim=64, v_dim=64)
        (array([256.]), array([640.]))
    """
    return 2 * pairs * (head_dim + v_dim), 2 * pairs * (3 * head_dim + 2 * v_dim)
