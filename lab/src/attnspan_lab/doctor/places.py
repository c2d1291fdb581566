"""Lines of the user's code: on the stack, and in tracebacks."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

__all__ = ["Place", "is_direct", "is_users", "lines_here", "lines_in", "lines_of", "on_stack", "place_here"]

_FILE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
# What stands on the stack between a line and an operator that is watched.
_MACHINERY = (
    "doctor/watch.py",
    "_python_dispatch.py",
    "_compile.py",
    "eval_frame.py",
    "overrides.py",
    "_stats.py",
)


@dataclass(frozen=True)
class Place:
    """A line of source.

    Args:
        file: Its path.
        line: From 1.
        function: That it is in.
    """

    file: str
    line: int
    function: str = ""

    @property
    def text(self) -> str:
        """The line itself, "" if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@cache
def _libraries() -> tuple[str, ...]:
    """Folders whose code is not the user's, whether they are imported or not."""
    specs = map(find_spec, ("attnspan", "attnspan_lab", "torch", "functorch", "numpy", "jaxtyping"))
    return tuple(f"{Path(x.origin).parent}/" for x in specs if x is not None and x.origin)


def is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor torch's or written by it, nor attnspan's own."""
    if file.startswith(("<", *_libraries())) or "/torchinductor_" in file:
        return False
    python = sysconfig.get_paths()["stdlib"] + "/"
    return not file.startswith(python) or "site-packages" in file


def lines_of(frame: FrameType | None) -> Iterator[Place]:
    """Lines of the user's from a frame outwards, the innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def place_here() -> Place | None:
    """The innermost line of the user's on the stack."""
    return next(lines_of(sys._getframe(1)), None)


def lines_here() -> list[str]:
    """All lines of the user's on the stack, the innermost first, as "file:line"."""
    return [str(x) for x in lines_of(sys._getframe(1))]


def lines_in(text: str) -> list[Place]:
    """The user's lines of a traceback as text, the innermost first."""
    found = [Place(x["file"], int(x["line"]), x["function"]) for x in _FILE_LINE.finditer(text)]
    return [x for x in reversed(found) if is_users(x.file)]


def is_direct() -> bool:
    """Whether the user's line itself calls the operator, and not Python code of torch between them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_MACHINERY):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def on_stack(path: str, until: str = "") -> bool:
    """Whether a file of this path, or of this folder, is on the stack, above a file where the search ends."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != until:
        file = frame.f_code.co_filename
        if file.startswith(path) and "/doctor/" not in file:
            return True
        frame = frame.f_back
    return False
