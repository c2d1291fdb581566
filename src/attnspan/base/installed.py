"""Checks of installed packages. Errors tell which package to install if it is absent or does not fit."""

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

#: The first version of Triton that has the features that attnspan's kernels and torch's compiler need.
FIRST_TRITON = "3.6"


def require(module: str, needed_by: str, extra: str, versions: tuple[str, str] | None = None) -> Any:
    """Import a package, or raise an error that names the extra of attnspan to install.

    Args:
        module: Name of the module and of its package.
        needed_by: The module of attnspan that needs it.
        extra: The extra that installs it.
        versions: The first version that fits, and the first later version that does not. None accepts all.

    Raises:
        ModuleNotFoundError: If the package is not installed.
        ImportError: If another version is installed.

    Example:
        >>> require("tensorfoo", "attnspan.foo", "foo")
        Traceback (most recent call last):
        ModuleNotFoundError: attnspan.foo: expected tensorfoo, got no such package. Run \
pip install 'attnspan[foo]'.
        >>> require("numpy", "attnspan.foo", "foo", ("99", "100"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ImportError: attnspan.foo: expected numpy of version 99 or newer, older than 100, got ... Run \
pip install 'attnspan[foo]'.
    """
    remedy = f"Run pip install 'attnspan[{extra}]'."
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, but one of its own imports is missing
            raise
        found = None
    if found is None:
        raise ModuleNotFoundError(
            f"{needed_by}: expected {module}, got no such package. {remedy}", name=module
        )
    if versions is not None:
        first, beyond = versions
        got = version(module)
        if not _numbers(first) <= _numbers(got) < _numbers(beyond):
            expected = f"{module} of version {first} or newer, older than {beyond}"
            raise ImportError(f"{needed_by}: expected {expected}, got {got}. {remedy}", name=module)
    return found


def lacking(package: str, first: str) -> str | None:
    """The reason why a package cannot be used (it is missing or too old), or None. The answer is cached.

    Example:
        >>> lacking("numpy", "1.0"), lacking("tensorfoo", "1.0")
        (None, 'the package tensorfoo is missing (run `pip install tensorfoo`)')
    """
    if package not in _lacking:
        _lacking[package] = _why_lacking(package, first)
    return _lacking[package]


_lacking: dict[str, str | None] = {}
# torch.compile calls it while it traces, and keeps the answer.
lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_lacking(package: str, first: str) -> str | None:
    try:
        got = version(package)
    except PackageNotFoundError:
        if find_spec(package) is None:
            return f"the package {package} is missing (run `pip install {package}`)"
        got = str(import_module(package).__version__)  # the distribution has another name
    if _numbers(got) >= _numbers(first):
        return None
    return f"it needs {package} {first} or newer, not {got} (run `pip install --upgrade {package}`)"


def require_names(module: Any, names: Iterable[str], needed_by: str, extra: str) -> None:
    """Raise an ImportError if a module of another package lacks names that an adapter needs.

    Example:
        >>> import numpy
        >>> require_names(numpy, ["zeros", "no_such"], "attnspan.foo", "foo")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ImportError: attnspan.foo: expected numpy with no_such, got version ... Run \
pip install 'attnspan[foo]'.
    """
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        package = module.__name__.partition(".")[0]
        raise ImportError(
            f"{needed_by}: expected {module.__name__} with {', '.join(missing)}, "
            f"got version {version(package)}. Run pip install 'attnspan[{extra}]'.",
            name=package,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, for example (5, 23, 0) for 5.23.0.dev1."""
    return tuple(int(x) for x in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
