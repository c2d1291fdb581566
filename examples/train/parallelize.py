"""Devices and ranks of a job, and the distributed model.

Rank ``d * cp + c`` is member ``c`` of replica ``d``. The ranks of a replica share its rows.
"""

# mypy: no-warn-return-any

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from timeit import repeat
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_map_only

from attnspan_lab.bench.ceilings import native_probe
from train.config import ConfigError, JobError, RankError, TrainConfig
from train.data import Part
from train.model import Decoder

__all__ = ["ALONE", "Ranks", "build_model", "faster_dtype", "is_rank", "open_ranks", "peak_flops"]

T = TypeVar("T")

# Time limit for the surviving ranks to report to each other after a failed exchange.
_ROLL_CALL_SECONDS = 10.0
_LOOK = "Look for the rank that ended first. Use --resume, or let torchrun restart ranks: --max-restarts N"
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among the ranks of its job. Without arguments: a job of one process on the CPU."""

    device: torch.device = _CPU  # device of this rank
    number: int = 0  # number of this rank
    world: int = 1  # number of ranks
    mesh: DeviceMesh | None = None  # all ranks, with dimensions ("dp", "cp"); None without a process group
    everyone: DeviceMesh | None = None  # the same ranks in one dimension, for sums and for sharded parameters
    host: dist.ProcessGroup | None = None  # the same ranks over gloo, for agreements
    saver: dist.ProcessGroup | None = None  # another gloo group, for the thread that writes checkpoints

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.number == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers of all ranks. Integers below 2^53 stay exact."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.host is not None:
            dist.all_reduce(total, group=self.host)
        return total.tolist()

    def together(self, action: Callable[[], T]) -> T:
        """Run an action on every rank, without waiting for others. If one rank fails, all raise its error."""
        if self.host is None:
            return action()
        errors: list[Any] = [None] * self.world
        value, error = None, None
        try:
            value = action()
        except (JobError, OSError) as caught:  # Errors of the user. A defect ends the rank.
            error = caught
        dist.all_gather_object(errors, error, group=self.host)
        for error in filter(None, errors):
            error.shared = True
            raise error
        return cast(T, value)

    def first(self, action: Callable[[], T]) -> T:
        """Run an action on the first rank. All ranks get its picklable result, or raise its error."""
        result: list[Any] = [self.together(lambda: action() if self.is_first else None)]
        if self.host is not None:
            dist.broadcast_object_list(result, src=0, group=self.host)
        return cast(T, result[0])

    def place(self, part: Part) -> Part:
        """Move the data loader's results to this rank's device and mesh, without synchronization."""
        moved = part
        if self.device != _CPU:
            moved = tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), part)
        if part.shared is None or self.mesh is None:
            return moved
        return moved._replace(mask=part.mask.on(self.mesh["cp"], rows=part.shared))

    def peak_memory(self) -> int:
        """Return the process's peak memory in bytes: allocated on a GPU, resident on a CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024

    @contextmanager
    def joined(self, doing: Callable[[], str]) -> Iterator[None]:
        """Guard code that waits for other ranks. If a rank is lost, a RankError names it."""
        try:
            yield
        except RuntimeError as error:  # The base class of all errors of torch's collectives.
            if not (lost := self._lost()):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"rank {self.number}, {os.path.basename(where.filename)}:{where.lineno}"
            wanted = f"all {self.world} ranks to take part in {doing()}"
            got = f"no answer from {lost}, after this on {at}: {_line(error)}"
            raise RankError(wanted, got, _LOOK) from error

    def _lost(self) -> str:
        """Name the ranks that do not respond. Each rank whose step failed reports in the store."""
        if self.host is None:
            return ""
        store, end = _get_default_store(), time.monotonic() + _ROLL_CALL_SECONDS
        missing = [f"rank {rank}" for rank in range(self.world)]
        try:
            store.set(f"failed/rank {self.number}", "here")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"failed/{rank}"])]
                time.sleep(0.1)
        except RuntimeError:
            return "rank 0, which holds the store"
        return ", ".join(missing)


#: A job of one process, on the CPU.
ALONE = Ranks()


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def open_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """Join the other ranks, from the launcher's environment or from an existing process group."""
    there = dist.is_initialized()
    world = dist.get_world_size() if there else int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    start = f"Start them: torchrun --nproc-per-node {config.world} examples/train ..."
    wanted = f"{config.world} ranks for --dp {config.dp} and --cp {config.cp}"
    remedy = f"{start}, or pass --dp and --cp whose product is the number of ranks"
    ConfigError.unless(world == config.world, wanted, world, remedy)
    grouped = there or is_rank() or not config.fsdp
    ConfigError.unless(grouped, "a process group for --fsdp", "none", start)
    cuda, remedy = torch.cuda.is_available(), "Use --device cpu, or install torch for CUDA"
    ConfigError.unless(cuda or config.device != "cuda", "a CUDA device", "none", remedy)
    device = _CPU
    if cuda and config.device != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world == 1 and not config.fsdp:
        yield Ranks(device)
        return
    limit = timedelta(seconds=config.timeout)
    if there:
        yield _ranks(config, device, limit)
        return
    _join("gloo" if device == _CPU else "cpu:gloo,cuda:nccl", limit)
    try:
        yield _ranks(config, device, limit)
        dist.barrier()  # gloo may abort a process if its peers leave while its meshes are still referenced.
    finally:
        dist.destroy_process_group()


def _join(backend: str, limit: timedelta) -> None:
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))  # type: ignore[no-untyped-call]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torch 2.13 keeps that store over restarts, including the addresses of processes that have ended.
            store = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except RuntimeError as error:
        wanted = f"all {os.environ['WORLD_SIZE']} ranks to join within {limit.total_seconds():.0f} s"
        got, remedy = f"on rank {os.environ['RANK']}: {_line(error)}", "Check why the others did not start, "
        raise RankError(wanted, got, remedy + "or raise --timeout") from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _ranks(config: TrainConfig, device: torch.device, limit: timedelta) -> Ranks:
    """Make meshes whose groups have the configured timeout, which a mesh from sizes would ignore."""
    kind, numbers = device.type, torch.arange(config.world).view(config.dp, config.cp)
    everyone = init_device_mesh(kind, (config.world,), mesh_dim_names=("ranks",))
    axes = (numbers.T.tolist(), numbers.tolist())
    groups = [dist.new_subgroups_by_enumeration(axis, timeout=limit)[0] for axis in axes]  # type: ignore[no-untyped-call]
    mesh = DeviceMesh.from_group(groups, kind, mesh=numbers, mesh_dim_names=("dp", "cp"))
    host, saver = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
    return Ranks(device, dist.get_rank(), config.world, mesh, everyone, host, saver)


def build_model(config: TrainConfig, vocab_size: int, ranks: Ranks = ALONE) -> Decoder:
    """Make the model of a rank: build it on the meta device, compile, shard, then initialize its weights."""
    with torch.device("meta"):
        model = Decoder(config, vocab_size)
    if config.compile:
        for block in model.blocks:
            # Compile only forward: FSDP's hooks, which gather and free parameters, stay outside of the graph.
            # All blocks share one graph. SDPA calls per segment break the graph, because their shapes always
            # change.
            whole = config.attention != "sdpa-documents"
            block.forward = torch.compile(block.forward, fullgraph=whole, dynamic=False)
    if config.fsdp and ranks.everyone is not None:
        half = torch.bfloat16 if config.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=ranks.everyone, mp_policy=policy)
            # Each rank's loss is its part of the sum, so FSDP must not divide by the number of ranks.
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model.initialize(ranks.device)


def faster_dtype(device: torch.device = _CPU) -> str:
    """Choose the training dtype: bfloat16 if its products are at least 1.5 times as fast as float32's.

    A CPU without bfloat16 dot products emulates them and is slower. The margin covers autocast's conversions.
    """
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"

    def seconds(dtype: torch.dtype) -> float:
        factor = torch.randn(512, 512).to(dtype)
        return min(repeat(lambda: factor @ factor, number=1, repeat=8))

    return "bfloat16" if seconds(torch.float32) >= 1.5 * seconds(torch.bfloat16) else "float32"


def peak_flops(config: TrainConfig, device: torch.device, bursts: int = 5) -> list[float]:
    """Measure the peak FLOP/s of this rank's cores, with short bursts of their widest multiply-add.

    No program on these cores is faster. However, other programs slow down a burst.

    Returns:
        The rate of each burst. Zeros if no ceiling is known: on a GPU, without the compiled kernel, or
        without instructions for the dtype.
    """
    probe = native_probe() if device == _CPU else None
    if probe is None:
        return [0.0] * bursts
    kinds = [kind for kind in probe.peak_kinds() if kind.endswith(config.dtype.replace("float", "f"))]
    burst = partial(probe.peak, num_threads=torch.get_num_threads(), seconds=0.05)
    return [max(map(burst, kinds), default=0.0) for _ in range(bursts)]
