"""Count habits of prose that make sentences hard to read: python tests/docs/prose.py [FILE …]

Counts are per 1,000 words of prose. Code, tables' separators, links and HTML are left out. Python files count
by their docstrings, notebooks by their Markdown cells.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Name of a habit -> its pattern.
HABITS = {
    "semicolons": r";",
    "that of": r"\b(?:that|those) of\b",
    "nominal what": r"(?:^|[.:] )(?:What|Whatever|Whoever) (?![^.]*\?)",
    "somebody": r"\b(?:somebody|nobody|whoever|one's own)\b",
    "by name": r"\bby name\b",
    "for example": r"\b(?:for example|for instance|such as|e\.g\.)",
    "you": r"\b(?:you|your|yours)\b",
}
_GLOBS = {
    "README": ["README.md"],
    "how-to": ["docs/howto/*.md", "docs/switch/*.md", "docs/caches.md"],
    "concepts": ["docs/concepts/*.md", "docs/why/*.md", "docs/masks.md"],
    "docs": ["docs/**/*.md"],
    "docstrings": ["src/**/*.py", "lab/src/**/*.py"],
}
#: Name of a group -> its files.
GROUPS = {name: sorted(x for y in globs for x in ROOT.glob(y)) for name, globs in _GLOBS.items()}
_NOT_PROSE = (
    r"(?s)^---\n.*?\n---\n",  # front matter
    r"(?sm)^ *```.*?^ *```$",
    r"(?m)^:::.*$",
    r"(?m)^--8<--.*$",
    r"(?s)<!--.*?-->",
    r"<[^>\n]+>",
    r"!\[[^\]]*\]\([^)]*\)",
    r"(?m)^\|?[-:| ]+\|$",
    r"(?m)^    >>> .*$|^    \.\.\. .*$",
)


def prose(text: str) -> str:
    """Markdown without code, pictures, links' targets and HTML."""
    for pattern in _NOT_PROSE:
        text = re.sub(pattern, "\n", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"``?[^`\n]*``?", "CODE", text)


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables, each on one line."""
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*|#>]|\d+\. ))", prose(text)):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            if one := " ".join(cell.split()).lstrip("-*#> "):
                yield one


def sentences(text: str) -> Iterator[str]:
    """Sentences of the paragraphs."""
    for paragraph in paragraphs(text):
        yield from re.split(r"(?<=[.!?:]) (?=[A-Z`\"(])", paragraph)


def length(sentence: str) -> int:
    """Words of a sentence."""
    return len(re.findall(r"[\w'-]+", sentence))


def counts(texts: Iterable[str]) -> Counter[str]:
    """Words and occurrences of each habit."""
    found: Counter[str] = Counter()
    for paragraph in (x for text in texts for x in paragraphs(text)):
        found["words"] += length(paragraph)
        for name, pattern in HABITS.items():
            flags = re.IGNORECASE if name != "nominal what" else 0
            found[name] += len(re.findall(pattern, paragraph, flags))
    return found


def per_thousand(found: Counter[str]) -> dict[str, float]:
    """Occurrences per 1,000 words."""
    return {name: 1000 * found[name] / max(1, found["words"]) for name in HABITS}


def text_of(path: Path) -> str:
    """The prose of a page, a notebook or a module's docstrings."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
        return "\n\n".join(ast.get_docstring(node) or "" for node in nodes)
    if path.suffix == ".ipynb":
        cells = json.loads(source)["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return source


def main(names: list[str]) -> None:
    groups = {name: [Path(name)] for name in names} or GROUPS
    print(f"{'per 1,000 words':44}{'words':>8}" + "".join(f"{name:>14}" for name in HABITS))
    for name, paths in groups.items():
        texts = [text_of(path) for path in paths]
        found = counts(texts)
        line = "".join(f"{value:14.1f}" for value in per_thousand(found).values())
        print(f"{name[-44:]:44}{found['words']:8}{line}")
        longest = sorted((s for text in texts for s in sentences(text)), key=length)[-3:] if names else []
        for sentence in filter(lambda x: length(x) > 30, longest):
            print(f"    {length(sentence)} words: {sentence[:160]}")


if __name__ == "__main__":
    main(sys.argv[1:])
