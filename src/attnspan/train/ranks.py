"""The ranks of a job: which of them this process is, and what they decide, count and wait for together.

Rank ``d * cp + c`` is member ``c`` of replica ``d``: the ranks of a replica share its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from attnspan.parallel.errors import CommunicationError
from attnspan.train.config import TrainConfig
from attnspan.train.errors import ConfigError, JobError, RankError

__all__ = ["ALONE", "Ranks", "is_rank", "job_id", "open_ranks", "restarted"]

T = TypeVar("T")

# How a lost peer shows in gloo's messages; in Python they are plain RuntimeErrors.
_LOST = ("gloo/", "connection closed", "connection reset", "timed out", "broken pipe")

# A group needs some limit: longer than any comparison on one rank.
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among the ranks of its job; without arguments, a job of one process.

    Args:
        mesh: All ranks, with dimensions ("dp", "cp"); None without a process group.
        everyone: The same ranks in one dimension, for sums and for sharded parameters.
        patient: The same ranks, who wait here while the first one works alone, however long that takes.

    Example:
        >>> ranks = Ranks()
        >>> ranks.world, ranks.is_first, ranks.sum([1.0, 2.0])
        (1, True, [1.0, 2.0])
    """

    mesh: DeviceMesh | None = None
    everyone: DeviceMesh | None = None
    patient: dist.ProcessGroup | None = None

    @property
    def dp(self) -> int:
        """Replicas."""
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def cp(self) -> int:
        """Ranks of each replica."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(0)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.mesh is None or dist.get_rank() == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks share one machine's cores; so it is when no launcher says otherwise."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) == self.world

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks, or None for a job of one process."""
        return None if self.everyone is None else self.everyone.get_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add figures of all ranks; whole numbers below 2^53 stay exact.

        Args:
            values: This rank's; as many on every rank.
        """
        if self.group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        figures: list[float] = total.tolist()
        return figures

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def wait_for_first(self) -> None:
        """Wait until the first rank has done what it does alone; the limit of the other groups is none here.

        A rank that ends meanwhile is noticed at once all the same.
        """
        if self.patient is not None:
            dist.barrier(group=self.patient)

    def first(self, action: Callable[[], T]) -> T:
        """Do something on the first rank; all ranks get its result, or raise its error.

        Args:
            action: What to do; its result must be picklable.

        Example:
            >>> Ranks().first(lambda: 3)
            3
        """
        if self.group is None:
            return action()
        outcome = [_attempt(action) if self.is_first else (None, None)]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        return _settle(outcome[0])

    def together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; when it fails on one, all raise the error of the first that failed.

        Args:
            action: What to do. It must not wait for other ranks: one of them may have failed already.

        Example:
            >>> Ranks().together(lambda: 3)
            3
        """
        if self.group is None:
            return action()
        outcome = _attempt(action)
        errors: list[Exception | None] = [None] * self.world
        dist.all_gather_object(errors, outcome[1], group=self.group)
        failed = next((each for each in errors if each is not None), None)
        return _settle((outcome[0], failed))

    @contextmanager
    def joined(self, doing: Callable[[], str]) -> Iterator[None]:
        """Surround what waits for other ranks: a lost one becomes an error that says what was going on.

        Args:
            doing: Names it, when it is asked for.

        Raises:
            RankError: Another rank ended, or did not come in time.
        """
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if self.group is None or not _is_lost(error):
                raise
            raise RankError(
                expected=f"all {self.world} ranks to take part in {doing()}",
                got=f"on rank {dist.get_rank()}: {str(error).strip().splitlines()[0]}",
                remedy="look for the rank that ended first; go on with --resume, or let torchrun do it: "
                "--max-restarts N",
            ) from error


#: A job of one process.
ALONE = Ranks()


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks, or of one.

    Example:
        >>> is_rank()
        False
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun started this process in place of one that failed.

    Example:
        >>> restarted()
        False
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def job_id() -> str | None:
    """torchrun's name of the job of this process, the same after restarts; None without torchrun.

    Example:
        >>> job_id() is None
        True
    """
    return os.environ.get("TORCHELASTIC_RUN_ID")


@contextmanager
def open_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """Join the other ranks, as the launcher's environment says, or those of a group that exists already.

    Args:
        config: How many ranks there are to be, and how long they wait for each other.

    Raises:
        ConfigError: There are more or fewer than the configuration says.
        RankError: Some did not come.

    Example:
        >>> with open_ranks(TrainConfig()) as ranks:
        ...     print(ranks.world)
        1
    """
    there = dist.is_initialized()
    world = dist.get_world_size() if there else int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    if world != config.world:
        raise ConfigError(
            expected=f"{config.world} ranks for --dp {config.dp} and --cp {config.cp}",
            got=str(world),
            remedy=f"start them: torchrun --nproc-per-node {config.world} -m attnspan train ...; "
            "or give --dp and --cp whose product is the number of ranks",
        )
    if world == 1 and not (config.fsdp and (there or is_rank())):
        if config.fsdp:
            raise ConfigError(
                expected="a process group for --fsdp",
                got="none",
                remedy="start the job with torchrun --nproc-per-node 1 -m attnspan train ...",
            )
        yield ALONE
        return
    limit = timedelta(seconds=config.timeout)
    if not there:
        _join(limit)
    try:
        yield _mesh(config, limit)
        if not there:
            # gloo may abort a process whose peers leave while its meshes are still referenced.
            dist.barrier()
    finally:
        if not there:
            dist.destroy_process_group()


def _join(limit: timedelta) -> None:
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))  # type: ignore[no-untyped-call]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torch 2.13 keeps that store over restarts, and with it the addresses of processes that are gone.
            store = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, dist.DistError) as error:
        raise RankError(
            expected=f"all {os.environ['WORLD_SIZE']} ranks to come within {limit.total_seconds():.0f} s",
            got=f"on rank {os.environ['RANK']}: {str(error).strip().splitlines()[0]}",
            remedy="see why the others did not start, or give more time with --timeout",
        ) from error


def _mesh(config: TrainConfig, limit: timedelta) -> Ranks:
    """Both meshes; the groups wait as long as the configuration says: those of a mesh of sizes do not."""
    everyone = init_device_mesh("cpu", (config.world,), mesh_dim_names=("ranks",))
    numbers = torch.arange(config.world).view(config.dp, config.cp)
    replicas, sharers = (_own_group(each.tolist(), limit) for each in (numbers.T, numbers))
    names = ("dp", "cp")
    mesh = DeviceMesh.from_group([replicas, sharers], "cpu", mesh=numbers, mesh_dim_names=names)
    patient = dist.new_group(timeout=_PATIENCE)
    return Ranks(mesh, everyone, patient)


def _own_group(members: list[list[int]], limit: timedelta) -> dist.ProcessGroup:
    """Make all of these groups; the one that this rank is in."""
    own, _ = dist.new_subgroups_by_enumeration(members, timeout=limit)  # type: ignore[no-untyped-call]
    return cast(dist.ProcessGroup, own)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Result and error of an action; only what a user can mend travels, a defect ends the rank at once."""
    try:
        return action(), None
    except (JobError, OSError) as error:
        return None, error


def _settle(outcome: tuple[T | None, Exception | None]) -> T:
    value, error = outcome
    if error is None:
        return cast(T, value)
    if isinstance(error, JobError):
        error.shared = True
    raise error


def _is_lost(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError | CommunicationError) or any(sign in text for sign in _LOST)
