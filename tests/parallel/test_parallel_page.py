"""What docs/parallel.md shows runs, and its formulas are those of the code."""

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import torchrun, world

from attnspan import window
from attnspan.parallel import Layout, Strategy
from attnspan.parallel.needs import foreign, lent
from attnspan.parallel.strategy import split_heads

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
MODEL, LOOP, START = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1:4]


def loop(script: Path) -> list[float]:
    """What the loop of the page prints on a rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script))["main"]()
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def under_torchrun(script: Path, ranks: int) -> list[float]:
    script.write_text(script.read_text(encoding="utf-8") + START, encoding="utf-8")
    found = [float(x) for x in re.findall(r"loss ([\d.]+)", torchrun(ranks, script))]
    assert found == sorted(found, key=found.index)
    return found[::ranks]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_ordinary_loop_has_the_losses_of_one_rank(tmp_path: Path, backend: str) -> None:
    assert MODEL.startswith("# train_cp.py: torchrun --nproc-per-node 2 train_cp.py\n")
    assert len(LOOP.splitlines()) <= 40
    script = tmp_path / "train_cp.py"
    compiled = LOOP.replace("compile(fullgraph=True)", f"compile(fullgraph=True, backend={backend!r})")
    assert compiled != LOOP
    script.write_text(MODEL + compiled, encoding="utf-8")
    (one,), (two, same) = (world(ranks).run(loop, script) for ranks in (1, 2))
    if backend == "inductor":  # It takes long anyway.
        two = same = under_torchrun(script, 2)
    assert two == same
    assert len(one) == 5
    np.testing.assert_allclose(two, one, atol=2e-4)  # as they are printed
    assert one[-1] < one[0]


def formulas() -> dict[str, tuple[str, str]]:
    """Forward and backward of the table of bytes, by the name of the row."""
    table = PAGE[PAGE.index("| | forward | backward") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: (first, second) for name, first, second in cells}


def value(text: str, names: dict[str, Any]) -> int:
    """The sum of the formulas in a cell of the table."""
    return sum(eval(part, dict(names)) for part in re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 3), (5, 1)])
@pytest.mark.parametrize(("members", "groups"), [(1, 3), (2, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("kind", ["exchange", "ring"])
def test_the_table_of_bytes_is_what_is_counted(
    kind: str, members: int, groups: int, heads: tuple[int, int]
) -> None:
    strategy = Strategy(kind, members, groups)  # type: ignore[arg-type]
    layout = Layout.of(window(20, 3), q_len=132, ranks=strategy.ranks, method="zigzag")
    sizes = {"head_dim": 8, "v_dim": 24, "itemsize": 2, "batch": 3}
    plan = layout.plan(heads=heads, strategy=strategy, **sizes)
    needs, holders = plan.needs(strategy), plan.holders(strategy)
    split, table, cost = split_heads(*heads, members), formulas(), plan.cost()
    for rank in range(strategy.ranks):
        group, member = divmod(rank, members)
        names = {"u": members, "r": groups, "n": layout.rows_per_rank, "B": 3, "e": 2, "D": 8, "Dv": 24}
        names |= {
            "Hq": heads[0],
            "h": split[member].heads,
            "g": len(split[member].kv),
            "G": sum(len(part.kv) for part in split),
            "F": int(foreign(needs, holders)[group]),
            "L": int(lent(needs, holders)[group]),
        }
        rows = ["Ulysses within a group, in", "Ulysses within a group, out"] * (members > 1)
        rows += [kind] * (groups > 1)
        forward = sum(value(table[row][0], names) for row in rows)
        # Between groups, keys and values come again in backward.
        again = value(table[kind][0], names) if groups > 1 else 0
        backward = sum(value(table[row][1], names) for row in rows) + again
        assert cost.received("forward")[rank] == forward
        assert cost.received("backward")[rank] == backward
