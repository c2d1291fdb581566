"""The ranks that tests run on: a failure of theirs must be seen, named and survived."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import Died, RankError, World, ranks, world


def add_ranks(more: float = 0.0) -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return float(total) + more


@pytest.mark.parametrize("count", [2, 3])
@ranks(lambda count: count)
def test_the_body_of_a_test_runs_on_every_rank(count: int, tmp_path: Path) -> None:
    assert dist.get_world_size() == count
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == count
    with pytest.raises(ZeroDivisionError):
        _ = 1 / (dist.get_rank() - dist.get_rank())


@pytest.mark.parametrize("add", [lambda x: add_ranks(x), add_ranks], ids=["local", "of a module"])
def test_a_function_in_a_test_gives_what_each_rank_returns(add: Callable[[float], float]) -> None:
    more = 0.5

    @ranks(2)
    def sums(*, factor: float = 2.0) -> float:
        return factor * add(more)

    assert sums() == [3.0, 3.0]
    assert sums(factor=1.0) == [1.5, 1.5]
    assert world(2).run(add, more) == [1.5, 1.5]


def assert_rank(number: int) -> None:
    assert dist.get_rank() == number, "not here"


@ranks(2)
def compare(number: int) -> None:
    assert number == 0, "another number"
    assert_rank(number)


def test_an_error_of_one_rank_is_shown_and_the_next_body_has_a_new_world() -> None:
    before = world(2)
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
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 silent: did not answer in time"):
        one.call(lambda: time.sleep(1000 * dist.get_rank()), seconds=0.5)
    assert time.monotonic() - start < 30
    assert not one.alive
