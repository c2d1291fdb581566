"""What a machine can do, measured or assumed, and the time that it would need: the cost model of "auto".

A prediction is arithmetic on pairs, bytes and six figures of a machine. It tells what dominates; it is no
measurement, and whatever prints one says whose figures it took.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, ShapeError
from .traffic import Phase, Traffic

__all__ = ["Machine", "Prediction", "Times", "flops_of", "phase_seconds", "predict"]

Floats = NDArray[np.float64]

_SCHEMA = 1
_VARIABLE = "ATTNSPAN_MACHINE"


@dataclass(frozen=True)
class Machine:
    """The figures that a prediction needs.

    The default is an assumption: round figures in the proportions of nodes of eight accelerators, of no
    machine in particular. `calibrate` measures instead.

    Attributes:
        name: Whose figures they are; said wherever a prediction is shown.
        dtype: Element type that the rates hold for.
        forward_flops, backward_flops: Attention of one rank, FLOP/s over visible pairs.
        bandwidth_within, bandwidth_across: What one rank receives, while it sends as much, from ranks of its
            node and from other nodes, bytes/s.
        latency_within, latency_across: What each further rank that something comes from adds, s.
        node_size: Ranks of a node.
        notes: What was not measured.

    Raises:
        OptionError: A figure is not positive and finite.

    Example:
        >>> Machine().name
        'assumed figures of no machine in particular'
    """

    name: str = "assumed figures of no machine in particular"
    dtype: str = "bfloat16"
    forward_flops: float = 4e14
    backward_flops: float = 3e14
    bandwidth_within: float = 2e11
    bandwidth_across: float = 2.5e10
    latency_within: float = 5e-6
    latency_across: float = 1e-5
    node_size: int = 8
    notes: tuple[str, ...] = ("nothing was measured: Machine.calibrate() does",)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise OptionError(
                    f"Machine: {each.name}",
                    expected="a positive, finite figure",
                    got=str(value),
                    remedy="Measure it with Machine.calibrate()",
                )

    @classmethod
    def default(cls) -> Machine:
        """The file that the environment variable ATTNSPAN_MACHINE names, or else the assumed figures.

        Raises:
            OptionError: The variable names a file that cannot be used.

        Example:
            >>> Machine.default() == Machine() or "ATTNSPAN_MACHINE" in os.environ
            True
        """
        path = os.environ.get(_VARIABLE)
        return cls.load(Path(path)) if path else cls()

    @classmethod
    def calibrate(
        cls,
        group: Any = None,
        *,
        dtype: str = "float32",
        head_dim: int = 128,
        seconds: float = 2.0,
        node_size: int | None = None,
        device: str | None = None,
    ) -> Machine:
        """Measure attention and the network, on all ranks of a group at once; all get the same figures.

        Args:
            group: A process group of torch.distributed; None: the default one.
            dtype: Element type, such as "bfloat16".
            head_dim: Of the attention that is timed.
            seconds: About how long to measure, s.
            node_size: Ranks of a node; None: LOCAL_WORLD_SIZE, as torchrun sets it, or else all ranks.
            device: "cpu" or "cuda"; None: what the group's engine works on.

        Raises:
            OptionError: There is no process group, or it has one rank only.
        """
        from ._calibrate import calibrate

        return calibrate(
            group, dtype=dtype, head_dim=head_dim, seconds=seconds, node_size=node_size, device=device
        )

    def save(self, path: Path) -> None:
        """Write the figures as JSON; a reader sees the old file or the new one.

        Args:
            path: The file; its folder must be there.

        Raises:
            OptionError: It cannot be written.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp(), "machine.json")
            >>> Machine().save(path)
            >>> Machine.load(path) == Machine()
            True
        """
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            draft.write_text(json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n")
            os.replace(draft, path)
        except OSError as error:
            raise OptionError(
                str(path),
                expected="a place that can be written",
                got=error.strerror or str(error),
                remedy="Name another file",
            ) from None

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what `save` wrote.

        Raises:
            OptionError: The file is missing, or is something else.

        Example:
            >>> Machine.load(Path("nowhere.json"))
            Traceback (most recent call last):
            attnspan.errors.OptionError: nowhere.json: expected the figures of a machine, got no such file. \
Save those of Machine.calibrate() there.
        """
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            raise _refused(path, "no such file") from None
        except (OSError, ValueError) as error:
            raise _refused(path, str(error)) from None
        types: dict[str, type] = {each.name: type(each.default) for each in fields(cls)}
        schema = value.pop("schema", None) if isinstance(value, dict) else None
        if schema != _SCHEMA or set(value) != set(types):
            raise _refused(path, "other fields, or those of another version")
        if isinstance(value["notes"], list):
            value["notes"] = tuple(map(str, value["notes"]))
        for name, kind in types.items():
            # JSON writes 2e11 as a float, but a hand-written file may say 200000000000.
            if kind is float and type(value[name]) is int:
                value[name] = float(value[name])
            if type(value[name]) is not kind:
                raise _refused(path, f"{name} {value[name]!r}")
        return cls(**value)

    def with_nodes(self, node_size: int) -> Machine:
        """The same figures for nodes of another size.

        Example:
            >>> Machine().with_nodes(4).node_size
            4
        """
        return replace(self, node_size=node_size)

    def __str__(self) -> str:
        rates = f"{_si(self.forward_flops)}FLOP/s forward, {_si(self.backward_flops)}FLOP/s backward"
        within = f"{_si(self.bandwidth_within)}B/s and {self.latency_within * 1e6:.3g} us within a node"
        across = f"{_si(self.bandwidth_across)}B/s and {self.latency_across * 1e6:.3g} us across"
        notes = "".join(f"; {note}" for note in self.notes)
        nodes = f"nodes of {self.node_size}"
        return f"{self.name} ({self.dtype}: {rates}; {within}, {across}; {nodes}{notes})"


def _refused(path: Path, got: str) -> OptionError:
    return OptionError(
        str(path),
        expected="the figures of a machine",
        got=got,
        remedy="Save those of Machine.calibrate() there",
    )


def _si(value: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} "


def flops_of(pairs: Floats, *, head_dim: int, v_dim: int) -> tuple[Floats, Floats]:
    """FLOPs of attention over visible pairs, forward and backward.

    Two products forward (q k, p v), five backward (q k again, dout v, and one each for dq, dk, dv).

    Args:
        pairs: Visible (query, key, head) triples, any shape.
        head_dim, v_dim: Elements of a row of q and k, and of v.

    Example:
        >>> flops_of(np.array([1.0]), head_dim=64, v_dim=64)
        (array([256.]), array([640.]))
    """
    return 2 * pairs * (head_dim + v_dim), 2 * pairs * (3 * head_dim + 2 * v_dim)


@dataclass(frozen=True, eq=False)
class Times:
    """Where the time of one direction goes, each float64 (P,), s.

    Attributes:
        compute: Attention itself.
        network: Exchange or ring, and the gradients of it, which overlap with compute.
        exposed: Scatter and gather, which wait for nothing and let nobody start.
        total: All of it, with the overlap.

    Example:
        >>> one = Times.of(np.array([8.0]), np.array([4.0]), np.array([1.0]), parts=4)
        >>> one.total  # 8, and the first quarter of 4, and 1
        array([10.])
    """

    compute: Floats
    network: Floats
    exposed: Floats
    total: Floats

    @classmethod
    def of(
        cls, compute: Floats, network: Floats, exposed: Floats, *, parts: int, at_hand: bool = False
    ) -> Times:
        """The time of work that is cut into equal parts: while one is computed, the next ones travel.

        Args:
            compute, network, exposed: Times of each alone, s (P,).
            parts: How many.
            at_hand: Whether the first part need not travel, as in a ring.

        Example:
            >>> Times.of(np.array([1.0]), np.array([8.0]), np.array([0.0]), parts=4, at_hand=True).total
            array([8.25])
        """
        first = 0.0 if at_hand else network / parts
        last = compute / parts * (network > 0)
        total = np.maximum(compute + first, network + last) + exposed
        return cls(compute, network, exposed, total)


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predicted time of a call of attention.

    Attributes:
        forward, backward: Of each rank.

    Example:
        >>> one = Times.of(np.array([3.0, 1.0]), np.array([2.0, 2.0]), np.array([1.0, 0.0]), parts=2)
        >>> Prediction(one, one).seconds
        10.0
    """

    forward: Times
    backward: Times

    @property
    def seconds(self) -> float:
        """Forward and backward: in each, all wait for the slowest rank."""
        return float(self.forward.total.max() + self.backward.total.max())

    @property
    def bound(self) -> str:
        """What the slowest rank spends most of its time on: "compute", "exchange" or "scatter and gather".

        Example:
            >>> one = Times.of(np.array([3.0, 1.0]), np.array([2.0, 2.0]), np.array([1.0, 0.0]), parts=2)
            >>> Prediction(one, one).bound
            'compute'
        """
        parts = dict.fromkeys(("compute", "exchange", "scatter and gather"), 0.0)
        for times in (self.forward, self.backward):
            slowest = int(times.total.argmax())
            compute, exposed = float(times.compute[slowest]), float(times.exposed[slowest])
            parts["scatter and gather"] += exposed
            parts["compute"] += compute
            parts["exchange"] += float(times.network[slowest])
        return max(parts, key=lambda name: parts[name])


def predict(
    machine: Machine,
    traffic: Traffic,
    forward: Floats,
    backward: Floats,
    *,
    parts: int = 1,
    at_hand: bool = False,
) -> Prediction:
    """The time of one call.

    Exchange and ring overlap with compute; scatter and gather do not. Links within and across nodes work at
    the same time, both directions of each too, and nobody shares one. A ring's steps are taken to cost the
    same; where a mask makes some heavier than others, a real ring is slower than this.

    Args:
        machine: Its figures.
        traffic: Bytes of the call, of nodes of the machine's size.
        forward, backward: FLOPs of each rank, float64 (P,).
        parts, at_hand: Of the overlap, as in `Times.of`.

    Raises:
        ShapeError: The traffic is one of nodes of another size.

    Example:
        >>> from attnspan.parallel.traffic import Traffic
        >>> machine = Machine(forward_flops=100.0, backward_flops=50.0)
        >>> predict(machine, Traffic(ranks=1, node_size=8), np.array([100.0]), np.array([100.0])).seconds
        3.0
    """
    if traffic.node_size != machine.node_size:
        raise ShapeError(
            "predict: traffic",
            expected=f"nodes of {machine.node_size} ranks, as the machine has",
            got=str(traffic.node_size),
            remedy="Count the traffic with the machine's node_size",
        )
    return Prediction(
        Times.of(
            forward / machine.forward_flops,
            *_sums(machine, traffic, traffic.forward),
            parts=parts,
            at_hand=at_hand,
        ),
        Times.of(
            backward / machine.backward_flops,
            *_sums(machine, traffic, traffic.backward),
            parts=parts,
            at_hand=at_hand,
        ),
    )


def _sums(machine: Machine, traffic: Traffic, phases: Mapping[str, Phase]) -> tuple[Floats, Floats]:
    """What overlaps, and what does not, float64 (P,)."""
    network, exposed = np.zeros(traffic.ranks), np.zeros(traffic.ranks)
    for name, phase in phases.items():
        sums = exposed if name in ("scatter", "gather") else network
        sums += phase_seconds(machine, phase)
    return network, exposed


def phase_seconds(machine: Machine, phase: Phase) -> Floats:
    """Time of one phase, float64 (P,): the slower of two links, and a latency for each rank waited for.

    Example:
        >>> float(phase_seconds(Machine(), Phase.zeros(1))[0])
        0.0
    """
    within = np.maximum(phase.received_within, phase.sent_within) / machine.bandwidth_within
    across = np.maximum(phase.received_across, phase.sent_across) / machine.bandwidth_across
    near = phase.messages - phase.messages_across
    latency = near * machine.latency_within + phase.messages_across * machine.latency_across
    return np.asarray(np.maximum(within, across) + latency, np.float64)
