"""Access to the reference job, `examples/train`. It is part of a checkout, but of no package."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from attnspan.errors import expect

__all__ = ["find_train"]


def find_train() -> None:
    """Make ``import train`` find the reference job, from the folder of a checkout or a folder below.

    Raises:
        OptionError: No checkout holds the current folder.
    """
    here = Path.cwd()
    folders = [x / "examples" for x in (here, *here.parents) if (x / "examples/train/__init__.py").is_file()]
    found = find_spec("train") is not None or folders
    expect(found, "training", "a checkout of attnspan, which has examples/train", here, "Run it in one")
    if find_spec("train") is None:
        sys.path.insert(0, str(folders[0]))
