"""The notebooks of the site, with what they print: `python docs/notebooks.py` runs them and keeps it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent / "notebooks"


def executed(path: Path) -> Any:
    """The notebook with the outputs of a fresh kernel. An error in a cell raises."""
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning on stderr
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, record_timing=False, kernel_name="python3").execute()
    return notebook


if __name__ == "__main__":
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(path), path)
