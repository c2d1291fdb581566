"""Combinations of features: distinct, covering, cut down to the smallest; attnspan's own pass."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from covering import covering as rows_of
from covering import everything

from attnspan_lab.doctor.torch import matrix
from attnspan_lab.doctor.torch.matrix import all_cells, covering, smallest
from attnspan_lab.zoo.step import differences, in_float64

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from _features import ATTENTIONS, FACTORS, Cell, Example, run_cells

pytestmark = pytest.mark.filterwarnings("ignore")


def test_no_two_cells_are_the_same_program() -> None:
    cells = all_cells(Cell, FACTORS)
    assert len(set(cells)) == len(cells) == 117

    def program(cell: Cell) -> tuple[str, ...]:
        """What is wrapped around a block and around the model, from the inside out."""
        block = [] if cell.checkpoint == "none" else [f"checkpoint {cell.checkpoint}"]
        whole = ["compile"] if cell.compile == "whole" else []
        if cell.compile == "block":
            block = [*block, "compile"] if cell.order == "inside" else ["compile", *block]
        elif cell.compile == "whole" and cell.order == "around":
            block, whole = [], [*whole, *block]
        return cell.mask, cell.ranks, *block, "|", *whole

    assert len({program(x) for x in cells}) == len(cells)


def test_a_few_cells_hold_every_pair_of_values() -> None:
    cells = all_cells(Cell, FACTORS)

    def pairs(some: list[Cell]) -> set[tuple[object, ...]]:
        return {x for cell in some for x in combinations(vars(cell).items(), 2)}

    few = covering(cells)
    assert len(few) < 20
    assert pairs(few) == pairs(cells)


@pytest.mark.parametrize(
    "guilty",
    [
        Cell(compile="whole"),
        matrix.Cell(compile="block", checkpoint="full"),
        Cell(mask="spans", compile="whole", checkpoint="selective", order="around"),
        Cell(mask="function", ranks="context"),
    ],
    ids=str,
)
def test_the_smallest_failing_combination_is_found(guilty: matrix.Cell) -> None:
    wanted = {k: v for k, v in vars(guilty).items() if v != vars(type(guilty)())[k]}
    asked: list[matrix.Cell] = []

    def fails(cell: matrix.Cell) -> bool:
        asked.append(cell)
        return all(vars(cell)[k] == v for k, v in wanted.items())

    more = {"compile": "whole", "checkpoint": "full", "order": "around", "ranks": "data"}
    first = replace(guilty, **{k: v for k, v in more.items() if k in vars(guilty) and k not in wanted})
    assert smallest(first, fails) == guilty
    assert len(asked) < 20


@pytest.mark.parametrize("mask", ATTENTIONS["attnspan"])
def test_the_attention_that_is_written_out_is_the_reference(mask: str) -> None:
    """The reference of all cells is not attnspan's, and agrees with it."""
    exact, found = Example("written out", mask), Example("attnspan", mask)
    exact.model.double()
    with in_float64():
        want = exact.outcome(exact.model, 0)
    assert max(differences(found.outcome(found.model, 0), want)) < 1e-6
    if mask != "causal":
        assert max(differences(found.outcome(found.model, 1), want)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_attnspan_passes(ranks: str) -> None:
    if ranks == "two" and not everything():
        pytest.skip("the long run")
    cells = all_cells(Cell, FACTORS | {"ranks": ("one",) if ranks == "one" else ("data", "context")})
    if not everything():  # tests/torch/test_matrix.py has the pairs.
        cells = [cells[i] for i in rows_of([list(vars(cell).values()) for cell in cells], 1)]
    found = dict(run_cells(cells))
    assert {cell: what for cell, what in found.items() if what} == {}


def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex has no backward pass on CPUs; a kernel that runs too often is seen."""
    ((_, what),) = run_cells([Cell()], "flex")
    assert what.startswith("NotImplementedError: FlexAttention does not support backward on CPU")
    monkeypatch.setattr(Example, "__init__", _with_one_more_call)
    ((_, what),) = run_cells([Cell()])
    assert what == "the kernel ran 2 times, not 3"


_init = Example.__init__


def _with_one_more_call(example: Example, kind: str, mask: str, ranks: str = "one") -> None:
    _init(example, kind, mask, ranks)
    example.kernel_calls = 3 if kind == "attnspan" else 0
