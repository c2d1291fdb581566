"""What `ContextParallel` asks of its arguments before anything is planned."""

from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import DtypeError, OptionError
from .machine import Machine
from .partition import Partition


def group_of(mesh: DeviceMesh) -> tuple[Any, int | None]:
    """The process group of all ranks of a mesh, and the ranks of a node where it has two levels."""
    if not isinstance(mesh, DeviceMesh):
        raise DtypeError(
            "ContextParallel: mesh",
            expected="a DeviceMesh, such as mesh['cp']",
            got=type(mesh).__name__,
            remedy="Make one by torch.distributed.device_mesh.init_device_mesh",
        )
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise OptionError(
                "ContextParallel: mesh",
                expected="names of its two dimensions, by which torch finds the group of all ranks",
                got=repr(mesh),
                remedy="Make it with mesh_dim_names=('inter', 'intra')",
            )
        return mesh._flatten().get_group(), mesh.size(1)
    raise OptionError(
        "ContextParallel: mesh",
        expected="one dimension, or two: nodes and the ranks of a node",
        got=f"{mesh.ndim}",
        remedy="Take the dimension that context parallelism is to use, mesh['cp']",
    )


def check_heads(heads: Any) -> None:
    whole = isinstance(heads, tuple) and len(heads) == 2 and all(type(x) is int and x > 0 for x in heads)
    if not whole or heads[0] % heads[1]:
        raise OptionError(
            "ContextParallel: heads",
            expected="(query heads, key heads), the second a divisor of the first",
            got=repr(heads),
            remedy="Pass the numbers of heads of this rank's q and k",
        )


_MAY_BE_NONE = ("k_len", "rows_per_chunk", "machine", "partition", "keys")


def check_types(**arguments: tuple[Any, type]) -> None:
    for name, (value, kind) in arguments.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DtypeError(
                f"ContextParallel: {name}",
                expected=f"{'an' if kind is int else 'a'} {_KINDS[kind]}",
                got=repr(value),
                remedy=f"Pass {'a number' if kind is int else _KINDS[kind]}",
            )
        if name in ("batch", "head_dim") and cast(int, value) < 1:
            raise OptionError(
                f"ContextParallel: {name}", expected="at least 1", got=str(value), remedy="Pass its number"
            )


_KINDS = {int: "int", torch.dtype: "torch.dtype", Machine: "Machine", Partition: "Partition"}


def check_given(dealt_twice: bool, keys_of_rows: bool) -> None:
    if dealt_twice:
        raise OptionError(
            "ContextParallel: partition",
            expected="it alone, as it says who owns which rows",
            got="method, rows_per_chunk or tolerance beside it",
            remedy="Pass these to the function that makes the partition",
        )
    if keys_of_rows:
        raise OptionError(
            "ContextParallel: keys",
            expected="k_len beside it, as in cross attention",
            got="k_len=None, where keys lie like the rows",
            remedy="Leave keys out, or pass the number of keys",
        )


def refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise OptionError(
                f"{name} with context parallelism",
                expected="None",
                got=type(value).__name__,
                remedy="The plan knows where rows are, and the device which backend runs",
            )
