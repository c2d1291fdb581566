"""The Python of the pages runs: every block, from top to bottom, in one namespace per page.

A block that cannot run here has a comment on the line above it, such as `<!-- not run: needs two ranks -->`.
It is only compiled. Where a block of text follows, it is what the Python above it prints.
"""

import contextlib
import io
import linecache
import re
import shlex
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from covering import everything

torch = pytest.importorskip("torch")

from attnspan.__main__ import main  # noqa: E402
from attnspan.backends import table  # noqa: E402
from attnspan_lab.cli import build_app  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
#: Packages that some pages need besides torch.
NEEDS = {
    "bridge": ("jax",),
    "howto/diffusion": ("diffusers",),
    "howto/lora": ("transformers", "peft"),
    "interchange": ("jax",),
    "jax": ("jax", "flax"),
    "switch/jax": ("jax",),
    "transformers": ("transformers",),
}
#: What the ordinary run does not wait for: Inductor, but on one page, a search for a second, long trainings.
QUICKER = {"fullgraph=True)": 'fullgraph=True, backend="aot_eager")', "seconds=1.0": "seconds=0.1"}
QUICKER |= {"range(15)": "range(4)", "range(30)": "range(12)"}  # steps of trainings
AS_IT_IS = "torch"
#: Pages that tests of other rooms run, because they need ranks, devices or a folder.
ELSEWHERE = {
    "diffusers": "integrations/test_diffusers.py",
    "diffusers-parallel": "integrations/test_diffusers_parallel.py",
    "howto/multi-token": "parallel/test_multi_token.py",
    "howto/packed-ranks": "parallel/test_recipe_page.py",
    "howto/pipeline": "parallel/test_pipeline.py",
    "monitoring": "lab/bench/test_monitor.py",
    "parallel": "parallel/test_parallel_page.py",
    "spmd": "parallel/test_jax_programs.py",
}
ALL = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
MARK = "<!-- not run"
BLOCK = re.compile(
    rf"^(?:{MARK}(?P<reason>.*)-->\n)?```python\n(?P<code>(?:.*\n)*?)```$"
    r"(?:\n+```text\n(?P<shown>(?:.*\n)*?)```$)?",
    re.MULTILINE,
)
FENCE = re.compile(r"^[> \t]*```+ *py", re.MULTILINE)
IMPORT_OF_COMPILER = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one page must not count against the limit of another."""
    yield
    torch._dynamo.reset()


def blocks_of(text: str) -> list[re.Match[str]]:
    """The blocks of a page, in order. Raises for what looks like a block or a mark and is not read as one."""
    found = list(BLOCK.finditer(text))
    assert len(found) == len(FENCE.findall(text)), "a block is not read as one"
    marks = [match["reason"] for match in found if match["reason"] is not None]
    assert all(reason.strip(": ") for reason in marks), "no reason"
    assert len(marks) == text.count(MARK), "a mark is not above a block"
    return found


def run(page: Path, swaps: Mapping[str, str] = types.MappingProxyType({})) -> dict[str, Any]:
    """Execute the blocks of a page, and return the names that it has defined. Errors name page and line."""
    text = page.read_text(encoding="utf-8")
    for swap in swaps.items():
        text = text.replace(*swap)
    module = types.ModuleType(f"page_{page.stem}".replace("-", "_"))
    sys.modules[module.__name__] = module  # where compilers look for the globals of a function
    torch.manual_seed(0)
    for block in blocks_of(text):
        # In angle brackets: torch's compiler opens any file it can, and expects Python alone.
        file = f"<{page.parent.name}/{page.name}, line {text.count(chr(10), 0, block.start('code')) + 1}>"
        linecache.cache[file] = (len(block["code"]), None, block["code"].splitlines(keepends=True), file)
        program = compile(block["code"], file, "exec", dont_inherit=True)
        if block["reason"] is not None:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(program, vars(module))
        if block["shown"] is not None:
            assert plain(said.getvalue()) == plain(block["shown"]), file
    return vars(module)


def plain(text: str) -> str:
    """Printed text without what depends on the machine."""
    return re.sub(r"\d+ threads?, \w+", "machine", text).strip()


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


#: Pages with Python that runs, and that no test of another room runs.
RUN_HERE = [
    page
    for page in ALL
    if page not in ELSEWHERE and any(x["reason"] is None for x in blocks_of(text_of(page)))
]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    IMPORT_OF_COMPILER,
    "ignore:flex_attention called without:UserWarning",  # the page says so
    "ignore:The .grad attribute of a Tensor:UserWarning",  # the compiler's own
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # PEFT's call
)
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDS.get(page, ()):
        pytest.importorskip(name)
    if page == "bridge" and torch.__version__ < "2.13":
        pytest.skip("call_jax in compiled code needs torch 2.13")
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    monkeypatch.chdir(README.parent)
    assert run(DOCS / f"{page}.md", {} if everything() or page == AS_IT_IS else QUICKER)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_pages_are_run_by_a_test_that_names_them(page: str) -> None:
    assert f"{page}.md" in (README.parent / "tests" / ELSEWHERE[page]).read_text(encoding="utf-8")


CONSOLE = re.compile(r"^```\n\$ python -m attnspan (.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@pytest.mark.compiled_module("it runs by default")
@pytest.mark.parametrize("page", [page for page in ALL if "$ python" in text_of(page)])
def test_a_command_prints_what_its_page_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = CONSOLE.findall(text_of(page))
    assert found
    for command, shown in found:
        main(shlex.split(command))
        assert plain(capsys.readouterr().out) == plain(shown)


COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ALL)
def test_commands_name_what_there_is(page: str) -> None:
    """A command without output is not run: the programs, targets and files that it names are there."""
    root = README.parent
    commands = [command.name for command in build_app().registered_commands]
    targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for block in COMMANDS.findall(text_of(page)):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "cd" in words:
                break  # what follows is of another folder
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            if words[:1] == ["attnspan"] and len(words) > 1:
                assert words[1] in commands, line
            for word in words:
                if word.startswith(("examples/", "benchmarks/", "tests/")) and "results" not in word:
                    assert (root / word.partition(":")[0]).exists(), line


@pytest.mark.compiled_module("it runs by default")
def test_readme_prints_what_it_shows() -> None:
    (shown,) = (x["shown"] for x in blocks_of(README.read_text(encoding="utf-8")) if x["shown"])
    assert "runs     cpu" in shown
    run(README)


def test_the_page_of_jax_names_every_backend() -> None:
    pytest.importorskip("attnspan.jax")
    rows = re.findall(r"^\| `(\w+)` \|", text_of("jax"), re.MULTILINE)
    assert sorted(rows) == sorted(table("jax"))


#: Pages, with "py" in the place of a fence and of Python, and the error that running them raises.
WRONG = [
    ("py\nx = 1\n```\n\nText.\n\npy\nx += 1\nassert x == 3", AssertionError, ""),
    ("py\nprint(1 + 1)\n```\n\n```text\n3", AssertionError, "line 2"),
    ("<!-- not run: needs two ranks -->\npy\nranks = = 0", SyntaxError, "line 3"),
    ("<!-- not run: -->\npy\nx = 1", AssertionError, "no reason"),
    ("<!-- not run: needs two ranks -->\n\npy\nx = 1", AssertionError, "not above"),
    ("  py\nx = 1", AssertionError, "not read"),
]


@pytest.mark.parametrize(("text", "kind", "message"), WRONG)
def test_a_wrong_page_is_an_error(tmp_path: Path, text: str, kind: type[Exception], message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(re.sub("^( *)py$", r"\1```python", text, flags=re.MULTILINE) + "\n```\n")
    with pytest.raises(kind, match=message or None):
        run(page)
