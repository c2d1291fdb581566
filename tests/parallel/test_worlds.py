"""Worlds of ranks fail a test where a rank raises, dies or hangs, and the next test has a new one."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from worlds import Died, RankError, World, ranks, world


def add_ranks(more: float = 0.0) -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return float(total) + more


@ranks(2)
def compare(number: int) -> None:
    assert dist.get_rank() == number, "not here"


def test_an_error_of_one_rank_is_shown_and_the_next_body_has_a_new_world() -> None:
    before, more = world(2), 0.5
    assert before.run(lambda: add_ranks(more)) == before.run(add_ranks, more) == [1.5, 1.5]
    pattern = r"compare\nrank 1 of 2 raised: Traceback(.|\n)*AssertionError: not here\nassert 1 == 0"
    with pytest.raises(RankError, match=pattern) as caught:
        compare(0)
    assert "rank 0" not in str(caught.value)
    assert not before.alive
    assert world(2).run(add_ranks) == [1.0, 1.0]


def test_a_rank_that_dies_is_an_error_unless_it_was_to() -> None:
    def die() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            dist.barrier()

    with pytest.raises(RankError, match=r"rank 0 of 2 died: Died\(exitcode=-9\)"):
        world(2).run(die)
    assert ranks(2, may_die=(0,))(die)() == [Died(-9), None]


def test_a_rank_that_hangs_is_ended_in_time() -> None:
    one = World(2)
    one.run(add_ranks)
    with pytest.raises(RankError, match="rank 1 of 2 silent: did not answer in time"):
        one.call(lambda: time.sleep(1000 * dist.get_rank()), seconds=0.5)
    assert not one.alive
