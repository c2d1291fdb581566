"""The ranks that the tests of this folder run on: a failure of theirs must be seen, named and survived."""

import os
import time

import pytest
import torch
from worlds import Died, JobError, World, world


def test_every_rank_answers_and_the_ranks_are_shared_by_jobs() -> None:
    first, second = (world(2).run("world_jobs:add_ranks", value) for value in (1.0, 2.0))
    assert [total for _, total in first] == [3.0, 3.0]
    assert [total for _, total in second] == [5.0, 5.0]
    pids = [pid for pid, _ in first]
    assert pids == [pid for pid, _ in second], "the same processes"
    assert len({os.getpid(), *pids}) == 3


def test_tensors_travel_and_each_rank_has_one_thread() -> None:
    for threads, result in world(2).run("world_jobs:square", torch.arange(3.0)):
        assert threads == 1
        assert torch.equal(result, torch.tensor([0.0, 1.0, 4.0]))


def test_an_error_of_one_rank_is_shown_and_the_next_job_has_a_new_world() -> None:
    before = world(2)
    with pytest.raises(JobError, match=r"rank 1 of 2 raised(.|\n)*ValueError: no such luck on 1"):
        before.run("world_jobs:raise_on", 1)
    assert not before.alive
    assert [total for _, total in world(2).run("world_jobs:add_ranks", 0.0)] == [1.0, 1.0]


def test_a_rank_that_dies_is_an_error_unless_it_was_to() -> None:
    with pytest.raises(JobError, match=r"rank 0 of 2 died: Died\(exitcode=-9\)"):
        world(2).run("world_jobs:die_on", 0)
    died, other = world(2).run("world_jobs:die_on", 0, may_die=(0,))
    assert died == Died(-9)
    assert other != "nothing noticed"


def test_a_rank_that_hangs_is_ended_in_time() -> None:
    one = World(2)
    one.run("world_jobs:add_ranks", 0.0)
    start = time.monotonic()
    with pytest.raises(JobError, match="rank 1 of 2 silent: did not answer in time"):
        one.run("world_jobs:hang_on", 1, seconds=0.5)
    assert time.monotonic() - start < 30
    assert not one.alive
