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


@pytest.mark.parametrize("name", MODULES)
def test_all_is_there_complete_and_sorted(name):
    tree = ast.parse(_path(name).read_text(encoding="utf-8"))
    shown = [alias for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) for alias in x.names]
    declared = {x.name for x in shown if x.name == x.asname}
    declared |= {x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    targets = [(x, x.targets[0]) for x in tree.body if isinstance(x, ast.Assign)]
    targets += [(x, x.target) for x in tree.body if isinstance(x, ast.AnnAssign)]
    (value,) = [x.value for x, target in targets if ast.unparse(target) == "__all__"]
    is_made = isinstance(value, ast.Call)
    listed = list(importlib.import_module(name).__all__ if is_made else ast.literal_eval(value))
    assert listed == sorted(set(listed), key=_order)
    assert {x for x in declared if not x.startswith("_")} <= set(listed)


def test_all_names_what_is_there_and_no_module():
    for name in IMPORTED:
        module = importlib.import_module(name)
        found = [x for x in module.__all__ if isinstance(getattr(module, x), types.ModuleType)]
        assert found == [], name


def test_a_star_import_rebinds_nothing():
    mine = {name: object() for name in ("torch", "jax", "np", "numpy", "random", "math", "time")}
    for name in [importlib.import_module(x).__name__ for x in IMPORTED]:  # Submodules are attributes by now.
        space = dict(mine)
        exec(f"from {name} import *", space)
        rebound = [x for x in mine if space[x] is not mine[x]]
        assert not rebound, f"{name} rebinds {rebound}"


def test_the_version_is_that_of_the_distribution():
    assert attnspan.__version__ == version("attnspan")
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        attnspan.versoin  # noqa: B018
