"""What `make docs` adds to MkDocs: pages for examples and notebooks, and a check that the reference is whole.

Links out of `docs/` work in the repository. On the site an example is a page of its own, and any other path
is shown as text.
"""

from __future__ import annotations

import ast
import html
import importlib
import itertools
import json
import re
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from public_modules import MODULES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(
    r"\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>(?:examples|lab|benchmarks|src|tests)(?:/[^)#]*)?)\)"
)
NAMED = re.compile(r"\[(?P<name>[\w-]+\.md)\]\((?P<path>[\w./-]+\.md)(?P<anchor>#[^)]*)?\)")
NOTEBOOK = re.compile(r"\]\((?P<path>[\w./-]+)\.ipynb\)")
DIRECTIVE = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)
ANCHOR = re.compile(r'\bid="([^"]+)"')


def names_of(module: str) -> list[str]:
    """Names in a public module's `__all__`, read without importing it where it is a list.

    A private module has none. Its names are the functions and classes that it defines.
    """
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if module not in MODULES:
        return [
            x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name[0] != "_"
        ]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            if isinstance(node.value, ast.List):
                return list(ast.literal_eval(node.value))
            return list(importlib.import_module(module).__all__)
    raise PluginError(f"{module} has no __all__")


@cache
def inner_modules() -> dict[str, list[str]]:
    """Modules of the library itself, by room: names without an underscore, not those of users."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/attnspan").rglob("*.py")):
        parts = [x for x in path.relative_to(ROOT / "src").with_suffix("").parts if x != "__init__"]
        module = ".".join(parts)
        inside = "backends" in parts[1:-1] or "experimental" in parts
        if len(parts) == 1 or any(x.startswith("_") for x in parts) or inside:
            continue
        if module not in MODULES and names_of(module):
            found.setdefault(parts[1], []).append(module)
    return found


@cache
def public() -> dict[str, griffe.Object | None]:
    """Every public name, dotted, and the definition it stands for; None for a name of another library."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"))
    package = griffe.load(
        "attnspan", search_paths=[ROOT / "src"], extensions=extensions, resolve_aliases=False
    )
    modules = [*MODULES, *itertools.chain.from_iterable(inner_modules().values())]
    return {
        f"{module}.{name}": _definition(package, f"{module}.{name}")
        for module in modules
        for name in names_of(module)
    }


def _definition(package: Any, path: str) -> griffe.Object | None:
    try:
        found = package[path.removeprefix("attnspan.")]
        if found.is_module:  # a function of the same name, which the package shows in its place
            found = found[found.name]
        return found.final_target if found.is_alias else found
    except (griffe.AliasResolutionError, KeyError):
        return None


def _inside(modules: list[str], room: str, shown: set[str]) -> str:
    """The page of a room: what its modules define and no page before it shows."""
    text = ["---", "search: {exclude: true}", "---", "", f"# Inside attnspan.{room}", ""]
    text += ["For the library itself. [Design](../../design.md) says what the package promises.", ""]
    for module in modules:
        text += [f"## {module}", ""]
        for name in names_of(module):
            definition = public()[f"{module}.{name}"]
            if definition is None:
                text += [
                    f"[](){{ #{module}.{name} }}",
                    "",
                    f"`{name}`: a constant, or a name of another library.",
                    "",
                ]
            elif definition.path not in shown:
                shown.add(definition.path)
                text += [f"::: {definition.path}", ""]
    return "\n".join(text)


@cache
def _aliases() -> dict[str, list[str]]:
    """By the path of a definition: the public names that stand for it."""
    found: dict[str, list[str]] = {}
    for name, definition in public().items():
        if definition is not None:
            found.setdefault(definition.path, []).append(name)
    return found


def _of_notebook(path: Path) -> str:
    """The page of a notebook, with the outputs that it holds: nothing is run."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(_output, cell.get("outputs", ()))
    title, *rest = parts[0].split("\n", 1)
    link = f'<a href="{path.name}" download>Download this notebook</a>'
    return "\n\n".join([title, link, *rest, *parts[1:]])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    text = "".join(output.get("text") or data["text/plain"])
    if "image/svg+xml" not in data:
        return f"```text\n{text.rstrip()}\n```"
    picture = b64encode("".join(data["image/svg+xml"]).encode()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{picture}">'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each example and notebook, and one for what is inside of each room."""
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_of_notebook(path)))
    for path in sorted((ROOT / "examples").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = f"# {name}\n\n````python\n{path.read_text(encoding='utf-8')}\n````\n"
        text = f"---\nsearch: {{boost: 0.01}}\n---\n\n{text}"  # after all other pages
        page = File.generated(config, _page_of(name), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    shown = {definition.path for name, definition in public().items() if definition and _of_users(name)}
    for room, modules in inner_modules().items():
        files.append(
            File.generated(config, f"reference/inside/{room}.md", content=_inside(modules, room, shown))
        )
    return files


def _of_users(name: str) -> bool:
    return name.rpartition(".")[0] in MODULES


def _page_of(example: str) -> str:
    return f"sources/{example.removesuffix('.py')}.md"


PIPE_IN_CODE = re.compile(r"`[^`\n]*`")


def _unescaped(line: str) -> str:
    """A row of a table: GitHub wants `|` in code escaped, MkDocs shows the escape."""
    if not line.startswith("|"):
        return line
    return PIPE_IN_CODE.sub(lambda code: code[0].replace("\\|", "|"), line)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Lead links where the site has what they name, and give each definition all its public names.

    The search reads a page's tags, which nothing else shows.
    """
    page.meta["tags"] = config.extra.get("search_terms", {}).get(page.file.src_uri, [])
    up = "../" * page.file.src_uri.count("/")

    def inside(match: re.Match[str]) -> str:
        text, path = match["text"], match["path"]
        if path.startswith("examples/") and path.endswith(".py"):
            return f"[{text}]({up}{_page_of(path)})"
        return text if "`" in text or text != path else f"`{text}`"

    def titled(match: re.Match[str]) -> str:
        path = ROOT / "docs" / Path(page.file.src_uri).parent / match["path"]
        if not path.exists():
            return match[0]  # MkDocs complains of it
        title = re.search(r"^# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return f"[{title[1] if title else match['name']}]({match['path']}{match['anchor'] or ''})"

    def named(match: re.Match[str]) -> str:
        path = match["path"]
        definition = public().get(path)
        others = _aliases().get(definition.path if definition else path, [])
        return "".join(f"[](){{ #{name} }}\n" for name in others if name != path) + f"\n{match[0]}"

    markdown = NOTEBOOK.sub(r"](\g<path>.md)", "\n".join(map(_unescaped, markdown.split("\n"))))
    return DIRECTIVE.sub(named, NAMED.sub(titled, LINK.sub(inside, markdown)))


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that leaves out a public name, or shows one without a docstring."""
    missing = missing_names(Path(config.site_dir))
    bare = [name for name, definition in public().items() if definition and not definition.has_docstring]
    if missing or bare:
        raise PluginError(f"not in docs/reference: {missing}; without a docstring: {bare}")


def missing_names(site: Path) -> list[str]:
    """Public names without an anchor in the pages of the reference."""
    pages = (site / "reference").rglob("*.html")
    anchors = {name for page in pages for name in ANCHOR.findall(page.read_text(encoding="utf-8"))}
    return sorted(set(public()) - anchors)
