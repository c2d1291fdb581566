"""What goes wrong is said on every rank, before anything is exchanged or else within the timeout."""

import re
import time

import pytest
from worlds import Died, JobError, World, world

DISAGREEMENTS = {
    "ids": "the same mask on every rank",
    "mask": "the same mask on every rank",
    "strategy": "the same strategy and heads on every rank",
    "layout": "the same layout on every rank",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_other_plans_on_one_rank_are_an_error_on_all_before_any_exchange(what: str) -> None:
    # gloo's collectives are driven by the host, so that the answer is there before the first one; engines
    # abort the process, or hang, where sizes do not meet.
    for name, text, exchanged in world(3).run("fault_jobs:disagree", what):
        assert name == "PlanMismatchError", text
        assert DISAGREEMENTS[what] in text
        assert "got another one on rank 2 than on rank 0" in text
        assert exchanged == 0
    assert {name for name, _, _ in world(3).run("fault_jobs:agree")} == {""}, "and the ranks still work"


def test_a_mask_that_differs_at_a_later_step_is_an_error_on_all() -> None:
    for name, text, exchanged in world(3).run("fault_jobs:disagree_later"):
        assert name == "PlanMismatchError", text
        assert "another one on ranks 1, 2 than on rank 0" in text
        assert exchanged == 0


CALLS = {
    **dict.fromkeys(["scale", "softcap", "sinks", "dropout_p"], "options"),
    "gradients_of_lse": "call",
    **{name: name for name in ("batch rows", "head dims", "dtype", "backend")},
}


@pytest.mark.parametrize("what", CALLS)
def test_another_call_on_one_rank_is_an_error_on_all_before_it_exchanges_anything(what: str) -> None:
    # Of other sizes gloo would abort the process.
    for name, text, exchanged in world(3).run("fault_jobs:call_otherwise", what, "exchange"):
        assert name == "PlanMismatchError", text
        assert (
            f"expected the same {CALLS[what]} on every rank, got another one on rank 2 than on rank 0" in text
        )
        assert what == "gradients_of_lse" or exchanged == 0
    assert {name for name, _, _ in world(3).run("fault_jobs:agree")} == {""}, "and the ranks still work"


def test_where_the_host_does_not_wait_another_call_is_an_error_one_step_late() -> None:
    for name, text, _ in world(3).run("fault_jobs:call_otherwise", "scale", "exchange", False):
        assert name == "PlanMismatchError", text
        assert "expected the same sequence of calls on every rank, got another one on rank 2" in text


@pytest.mark.parametrize("what", ["gather", "sum_gradients", "ShardedCache"])
def test_other_sizes_on_one_rank_are_an_error_on_all(what: str) -> None:
    for name, text, _ in world(3).run("fault_jobs:gather_otherwise", what):
        assert name == "PlanMismatchError", text
        assert "expected the same shape on every rank, got another one on rank 2 than on rank 0" in text


def test_nothing_is_compared_unless_asked() -> None:
    with pytest.raises(JobError, match="the same sequence of calls on every rank"):
        world(2).run("fault_jobs:disagree_unchecked")


@pytest.mark.covering(1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_killed_rank_makes_the_others_fail_with_what_to_do(strategy: str, phase: str) -> None:
    start = time.monotonic()
    ranks = World(3, group_seconds=20)
    results = ranks.run("fault_jobs:die_in_mid_step", strategy, phase, may_die=(1,))
    assert results[1] == Died(-9)
    for rank in (0, 2):
        name, text, _ = results[rank]
        assert name == "CommunicationError", text
        assert f"rank {rank} of 3" in text
        assert "expected an answer from every rank" in text
        assert "resume from a checkpoint" in text
    assert time.monotonic() - start < 60


def test_a_rank_that_hangs_makes_the_others_fail_in_the_time_of_the_group() -> None:
    ranks = World(3, group_seconds=3)
    ranks.run("world_jobs:add_ranks")
    start = time.monotonic()
    # The stopped rank never answers: it is ended from outside once the others have.
    results = ranks.run("fault_jobs:hang_in_mid_step", seconds=60, may_hang=(1,))
    assert time.monotonic() - start < 40
    for rank in (0, 2):
        name, text, _ = results[rank]
        assert name == "CommunicationError", text
        assert "expected an answer from every rank" in text


MISFITS = {
    "shard": ("ShapeError", "37 rows"),
    "gather": ("ShapeError", r"Layout.gather: x: expected this rank's \d+ rows"),
    "another rank's plan": ("OptionError", r"mesh: expected rank \d of 3, got rank \d of 3"),
    "another mesh": ("OptionError", r"mesh: expected rank 0 of 2, got rank \d of 3"),
    "second derivative": ("NotImplementedError", "second derivatives"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_misfit_is_one_clear_error_on_every_rank(what: str) -> None:
    kind, message = MISFITS[what]
    for name, text, exchanged in world(3).run("fault_jobs:misfit", what, seconds=30):
        assert name, f"{what} was taken"
        assert re.fullmatch(kind, name), f"{name}: {text}"
        assert re.search(message, text, re.DOTALL), text
        assert what == "second derivative" or exchanged == 0
