"""Factories of subjects: their module, and checks of what they return, for torch and JAX."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from attnspan_lab.doctor.unfit import Unfit, require

__all__ = ["MOST_BATCHES", "batches_of", "check_path", "factory_of", "options_of", "require_file"]

#: Maximum number of batches: more than the compiler's default limit of recompilations.
MOST_BATCHES = 12
_TARGET = "a factory such as file.py:factory, a script, or a class of a library"


def check_path(target: str) -> None:
    """Raise for notebooks, and for paths of directories. A bare name may also be a module or a class."""
    path = target.rpartition(":")[0] or target
    remedy = f"Export it with: jupyter nbconvert --to script {path}. Or write a module with a factory"
    require(not path.endswith(".ipynb"), target, _TARGET, "a notebook, which is not supported", remedy)
    is_path = "/" in path or path in (".", "..")
    require_file(target, is_file=not (is_path and Path(path).is_dir()))


def require_file(target: str, *, is_file: bool) -> None:
    """Raise for a target that is a directory."""
    remedy = "Name a file in it, and the factory after a colon"
    require(is_file, target, _TARGET, "a directory", remedy)


def factory_of(target: str) -> Any:
    """Import the factory that ``package.module:factory`` or ``file.py:factory`` names.

    Raises:
        OptionError: The module or the factory does not exist.
    """
    where, _, name = target.rpartition(":")
    module = _module(where)
    found = getattr(module, name, None)
    if found is not None:
        return found
    # A folder without __init__.py is imported as a module without a file.
    require_file(where, is_file=getattr(module, "__file__", None) is not None)
    known = [k for k, x in vars(module).items() if _is_own_factory(module, k, x)]
    similar = get_close_matches(name, known, 1)
    remedy = "Write a function of the module after the colon"
    remedy = f"Did you mean {where}:{similar[0]}" if similar else remedy
    has = f"the module {where} has only {', '.join(known[:12])}" if known else f"the module {where} has none"
    raise Unfit(where, expected=f"a factory named {name!r}", got=f"none: {has}", remedy=remedy)


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name).resolve()
        require(path.is_file(), name, "a file", "none", "Pass the path of a file, or the name of a module")
        sys.path.insert(0, str(path.parent))
        name = path.stem
    else:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        got, remedy = f"no module {error.name!r}", "Run from the folder that holds it, or install its package"
        raise Unfit(name, expected="a module", got=got, remedy=remedy) from None


def _is_own_factory(module: Any, name: str, x: Any) -> bool:
    """Whether a module defines a function that may be meant as a factory."""
    return inspect.isfunction(x) and x.__module__ == module.__name__ and not name.startswith("_")


def options_of(given: Sequence[Any], known: Sequence[str], noun: str, what: str) -> dict[str, Any]:
    """Check the third value of a factory, if there is one.

    Args:
        given: The factory's values after the second one.
        known: Names of the options.
        noun: Name of the options in errors.
        what: The factory.
    """
    options = given[0] if given else {}
    fits = isinstance(options, Mapping) and set(options) <= set(known)
    wanted = f"{noun}, a dict with some of {', '.join(known)}"
    require(fits, what, wanted, str(options)[:80], "Use only these keys")
    return dict(options)


def batches_of(given: Any, single: tuple[type, ...], noun: str, what: str) -> list[Any]:
    """Take the first batches of a factory.

    Args:
        given: The factory's batches.
        single: Types of a single batch, which is no iterable of batches.
        noun: Name of arrays in errors.
        what: The factory.
    """
    wanted = f"an iterable of batches: dicts of arguments, tuples, or {noun}"
    is_iterable = isinstance(given, Iterable) and not isinstance(given, (*single, Mapping, str))
    require(is_iterable, what, wanted, type(given).__name__, "Return a list of batches, or a generator")
    taken = list(islice(given, MOST_BATCHES))
    remedy = "Yield at least one batch. Batches of different lengths show recompilations"
    require(taken, what, wanted, "no batch", remedy)
    return taken
