"""Docstrings begin with a noun or a verb, not with a clause that hangs on nothing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(
    [*(ROOT / "src/attnspan").iterdir(), *(ROOT / "lab/src/attnspan_lab").iterdir(), ROOT / "examples"]
)
HEADLESS = re.compile(r"(What|Who|Whose|Where|Which|How|When)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("room", ROOMS, ids=lambda x: x.name)
def test_docstrings_have_a_head(room: Path) -> None:
    files = sorted(room.rglob("*.py")) if room.is_dir() else [room] * (room.suffix == ".py")
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and HEADLESS.match(text)
    ]
    assert found == []
