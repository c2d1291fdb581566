"""What to install, said where a framework is needed and absent."""

from importlib import import_module
from typing import Any


def require(module: str, needed_by: str, extra: str) -> Any:
    """Import a framework, or raise a ModuleNotFoundError that says which extra of attnspan brings it.

    Example:
        >>> require("tensorfoo", "attnspan.foo", "foo")
        Traceback (most recent call last):
        ModuleNotFoundError: attnspan.foo: expected tensorfoo, got no such package. Run \
pip install 'attnspan[foo]'.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # It is there, and lacks something of its own.
            raise
    raise ModuleNotFoundError(
        f"{needed_by}: expected {module}, got no such package. Run pip install 'attnspan[{extra}]'.",
        name=module,
    )
