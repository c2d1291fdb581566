"""Atomic writes of files, and conversion between dataclasses and JSON.

Files whose name ends in ``.gz`` are compressed. Read them with ``zcat file.json.gz``.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from attnspan.errors import OptionError, expect

__all__ = [
    "check_writable",
    "from_plain",
    "read_json",
    "read_results",
    "to_plain",
    "write_json",
    "write_whole",
]

T = TypeVar("T")

_ELSEWHERE = "Choose another path"


@contextmanager
def _writing(path: Path, remedy: str = _ELSEWHERE) -> Iterator[None]:
    """Create the folder of a file. Errors of the system become one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        got, wanted = error.strerror or str(error), "a writable file"
        raise OptionError(str(path), expected=wanted, got=got, remedy=remedy) from None


def check_writable(path: Path) -> None:
    """Check that a file can be written, before hours of work.

    Raises:
        OptionError: The file cannot be written.
    """
    expect(not path.is_dir(), str(path), "a writable file", "a folder", "Pass a file in this folder")
    with _writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_whole(path: Path, content: str | bytes, remedy: str = _ELSEWHERE) -> None:
    """Write a file atomically: readers see the old file or the complete new one.

    Missing folders are created.

    Raises:
        OptionError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "new" / "text"
        >>> write_whole(path, "whole")
        >>> path.read_text()
        'whole'
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    with _writing(path, remedy):
        try:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, indent: int | None = None, remedy: str = _ELSEWHERE) -> None:
    """Write a dataclass or plain data as one JSON document, compressed if the name ends in ``.gz``."""
    text = json.dumps(to_plain(value), indent=indent) + "\n"
    # Without a time stamp, equal data give equal files.
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text, remedy)


def read_json(path: Path, what: str = "a JSON file") -> Any:
    """Read a file that `write_json` wrote.

    Args:
        path: The file.
        what: Name of the expected content, for the error.

    Raises:
        OptionError: The file is missing, cut short or not JSON.
    """
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except FileNotFoundError:
        got, remedy = "no such file", "Check the path"
    except (OSError, ValueError, EOFError, zlib.error) as error:
        got, remedy = str(error), "Write the file again"
    raise OptionError(str(path), expected=what, got=got, remedy=remedy)


def read_results(kind: type[T], path: Path, what: str, *, schema: int, remedy: str) -> T:
    """Read a dataclass that has a field ``schema``.

    Args:
        kind: The dataclass.
        path: The file.
        what: Name of the expected content, for the error.
        schema: The supported schema version.
        remedy: Remedy for other versions, for the error.

    Raises:
        OptionError: The file is missing, not JSON, of another schema, or damaged.
    """
    data = read_json(path, what)
    found = data.get("schema") if isinstance(data, dict) else None
    got = f"schema {found}" if found is not None else "a file without a schema"
    expect(found == schema, str(path), f"results of schema {schema}", got, remedy)
    return from_plain(kind, data, str(path))


def to_plain(value: Any) -> Any:
    """Map dataclasses to dicts and tuples to lists, at any depth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_plain(kind: type[T], data: Any, where: str) -> T:
    """Build a dataclass from the output of `to_plain`, according to its annotations.

    Args:
        kind: The dataclass.
        data: Plain data.
        where: Name of the data in errors.

    Raises:
        OptionError: A field is missing, unknown, or of another type than its annotation.

    Example:
        >>> @dataclasses.dataclass
        ... class Point:
        ...     x: float
        >>> from_plain(Point, {"x": 1}, "point")
        Point(x=1.0)
        >>> from_plain(Point, {"y": 1}, "point")
        Traceback (most recent call last):
        attnspan.errors.OptionError: point: expected the fields x, got y. Write the file again.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    is_whole = isinstance(data, dict) and required <= set(data) <= set(fields)
    got = (", ".join(data) or "nothing") if isinstance(data, dict) else type(data).__name__
    expect(is_whole, where, f"the fields {', '.join(fields)}", got, "Write the file again")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})


# A file has thousands of objects of one class.
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _build(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if origin is types.UnionType:
        kind = next(arg for arg in args if arg is not type(None))
        return None if data is None and type(None) in args else _build(kind, data, where)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, data, where)  # type: ignore[arg-type]
    # JSON has only one kind of list and number: lists become tuples, and integers may become floats.
    kind = list if origin is tuple else origin or hint
    if kind is float and type(data) is int:
        return float(data)
    expect(type(data) is kind, where, kind.__name__, repr(data), "Write the file again")
    if origin is tuple:
        return tuple(_build(args[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in data.items()}
    return data
