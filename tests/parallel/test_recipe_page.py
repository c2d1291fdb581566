"""The recipe of docs/howto/packed-ranks.md gives one rank's losses, documents and samples on any ranks."""

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import torchrun, world

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "packed-ranks.md").read_text(encoding="utf-8")
*RECIPE, START = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def printed(text: str) -> dict[str, list[float]]:
    """The numbers of each kind of line."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        found.setdefault(line.split()[0], []).extend(float(x) for x in re.findall(r"\d+\.?\d*", line))
    return found


def recipe(script: Path, **options: Any) -> dict[str, list[float]]:
    """What the recipe prints on a rank."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(script))["main"](**options)
    return printed(said.getvalue())


@pytest.mark.slow
def test_the_recipe_gives_the_numbers_of_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text("\n".join(RECIPE), encoding="utf-8")
    assert RECIPE[0].startswith("# recipe.py: torchrun --nproc-per-node 2 recipe.py\n")
    (one,), *others = (world(ranks).run(recipe, script) for ranks in (1, 2, 3))
    for ranks in others:
        for found in ranks:
            for kind, values in one.items():
                np.testing.assert_allclose(found[kind], values, atol=2e-4, err_msg=kind)
    assert one["loss"][-1] < one["loss"][0] / 20
    assert one["sample"] == [8, 9, 10, 11, 12, 13, 14, 15]
