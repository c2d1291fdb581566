"""`PlanStack` holds the plans of a pipeline's microbatches. `torch.distributed.pipelining` splits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspan.errors import DtypeError, OptionError, ShapeError, expect
from attnspan.torch import compat
from attnspan.torch.compat import pytree

from .mesh_plan import TENSORS, Frame, MeshPlan, OnMesh


class PlanStack(OnMesh):
    """The plans of a step's microbatches, which the schedules of `torch.distributed.pipelining` split.

    Pass the stack to ``schedule.step`` as a keyword argument, without a chunk spec. Schedules split each
    tensor of the arguments along dim 0, so that every microbatch gets its own `MeshPlan`. The backward pass
    of a microbatch uses the plan of its forward pass, whatever the order of the schedule.

    Attributes:
        frame: The static part, which all plans share.
        data: int32 (M, m), the plans of M microbatches, padded to the longest plan.
        numbers: int64 (M, l), on the CPU, sizes of the plans.
        q_index: int64 (M, L, n), index of each local row in the whole sequence, -1 for padding.

    Example:
        >>> import torch.distributed as dist
        >>> from attnspan import causal, window
        >>> from attnspan.parallel import Layout
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        >>> mesh, layout = init_device_mesh("cpu", (1,)), Layout.of(causal(), q_len=9, ranks=1)
        >>> masks = causal(), causal() & window(3)
        >>> plans = [layout.plan(x, heads=(4, 2)).on(mesh, rows=layout.shard({}, 0)) for x in masks]
        >>> args, kwargs = split_args_kwargs_into_chunks((), {"mask": PlanStack.of(plans)}, chunks=2)
        >>> [type(chunk["mask"]).__name__ for chunk in kwargs]
        ['MeshPlan', 'MeshPlan']
        >>> dist.destroy_process_group()
    """

    def __init__(self, frame: Frame, data: Any, numbers: Any, q_index: Any) -> None:
        self.frame, self.data, self.numbers, self.q_index = frame, data, numbers, q_index

    @classmethod
    def of(cls, plans: Sequence[MeshPlan]) -> PlanStack:
        """Stack the plans of a step's microbatches, in the order of the microbatches.

        Args:
            plans: One plan for each microbatch, from `Plan.on`. All plans need the same mesh, strategy,
                heads, lengths and number of batch elements. Their masks and layouts may differ.

        Raises:
            DtypeError: An element is not a `MeshPlan`.
            OptionError: There is no plan, or the plans differ in one of these sizes.
            ShapeError: Some plans have a layout for each batch element, and others do not.
        """
        remedy = "Stack the results of plan.on(mesh, rows=rows), one for each microbatch"
        for x in plans:
            is_plan = isinstance(x, MeshPlan)
            expect(is_plan, "plans", "MeshPlans", type(x).__name__, remedy, error=DtypeError)
        expect(len(plans) > 0, "plans", "one plan for each microbatch", "none", remedy)
        for i, x in enumerate(plans):
            _check_alike(i, x, plans[0])
        # Schedules split tensors. Bytes after the end of a plan are never read.
        longest = max(x.data.shape[0] for x in plans)
        with torch.inference_mode(False):  # As in `MeshPlan.of`.
            data = torch.stack([pad(x.data, (0, longest - x.data.shape[0])) for x in plans])
            numbers, q_index = (torch.stack([getattr(x, name) for x in plans]) for name in TENSORS[1:])
        # Some layouts of a step keep the original order by chance.
        frame = plans[0].frame._replace(ordered=all(x.frame.ordered for x in plans))
        found = cls(frame, data, numbers, q_index)
        found.warn_without()
        return found

    def attention(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an OptionError, because a call needs the plan of one microbatch."""
        self._refuse_whole("mask")

    def rolled(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an OptionError, because a roll needs the plan of one microbatch."""
        self._refuse_whole("roll: plan")

    def _refuse_whole(self, what: str) -> NoReturn:
        raise OptionError(
            what,
            expected="the plan of one microbatch",
            got=f"a stack of {len(self.data)} plans",
            remedy="Pass the stack to schedule.step(...) of a schedule with one microbatch for each plan",
        )

    def __repr__(self) -> str:
        strategy = self.frame.strategy
        return f"PlanStack({len(self.data)} plans, {strategy.name} on {strategy.ranks} ranks)"


def _check_alike(i: int, plan: MeshPlan, first: MeshPlan) -> None:
    same = "Plan all microbatches with the same sizes and strategy, and put the plans on the same mesh"
    planes = "Give all microbatches masks for as many batch elements: & segments(ids) with ids of (B, S)"
    for name, mine, wanted in zip(Frame._fields, plan.frame, first.frame, strict=True):
        fits, remedy = mine == wanted or name == "ordered", planes if name == "planes" else same
        expect(fits, f"plans[{i}]", "{} {}, as plans[0]", f"{mine}", remedy, name, wanted)
    shapes = plan.q_index.shape, first.q_index.shape
    remedy = "Make all layouts with the same batch=, or all from masks without batch elements"
    fits, wanted = shapes[0] == shapes[1], "rows of shape {}, as plans[0]"
    expect(fits, f"plans[{i}]", wanted, tuple(shapes[0]), remedy, tuple(shapes[1]), error=ShapeError)


def _unflatten(children: Any, frame: Frame) -> PlanStack | MeshPlan:
    """Return an ordinary plan if the children hold one microbatch. Children may also be chunk specs."""
    if not all(isinstance(x, Tensor) and x.shape[:1] == (1,) for x in children):
        return PlanStack(frame, *children)
    plan = MeshPlan(frame, *(x[0] for x in children))
    # Views do not keep the mark of `MeshPlan.of`.
    compat.mark_dynamic(plan.data, 0)
    return plan


pytree.register_pytree_node(
    PlanStack, lambda stack: ([getattr(stack, name) for name in TENSORS], stack.frame), _unflatten
)
