"""Multi-token prediction: the page and the example have the losses of one rank."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
from covering import everything
from worlds import torchrun, world

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


def test_the_example_has_the_losses_and_gradients_of_one_rank() -> None:
    text = torchrun(2, EXAMPLE) if everything() else world(2).run(printed_by_example)[0]
    steps = re.findall(r"next token ([\d.]+), second token ([\d.]+)", text)
    assert len(steps) == 3
    (apart,) = re.findall(r"differ from one rank by (\S+)", text)
    assert float(apart) < 5e-6
