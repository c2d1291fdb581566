"""``attnspan.jax.shard``: from a mesh and a mask to one attention over all devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from ...masks import Mask, full
from ...spans import Spans
from ..choose import Call
from ..machine import Machine
from ..partition import Method, Partition
from ..planning import Request
from ._arguments import check_mask, check_sizes, strategy_of
from ._axes import Axes, AxisNames
from ._sharded import Frame, Sharded, planned


def shard(
    mesh: Mesh,
    *,
    mask: Mask | Spans | None = None,
    batch: AxisNames = None,
    heads: AxisNames = None,
    sequence: AxisNames = None,
    q_len: int | None = None,
    k_len: int | None = None,
    num_heads: tuple[int, int] | None = None,
    batch_size: int = 1,
    strategy: str = "auto",
    method: Method = "balanced",
    rows_per_chunk: int | None = None,
    tolerance: float | None = None,
    partition: Partition | None = None,
    keys: Partition | None = None,
    head_dim: int = 128,
    dtype: Any = "bfloat16",
    machine: Machine | None = None,
) -> Sharded:
    """Spread attention over a mesh: batch rows, heads and the sequence, each over axes of its own.

    Everything that goes with q, k and v is split as they are: the mask's bounds, biases, sinks, seeds. With
    ``sequence`` a plan is made on the host, of a mask whose arrays can be read: who owns which rows, and
    which keys cross the network.

    Args:
        mesh: The devices, with axes of any type.
        mask: What each query may see, of the whole problem; everything if None.
        batch: Mesh axis, or a tuple of them, that splits batch rows; None if none does.
        heads: Those that split heads. They divide the query heads. Key heads that they do not divide are held
            by all devices, each of which takes those that its query heads read.
        sequence: Those that split rows and keys.
        q_len: Rows of the whole problem; with ``sequence``.
        k_len: Its keys in cross attention, which are dealt out in order (`Sharded.shard_keys`); None for
            self-attention, where keys lie with their queries.
        num_heads: Query heads and key heads of the whole problem, (Hq, Hkv); with ``sequence``.
        batch_size: Batch rows of the whole problem, where those of the mask differ; with ``sequence``.
        strategy: "exchange" (keys that somebody may see cross the network, in equal pieces), "ring" (all of
            them, from neighbour to neighbour), or "auto": what the cost model finds faster.
        method: How rows are dealt out: see `attnspan.parallel.partition.partition`.
        rows_per_chunk: Neighbouring rows that stay together; None for a good number.
        tolerance: Largest over mean work that "balanced" aims at; None for a good one.
        partition: Who owns which rows, where another plan has decided it.
        keys: Who owns which keys in cross attention.
        head_dim: D, for "auto" and `Sharded.explain` alone.
        dtype: Of q, k and v, for the same.
        machine: Rates and bandwidths, for the same.

    Returns:
        A `Sharded`: a ``mask`` for `attnspan.jax.attention`, with what places a model's inputs.

    Raises:
        ValueError: Axes, sizes or the strategy do not fit.
        TypeError: The mesh or the mask is none.

    Example:
        >>> from attnspan import causal
        >>> mesh = jax.make_mesh((1, 1), ("data", "context"))
        >>> axes = {"batch": "data", "sequence": "context"}
        >>> sharded = shard(mesh, mask=causal(), q_len=9, num_heads=(4, 2), **axes)
        >>> x = sharded.shard(jax.numpy.ones((1, 9, 4, 16)))
        >>> sharded.attention(x, x[:, :, :2], x[:, :, :2], layout="bshd").shape
        (1, 9, 4, 16)
    """
    axes = Axes.of(mesh, batch, heads, sequence)
    mask = full() if mask is None else mask
    check_mask(mask, bool(axes.sequence))
    sizes = {
        "q_len": q_len,
        "k_len": k_len,
        "num_heads": num_heads,
        "rows_per_chunk": rows_per_chunk,
        "tolerance": tolerance,
        "partition": partition,
        "keys": keys,
        "machine": machine,
    }
    check_sizes(axes, batch_size, method, sizes)
    if not axes.sequence:
        return Sharded(Frame(axes, None, None, None), mask, None, None, None)
    assert q_len is not None
    assert num_heads is not None
    request = Request(
        ranks=axes.size("sequence"),
        call=Call(*num_heads, head_dim, head_dim, jax.numpy.dtype(dtype).itemsize, batch_size),
        strategy=strategy_of(strategy, axes.size("sequence")),
        self_attention=k_len is None,
        method=method,
        rows_per_chunk=rows_per_chunk,
        tolerance=tolerance,
        machine=machine,
        rows=partition,
        keys=keys,
    )
    return planned(Frame(axes, q_len, q_len if k_len is None else k_len, num_heads), mask, request, None)
