"""Training over ranks: a loss that can reach 0 reaches it, and one whose ids lie elsewhere does not."""

import functools

import pytest
from copying import Run, train
from worlds import world

#: Below it, nothing is left to learn; above the other, tokens are still being guessed.
LEARNED, STALLED = 1e-3, 0.05
#: How far losses may lie apart: in the first steps by few roundings, which then grow with each step.
EARLY, ALIKE_EARLY, ALIKE = 20, 1e-5, 1e-2


@functools.cache
def losses(ranks: int, run: Run) -> list[float]:
    """The loss of each step; all ranks must have seen the same one."""
    first, *others = world(ranks).run(train, run)
    assert all(other == first for other in others)
    return first


def end(curve: list[float]) -> float:
    """What the loss has come to: the mean of the last steps."""
    return sum(curve[-10:]) / 10


@pytest.mark.long  # Each step's gradients are those of tests/parallel/test_parity.py.
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "exchange"), (4, "exchange"), (2, "ring"), (4, "hybrid(2, 2)")]
)
def test_ranks_learn_what_one_process_learns(ranks: int, strategy: str) -> None:
    alone, together = losses(1, Run()), losses(ranks, Run(strategy))
    assert end(alone) < LEARNED
    assert end(together) < LEARNED
    assert together[:EARLY] == pytest.approx(alone[:EARLY], rel=ALIKE_EARLY)
    assert together == pytest.approx(alone, rel=ALIKE)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ids_that_lie_as_in_another_layout_stall(ranks: int) -> None:
    assert end(losses(ranks, Run("exchange", misplaced=True))) > STALLED
