"""Every sick model is diagnosed: first comes the planted finding, on its line. Healthy twins have none."""

from __future__ import annotations

import inspect
from pathlib import Path

import patients
import pytest

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import load

pytestmark = pytest.mark.filterwarnings("ignore")

SICK = sorted(patients.KINDS)
WELL = sorted(name for name in dir(patients) if name.startswith("well_"))
# Each stage finds kinds of its own: a patient goes through the one that finds its defect.
STAGE_OF = dict.fromkeys(("graph-break", "recompile", "recompile-limit", "compile-error"), "compiled")
STAGE_OF |= {"parity": "parity", "combination": "features", "rank-rows": "ranks", "rank-graphs": "ranks"}
STAGE_OF["rank-placement"] = "ranks"


def examined(name: str, *stages: str) -> tuple[Finding, ...]:
    found: list[Finding] = []

    def say(**what: object) -> None:
        if isinstance(x := what.get("finding"), Finding):
            found.append(x)

    for stage in stages:
        STAGES[stage](load(f"patients:{name}"), say, "aot_eager")
    return merged(found)


def planted(name: str) -> list[int]:
    """Numbers of the lines that are marked for a patient."""
    lines = Path(patients.__file__).read_text().splitlines()
    marks = [line.partition("# sick: ")[2].split(", ") for line in lines]
    own = [i for i, mark in enumerate(marks, 1) if name in mark]
    source, first = inspect.getsourcelines(getattr(patients, name))
    return own or [first + i for i, line in enumerate(source) if line.rstrip().endswith("# sick")]


def test_there_are_enough_of_each() -> None:
    assert len(SICK) >= 25
    assert len(WELL) >= 7
    assert all(planted(name) for name in SICK if patients.KINDS[name] != "combination")


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_the_planted_cause_and_line_come_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = patients.KINDS[name]
    found = examined(name, STAGE_OF.get(kind, "eager"))
    capsys.readouterr()
    assert found
    assert found[0].kind == kind
    if kind == "combination":
        assert "compile" in found[0].what
        assert "checkpoint" in found[0].what
        assert "order" not in found[0].what
        return
    assert found[0].places[0].line in planted(name)
    assert found[0].cause
    assert found[0].remedy


@pytest.mark.slow
@pytest.mark.parametrize("name", WELL)
def test_healthy_twins_have_no_finding(name: str) -> None:
    more = ["ranks"] if name == "well_shared" else []
    assert examined(name, "eager", "compiled", "parity", *more) == ()


@pytest.mark.slow
def test_what_mends_a_recompilation_is_tried() -> None:
    (found,) = examined("sick_counter", "compiled")
    assert "calls as a tensor" in found.tried
    assert found.tried.endswith("0 recompilations instead of 8")


def test_rows_of_padding_may_see_nothing() -> None:
    assert {x.kind for x in examined("padded_decoder", "eager")} == {"dense-mask"}
