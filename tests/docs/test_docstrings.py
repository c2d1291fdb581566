"""The reference promises that each public name has an example and, if it can raise, its errors."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))

from public_modules import ELSEWHERE, MODULES

#: Functions without a check of their own, and classes that only a function of the library makes.
RAISE_NOTHING = {
    *("Bias", "Choice", "Enabled", "Explanation", "Float", "Index", "Interval", "Isolation", "Leak"),
    *("LocalPlan", "Lowering", "Mask", "MeshPlan", "Part", "PlacedPlan", "Plan", "PlanStack", "Problem"),
    *("Registration", "Rows", "Sharded", "Softmax", "TokenPlan", "Wrapped", "backward_flops", "causal"),
    *("checkpoint_policy", "defaults", "forward_flops", "full", "keep_backend", "load", "plans_only"),
    *("reads_masks", "register_pytrees", "register_raiser", "shown"),
}


def _public():
    """Names and documented objects, without types that stand for several types."""
    for name in sorted({*MODULES} - {*ELSEWHERE}):
        if "jax" in name:
            pytest.importorskip("jax")
        module = importlib.import_module(name)
        yield from ((name, x, getattr(module, x)) for x in module.__all__ if callable(getattr(module, x)))


def _is_error(x, kind=Exception):
    return inspect.isclass(x) and issubclass(x, kind)


def _sections(x):
    return f"{inspect.getdoc(x)}\n{inspect.getdoc(x.__init__) if inspect.isclass(x) else ''}"


def test_each_public_name_has_an_example():
    named = [(name, x) for _, name, x in _public() if not _is_error(x, Warning)]
    assert [name for name, x in named if "Example" not in _sections(x)] == []


def test_each_public_name_that_raises_says_which_errors():
    silent = {name for _, name, x in _public() if "Raises:" not in _sections(x) and not _is_error(x)}
    assert silent == RAISE_NOTHING


def test_a_name_that_raises_nothing_has_no_check():
    for _, name, x in _public():
        if name in RAISE_NOTHING and inspect.isfunction(inspect.unwrap(x)):
            used = inspect.unwrap(x).__code__.co_names
            assert not {"expect", "check", "OptionError", "ShapeError"} & set(used), name
