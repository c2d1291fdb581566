"""What docs/jax.md shows runs, in order, and its table names the backends that there are."""

import re
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from attnspan.jax import backends  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")


def test_the_examples_run_one_after_the_other() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/jax.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    assert names["dq"].any()
    assert names["attend"]._cache_size() == 1


def test_the_table_has_every_back_end() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(backends.BACKENDS)
