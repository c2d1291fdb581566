"""What goes wrong is said on every rank, before anything is exchanged or else within the timeout."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed import Placed, attend, local_inputs, place
from samples.parallel import Case, segment_ids
from worlds import Died, RankError, World, mesh, raising, ranks

from attnspan import alibi, causal, relative, segments, window
from attnspan.parallel import Layout, ShardedCache
from attnspan.parallel.torch.comm import Ranks, counted_bytes
from attnspan.parallel.torch.loss import sum_gradients, sum_over
from attnspan.torch import attention

CASE = Case(length=37)


@contextlib.contextmanager
def refused(pattern: str, before: bool = True) -> Iterator[None]:
    """An error on this rank, by default before anything is exchanged."""
    with counted_bytes() as counts, raising(pattern):
        yield
    assert not before or sum(counts.sent.values()) == 0


OTHER = "got a different one on rank 2 than on rank 0"


def is_odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def agree() -> None:
    """The ranks still work."""
    for _ in range(2):
        attend(place(CASE), CASE)


IDS = segment_ids(CASE, CASE.batch)
DISAGREEMENTS = {
    "ids": ("mask", {"mask": causal() & segments(IDS.roll(1, -1), max_runs=2)}),
    "mask": ("mask", {"mask": causal()}),
    "strategy": ("strategy and heads", {"strategy": "ring"}),
    "layout": ("layout", {"method": "zigzag", "rows_per_chunk": 3}),
    "keys": ("layout of the keys", {"keys": Layout.contiguous(37, 3)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("same", "changes"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
@ranks(3)
def test_other_plans_on_one_rank_are_an_error_on_all_before_any_exchange(
    same: str, changes: dict[str, Any]
) -> None:
    # gloo's collectives are driven by the host, so that the answer is there before the first one; engines
    # abort the process, or hang, where sizes do not meet.
    given = {"mask": causal() & segments(IDS, max_runs=2), "rows_per_chunk": 3}
    with refused(f"PlanMismatchError: .*the same {same} on every rank.*{OTHER}"):
        attend(place(CASE, **(given | changes if is_odd() else given)), CASE)
    agree()


SEED = {"dropout_seed": torch.tensor(1)}
#: What differs -> what the error names, how most ranks call, and how the last does.
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "scale": ("scale", {"scale": 0.25}, {"scale": 0.5}),
    "softcap": ("softcap", {"softcap": 0.25}, {"softcap": 0.5}),
    "sinks or none": ("sinks", {"sinks": torch.zeros(4)}, {}),
    "sinks": ("sinks", {"sinks": torch.zeros(4)}, {"sinks": torch.tensor([0.0, 0.0, 0.0, 1e-3])}),
    "sinks in another order": ("sinks", {"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0).flip(0)}),
    "slopes": ("bias", {"bias": alibi(torch.ones(4))}, {"bias": alibi(torch.ones(4) / 2)}),
    "table": ("bias", {"bias": relative(torch.zeros(4, 9))}, {"bias": relative(torch.ones(4, 9))}),
    "kind of bias": ("bias", {"bias": alibi(torch.ones(4))}, {"bias": relative(torch.ones(4, 9))}),
    "dropout_p": ("dropout_p", {"dropout_p": 0.25, **SEED}, {"dropout_p": 0.5, **SEED}),
    "dropout_seed": (
        "dropout_seed",
        {"dropout_p": 0.25, **SEED},
        {"dropout_p": 0.25, "dropout_seed": torch.tensor(2)},
    ),
    "gradients_of_lse": ("call", {"gradients": ["out"]}, {"gradients": ["out", "lse"]}),
    "batch size": ("batch size", {}, {"batch": 3}),
    "head dims": ("head dims", {}, {"dim": 24}),
    "dtype": ("dtype", {}, {"dtype": torch.bfloat16}),
    "backend": ("backend", {"backend": "cpu"}, {"backend": "math"}),
}


def call(
    gradients: Any = (), batch: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Forward, and backward where gradients of results are named."""
    placed = place(CASE, mask=causal())
    shapes = [(batch, heads, placed.mask.frame.rows_per_rank, dim) for heads in (4, 2, 2)]
    inputs = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    out, lse = attention(*inputs, mask=placed.mask, return_lse=True, **options)
    if gradients:
        results = {"out": out, "lse": lse.nan_to_num(neginf=0.0)}
        torch.stack([results[name].sum() for name in gradients]).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("what", CALLS)
@ranks(3)
def test_another_call_on_one_rank_is_an_error_on_all_before_it_exchanges_anything(what: str) -> None:
    name, common, odd = CALLS[what]
    text = f"PlanMismatchError: .*expected the same {name} on every rank, {OTHER}"
    with refused(text, before=what != "gradients_of_lse"):  # Of other sizes gloo would abort the process.
        call(**(odd if is_odd() else common))
    agree()


@contextlib.contextmanager
def answering_late() -> Iterator[None]:
    """As on devices, where collectives do not wait for the host."""
    agreement = Ranks.of(mesh(3)["cp"], CASE.members).agreement
    agreement.early = False
    try:
        yield
    finally:
        agreement.early = True


#: Those that meet no exchange of other sizes.
LATE = ["scale", "sinks", "sinks in another order", "slopes", "table", "dropout_seed"]


@pytest.mark.parametrize("what", LATE)
@ranks(3)
def test_where_the_host_does_not_wait_another_call_is_an_error_one_step_late(what: str) -> None:
    name, common, odd = CALLS[what]
    with answering_late():
        for _ in range(2):
            call(**common)
        call(**(odd if is_odd() else common))
        with refused(f"PlanMismatchError: .*expected the same {name} on every rank, {OTHER}", before=False):
            for _ in range(2):
                call(**common)
    agree()


@pytest.mark.parametrize("late", [False, True])
@ranks(3)
def test_the_plan_of_the_step_before_on_one_rank_is_an_error_on_all(late: bool) -> None:
    def attend_by(placed: Placed) -> None:
        rows = placed.mask.frame.rows_per_rank  # A ring of masks of one size: all shapes fit.
        attention(*(torch.randn(2, heads, rows, 16) for heads in (4, 2, 2)), mask=placed.mask)

    with answering_late() if late else contextlib.nullcontext():
        before = place(CASE, mask=causal() & window(5), strategy="ring")
        attend_by(before)
        now = place(CASE, mask=causal() & window(6), strategy="ring")
        text = f"PlanMismatchError: .*expected the same plan of the call on every rank, {OTHER}"
        with refused(text, before=not late):
            attend_by(before if is_odd() else now)
            for width in (7, 8):
                attend_by(place(CASE, mask=causal() & window(width), strategy="ring"))
    agree()


def gather(line: Any, wide: int) -> None:
    Layout.contiguous(12, 3).gather(torch.zeros(2, 4, wide), line)


def sum_of_gradients(line: Any, wide: int) -> None:
    sum_gradients([torch.zeros(wide, requires_grad=True)], line)


def sum_of_losses(line: Any, wide: int) -> None:
    sum_over(torch.zeros(wide), line)


def step_of_a_cache(line: Any, wide: int) -> None:
    cache = ShardedCache(line, batch=1, kv_heads=1, max_len=9, head_dim=8)
    cache.attend(*(torch.zeros(1, 1, wide, 8) for _ in range(3)))


@pytest.mark.parametrize("action", [gather, sum_of_gradients, sum_of_losses, step_of_a_cache])
@ranks(3)
def test_other_sizes_on_one_rank_are_an_error_on_all(action: Callable[[Any, int], None]) -> None:
    text = f"PlanMismatchError: .*expected the same shape on every rank, {OTHER}"
    with refused(text, before=False):
        action(mesh(3)["cp"], 3 + is_odd())


@ranks(3)
def test_ranks_at_different_places_of_a_program_find_that_out() -> None:
    placed = place(CASE, mask=causal())
    with refused("PlanMismatchError: .*the same step of the program on every rank", before=False):
        if is_odd():  # It left attention out, or gave it no plan.
            placed = place(CASE, mask=causal())
        attention(
            *(torch.randn(2, n, placed.mask.frame.rows_per_rank, 16) for n in (4, 2, 2)), mask=placed.mask
        )
    agree()


@ranks(2)
def call_unchecked() -> None:
    """Another scale on one rank; only the plan of the third call compares."""
    for check in (False, False, True):
        placed = place(CASE, mask=causal(), check=check)
        rows = [torch.randn(2, heads, placed.mask.frame.rows_per_rank, 16) for heads in (4, 2, 2)]
        attention(*rows, mask=placed.mask, scale=0.5 if is_odd() and not check else 0.25)


def test_nothing_is_compared_unless_asked() -> None:
    with pytest.raises(RankError, match="the same scale on every rank"):
        call_unchecked()


NOBODY = (
    r"expected an answer from every rank, got none from global rank 1, {}.*resume from a checkpoint".format
)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_killed_rank_makes_the_others_fail_with_what_to_do(strategy: str, phase: str) -> None:
    def die() -> None:
        case = Case(length=101, strategy=strategy, heads=(4, 4))
        placed = place(case)
        leaves, (dout, _) = local_inputs(placed, case)
        attend(placed, case)

        def die_in(now: str) -> None:
            if phase == now and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        die_in("forward")
        here = rf"rank {dist.get_rank()} of (a part of )?mesh dimension 'cp' \(global ranks 0 to 2\)"
        with refused(f"CommunicationError: .*{here}.*{NOBODY('whose process has ended')}", before=False):
            out = attention(*leaves, mask=placed.mask)
            die_in("backward")
            torch.autograd.grad(out, leaves, dout)
            # Small sends may have left before the other end died; the next step must notice.
            torch.autograd.grad(attention(*leaves, mask=placed.mask), leaves, dout)

    start = time.monotonic()
    assert World(3, group_seconds=20).call(die, may_die=(1,)) == [None, Died(-9), None]
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_rank_that_hangs_makes_the_others_fail_in_the_time_of_the_group() -> None:
    def hang() -> None:
        case = Case(length=101, heads=(4, 4))
        placed = place(case)
        leaves, _ = local_inputs(placed, case)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with refused(f"CommunicationError: .*{NOBODY('silent for 5 s')}", before=False):
            attention(*leaves, mask=placed.mask)

    three = World(3, group_seconds=3)
    three.run(dist.barrier)
    start = time.monotonic()
    # The stopped rank never answers: it is ended from outside once the others have.
    three.call(hang, seconds=60, may_hang=(1,))
    assert time.monotonic() - start < 40
