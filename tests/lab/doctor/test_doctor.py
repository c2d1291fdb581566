"""The command and its processes: bad input, limits, files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import bad_inputs
import pytest
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.cli import build_app
from attnspan_lab.doctor import Finding, Place, diagnose, run
from attnspan_lab.doctor.child import _unloadable
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.process import Stage, _crash
from attnspan_lab.doctor.run import _in_library, _with_known_issues
from attnspan_lab.doctor.torch.subject import load

HERE = Path(__file__).parent
#: Each stage has a process of its own, which is forked: no interpreter starts.
FORKED = pytest.mark.usefixtures("forked")
LINES = (HERE / "bad_inputs.py").read_text().splitlines()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def marked(name: str) -> int:
    """The line of a factory that is marked."""
    start = next(i for i, line in enumerate(LINES) if line.startswith(f"def {name}") or name in line)
    return next(i for i, line in enumerate(LINES[start:], start + 1) if line.endswith("# here"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("raises", "subject", "KeyError: 'weights.bin'"),
        ("returns_junk", "subject", "expected a factory that returns (model, batches)"),
        ("has_no_batch", "subject", "got no batch"),
        ("wants_a_gpu", "subject", "CUDA"),
        ("exits", "subject", "SystemExit: no licence"),
        ("no_such_name", "subject", "expected a factory named 'no_such_name', got none"),
        ("raises_in_forward", "error", "RuntimeError: mat1 and mat2"),
    ],
)
@FORKED
def test_bad_input_is_a_finding(name: str, kind: str, said: str) -> None:
    found = diagnose(f"bad_inputs:{name}", stages=["eager"]).findings
    assert [x.kind for x in found] == [kind]
    assert said in found[0].what
    assert found[0].remedy
    if name == "raises_in_forward":
        assert found[0].places[0].line == marked("_Raising")
    if name == "wants_a_gpu":
        assert "GPU" in found[0].cause


def unloadable(target: str) -> Finding:
    """What the doctor says of a target that it cannot load."""
    with pytest.raises(Exception) as raised:
        load(target)
    return _unloadable(raised.value, target)


def test_a_misspelt_factory_is_named() -> None:
    found = unloadable("bad_inputs:raisess")
    said = "bad_inputs:raisess cannot be examined: expected a factory named 'raisess', got none: the module "
    assert found.what.startswith(f"{said}bad_inputs has only raises, returns_junk, ")
    assert found.remedy == "Did you mean bad_inputs:raises"
    assert "Error" not in found.what


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("a.ipynb", "a notebook"),
        ("a.ipynb:factory", "a notebook"),
        ("folder/", "a directory"),
        ("./folder:factory", "a directory"),
        ("folder:factory", "a directory"),
    ],
)
def test_notebooks_and_directories_are_named(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = unloadable(target)
    assert f"got {said}" in found.what
    assert "OptionError" not in found.what
    assert ("jupyter nbconvert --to script a.ipynb" in found.remedy) == (said == "a notebook")


@pytest.mark.parametrize("end", ["", ":factory"])
def test_a_syntax_error_has_its_line(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "has_no_syntax.py"
    path.write_text("import os\ndef factory(:\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = unloadable(f"{path}{end}")
    assert found.places == (Place(str(path), 2),)
    assert found.what.endswith("SyntaxError: invalid syntax")
    assert found.remedy.startswith("Correct this line")


def test_the_command_that_tests_a_factory_names_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert unloadable("bad_inputs:raises").remedy.endswith(
        "python -c 'import bad_inputs; bad_inputs.raises()'"
    )
    found = unloadable("../doctor/bad_inputs.py:raises")
    assert "PYTHONPATH=../doctor python -c 'import bad_inputs;" in found.remedy


def test_a_remedy_of_two_sentences_is_whole() -> None:
    found = unloadable("bad_inputs:has_no_batch")
    assert found.remedy.startswith("Yield at least one batch. Batches of different lengths")
    assert "Yield" not in found.what


@FORKED
@pytest.mark.slow
def test_a_target_that_cannot_be_examined_is_said_once() -> None:
    made = CliRunner().invoke(build_app(), ["doctor", "bad_inputs:raisess", "--stages", "eager"])
    assert made.exit_code == 1
    assert made.output.count("cannot be examined") == 1
    assert made.output.count("Did you mean") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "signal"), [("crashes", "SIGABRT"), ("is_killed", "SIGKILL")])
def test_a_crash_is_a_finding_with_its_line(name: str, signal: str) -> None:
    (found,) = diagnose(f"bad_inputs:{name}", stages=["eager"]).findings
    assert found.kind == "crash"
    assert f"signal {signal}" in found.what
    assert found.remedy
    assert found.places[0].line == marked(name)


@FORKED
@pytest.mark.slow
def test_a_hang_is_a_finding_with_its_line() -> None:
    (found,) = diagnose("bad_inputs:hangs", stages=["eager"], limit=6).findings
    assert found.kind == "hang"
    assert "the process was loading" in found.what
    assert found.places[0].line == marked("hangs")


@FORKED
@pytest.mark.slow
def test_a_factory_that_forks_is_examined_once() -> None:
    found = diagnose("bad_inputs:forks", stages=["eager"])
    assert found.findings == ()
    assert found.facts["eager"]["attention calls"] == 1
    assert hasattr(bad_inputs, "forks")


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--in-place"]], ids=["torch.compile(model)", "model.compile()"])
def test_a_script_is_run_with_its_arguments_and_its_model_examined(how: list[str]) -> None:
    found = diagnose("train_script.py", ["--steps", "3", *how], stages=["eager"])
    assert [x.kind for x in found.findings] == ["copy"]
    assert found.subject == "train_script.py: Model, 3 batches"


@pytest.mark.slow
def test_the_command_writes_what_it_found_and_keeps_limits(tmp_path: Path) -> None:
    files = {name: tmp_path / f"found.{name}" for name in ("json", "junit", "page")}
    options = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    limits = ["--max-breaks", "0", "--max-copies", "0"]
    made = CliRunner().invoke(
        build_app(),
        [
            "doctor",
            "--stages",
            "eager,compiled",
            *limits,
            *options,
            "--",
            "python",
            "train_script.py",
            "--steps",
            "2",
        ],
    )
    assert made.exit_code == 1, made.output
    assert "over the limit: copies: 1, at most 0" in made.output
    assert "breaks" not in made.output.partition("over the limit")[2]
    assert "patients.py" in made.output
    assert json.loads(files["json"].read_text())["findings"][0]["kind"] == "copy"
    suite = ElementTree.parse(files["junit"]).getroot()
    # The finding only costs; the limit makes it a failure.
    assert int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) == 2
    assert suite.get("failures") == "1"
    page = files["page"].read_text()
    assert "Remove the copy: torch&#39;s fused kernels accept transposed views" in page
    assert "http-equiv" in page


@FORKED
@pytest.mark.slow
def test_options_may_follow_the_target_and_only_scripts_have_arguments() -> None:
    made = CliRunner().invoke(build_app(), ["doctor", "patients:sick_contiguous", "--stages", "eager"])
    assert made.exit_code == 0, made.output
    assert "1. copy" in made.output
    assert "\ncompiler" not in made.output
    made = CliRunner().invoke(build_app(), ["doctor", "patients:well_fused", "--", "--steps", "3"])
    assert isinstance(made.exception, OptionError)
    assert "Only scripts take arguments" in str(made.exception)


@FORKED
@pytest.mark.slow
def test_the_cure_compiles_the_models_own_attention_as_it_is() -> None:
    found = diagnose("patients:well_fused", stages=["compiled", "cure"])
    own, cure = found.facts["compiled"], found.facts["cure"]
    assert [cure["own"][x] for x in ("graphs", "breaks")] == [own["graphs"], own["breaks"]]
    assert cure["attnspan"]["attnspan calls"] > 0
    assert found.findings == ()


@FORKED
@pytest.mark.slow
def test_the_page_shows_what_the_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    root = HERE.parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setenv("COLUMNS", "86")
    target = "examples/ailing_gpt.py:factory"
    made = CliRunner().invoke(build_app(), ["doctor", target, "--stages", "eager,compiled"])
    shown = (root / "docs/doctor.md").read_text().partition("```text\n")[2].partition("```")[0]
    figures = ("attention  ", "largest tensor", "compiler  ", "error of", "examined in")
    figures += ("parity: ", "  compiled results", f"{'':19}mode")  # of a stage that does not run here
    told = [x for x in shown.splitlines()[1:] if x and not x.startswith(figures)]
    printed = [x.rstrip() for x in made.output.splitlines()]
    assert len(told) > 20
    assert [x for x in told if x not in printed] == []


@FORKED
@pytest.mark.slow
def test_a_healthy_model_passes(tmp_path: Path) -> None:
    junit = tmp_path / "found.xml"
    arguments = ["doctor", "--stages", "eager", "--junit", str(junit), "patients:well_fused"]
    made = CliRunner().invoke(build_app(), arguments)
    assert made.exit_code == 0, made.output
    assert "No findings" in made.output
    assert ElementTree.parse(junit).getroot().get("failures") == "0"


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspan_lab.doctor.torch import stages

    monkeypatch.setattr(shutil, "which", lambda _: None)
    found: list[Finding] = []
    stages.parity(
        load("patients:well_fused"),
        lambda **x: found.extend([x["finding"]] if "finding" in x else []),
        "inductor",
    )
    assert [x.kind for x in found] == ["environment"]
    assert "no C++ compiler" in found[0].what


def test_findings_of_one_line_are_one_and_in_order() -> None:
    place = Place("a.py", 3)
    found = merged([Finding("copy", "a", (place,)), Finding("leak", "b"), Finding("copy", "a", (place,))])
    assert [(x.kind, x.count) for x in found] == [("leak", 1), ("copy", 2)]


@FORKED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sick_extension", "this line calls attention"),
        ("sick_print", "code around it"),
        ("sick_written_and_printed", "cannot be taken out (written out)"),
    ],
)
def test_attention_is_blamed_only_where_it_was_taken_out(name: str, said: str) -> None:
    found = diagnose(f"patients:{name}", stages=["compiled"]).findings
    assert found[0].kind == "graph-break"
    assert said in found[0].evidence[-1]


def test_what_was_found_stays_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Stage, child: object) -> bool:
        self.findings.append(Finding("copy", "seen before"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "look", interrupted)
    found = diagnose("patients:well_fused")
    assert not found.complete
    assert [x.kind for x in found.findings] == ["copy"]


def test_known_issues_are_matched_by_kind_words_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Finding("error", "NotImplementedError: FlexAttention does not support backward on CPU")
    (found,) = _with_known_issues([error])
    assert "148752" in found.known[0]
    assert _with_known_issues([Finding("error", "another")])[0].known == ()
    assert _with_known_issues([Finding("crash", error.what)])[0].known == ()
    old = Finding("graph-break", "call_id with args (NestedUserFunctionVariable(),)")
    assert _with_known_issues([old])[0].known == ()
    monkeypatch.setattr(run, "version", lambda _: "2.7.1+cpu")
    assert "attention-gym/issues/94" in _with_known_issues([old])[0].known[0]


_OUTER, _INNER = Place(bad_inputs.__file__, 9, "outer"), Place(bad_inputs.__file__, 12, "inner")
_LINE = f'  File "{bad_inputs.__file__}", line 9 in outer\n'
_WHOLE = '  File "<frozen runpy>", line 198 in _run_module_as_main\n'


def crashed(dump: str, *last: Place) -> Finding:
    return _crash(f"Current thread 0x1 (most recent call first):\n{dump}", -11, "running", last)


@pytest.mark.parametrize(
    "dump", ["", "  File ", '  File ", /x/pytorch._C._special", line 1778 in _call\n', _LINE]
)
def test_after_a_crash_without_a_whole_stack_the_line_last_seen_counts(dump: str) -> None:
    assert crashed(dump, _INNER, _OUTER).places == (_INNER, _OUTER)


def test_a_whole_stack_counts_and_the_line_last_seen_is_evidence() -> None:
    """It may be of a call that had returned."""
    found = crashed(_LINE + _WHOLE, _INNER, _OUTER)
    assert found.places == (_OUTER,)
    assert found.evidence == (f"at most 50 ms before, it was seen at {_INNER}: {_INNER.text}",)
    assert crashed(_LINE + _WHOLE, _OUTER).evidence == ()


def test_documents_that_see_each_other_in_transformers_are_mended_by_the_batch() -> None:
    """Its attention may be attnspan's already."""
    place = Place("/x/site-packages/transformers/models/a.py", 3, "forward")
    found = {kind: _in_library(Finding(kind, "a", (place,))).remedy for kind in ("leak", "dense-mask")}
    assert "position_ids" in found["leak"]
    assert found["dense-mask"].startswith("The line is transformers' own")
