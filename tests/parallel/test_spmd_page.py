"""What docs/spmd.md shows runs, and gives what one device gives."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

from virtual_devices import devices

PAGE = (Path(__file__).parents[2] / "docs" / "spmd.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_give_what_one_device_gives() -> None:
    assert len(BLOCKS) == 4
    found = devices().run("spmd_program_jobs:page", BLOCKS)
    for name in ("batch and heads", "window", "flax"):
        assert found[name] < 1e-6, name
    assert found["losses"] == pytest.approx(found["losses of one"], rel=1e-5)
    assert found["losses"][-1] != found["losses"][0]
    assert found["traces"] <= 3
