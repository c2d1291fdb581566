"""The ranks that the tests of this folder run on: a failure of theirs must be seen, named and survived."""

import time

import pytest
from worlds import Died, JobError, World, world


def test_an_error_of_one_rank_is_shown_and_the_next_job_has_a_new_world() -> None:
    before = world(2)
    with pytest.raises(JobError, match=r"rank 1 of 2 raised(.|\n)*ValueError: no such luck on 1"):
        before.run("world_jobs:raise_on", 1)
    assert not before.alive
    assert world(2).run("world_jobs:add_ranks") == [1.0, 1.0]


def test_a_rank_that_dies_is_an_error_unless_it_was_to() -> None:
    with pytest.raises(JobError, match=r"rank 0 of 2 died: Died\(exitcode=-9\)"):
        world(2).run("world_jobs:die_on", 0)
    died, other = world(2).run("world_jobs:die_on", 0, may_die=(0,))
    assert died == Died(-9)
    assert other != "nothing noticed"


def test_a_rank_that_hangs_is_ended_in_time() -> None:
    one = World(2)
    one.run("world_jobs:add_ranks")
    start = time.monotonic()
    with pytest.raises(JobError, match="rank 1 of 2 silent: did not answer in time"):
        one.run("world_jobs:hang_on", 1, seconds=0.5)
    assert time.monotonic() - start < 30
    assert not one.alive
