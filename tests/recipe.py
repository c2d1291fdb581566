"""The backends that CONTRIBUTING.md tells its readers to write, as it writes them."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attnspan.backends

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## Add a backend\n")[2].partition("\n## ")[0]
BLOCKS = dict(zip(("torch", "jax"), re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S), strict=True))


@contextmanager
def followed(framework: str) -> Iterator[Counter[str]]:
    """Runs a block. Counts the calls of its functions by the kernels that call them."""
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(BLOCKS[framework], "CONTRIBUTING.md", "exec"), names)
    runs: Counter[str] = Counter()
    arrays_of = names["arrays_of"]

    def counted(part: Any) -> Any:
        runs["arrays_of"] += 1
        return arrays_of(part)

    names["arrays_of"] = counted
    try:
        yield runs
    finally:
        attnspan.backends.Registration(attnspan.backends.table(framework)["mine"]).remove()
