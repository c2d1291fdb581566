"""Process groups of meshes, their names in errors, and their ranks that do not answer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import DtypeError, expect
from attnspan.torch import compat

#: Name of a group, which is a number -> its label in errors.
_labels: dict[str, str] = {}
#: Seconds that a rank waits for failure reports of other ranks, and seconds between two looks.
_ROLL_CALL, _PAUSE = 5.0, 0.05
_KEY = "attnspan/{}/{}".format


def group_of(mesh: DeviceMesh) -> Any:
    """Return the process group of all ranks of a mesh.

    The mesh has one dimension, or two: nodes, and the ranks of a node.

    Raises:
        DtypeError: `mesh` is no DeviceMesh.
        OptionError: The mesh has more dimensions, has two without names, or does not contain this rank.
    """
    remedy = "Make one by torch.distributed.device_mesh.init_device_mesh"
    is_mesh = isinstance(mesh, DeviceMesh)
    expect(is_mesh, "mesh", "a DeviceMesh, such as mesh['cp']", type(mesh).__name__, remedy, error=DtypeError)
    remedy, wanted = "Call it only on the ranks of the mesh", "this rank, {}, among its ranks"
    expect(mesh.get_coordinate() is not None, "mesh", wanted, repr(mesh), remedy, dist.get_rank())
    wanted, remedy = "one dimension, or two: nodes and their ranks", "Pass a part of it, such as mesh['cp']"
    expect(mesh.ndim in (1, 2), "mesh", wanted, str(mesh.ndim), remedy)
    names = mesh.mesh_dim_names
    remedy = "Make it with mesh_dim_names=('inter', 'intra')"
    named = mesh.ndim == 1 or names is not None
    expect(named, "mesh of two dimensions", "names of both", repr(mesh), remedy)
    group = mesh.get_group() if mesh.ndim == 1 else compat.flattened(mesh).get_group()
    if names is not None:
        dims = " and ".join(map(repr, names))
        _labels[group.group_name] = f"mesh dimension{'s'[: mesh.ndim - 1]} {dims}"
    return group


def named_part(part: Any, whole: Any) -> Any:
    """Label `part` as a part of `whole` in errors, and return it."""
    if part is not whole:
        _labels.setdefault(part.group_name, f"a part of {_label(whole)}")
    return part


def _label(group: Any) -> str:
    return _labels.get(group.group_name) or f"process group {group.group_desc or group.group_name}"


def shown_group(group: Any) -> str:
    """Describe a group by its mesh dimension and its global ranks.

    Example:
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        >>> shown_group(group_of(mesh))
        "mesh dimension 'cp' (global ranks 0 to 3)"
        >>> dist.destroy_process_group()
    """
    return f"{_label(group)} ({_shown_ranks(dist.get_process_group_ranks(group))})"


def _shown_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"global rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"global ranks {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"global ranks {', '.join(map(str, ranks[:16]))}{more}"


def announce() -> None:
    """Store this rank's process id in the store of the process groups, for other ranks."""
    process = f"{_machine()} {os.getpid()} {_state(os.getpid())}"
    # The store of torch's fake group stores nothing, and no rank of that group can fall silent.
    with contextlib.suppress(RuntimeError):
        compat.default_store().set(_KEY("process", dist.get_rank()), process)


def silence_of(group: Any) -> str:
    """Describe the ranks of a group that do not answer, as far as a few seconds can tell.

    A rank that sees a failure reports it in the store of the process groups. The result names ranks without
    a report: ranks on this machine whose process has ended, or else all of them.
    """
    try:
        store, me = compat.default_store(), dist.get_rank()
        store.set(_KEY("saw a failure", me), "")
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != me]
        end = time.monotonic() + _ROLL_CALL
        while others := [rank for rank in others if not store.check([_KEY("saw a failure", rank)])]:
            ended = [rank for rank in others if _has_ended(store, rank)]
            if ended:
                return f"{_shown_ranks(ended)}, whose process has ended"
            if time.monotonic() > end:
                return f"{_shown_ranks(others)}, silent for {_ROLL_CALL:.0f} s after the failure"
            time.sleep(_PAUSE)
    except RuntimeError as error:
        return f"the store of the process groups either ({str(error).splitlines()[0]})"
    return ""


def _has_ended(store: Any, rank: int) -> bool:
    """Whether a rank's process ran on this machine and has ended."""
    key = _KEY("process", rank)
    if not store.check([key]):
        return False
    machine, pid, began = store.get(key).decode().rsplit(" ", 2)
    return bool(machine == _machine() and _state(int(pid)) != began)


def _machine() -> str:
    """Name of this machine and its namespace of process ids."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.exists() else 'unknown'}"


def _state(pid: int) -> str:
    """Start time of a process, "ended" if it has ended, or "unknown"."""
    if not Path("/proc/self/stat").exists():
        return "unknown"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "ended"
    return "ended" if fields[0] in "ZX" else fields[19]
