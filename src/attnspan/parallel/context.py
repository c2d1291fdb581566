"""One attention over the ranks of a mesh: the plan of a step, and what a model needs of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._biases import DenseBias
from ..call import Call, check_layout
from ..errors import OptionError, ShapeError, expect
from ..masks import Mask, full
from ..options import Given
from ..spans import Spans
from ..torch._front import TorchFront, from_bhsd
from ..torch._options import dropout_seeds
from ..torch.dtensor import Places, ShardedMask, is_dtensor
from . import _flops as _flops  # registers what a call costs
from ._agree import check_agreement
from ._checks import check_given, check_heads, check_types, group_of, refuse
from ._gather import gather_rows
from ._ops import sharded_forward
from .choose import Call as Sizes
from .dtensor import attend
from .explain import Explanation, explain
from .local import encode
from .machine import Machine
from .partition import Method, Partition
from .planning import Request, lower, make_plan
from .strategy import Strategy

__all__ = ["ContextParallel"]

# Options without a place: the plan has the rows' indices.


class ContextParallel(ShardedMask):
    """Attention whose sequence is spread over ranks, under any mask.

    Each rank holds some rows of the sequence: `shard` takes them from whole inputs, once, at the start of a
    model; everything but attention works on rows alone. All ranks must be given the same mask: a plan is made
    of it on each rank, and compared.

    Losses are sums over ranks: each rank's local loss, divided by the *global* number of tokens, is its part,
    and the gradient of a parameter that all ranks have is the sum of what they find.

    Args:
        mesh: The ranks, one-dimensional; or two-dimensional (nodes, ranks of a node), of which ranks of a
            node share out heads unless ``strategy`` says otherwise.
        mask: What each query may see, of the whole problem: segment ids and the like are global.
        q_len: Rows of the whole problem.
        k_len: Keys of the whole problem, for cross attention: they are dealt out in order (`shard_keys`).
            None for self-attention, where keys lie with their queries.
        heads: Query heads and key heads of a rank's q and k, (Hq, Hkv): any numbers of which the second
            divides the first.
        strategy: "exchange" (only keys that somebody may see cross the network), "ring" (all of them, from
            neighbour to neighbour), "ulysses" (each rank gets all rows of some heads), "hybrid(u, r)"
            (Ulysses among u neighbours, an exchange between r groups of them), "hybrid(u, r, ring)", or
            "auto": what the cost model finds fastest; `explain` says why.
        batch: Batch rows of a rank's q, where those of the mask differ; also for "auto" and `explain`.
        method: How rows are dealt out: see `attnspan.parallel.partition.partition`.
        rows_per_chunk: Neighbouring rows that stay together; None for a good number.
        tolerance: Largest over mean work of a rank that "balanced" aims at; None for a good one.
        partition: Who owns which rows, where that is decided already: by another plan of a model whose layers
            have different masks, or in the data loader. Then nothing is dealt out, and ``method``,
            ``rows_per_chunk`` and ``tolerance`` may not be given.
        keys: Who owns which keys in cross attention, such as the ``partition`` of the encoder's plan; None to
            deal them out in order.
        head_dim: D, for "auto" and `explain` alone.
        dtype: Of q, k and v, for "auto" and `explain` alone.
        machine: Rates and bandwidths, for the same; None for measured ones where there are any.
        dtensor_rows: What rows of a DTensor are: "natural", in their own order, which is right only where the
            partition keeps it (``method="contiguous"``), or "plan", as ``cp.shard`` gives them. They look the
            same, so it must be said.
        check: Compare the plan between the ranks, a small all-gather; the others may hang if a rank skips it.

    Attributes:
        plan: Who attends to what.
        partition: Who owns which rows.
        strategy: The strategy in use.
        rank: This rank's number within the mesh.
        rows_per_rank: n, the same on all ranks whatever the mask; the last ones may be padding.
        positions: Global row number of each local row, (n,) int64 on the mesh's device; 0 for padding.
        valid: Which local rows are no padding, (n,) bool.

    Raises:
        PlanMismatchError: Ranks were given different problems.
        ValueError: Sizes or the strategy do not fit.
        TypeError: The mask is none.

    Example:
        >>> import torch.distributed as dist
        >>> from attnspan import causal
        >>> from attnspan.torch import attention
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(init_device_mesh("cpu", (1,)), mask=causal(), q_len=9, heads=(4, 2))
        >>> x = cp.shard(torch.randn(1, 9, 6, 16), dim=1)
        >>> q, k, v = x.split([2, 2, 2], dim=2)
        >>> attention(x[:, :, :4], x[:, :, 4:], x[:, :, 4:], mask=cp, layout="bshd").shape
        torch.Size([1, 9, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        mask: Mask | Spans | None = None,
        q_len: int,
        k_len: int | None = None,
        heads: tuple[int, int],
        strategy: str | Strategy = "auto",
        batch: int = 1,
        method: Method = "balanced",
        rows_per_chunk: int | None = None,
        tolerance: float | None = None,
        partition: Partition | None = None,
        keys: Partition | None = None,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        machine: Machine | None = None,
        dtensor_rows: Literal["natural", "plan"] = "natural",
        check: bool = True,
    ) -> None:
        check_heads(heads)
        check_types(
            q_len=(q_len, int),
            k_len=(k_len, int),
            batch=(batch, int),
            head_dim=(head_dim, int),
            rows_per_chunk=(rows_per_chunk, int),
            dtype=(dtype, torch.dtype),
            machine=(machine, Machine),
            partition=(partition, Partition),
            keys=(keys, Partition),
        )
        if dtensor_rows not in ("natural", "plan"):
            raise OptionError(
                "ContextParallel: dtensor_rows",
                expected='"natural" or "plan"',
                got=repr(dtensor_rows),
                remedy="Say in which order DTensors hold their rows",
            )
        dealt = (method != "balanced") or rows_per_chunk is not None or tolerance is not None
        check_given(partition is not None and dealt, keys is not None and k_len is None)
        self._group, node_size = group_of(mesh)
        self.mesh, self._group_name, self.rank = mesh, self._group.group_name, self._group.rank()
        self.q_len, self.k_len, self.heads = q_len, q_len if k_len is None else k_len, heads
        call = Sizes(*heads, head_dim, head_dim, dtype.itemsize, batch)
        self._request = Request(
            ranks=self._group.size(),
            call=call,
            strategy=strategy,
            node_size=node_size,
            self_attention=k_len is None,
            method=method,
            rows_per_chunk=rows_per_chunk,
            tolerance=tolerance,
            machine=machine,
            rows=partition,
            keys=keys,
        )
        self._check, self.dtensor_rows = check, dtensor_rows
        self._plan(full() if mask is None else mask)

    def _plan(self, mask: Mask | Spans) -> None:
        lowered = lower(mask, self.q_len, self.k_len, self._request.call.batch, self.heads[0])
        self.plan, self.choice = make_plan(lowered, self._request)
        if self._check:
            check_agreement(self.plan, self._group, self.mesh.device_type)
        self._settle()

    def _settle(self) -> None:
        """What models and compilers read at each call: tensors and a few numbers."""
        self.partition, self.strategy = self.plan.rows, self.plan.strategy
        self.rows_per_rank = self.partition.rows_per_rank
        self.keys_per_rank, self._planes = self.plan.keys.rows_per_rank, self.plan.planes
        device = self.mesh.device_type
        local = self.plan.local(self.rank)
        data, meta = encode(replace(local, fingerprint=self.plan.fingerprint) if self._check else local)
        # A plan may be made while evaluating and serve training, which inference tensors could not.
        with torch.inference_mode(False):
            self._data = torch.from_numpy(data).to(device)
            self._meta = torch.from_numpy(meta)
            self.positions = torch.from_numpy(self.partition.positions(self.rank)).to(device)
            self.valid = torch.from_numpy(self.partition.valid(self.rank)).to(device)
        # The plan of the next step has another length: no reason to compile anything.
        torch._dynamo.maybe_mark_dynamic(self._data, 0)
        self._keeps_order = _is_natural(self.partition) and _is_natural(self.plan.keys)
        here = self.plan.heads[self.rank % self.strategy.members]
        self._members, self._heads_here, self._kv_here = self.strategy.members, here.heads, len(here.kv)

    def with_mask(
        self,
        mask: Mask | Spans,
        q_len: int | None = None,
        *,
        k_len: int | None = None,
        batch: int | None = None,
        keep_rows: bool = False,
    ) -> ContextParallel:
        """The same for another mask: that of the next step, or of other layers of the same step.

        Each step deals the rows out anew: what `shard` of one plan gave must not meet another plan, unless
        that keeps its rows.

        Args:
            mask: What each query may see.
            q_len: Rows of the whole problem, if they are others.
            k_len: Keys of the whole problem in cross attention, if they are others.
            batch: Batch rows, if they are others.
            keep_rows: Leave the rows where this plan has them, as layers with different masks need it.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.choice = None
        other.q_len = self.q_len if q_len is None else q_len
        other.k_len = self.k_len if k_len is None else k_len
        request = self._request
        if request.self_attention:
            other.k_len = other.q_len
        call = request.call if batch is None else replace(request.call, batch=batch)
        rows = self.partition if keep_rows else request.rows
        # "auto" has been decided: what it would choose may not change from step to step on some ranks only.
        other._request = replace(request, strategy=self.strategy, call=call, rows=rows)
        other._plan(mask)
        return other

    @property
    def digest(self) -> dict[str, str]:
        """Fingerprints of the plan: equal on all ranks."""
        return self.plan.digest

    def shard(self, x: Any, dim: int = 1, fill: Any = 0) -> Any:
        """This rank's rows of whole inputs.

        Args:
            x: A tensor with q_len rows along ``dim``, or a mapping of them, such as a batch of a data loader.
            dim: The dimension of the rows.
            fill: Value of padding rows; for mappings see `Partition.shard`: ids get -1, labels -100.

        Returns:
            The same with `rows_per_rank` rows.

        Raises:
            ShapeError: Another number of rows.
        """
        return self.partition.shard(x, self.rank, dim, fill)

    def shard_keys(self, x: Any, dim: int = 1, fill: Any = 0) -> Any:
        """This rank's rows of what keys are made of; `shard` itself in self-attention.

        Args:
            x: A tensor with k_len rows along ``dim``, or a mapping of them.
            dim: The dimension of the rows.
            fill: Value of padding rows.
        """
        return self.plan.keys.shard(x, self.rank, dim, fill)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole from the rows of all ranks, on every rank; an all-gather.

        Its gradient is the sum over the ranks' gradients, of which each rank takes its rows: as for
        parameters, the loss is the sum of the ranks' losses.

        Args:
            x: `rows_per_rank` rows along ``dim``.
            dim: The dimension of the rows.

        Returns:
            q_len rows along ``dim``; padding is dropped.

        Raises:
            ShapeError: Another number of rows.
        """
        return gather_rows(x, dim, self.partition, self._group)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        layout: Any = "bhsd",
        return_lse: bool = False,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """`attnspan.torch.attention` of this rank's rows to the keys of all ranks.

        Args:
            q: This rank's rows, shape (B, Hq, n, D) in layout "bhsd"; or a DTensor of them, as k and v then
                are, whose sequence is split along the plan's mesh axes and whose other axes may split batch
                rows and heads (`attnspan.parallel.dtensor`).
            k: This rank's keys, (B, Hkv, n, D); n is `keys_per_rank` in cross attention.
            v: Its values, (B, Hkv, n, Dv).
            scale: Factor of the scores; 1/sqrt(D) by default.
            layout: "bhsd", "bshd" or "thd".
            return_lse: Also return the lse of this rank's rows.
            backend: Not taken: the kernel where it runs, else framework code.
            **options: Options of `attention`: a bias, which must not be dense, and sinks are those of all
                heads; a ``dropout_seed`` is of shape (), the same on all ranks, or (B, Hq): what is dropped
                is what one rank would drop. ``q_index`` and ``k_index`` are not taken: the plan knows where
                rows are.

        Returns:
            This rank's rows of the output, and of lse. Padding rows see nothing: their output is 0.

        Raises:
            CommunicationError: A rank did not answer.
            ValueError: Shapes, devices or options do not fit.
            TypeError: Element types do not fit.
            NotImplementedError: A second derivative or a forward-mode one is asked of it.
        """
        given, front = Given(**options), _Front(self)
        refuse(q_index=given.q_index, k_index=given.k_index, backend=backend)
        if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
            check_layout(front, layout, q, k, v)
            places = cast(Places, front.split(q, k, v, given, layout))
            self._check_order()
            wanted = {"scale": scale, "layout": layout, "return_lse": return_lse}
            return attend(self, places, q, k, v, given, **wanted)
        call = Call.of(front, q, k, v, given, mask=None, scale=scale, layout=layout)
        out, lse, *_ = sharded_forward(
            *(call.q, call.k, call.v, self._data, self._meta, self._group_name, self._members),
            *(self._heads_here, self._kv_here, call.scale, *_arguments(call)),
        )
        return from_bhsd(out, lse, layout, return_lse)

    def explain(self) -> Explanation:
        """What the plan does, and why; ``print`` it. Bytes go by ``head_dim``, ``dtype`` and ``batch``."""
        return explain(self.plan, self._request, self.choice)

    def _check_order(self) -> None:
        if self.dtensor_rows == "natural" and not self._keeps_order:
            raise OptionError(
                "DTensors with context parallelism",
                expected="rows in the plan's order, which must be said as they look like rows in any other",
                got='a plan made with dtensor_rows="natural", whose partition changes the order',
                remedy='Make them by DTensor.from_local(cp.shard(x), ...) and pass dtensor_rows="plan", or '
                'plan with method="contiguous"',
            )

    def _check_local(self, given: Given, q: Tensor, k: Tensor) -> None:
        for name, x, count, rows in (
            ("q", q, self.heads[0], self.rows_per_rank),
            ("k", k, self.heads[1], self.keys_per_rank),
        ):
            what, fits = f"{name} with context parallelism", x.shape[1] == count and x.shape[2] == rows
            wanted = "{} heads and this rank's {} rows, padding included"
            remedy = "Shard the model's inputs by cp.shard(...), and give ContextParallel its heads"
            if not fits:
                got = f"shape {tuple(x.shape)} in layout bhsd"
                expect(fits, what, wanted, got, remedy, count, rows, error=ShapeError)
        what, wanted = "q with context parallelism", "{} batch rows, as the mask has"
        fits, remedy = self._planes in (1, q.shape[0]), "Plan with the mask of this batch"
        expect(fits, what, wanted, q.shape[0], remedy, self._planes, error=ShapeError)
        got = "a dense bias, which holds a value for each pair of rows of all ranks"
        what, wanted = "bias with context parallelism", "alibi(...) or relative(...)"
        remedy = "Use a bias by position, or fold what is visible into the mask"
        expect(not isinstance(given.bias, Tensor | DenseBias), what, wanted, got, remedy)

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        """The plan itself: it is not changed, and a copy of a model works with the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "pickling a ContextParallel: expected something without a process group, got one. "
            "Send its `partition`, and make the plan where it is used."
        )

    def __repr__(self) -> str:
        return (
            f"ContextParallel({self.strategy.name} on {self.strategy.ranks} ranks, q_len={self.q_len}, "
            f"k_len={self.k_len}, heads={self.heads}, rows_per_rank={self.rows_per_rank})"
        )


class _Front(TorchFront):
    """This rank's part of a call: the plan has the mask, and knows where rows are."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.mesh = cp, cp.mesh

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        self.cp._check_local(given, q, k)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[None, Given]:  # type: ignore[override]
        del mask, q, k
        return None, given


def _arguments(call: Call) -> tuple[Any, ...]:
    """The options as `sharded_forward` takes them, with a seed for each batch row and head."""
    if (o := call.options) is None:
        return ()
    seed = o.dropout_seed
    if seed is not None and seed.dim() == 0:
        seed = dropout_seeds(seed, call.q.shape[0], call.q.shape[1])
    return o.softcap, o.bias, o.bias_kind, o.sinks, o.dropout_p, seed


def _is_natural(partition: Partition) -> bool:
    """Do the ranks hold the rows in their own order, one after the other?"""
    rows = partition.rows.reshape(-1)
    return bool((rows[: partition.q_len] == np.arange(partition.q_len)).all())
