"""Plans on the ranks of a mesh, which are masks for `attnspan.torch.attention` and pytrees of tensors."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.call import Call, check_layout
from attnspan.call.options import Given
from attnspan.errors import ShapeError, expect
from attnspan.parallel.errors import PlanMismatchError
from attnspan.parallel.local import LocalPlan
from attnspan.parallel.plan import Plan
from attnspan.parallel.rows import Evidence, Marks, check_attends, check_evidence, check_options, fits_rows
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
from .ops import PLAN_OPTIONS, backend_for_parts, sharded_attention
from .roll import rolled

_SHARD = "Shard the model's inputs by layout.shard(...), and plan with its heads"


class Frame(NamedTuple):
    """Static part of a plan, for which programs are compiled. It is equal for all steps of the same sizes.

    Attributes:
        mesh: The ranks.
        group: Name of the process group of all ranks.
        strategy: Strategy of the ranks.
        heads: (Hq, Hkv) of a rank's q and k.
        heads_here: Query and key heads that this rank attends with.
        q_len, k_len: Queries and keys of the whole problem.
        rows_per_rank, keys_per_rank: Rows and keys of a rank, padding included.
        planes: Batch elements of the mask.
        ordered: Whether DTensors hold rows in the plan's order.
        shifts: Shifts of a roll. Empty for attention.
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
    shifts: tuple[int, ...]


class OnMesh(ShardedMask):
    """Plans of one rank on a mesh, as tensors."""

    frame: Frame

    @property
    def shifts(self) -> tuple[int, ...]:
        """Shifts of a plan of `Layout.plan_roll`. Empty for attention."""
        return self.frame.shifts

    def warn_without(self) -> None:
        """Warn about calls with the sizes of this plan and without it, as long as it is alive."""
        frame = self.frame
        if frame.strategy.ranks > 1 and not frame.shifts:
            remember(self, Held(frame.rows_per_rank, frame.keys_per_rank, *frame.heads))

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the plan itself, which is never changed. A copy of a model works with the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"pickling a {type(self).__name__}: expected an object without a process group, got one. "
            "Send the Plan or its local(rank), and call on(mesh) in the receiving process."
        )


class MeshPlan(OnMesh):
    """One rank's plan as tensors, a ``mask`` for `attention`. `Plan.on` and `LocalPlan.on` return it.

    A mesh plan is a pytree. Pipeline stages, activation checkpointing and export accept it. The next step's
    plan is other data for the same program. For the microbatches of a pipeline, see `PlanStack`.

    The loss must be a sum over ranks: each rank contributes its local sum, divided by the *global* number of
    tokens. The gradient of a parameter that all ranks have is the sum of the ranks' gradients.

    Attributes:
        frame: Static part, for which programs are compiled.
        data: int32 (m,), the plan.
        numbers: int64, on the CPU, sizes of the plan.
        q_index: int64 (L, n), index of each local row in the whole sequence, -1 for padding.

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
        check: bool | None = True,
        dtensor_rows: Literal["natural", "plan"] = "natural",
    ) -> MeshPlan:
        """Put a rank's plan on a mesh, without synchronizing with a device.

        Args:
            plan: This rank's plan.
            mesh: DeviceMesh of one dimension, or of two (nodes, ranks of a node).
            rows: The batch that you use the plan with, as `Layout.shard` returned it, its ``marks``, or its
                ``"q_index"`` on the host. They must belong to this rank and to the plan's layout.
                "unchecked" compares nothing.
            check: Compare the plans, calls and values of options of all ranks by small all-gathers. They are
                read one step late, or with gloo before the first exchange of each call. None leaves this to
                the plans of the same mesh.
            dtensor_rows: Order of the rows in DTensors, which cannot be detected. "natural" is the original
                order. It works only if the layout keeps this order (`Layout.is_natural`). "plan" is the order
                of `Layout.shard`.

        Raises:
            PlanMismatchError: ``rows`` belong to another layout or rank, or the plans or calls of an earlier
                step differed between ranks. The latter raises on all ranks.
            OptionError: There are no ``rows``, or the mesh does not fit the plan.
            DtypeError: ``rows`` do not identify their layout, or ``mesh`` is no DeviceMesh.
            ShapeError: ``rows`` have another length.
        """
        known, remedy = dtensor_rows in ("natural", "plan"), "Pass the order of the rows in DTensors"
        expect(known, "dtensor_rows", '"natural" or "plan"', repr(dtensor_rows), remedy)
        strategy = plan.strategy
        ranks = Ranks.of(mesh, strategy.members)
        group = ranks.whole
        remedy = "Make the layout for the ranks of this mesh, and use plan.local(rank) of this rank in it"
        wanted, got = f"rank {plan.rank} of {strategy.ranks}", f"rank {group.rank()} of {group.size()}"
        expect((group.rank(), group.size()) == (plan.rank, strategy.ranks), "mesh", wanted, got, remedy)
        check_evidence(rows, plan.rows, Marks(plan.layout, plan.rank))
        if check is not None:
            ranks.agreement.compares = check
        if check:
            ranks.agreement.start(plan.facts, mesh.device_type)
        here = split_heads(*plan.heads, strategy.members)[plan.rank % strategy.members]
        sizes = plan.q_len, plan.k_len, plan.rows.shape[1], plan.keys_per_rank, plan.planes
        heads, ordered = (here.heads, len(here.kv)), plan.natural or dtensor_rows == "plan"
        frame = Frame(mesh, group.group_name, strategy, plan.heads, heads, *sizes, ordered, plan.shifts)
        # A plan may be made during evaluation and used in training, where inference tensors would fail.
        with torch.inference_mode(False):
            data, q_index = (moved(x, mesh.device_type) for x in (plan.data, plan.rows.astype("int64")))
            numbers = moved(plan.numbers, "cpu")
        # The next step's plan has another length, which must not recompile.
        compat.mark_dynamic(data, 0)
        found = cls(frame, data, numbers, q_index)
        found.warn_without()
        return found

    @property
    def positions(self) -> Tensor:
        """Index of each local row in the whole sequence, int64 (L, n), 0 for padding."""
        return self.q_index.clamp_min(0)  # type: ignore[no-any-return]

    @property
    def valid(self) -> Tensor:
        """Mask of local rows, bool (L, n): True for tokens, False for padding."""
        return self.q_index >= 0  # type: ignore[no-any-return]

    def rolled(self, x: Tensor, dim: int = 1, fill: complex = 0) -> tuple[Tensor, ...]:
        """Roll this rank's rows by each of the plan's shifts. See `attnspan.parallel.roll`."""
        return rolled(self, x, dim, fill)

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
        """Attend with this rank's queries to the keys of all ranks, as `attnspan.torch.attention` does.

        Args:
            q: This rank's queries, shape (B, Hq, n, D) in layout "bhsd". q, k and v may be DTensors whose
                sequence is split along the plan's mesh axes. Other mesh axes may split the batch and the
                heads (`attnspan.parallel.torch.dtensor`).
            k: This rank's keys, (B, Hkv, n, D). In cross attention n is `keys_per_rank`.
            v: This rank's values, (B, Hkv, n, Dv).
            scale, layout, return_lse: See `attnspan.torch.attention`.
            backend: See `attnspan.torch.attention`. Pass the same on all ranks. "vendor" does not support
                plans.
            q_index: ``rows["q_index"]`` of `Layout.shard`: the indices of the queries, (n,) or (L | B, n). If
                they belong to another layout, the call raises, or the output is NaN on devices and in
                compiled code.
            **options: Options of `attention`. A bias must not be dense. Bias and sinks must cover all heads.
                A ``dropout_seed`` has shape (), the same on all ranks, or (B, Hq). Dropout drops the same
                weights as on one rank. ``k_index`` raises, because the plan knows where keys are.

        Returns:
            This rank's rows of the output, and of lse with ``return_lse``. Padding attends to nothing: its
            output is 0.

        Raises:
            PlanMismatchError: The rows do not belong to the plan, or the ranks' plans or calls differ.
            CommunicationError: A rank did not answer.
            ValueError: Shapes, devices or options do not fit.
            TypeError: Dtypes do not fit.
            NotImplementedError: You asked for a second derivative or a forward-mode derivative.
        """
        given, front = Given(**options), _Front(self)
        asked: dict[str, Any] = {"scale": scale, "layout": layout}
        if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
            check_layout(front, layout, q, k, v)
            places = cast(Places, front.split(q, k, v, given, layout))
            remedy = "Make them by DTensor.from_local(layout.shard(x, rank), ...) and pass "
            remedy += "dtensor_rows='plan' to plan.on(...), or plan with Layout.contiguous(q_len, ranks)"
            what = "DTensors with context parallelism"
            wanted = "dtensor_rows='plan', or rows in original order"
            expect(self.frame.ordered, what, wanted, "a plan whose layout changes the order", remedy)
            found = attend(self, places, q, k, v, given, return_lse=return_lse, backend=backend, **asked)
            return self._marked(found, q_index)
        call = Call.of(front, q, k, v, given, mask=None, **asked)
        frame = self.frame
        chosen = backend_for_parts(call.q, call.k, call.v, frame.k_len, given.names(), backend)
        out, lse, *_ = sharded_attention(
            *(call.q, call.k, call.v, self.data, self.numbers, frame.group, frame.strategy.members),
            *(*frame.heads_here, chosen, call.scale, *_arguments(call)),
        )
        return self._marked(from_bhsd(out, lse, layout, return_lse), q_index)

    def _marked(self, found: Any, q_index: Any) -> Any:
        """Return the results if q's rows belong to the plan. Else raise, or return NaN on devices."""
        if q_index is None:
            return found
        mine = self.q_index
        index = q_index.to_local() if is_dtensor(q_index) else torch.as_tensor(q_index, device=mine.device)
        what, wanted = "q_index with context parallelism", "the rows of the plan's layout"
        expect(
            fits_rows(index, mine), what, wanted + ", {}", index.shape, _REMEDY, mine.shape, error=ShapeError
        )
        same = (index == mine).all()
        if same.is_cpu and not torch.compiler.is_compiling():
            if not same:
                raise PlanMismatchError(what, expected=wanted, got="others", remedy=_REMEDY)
            return found
        return pytree.tree_map(lambda x: torch.where(same, x, torch.nan), found)

    def _check_rows_and_heads(self, given: Given, q: Tensor, k: Tensor) -> None:
        frame, at = self.frame, "{} with context parallelism".format
        check_attends(at("mask"), frame.shifts)
        sizes = zip("qk", (q, k), frame.heads, (frame.rows_per_rank, frame.keys_per_rank), strict=True)
        for name, x, heads, rows in sizes:
            wanted = "{} heads and this rank's {} rows, padding included"
            if x.shape[1] != heads or x.shape[2] != rows:
                got = f"shape {tuple(x.shape)} in layout bhsd"
                expect(False, at(name), wanted, got, _SHARD, heads, rows, error=ShapeError)
        remedy = "Plan with the mask and layout of this batch. In a pipeline, pass PlanStack.of(plans)"
        fits = frame.planes in (1, q.shape[0])
        wanted = "{} batch elements, as the plan has"
        expect(fits, at("q"), wanted, q.shape[0], remedy, frame.planes, error=ShapeError)
        check_options(given, "with context parallelism")

    def __repr__(self) -> str:
        frame = self.frame
        kind = f"roll by {frame.shifts}" if frame.shifts else frame.strategy.name
        sizes = f"q_len={frame.q_len}, k_len={frame.k_len}, heads={frame.heads}"
        ranks = f"{kind} on {frame.strategy.ranks} ranks"
        return f"MeshPlan({ranks}, {sizes}, rows_per_rank={frame.rows_per_rank})"


_REMEDY = "Use the plan with the batch of the layout that made it"


class _Front(TorchFront):
    """This rank's part of a call. The plan has the mask and the indices of rows."""

    def __init__(self, plan: MeshPlan) -> None:
        self.plan, self.mesh = plan, plan.frame.mesh

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        self.plan._check_rows_and_heads(given, q, k)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[None, Given]:  # type: ignore[override]
        del mask, q, k
        return None, given


def _arguments(call: Call) -> tuple[Any, ...]:
    """Options as arguments of `sharded_attention`, with a seed for each batch element and head."""
    if (o := call.options) is None:
        return ()
    seed = o.dropout_seed
    if seed is not None and seed.dim() == 0:
        seed = dropout_seeds(seed, call.q.shape[0], call.q.shape[1])
    return tuple((o._asdict() | {"dropout_seed": seed})[row.name] for row in PLAN_OPTIONS)


#: Attributes of a plan that are tensors.
TENSORS = ("data", "numbers", "q_index")
pytree.register_pytree_node(
    MeshPlan,
    lambda plan: ([getattr(plan, name) for name in TENSORS], plan.frame),
    lambda children, frame: MeshPlan(frame, *children),
    flatten_with_keys_fn=lambda plan: (
        [(pytree.GetAttrKey(name), getattr(plan, name)) for name in TENSORS],
        plan.frame,
    ),
)


def on_mesh(plan: Plan, mesh: DeviceMesh, **options: Any) -> MeshPlan:
    """Put this rank's part of a plan on a mesh. See `attnspan.parallel.Plan.on`."""
    return MeshPlan.of(plan.local(group_of(mesh).rank()), mesh, **options)


def for_roll(plan: Plan, mesh: DeviceMesh, **axes: Any) -> MeshPlan:
    """Put the plan of a roll on a mesh, without a collective. See `attnspan.parallel.roll`."""
    got, remedy = ", ".join(axes), "Leave them out: the mesh has only the ranks of the layout"
    expect(not axes, "roll: mesh axes", "none for a DeviceMesh", got, remedy)
    return MeshPlan.of(plan.local(group_of(mesh).rank()), mesh, rows="unchecked", check=None)
