"""Files for those who take part name what there is, and keep what they promise."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "MAINTAINING.md", "SECURITY.md")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [x for x in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if x.name != "config.yml"]
#: Calls that run what a file names.
LOADERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PATH = re.compile(r"`((?:\.github|csrc|docs|examples|src|tests)/[\w./]*)[^`]*`")


def text(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page: str) -> None:
    named = LINK.findall(text(page)) + PATH.findall(text(page))
    assert [x for x in named if not (ROOT / x).exists()] == []
    assert f"({page})" in text("README.md") or f"({page})" in text("CONTRIBUTING.md")


@pytest.mark.parametrize("path", [*(ROOT / x for x in PAGES), *WORKFLOWS], ids=lambda x: x.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    named = re.findall(r"(?:^|`|run: )make ([\w-]+)", text(path), re.MULTILINE)
    assert set(named) <= targets


def test_a_release_waits_for_real_addresses() -> None:
    """Each placeholder stands in a file that `make release` looks at."""
    looked_at = re.search(r'example\\.invalid" (.*?) \|\|', text("Makefile"))[1].split()  # type: ignore[index]
    tracked = [x for x in ROOT.iterdir() if x.suffix in (".md", ".toml", ".cff")] + [
        ROOT / "lab/pyproject.toml"
    ]
    holding = {str(x.relative_to(ROOT)) for x in tracked if "example.invalid" in text(x)}
    assert holding <= set(looked_at)


@pytest.mark.parametrize("form", FORMS, ids=lambda x: x.name)
def test_forms_ask_for_the_environment(form: Path) -> None:
    fields = {x.get("id"): x for x in yaml.safe_load(text(form))["body"]}
    assert "python -m attnspan explain --env" in fields["environment"]["attributes"]["label"]
    assert fields["environment"]["validations"] == {"required": True}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda x: x.name)
def test_workflows_have_no_rights_and_pin_their_actions(path: Path) -> None:
    workflow = yaml.safe_load(text(path))
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text(path)
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert [x for x in used if not re.fullmatch(r"actions/[\w-]+@v\d+", x)] == []


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    project = tomllib.loads(text("pyproject.toml"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def pickles(source: str) -> list[str]:
    """Imports of modules that read pickles, and calls of `torch.load` and `np.load`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [x for x in names if x.partition(".")[0] in LOADERS]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "np.load", "numpy.load"):
            found.append(ast.unparse(node))
    return found


def test_the_library_loads_no_pickle() -> None:
    assert pickles("import pickle\nfrom joblib import load\nx = torch.load(y)") == [
        "pickle",
        "joblib",
        "torch.load",
    ]
    sources = sorted((ROOT / "src/attnspan").rglob("*.py"))
    assert {str(x): y for x in sources if (y := pickles(text(x)))} == {}
