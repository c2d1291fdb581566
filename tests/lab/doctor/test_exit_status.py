"""The exit status, the JUnit file and the JSON file agree about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.cli import build_app
from attnspan_lab.doctor import Diagnosis, Finding, command, run
from attnspan_lab.doctor.process import Stage

KINDS = {
    "wrong": ("leak", "nan", "mask-lost", "causality-lost", "causal-alignment", "hidden-rows", "parity"),
    "stops": ("crash", "hang", "error", "subject"),
    "failed": ("compile-error", "combination"),
}
FACTS = {"eager": {}, "compiled": {"graphs": 1, "breaks": 1, "recompiles": 0, "compile seconds": 0.1}}
LIMITS = ([], ["--max-breaks", "9"], ["--max-copies", "9"], ["--max-breaks", "9", "--max-recompiles", "9"])


def outcome(
    monkeypatch: pytest.MonkeyPatch, folder: Path, limits: list[str], found: Diagnosis
) -> tuple[int, dict[str, bool], list[str], str]:
    """Exit status, whether the case of each kind fails, severities of the JSON file, and the text."""
    monkeypatch.setattr(command, "diagnose", lambda *_, **__: found)
    files = ["--junit", str(folder / "a.xml"), "--json", str(folder / "a.json")]
    made = CliRunner().invoke(build_app(), ["doctor", *limits, *files, "a.py:factory"])
    cases = ElementTree.parse(folder / "a.xml").getroot().iter("testcase")
    failed = {str(x.get("name")).partition(":")[0]: x.find("failure") is not None for x in cases}
    told = json.loads((folder / "a.json").read_text())["findings"]
    return made.exit_code, failed, [x["severity"] for x in told], made.output


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("kind", [kind for kinds in KINDS.values() for kind in kinds])
def test_wrong_is_red_with_any_limit(
    kind: str, limits: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = Diagnosis("a.py:factory", (Finding(kind, "wrong"), Finding("copy", "a copy")), FACTS)
    code, failed, severities, _ = outcome(monkeypatch, tmp_path, limits, found)
    assert code == 1
    assert failed == {kind: True, "copy": False}
    assert severities == [found.findings[0].severity, "slow"]


@pytest.mark.parametrize(
    ("kind", "limits", "code"),
    [
        ("graph-break", [], 1),
        ("graph-break", ["--max-breaks", "1"], 0),
        ("graph-break", ["--max-breaks", "0"], 1),
        ("recompile", ["--max-breaks", "1"], 0),
        ("copy", [], 0),
        ("dense-mask", ["--max-copies", "0"], 0),
        ("copy", ["--max-copies", "0"], 1),
    ],
)
def test_costs_are_judged_by_limits(
    kind: str, limits: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = Diagnosis("a.py:factory", (Finding(kind, "it costs"),), FACTS)
    status, failed, *_ = outcome(monkeypatch, tmp_path, limits, found)
    assert status == code == any(failed.values())
    assert failed.get("limit", False) == (code == 1 and bool(limits))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "code"),
    [("sees_padding", 1), ("returns_nan", 1), ("leaks", 1), ("hides_padding", 0), ("copies", 0)],
)
def test_a_wrong_model_fails_with_limits(name: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    limits = ["--quick", "--max-copies", "1"]
    made = CliRunner().invoke(build_app(), ["doctor", *limits, f"targets:{name}"])
    assert made.exit_code == code, made.output


def test_an_interruption_fails_a_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, failed, *_ = outcome(monkeypatch, tmp_path, [], Diagnosis("a", complete=False))
    assert (code, failed) == (130, {"interrupted": True})


def test_checks_that_were_not_made_are_skipped_cases_and_a_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = {"eager": {"checked": {"padding": "from mask"}, "unchecked": {"causality": "not declared"}}}
    *_, output = outcome(monkeypatch, tmp_path, [], Diagnosis("a", facts=facts))
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert [suite.get(x) for x in ("tests", "failures", "skipped")] == ["2", "0", "1"]
    (skipped,) = suite.iter("skipped")
    assert skipped.get("message") == "not declared"
    lines = [line.split() for line in output.splitlines() if line.strip()]
    assert lines[-4:] == [
        ["checked"],
        ["padding", "from", "mask"],
        ["not", "checked"],
        ["causality", "not", "declared"],
    ]


def test_a_factory_that_hangs_costs_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def hangs(self: Stage, child: object) -> bool:
        ran.append(self.stage)
        self.at = "loading"
        self.findings.append(Finding("hang", "Not finished"))
        return True

    monkeypatch.setattr(Stage, "look", hangs)
    found = run.diagnose("a.py:factory")
    assert ran == ["eager"]
    assert set(found.facts["stages"]["unchecked"].values()) == {"the model could not be loaded"}


def test_quick_runs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def diagnose(*_: object, **options: object) -> Diagnosis:
        asked.append(options["stages"])
        return Diagnosis("a")

    monkeypatch.setattr(command, "diagnose", diagnose)
    CliRunner().invoke(build_app(), ["doctor", "--quick", "a.py:factory"])
    assert asked == [("eager",)]
    made = CliRunner().invoke(build_app(), ["doctor", "--quick", "--stages", "compiled", "a.py:factory"])
    assert isinstance(made.exception, OptionError)


def test_findings_are_shown_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def diagnose(*_: object, **options: object) -> Diagnosis:
        one = Finding("copy", "a copy")
        for _ in range(2):
            options["seen"](one)  # type: ignore[operator]
        options["after"]("eager", [one, one], {})  # type: ignore[operator]
        return Diagnosis("a", (one,))

    monkeypatch.setattr(command, "diagnose", diagnose)
    output = CliRunner().invoke(build_app(), ["doctor", "a.py:factory"]).output
    assert output.splitlines()[:2] == ["copy  a copy", "eager: 1 finding"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "no finding"),
        ({"unchecked": {"the stage compiled": "the doctor failed"}}, "not checked"),
        (
            {"unchecked": {"documents": "one"}, "checked": {"attention": "1 call"}},
            "no finding in what was checked",
        ),
    ],
    ids=str,
)
def test_a_stage_that_failed_does_not_say_that_it_found_nothing(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, dict[str, str]], said: str
) -> None:
    def diagnose(*_: object, **options: object) -> Diagnosis:
        options["after"]("compiled", [], {"compiled": facts})  # type: ignore[operator]
        return Diagnosis("a")

    monkeypatch.setattr(command, "diagnose", diagnose)
    output = CliRunner().invoke(build_app(), ["doctor", "a.py:factory"]).output
    assert output.splitlines()[0] == f"compiled: {said}"
