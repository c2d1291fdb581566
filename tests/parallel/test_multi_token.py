"""Multi-token prediction: the page and the example have the losses of one rank."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from covering import everything
from worlds import torchrun, world

from attnspan import causal, segments
from attnspan.parallel import Layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/multi-token.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/multi_token_prediction.py"


def printed_by_page(code: str) -> str:
    """What a rank of a world, whose group is there already, prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(code, "docs/howto/multi-token.md", "exec"), {"__name__": "page"})
    return text.getvalue()


def printed_by_example() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLE))["main"]()
    return text.getvalue()


@pytest.mark.slow
def test_the_page_has_the_loss_of_one_rank_on_any_number() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    for old, new in (
        ('dist.init_process_group("gloo")\n', ""),
        ("fullgraph=True)", 'fullgraph=True, backend="aot_eager")'),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    (one,), (two, other) = (world(count).run(printed_by_page, code) for count in (1, 2))
    assert re.fullmatch(r"loss [\d.]+\n", one)
    assert one == two == other


def test_the_table_of_rows_is_that_of_the_plans() -> None:
    length, ids = 8192, np.repeat(np.arange(8192), np.random.default_rng(0).integers(64, 1024, 8192))[:8192]
    assert len(np.unique(ids)) == 16
    layouts = {
        "contiguous": Layout.contiguous(length, 4),
        "zigzag": Layout.of(q_len=length, ranks=4, method="zigzag"),
        "balanced, 16 packed documents": Layout.of(causal() & segments(ids), q_len=length, ranks=4),
    }
    for name, layout in layouts.items():
        rows = int(layout.plan_roll(-1).traffic().counts.sum())
        assert f"| {name} | {rows} | {3 * length:,} |" in PAGE


@pytest.mark.slow
def test_the_example_has_the_losses_and_gradients_of_one_rank() -> None:
    text = torchrun(2, EXAMPLE) if everything() else world(2).run(printed_by_example)[0]
    steps = re.findall(r"next token ([\d.]+), second token ([\d.]+)", text)
    assert len(steps) == 3
    (apart,) = re.findall(r"differ from one rank by (\S+)", text)
    assert float(apart) < 5e-6
