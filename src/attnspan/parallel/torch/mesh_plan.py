"""A plan on the ranks of a mesh: a mask for `attnspan.torch.attention`, and a pytree of tensors."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.call import Call, check_layout
from attnspan.call.options import Given, dense_bias
from attnspan.errors import ShapeError, expect
from attnspan.parallel.errors import PlanMismatchError
from attnspan.parallel.local import LocalPlan
from attnspan.parallel.plan import Plan
from attnspan.parallel.rows import Evidence, Marks, check_evidence
from attnspan.parallel.strategy import Strategy, split_heads
from attnspan.torch import compat
from attnspan.torch._front import TorchFront, from_bhsd
from attnspan.torch._options import dropout_seeds
from attnspan.torch._unplanned import Held, remember
from attnspan.torch.compat import pytree
from attnspan.torch.dtensor import Places, ShardedMask, is_dtensor

from .agreement import moved
from .comm import Ranks
from .dtensor import attend
from .groups import group_of
from .ops import backend_for_parts, sharded_attention

__all__ = ["Frame", "MeshPlan", "on_mesh"]

_SHARD = "Shard the model's inputs by layout.shard(...), and plan with its heads"


class Frame(NamedTuple):
    """Static part of a plan, for which a program is compiled; equal for all steps of one layout's sizes.

    Attributes:
        mesh: The ranks.
        group: Name of the process group of all of them.
        strategy: How they share the work.
        heads: (Hq, Hkv) of a rank's q and k.
        heads_here: The same while this rank attends.
        q_len, k_len: Rows and keys of the whole problem.
        rows_per_rank, keys_per_rank: Those of a rank, padding included.
        planes: Batch elements of the mask.
        ordered: Whether DTensors hold rows in the plan's order.
    """

    mesh: DeviceMesh
    group: str
    strategy: Strategy
    heads: tuple[int, int]
    heads_here: tuple[int, int]
    q_len: int
    k_len: int
    rows_per_rank: int
    keys_per_rank: int
    planes: int
    ordered: bool


class MeshPlan(ShardedMask):
    """One rank's plan as tensors: what `Plan.on` and `LocalPlan.on` return, a ``mask`` for `attention`.

    A pytree: pipeline stages, activation checkpointing and export carry it. The next step's plan is other
    data for the same program. Losses are sums over ranks: each rank's local loss, divided by the *global*
    number of tokens, is its part, and the gradient of a parameter that all ranks have is the sum of what they
    find.

    Attributes:
        frame: What programs are compiled for.
        data: int32 (m,), the plan.
        numbers: int64, on the CPU: its sizes.
        q_index: int64 (L, n), number of each local row in the whole sequence; -1 for padding.

    Example:
        >>> import torch.distributed as dist
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> from attnspan.torch import attention
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        >>> layout = Layout.of(causal(), q_len=9, ranks=1)
        >>> rows = layout.shard({"x": torch.randn(1, 9, 6, 16)}, rank=0)
        >>> plan = layout.plan(heads=(4, 2)).on(init_device_mesh("cpu", (1,)), rows=rows)
        >>> q, k, v = rows["x"].split([4, 1, 1], dim=2)
        >>> attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), mask=plan, layout="bshd").shape
        torch.Size([1, 9, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(self, frame: Frame, data: Any, numbers: Any, q_index: Any) -> None:
        self.frame, self.data, self.numbers, self.q_index = frame, data, numbers, q_index

    @classmethod
    def of(
        cls,
        plan: LocalPlan,
        mesh: DeviceMesh,
        *,
        rows: Evidence = None,
        check: bool = True,
        dtensor_rows: Literal["natural", "plan"] = "natural",
    ) -> MeshPlan:
        """Put a rank's plan on a mesh. Nothing waits for a device.

        Args:
            plan: This rank's.
            mesh: The ranks, of one dimension, or of two (nodes, ranks of a node).
            rows: The batch that the plan is used with, as `Layout.shard` gave it, its ``marks`` or its
                ``"q_index"`` on the host: they must be this rank's, of the plan's layout. "unchecked"
                compares nothing.
            check: Compare the plans, calls and values of options of all ranks, by small all-gathers that are
                read one step late; with gloo before the first exchange of each call.
            dtensor_rows: What rows of a DTensor are: "natural", in their own order, which is right only where
                the layout keeps it (``method="contiguous"``), or "plan", as `Layout.shard` gives them. They
                look the same, so it must be said.

        Raises:
            PlanMismatchError: ``rows`` are another layout's or another rank's; or the ranks' plans or calls
                of an earlier step differed, on all ranks.
            OptionError, DtypeError, ShapeError: No ``rows``, or such that say nothing of their layout; or the
                mesh does not fit the plan.
        """
        known, remedy = dtensor_rows in ("natural", "plan"), "Say in which order DTensors hold their rows"
        expect(known, "dtensor_rows", '"natural" or "plan"', repr(dtensor_rows), remedy)
        strategy = plan.strategy
        ranks = Ranks.of(mesh, strategy.members)
        group = ranks.whole
        remedy = "Make the layout for the ranks of this mesh, and take plan.local(...) of this rank in it"
        wanted, got = f"rank {plan.rank} of {strategy.ranks}", f"rank {group.rank()} of {group.size()}"
        expect((group.rank(), group.size()) == (plan.rank, strategy.ranks), "mesh", wanted, got, remedy)
        check_evidence(rows, plan.rows, Marks(plan.layout, plan.rank))
        ranks.agreement.compares = check
        if check:
            ranks.agreement.start(plan.facts, mesh.device_type)
        here = split_heads(*plan.heads, strategy.members)[plan.rank % strategy.members]
        sizes = plan.q_len, plan.k_len, plan.rows.shape[1], plan.keys_per_rank, plan.planes
        heads, ordered = (here.heads, len(here.kv)), plan.natural or dtensor_rows == "plan"
        frame = Frame(mesh, group.group_name, strategy, plan.heads, heads, *sizes, ordered)
        # A plan may be made while evaluating and serve training, which inference tensors could not.
        with torch.inference_mode(False):
            data, q_index = (moved(x, mesh.device_type) for x in (plan.data, plan.rows.astype("int64")))
            numbers = moved(plan.numbers, "cpu")
        # The plan of the next step has another length: no reason to compile anything.
        compat.mark_dynamic(data, 0)
        found = cls(frame, data, numbers, q_index)
        if strategy.ranks > 1:
            remember(found, Held(frame.rows_per_rank, frame.keys_per_rank, *frame.heads))
        return found

    @property
    def positions(self) -> Tensor:
        """Number of each local row in the whole sequence, (L, n) int64; 0 for padding."""
        return self.q_index.clamp_min(0)  # type: ignore[no-any-return]

    @property
    def valid(self) -> Tensor:
        """Mask of local rows that is true for no padding, (L, n) bool."""
        return self.q_index >= 0  # type: ignore[no-any-return]

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
        q_index: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """`attnspan.torch.attention` of this rank's rows to the keys of all ranks.

        Args:
            q: This rank's rows, shape (B, Hq, n, D) in layout "bhsd"; or a DTensor of them, as k and v then
                are, whose sequence is split along the plan's mesh axes and whose other axes may split batch
                rows and heads (`attnspan.parallel.torch.dtensor`).
            k: This rank's keys, (B, Hkv, n, D); n is `keys_per_rank` in cross attention.
            v: Its values, (B, Hkv, n, Dv).
            scale, layout, return_lse: As of `attnspan.torch.attention`.
            backend: As of `attnspan.torch.attention`, the same on all ranks; "vendor" takes no plan.
            q_index: ``rows["q_index"]`` of `Layout.shard`: the rows that q holds, (n,) or (L | B, n). If they
                are another layout's it raises, or, on devices and in compiled code, the output is NaN.
            **options: Options of `attention`: a bias, which must not be dense, and sinks are those of all
                heads; a ``dropout_seed`` is of shape (), the same on all ranks, or (B, Hq): what is dropped
                is what one rank would drop. ``k_index`` is not taken: the plan knows where keys are.

        Returns:
            This rank's rows of the output, and of lse. Padding rows see nothing: their output is 0.

        Raises:
            PlanMismatchError: The rows or the ranks' plans do not fit.
            CommunicationError: A rank did not answer.
            ValueError: Shapes, devices or options do not fit.
            TypeError: Element types do not fit.
            NotImplementedError: A second derivative or a forward-mode one is asked of it.
        """
        given, front = Given(**options), _Front(self)
        what, got, remedy = "k_index with context parallelism", given.k_index, "Leave it out: the plan knows"
        expect(got is None, what, "None", type(got).__name__, f"{remedy} where keys are")
        asked: dict[str, Any] = {"scale": scale, "layout": layout}
        if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
            check_layout(front, layout, q, k, v)
            places = cast(Places, front.split(q, k, v, given, layout))
            remedy = "Make them by DTensor.from_local(layout.shard(x, rank), ...) and pass "
            remedy += "dtensor_rows='plan' to plan.on(...), or use a layout with method='contiguous'"
            what, wanted = "DTensors with context parallelism", "rows in the plan's order, which must be said"
            expect(self.frame.ordered, what, wanted, "a plan whose layout changes the order", remedy)
            found = attend(self, places, q, k, v, given, return_lse=return_lse, backend=backend, **asked)
            return self._marked(found, q_index)
        call = Call.of(front, q, k, v, given, mask=None, **asked)
        frame = self.frame
        chosen = backend_for_parts(call.q, call.k, call.v, frame.k_len, backend)
        out, lse, *_ = sharded_attention(
            *(call.q, call.k, call.v, self.data, self.numbers, frame.group, frame.strategy.members),
            *(*frame.heads_here, chosen, call.scale, *_arguments(call)),
        )
        return self._marked(from_bhsd(out, lse, layout, return_lse), q_index)

    def _marked(self, found: Any, q_index: Any) -> Any:
        """The results, if q's rows are those of the plan; else NaN, or an error where the host knows."""
        if q_index is None:
            return found
        mine = self.q_index
        index = q_index.to_local() if is_dtensor(q_index) else torch.as_tensor(q_index, device=mine.device)
        what, wanted = "q_index with context parallelism", "the rows of the plan's layout"
        fits = index.ndim in (1, 2) and index.shape[-1] == mine.shape[1]
        fits = fits and (index.ndim == 1 or mine.shape[0] in (1, index.shape[0]))
        expect(fits, what, wanted + ", {}", index.shape, _REMEDY, mine.shape, error=ShapeError)
        same = (index == mine).all()
        if same.is_cpu and not torch.compiler.is_compiling():
            if not same:
                raise PlanMismatchError(what, expected=wanted, got="others", remedy=_REMEDY)
            return found
        return pytree.tree_map(lambda x: torch.where(same, x, torch.nan), found)

    def _check_rows_and_heads(self, given: Given, q: Tensor, k: Tensor) -> None:
        frame, at = self.frame, "{} with context parallelism".format
        sizes = zip("qk", (q, k), frame.heads, (frame.rows_per_rank, frame.keys_per_rank), strict=True)
        for name, x, heads, rows in sizes:
            wanted = "{} heads and this rank's {} rows, padding included"
            if x.shape[1] != heads or x.shape[2] != rows:
                got = f"shape {tuple(x.shape)} in layout bhsd"
                expect(False, at(name), wanted, got, _SHARD, heads, rows, error=ShapeError)
        fits, remedy = frame.planes in (1, q.shape[0]), "Plan with the mask and layout of this batch"
        wanted = "{} batch elements, as the plan has"
        expect(fits, at("q"), wanted, q.shape[0], remedy, frame.planes, error=ShapeError)
        got = "a dense bias, which holds a value for each pair of rows of all ranks"
        remedy = "Use a bias by position, or fold what is visible into the mask"
        by_position = not isinstance(given.bias, Tensor | dense_bias)
        expect(by_position, at("bias"), "alibi(...) or relative(...)", got, remedy)

    def __deepcopy__(self, memo: Any) -> MeshPlan:
        """The plan itself: it is not changed, and a copy of a model works with the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "pickling a MeshPlan: expected something without a process group, got one. "
            "Send the Plan or its local(rank), and call on(mesh) where it is used."
        )

    def __repr__(self) -> str:
        frame = self.frame
        sizes = f"q_len={frame.q_len}, k_len={frame.k_len}, heads={frame.heads}"
        ranks = f"{frame.strategy.name} on {frame.strategy.ranks} ranks"
        return f"MeshPlan({ranks}, {sizes}, rows_per_rank={frame.rows_per_rank})"


_REMEDY = "Use the plan with the batch of the layout that made it"


class _Front(TorchFront):
    """This rank's part of a call: the plan has the mask, and knows where rows are."""

    def __init__(self, plan: MeshPlan) -> None:
        self.plan, self.mesh = plan, plan.frame.mesh

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        self.plan._check_rows_and_heads(given, q, k)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[None, Given]:  # type: ignore[override]
        del mask, q, k
        return None, given


def _arguments(call: Call) -> tuple[Any, ...]:
    """The options as `sharded_attention` takes them, with a seed for each batch element and head."""
    if (o := call.options) is None:
        return ()
    seed = o.dropout_seed
    if seed is not None and seed.dim() == 0:
        seed = dropout_seeds(seed, call.q.shape[0], call.q.shape[1])
    return o.softcap, o.bias, o.bias_kind, o.sinks, o.dropout_p, seed


_TENSORS = ("data", "numbers", "q_index")
pytree.register_pytree_node(
    MeshPlan,
    lambda plan: ([getattr(plan, name) for name in _TENSORS], plan.frame),
    lambda children, frame: MeshPlan(frame, *children),
    flatten_with_keys_fn=lambda plan: (
        [(pytree.GetAttrKey(name), getattr(plan, name)) for name in _TENSORS],
        plan.frame,
    ),
)


def on_mesh(plan: Plan, mesh: DeviceMesh, **options: Any) -> MeshPlan:
    """Put this rank's part of a plan on a mesh; see `attnspan.parallel.Plan.on`."""
    return MeshPlan.of(plan.local(group_of(mesh).rank()), mesh, **options)
