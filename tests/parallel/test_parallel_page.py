"""What docs/parallel.md shows runs, and its formulas are those of the code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnspan.parallel.payload import Payload
from attnspan.parallel.traffic import traffic_of
from worlds import world

from attnspan.parallel.strategy import Strategy, split_heads

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
JOB = BLOCKS[1]


def run_job(folder: Path, ranks: int) -> str:
    """The job of the page, under plain torchrun; what its first rank prints."""
    script = folder / "train_cp.py"
    script.write_text(JOB, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    done = subprocess.run(
        [sys.executable, *launch],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long  # What ranks compute is in tests/train/test_ranks.py, torchrun in test_restarts.py.
def test_the_job_runs_under_torchrun_and_its_losses_are_those_of_one_rank(tmp_path: Path) -> None:
    assert JOB.startswith("# train_cp.py: torchrun --nproc-per-node 2 train_cp.py\n")
    printed = run_job(tmp_path, 2)
    losses = {
        ranks: [float(x) for x in re.findall(r"^step \d loss ([\d.]+)$", text, re.MULTILINE)]
        for ranks, text in ((2, printed), (1, run_job(tmp_path, 1)))
    }
    assert len(losses[2]) == 5
    np.testing.assert_allclose(losses[2], losses[1], atol=2e-5)  # as they are printed
    assert losses[2][-1] < losses[2][0]
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert without_figures(explanation(printed)) in map(without_figures, shown), "as the page has it"


def explanation(printed: str) -> str:
    """What `explain` printed, before the losses."""
    return "".join(line + "\n" for line in printed.splitlines() if not line.startswith("step "))


def without_figures(text: str) -> str:
    """A text whose figures may change with the partition or the cost model."""
    return re.sub(r" *[-+\d,.e]*\d", " #", text)


def test_the_other_examples_run_on_two_ranks() -> None:
    others = [block for block in BLOCKS if block is not JOB]
    assert len(others) == len(BLOCKS) - 1 >= 4
    for rows, shape, off in world(2).run("page_jobs:run_blocks", others):
        assert (rows, shape) == (501, [2, 8, 501, 32])
        # The page says that plans without the same rows have equal shapes and wrong results.
        assert off.pop("window, dealt anew") > 0.1
        assert len(off) == 4
        assert max(off.values()) < 2e-6, off


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
    split = split_heads(*heads, members)
    payload = Payload.of(split, rows=11, head_dim=8, v_dim=24, itemsize=2, batch=3)
    between = np.arange(groups * groups).reshape(groups, groups) * (1 - np.eye(groups, dtype=int))
    traffic = traffic_of(strategy, payload, between)
    table = formulas()
    for rank in range(members * groups):
        group, member = divmod(rank, members)
        names = {"u": members, "r": groups, "n": 11, "B": 3, "e": 2, "D": 8, "Dv": 24, "Hq": heads[0]}
        names |= {
            "h": split[member].heads,
            "g": len(split[member].kv),
            "G": sum(len(part.kv) for part in split),
            "F": between[group].sum(),
            "L": between[:, group].sum(),
        }
        rows = ["Ulysses within a group, in", "Ulysses within a group, out"] * (members > 1)
        rows += [kind] * (groups > 1)
        forward = sum(value(table[row][0], names) for row in rows)
        # Between groups, keys and values come again in backward.
        again = value(table[kind][0], names) if groups > 1 else 0
        backward = sum(value(table[row][1], names) for row in rows) + again
        assert traffic.received("forward")[rank] == forward
        assert traffic.received("backward")[rank] == backward
