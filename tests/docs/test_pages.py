"""The Python of the pages runs: every block, from top to bottom, in one namespace per page.

A block that cannot run here has a comment on the line above it, such as `<!-- not run: needs two ranks -->`.
It is only compiled.
"""

import functools
import linecache
import re
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnspan.torch import StaticCache  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
PAGES = ("caches", "library", "masks", "options", "partition", "scale", "torch")
MARK = "<!-- not run"
BLOCK = re.compile(rf"^(?:{MARK}(?P<reason>.*)-->\n)?```python\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)
FENCE = re.compile(r"^[> \t]*```+ *py", re.MULTILINE)
IMPORT_OF_COMPILER = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"


@dataclass(frozen=True)
class Block:
    """Python of a page: its first line there, counted from 1, and why it does not run, if it does not."""

    line: int
    code: str
    not_run: str | None = None


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one page must not count against the limit of another."""
    yield
    torch._dynamo.reset()


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in order. Raises for what looks like a block or a mark and is not read as one."""
    found = []
    for match in BLOCK.finditer(text):
        reason = match["reason"]
        if reason is not None:
            reason = reason.removeprefix(":").strip()
            assert reason, f"no reason: {match[0].splitlines()[0]}"
        found.append(Block(text.count("\n", 0, match.start("code")) + 1, match["code"], reason))
    assert len(found) == len(FENCE.findall(text)), "a block is not read as one"
    marked = [block for block in found if block.not_run]
    assert len(marked) == text.count(MARK), "a mark is not above a block"
    return found


def run(page: Path) -> dict[str, Any]:
    """Execute the blocks of a page. Errors name the page and the line.

    Returns:
        The names that the page has defined.
    """
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    file = name_in_tracebacks(page)
    _give_source(file, text.count("\n"), blocks)
    module = types.ModuleType(f"page_{page.stem}".replace("-", "_"))
    sys.modules[module.__name__] = module  # where compilers look for the globals of a function
    names = vars(module)
    torch.manual_seed(0)
    for block in blocks:
        lines_above = "\n" * (block.line - 1)
        program = compile(lines_above + block.code, file, "exec", dont_inherit=True)
        if block.not_run is None:
            exec(program, names)
    return names


def name_in_tracebacks(page: Path) -> str:
    """In angle brackets: torch's compiler opens any file it can, and expects Python alone."""
    return f"<{page.parent.name}/{page.name}>"


def _give_source(file: str, length: int, blocks: list[Block]) -> None:
    """Give tracebacks and `inspect` the page without its prose."""
    lines = ["\n"] * length
    for block in blocks:
        code = block.code.splitlines(keepends=True)
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    linecache.cache[file] = (len("".join(lines)), None, lines, file)


names_of = functools.cache(run)


@pytest.mark.filterwarnings(IMPORT_OF_COMPILER)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str) -> None:
    assert names_of(DOCS / f"{page}.md")


@pytest.mark.compiled_module("it runs by default")
def test_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    run(README)
    shown = re.search(r"^```text\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown
    said, wanted = (re.sub(r"\d+ threads?, \w+", "machine", x) for x in (capsys.readouterr().out, shown[1]))
    assert said == wanted


@pytest.mark.filterwarnings(IMPORT_OF_COMPILER)
def test_decoding_of_the_page_agrees_with_no_cache() -> None:
    names = names_of(DOCS / "caches.md")
    prompts, counts, generated, model = (names[name] for name in ("prompts", "counts", "generated", "model"))
    for b, count in enumerate(counts.tolist()):
        ids = torch.cat([prompts[b, 12 - count :], generated[b]])[None]
        for t in range(20):
            caches = [StaticCache(1, 2, 64, 16, layout="bshd") for _ in range(2)]
            with torch.no_grad():
                assert model(ids[:, : count + t], caches).argmax() == ids[0, count + t]


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_an_error_names_the_page_and_the_line(tmp_path: Path) -> None:
    page = written(
        tmp_path, "# Title\n\n```python\nx = 1\n```\n\nText.\n\n```python\nx += 1\nassert x == 3\n```\n"
    )
    with pytest.raises(AssertionError) as caught:
        run(page)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.line) == (name_in_tracebacks(page), 11, "assert x == 3")


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    page = written(tmp_path, '```python\nimport warnings\nwarnings.warn("old")\n```\n')
    with pytest.raises(UserWarning, match="old"):
        run(page)


def test_a_marked_block_is_compiled_only(tmp_path: Path) -> None:
    page = written(tmp_path, "<!-- not run: needs two ranks -->\n```python\nranks = 1 / 0\n```\n")
    assert "ranks" not in run(page)
    page = written(tmp_path, "<!-- not run: needs two ranks -->\n```python\nranks = = 0\n```\n")
    with pytest.raises(SyntaxError) as caught:
        run(page)
    assert (caught.value.filename, caught.value.lineno) == (name_in_tracebacks(page), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"{mark}\n```python", "no reason: <!-- not run")
            for mark in ("<!-- not run: -->", "<!-- not run -->")
        ),
        *((fence, "not read") for fence in ("  ```python", "```py", "``` python", "```python title")),
        ("<!-- not run: needs two ranks -->\n\n```python", "not above"),
    ],
)
def test_what_looks_like_a_block_or_a_mark_and_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        blocks_of(f"{text}\nx = 1\n```\n")
