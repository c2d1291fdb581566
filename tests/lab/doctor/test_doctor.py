"""The command and its processes: bad input, limits, files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import targets
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.cli import build_app
from attnspan_lab.doctor import Finding, Place, diagnose
from attnspan_lab.doctor.child import _unloadable
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.process import Stage, _crash
from attnspan_lab.doctor.run import _in_library
from attnspan_lab.doctor.torch.subject import load
from attnspan_lab.doctor.words import first_line

HERE = Path(__file__).parent
#: Each stage has a process of its own, which is forked: no interpreter starts.
FORKED = pytest.mark.usefixtures("forked")
LINES = (HERE / "targets.py").read_text().splitlines()


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
    found = diagnose(f"targets:{name}", stages=["eager"]).findings
    assert [x.kind for x in found] == [kind]
    assert said in found[0].what
    assert found[0].remedy
    if name == "raises_in_forward":
        assert found[0].places[0].line == marked("Raising")
    if name == "wants_a_gpu":
        assert "GPU" in found[0].cause


def unloadable(target: str) -> Finding:
    """What the doctor says of a target that it cannot load."""
    with pytest.raises(Exception) as raised:
        load(target)
    return _unloadable(raised.value, target)


def test_a_misspelt_factory_is_named() -> None:
    found = unloadable("targets:raisess")
    said = "targets:raisess cannot be examined: expected a factory named 'raisess', got none: the module "
    assert found.what.startswith(f"{said}targets has only raises, returns_junk, ")
    assert found.remedy == "Did you mean targets:raises"
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
    assert unloadable("targets:raises").remedy.endswith("python -c 'import targets; targets.raises()'")
    found = unloadable("../doctor/targets.py:raises")
    assert "PYTHONPATH=../doctor python -c 'import targets;" in found.remedy


def test_a_remedy_of_two_sentences_is_whole() -> None:
    found = unloadable("targets:has_no_batch")
    assert found.remedy.startswith("Yield at least one batch. Batches of different lengths")
    assert "Yield" not in found.what


@FORKED
@pytest.mark.slow
def test_a_target_that_cannot_be_examined_is_said_once() -> None:
    made = CliRunner().invoke(build_app(), ["doctor", "targets:raisess", "--stages", "eager"])
    assert made.exit_code == 1
    assert made.output.count("cannot be examined") == 1
    assert made.output.count("Did you mean") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "signal"), [("crashes", "SIGABRT"), ("is_killed", "SIGKILL")])
def test_a_crash_is_a_finding_with_its_line(name: str, signal: str) -> None:
    (found,) = diagnose(f"targets:{name}", stages=["eager"]).findings
    assert found.kind == "crash"
    assert f"signal {signal}" in found.what
    assert found.remedy
    assert found.places[0].line == marked(name)


@FORKED
@pytest.mark.slow
def test_a_hang_is_a_finding_with_its_line() -> None:
    (found,) = diagnose("targets:hangs", stages=["eager"], limit=6).findings
    assert found.kind == "hang"
    assert "the process was loading" in found.what
    assert found.places[0].line == marked("hangs")


@FORKED
@pytest.mark.slow
def test_a_factory_that_forks_is_examined_once() -> None:
    found = diagnose("targets:forks", stages=["eager"])
    assert found.findings == ()
    assert found.facts["eager"]["attention calls"] == 1
    assert hasattr(targets, "forks")


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
    asked = ["--stages", "eager,compiled", "--max-breaks", "0", "--max-copies", "0"]
    asked += [x for name, path in files.items() for x in (f"--{name}", str(path))]
    script = ["--", "python", "train_script.py", "--steps", "2"]
    made = CliRunner().invoke(build_app(), ["doctor", *asked, *script])
    assert made.exit_code == 1, made.output
    assert "over the limit: copies: 1, at most 0" in made.output
    assert "breaks" not in made.output.partition("over the limit")[2]
    assert "targets.py" in made.output
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
    made = CliRunner().invoke(build_app(), ["doctor", "targets:copies", "--stages", "eager"])
    assert made.exit_code == 0, made.output
    assert "1. copy" in made.output
    assert "\ncompiler" not in made.output
    made = CliRunner().invoke(build_app(), ["doctor", "targets:healthy", "--", "--steps", "3"])
    assert isinstance(made.exception, OptionError)
    assert "Only scripts take arguments" in str(made.exception)


@FORKED
@pytest.mark.slow
def test_the_cure_compiles_the_models_own_attention_as_it_is() -> None:
    found = diagnose("targets:healthy", stages=["compiled", "cure"], backend="aot_eager")
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
    arguments = ["doctor", "--stages", "eager", "--junit", str(junit), "targets:healthy"]
    made = CliRunner().invoke(build_app(), arguments)
    assert made.exit_code == 0, made.output
    assert "No findings" in made.output
    assert ElementTree.parse(junit).getroot().get("failures") == "0"


@pytest.mark.slow
def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnspan_lab.doctor.torch import stages

    monkeypatch.setattr(shutil, "which", lambda _: None)
    found: list[Finding] = []
    stages.parity(
        load("targets:healthy"),
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
        ("calls_an_extension", "this line calls attention"),
        ("prints", "code around it"),
        ("prints_and_writes", "cannot be taken out (written out)"),
    ],
)
def test_attention_is_blamed_only_where_it_was_taken_out(name: str, said: str) -> None:
    found = diagnose(f"targets:{name}", stages=["compiled"], backend="aot_eager").findings
    assert found[0].kind == "graph-break"
    assert said in found[0].evidence[-1]


def test_what_was_found_stays_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Stage, child: object) -> bool:
        self.findings.append(Finding("copy", "seen before"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "look", interrupted)
    found = diagnose("targets:healthy")
    assert not found.complete
    assert [x.kind for x in found.findings] == ["copy"]


_OUTER, _INNER = Place(targets.__file__, 9, "outer"), Place(targets.__file__, 12, "inner")
_LINE = f'  File "{targets.__file__}", line 9 in outer\n'
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


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        (-9, "Linux does so if memory runs out", "Use fewer layers"),
        (-11, "Native code crashed", "in a debugger"),
        (3, "The code ended its process", "Remove the call that ends the process"),
    ],
)
def test_why_a_process_ended(code: int, cause: str, remedy: str) -> None:
    found = _crash("", code, "running", ())
    assert cause in found.cause
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "needs a GPU"),
        (KeyError("use_cuda"), "The factory raises"),
        (RuntimeError("CUDA out of memory"), "The factory raises"),
        (RuntimeError("Attempting to deserialize object on a CUDA device but"), "holds tensors of a GPU"),
    ],
)
def test_an_error_that_names_cuda_may_have_another_cause(error: Exception, cause: str) -> None:
    found = _unloadable(error, "a:b")
    assert cause in found.cause
    assert ("map_location" in found.remedy) == ("holds" in cause)


def test_a_class_of_a_library_is_no_script() -> None:
    found = _unloadable(ModuleNotFoundError("No module named 'transformers'"), "LlamaModel")
    assert "python LlamaModel" not in found.remedy
    assert "Install transformers" in found.remedy


def test_a_script_that_exits_says_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit('no such data')\n")
    with pytest.raises(ValueError, match="before the script ended with 'no such data'"):
        load(str(path))


def test_an_error_is_cut_between_sentences():
    long, longer = f"Expected {'a, ' * 60}b", "x" * 3000
    said = {
        "Got 0.5. Pass 1.": "Got 0.5. Pass 1",
        f"{long}. Pass b.": long,
        f"Got a. {long}.": "Got a",
        longer: f"{longer[:1200]}...",
        "": "ValueError",
    }
    assert {x: first_line(ValueError(x)) for x in said} == said
