"""The examples of docs/parallel.md, as every rank of a world runs them."""

from typing import Any


def run_blocks(blocks: list[str]) -> tuple[int, list[int]]:
    """Run pieces of Python one after the other, in one namespace.

    Returns:
        The rows that a rank holds, and the shape of the last output.
    """
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/parallel.md", "exec"), names)
    return names["n"], list(names["out"].shape)
