"""What to install, said where a framework is needed and absent."""

from importlib import import_module
from typing import Any


def require(module: str, needed_by: str, extra: str) -> Any:
    """Import a framework.

    Args:
        module: its name, such as "torch".
        needed_by: what cannot do without, as users write it.
        extra: the extra of attnspan that brings it.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: it is not installed; the message says what to install.

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
