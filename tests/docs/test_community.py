"""Files for those who take part name what there is, and keep what they promise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "MAINTAINING.md", "SECURITY.md")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [x for x in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if x.name != "config.yml"]
#: Calls that run what a file names.
LOADERS = "pickle|dill|cloudpickle|joblib|marshal|shelve"
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PATH = re.compile(r"`((?:\.github|csrc|docs|examples|src|tests)/[\w./]*)[^`]*`")


def text(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_links_paths_and_make_targets_lead_somewhere() -> None:
    targets = re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE)
    for page in PAGES:
        named = LINK.findall(text(page)) + PATH.findall(text(page))
        assert [x for x in named if not (ROOT / x).exists()] == []
        assert f"({page})" in text("README.md") or f"({page})" in text("CONTRIBUTING.md")
    for path in [*PAGES, *WORKFLOWS]:
        assert {*re.findall(r"(?:^|`|run: )make ([\w-]+)", text(path), re.MULTILINE)} <= {*targets}, path


def test_a_release_waits_for_real_addresses() -> None:
    """Each placeholder stands in a file that `make release` looks at."""
    (looked_at,) = re.findall(r'example\\.invalid" (.*?) \|\|', text("Makefile"))
    tracked = [
        x for x in (*ROOT.iterdir(), ROOT / "lab/pyproject.toml") if x.suffix in (".md", ".toml", ".cff")
    ]
    holding = {str(x.relative_to(ROOT)) for x in tracked if "example.invalid" in text(x)}
    assert holding <= set(looked_at.split())


def test_forms_ask_for_the_environment() -> None:
    for form in FORMS:
        fields = {x.get("id"): x for x in yaml.safe_load(text(form))["body"]}
        assert "python -m attnspan explain --env" in fields["environment"]["attributes"]["label"]
        assert fields["environment"]["validations"] == {"required": True}


def test_workflows_have_no_rights_and_pin_their_actions() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(text(path))
        assert workflow["permissions"] == {"contents": "read"}
        assert "secrets." not in text(path)
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        used = {step["uses"] for step in steps if "uses" in step}
        assert {x for x in used if not re.fullmatch(r"actions/[\w-]+@v\d+", x)} == set()


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    project = tomllib.loads(text("pyproject.toml"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_library_loads_no_pickle() -> None:
    """A file is read without pickles. Of `pickle` itself, only the name of its error is used."""
    loads = r"\b(?:torch|np|numpy)\.load\((?![^\n]*(?:weights_only=True|allow_pickle=False))"
    others = LOADERS.replace("pickle|", "", 1)
    found = re.compile(
        rf"^\s*(?:import|from) (?:{others})\b|^\s*from pickle\b|\bpickle\.(?!UnpicklingError)|{loads}",
        re.MULTILINE,
    )
    sources = sorted((ROOT / "src/attnspan").rglob("*.py"))
    assert {str(x): y for x in sources if (y := found.findall(text(x)))} == {}
