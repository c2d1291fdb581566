"""Each public module says what `import *` gives, and gives nothing else."""

import ast
import importlib
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import attnspan

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from public_modules import ELSEWHERE, MODULES  # noqa: E402

IMPORTED = [name for name in MODULES if name not in ELSEWHERE]


def _path(name):
    path = ROOT / "src" / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _order(name):
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def _declared(path):
    """Public names that a file defines as functions or classes, or shows by `import x as x`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name == alias.asname)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def _listed(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return node.value
    return None


@pytest.mark.parametrize("name", MODULES)
def test_all_is_there_complete_and_sorted(name):
    path = _path(name)
    value = _listed(path)
    assert value is not None, f"{name} has no __all__"
    listed = (
        list(importlib.import_module(name).__all__)
        if isinstance(value, ast.Call)
        else ast.literal_eval(value)
    )
    assert listed == sorted(set(listed), key=_order)
    missing = {x for x in _declared(path) if not x.startswith("_")} - set(listed)
    assert not missing, f"{name}: {sorted(missing)}"


@pytest.mark.parametrize("name", IMPORTED)
def test_all_names_what_is_there_and_no_module(name):
    if ".jax" in name:
        pytest.importorskip("jax")
    module = importlib.import_module(name)
    for listed in module.__all__:
        assert not isinstance(getattr(module, listed), types.ModuleType), listed


def test_a_star_import_rebinds_nothing():
    for name in IMPORTED:
        importlib.import_module(name)  # Submodules are attributes of packages from here on.
    mine = {name: object() for name in ("torch", "jax", "np", "numpy", "random", "math", "time")}
    for name in IMPORTED:
        space = dict(mine)
        exec(f"from {name} import *", space)
        rebound = [x for x in mine if space[x] is not mine[x]]
        assert not rebound, f"{name} rebinds {rebound}"


def test_the_version_is_that_of_the_distribution():
    assert attnspan.__version__ == version("attnspan")
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        attnspan.versoin  # noqa: B018
