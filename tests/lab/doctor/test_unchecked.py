"""Checks and trials that raise are named, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.guarded import guarded
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.timing import examine_benchmark
from attnspan_lab.doctor.torch.cost.gradients import TOPIC, gradient_findings
from attnspan_lab.doctor.torch.cost.recompiles import Trials
from attnspan_lab.doctor.torch.masks import replacement as instead
from attnspan_lab.doctor.torch.recording.compiler import CompilerLog
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject, load

pytestmark = pytest.mark.filterwarnings("ignore")


class Shifted(nn.Module):
    """Adds parameters that get no gradient."""

    def __init__(self, change: Callable[[Tensor], Tensor], many: int = 1) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.shifts = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(many)])
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + sum(self.change(shift.detach()) for shift in self.shifts)


def only_ones(x: Tensor) -> Tensor:
    if not torch.equal(x, torch.ones(4)):
        raise ValueError("the shift must be 1")
    return x


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(4, generator=_NOISE)


def changed_in_place(x: Tensor) -> Tensor:
    return x.add_(0.0)


_NOISE = torch.Generator().manual_seed(0)


def without_gradient(
    change: Callable[[Tensor], Tensor], many: int = 1
) -> tuple[list[Finding], dict[str, str]]:
    """The findings on the shifts, and what was not checked."""
    torch.manual_seed(0)
    subject, coverage = Subject(Shifted(change, many), [torch.ones(2, 4)]), Coverage()
    left = [f"shifts.{i}" for i in range(many)]
    found = list(guarded(TOPIC, gradient_findings(subject, subject.batches[0], left, coverage), coverage))
    return found, coverage.facts["unchecked"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (only_ones, "with other values of them, the step raises ValueError: the shift must be 1"),
        (noisy, "the step returns NaN, or different results for the same batch"),
    ],
)
def test_parameters_that_cannot_be_changed_are_not_checked(
    change: Callable[[Tensor], Tensor], why: str
) -> None:
    assert without_gradient(change) == ([], {TOPIC: why})


def test_only_so_many_parameters_are_examined() -> None:
    found, unchecked = without_gradient(torch.neg, 18)
    assert [x.what.partition(":")[0] for x in found] == ["16 trainable parameters have no gradient"]
    assert unchecked == {TOPIC: "only 16 of the 18 without a gradient were examined"}
    assert without_gradient(torch.neg)[1] == {}


def test_a_gradient_that_cannot_be_tried_has_its_reason() -> None:
    ((found,), unchecked) = without_gradient(changed_in_place)
    assert found.kind == "no-gradient"
    assert found.tried.startswith("without it, the step raises RuntimeError: a leaf Variable")
    assert unchecked == {}


def test_a_mask_that_cannot_be_tried_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel here")

    monkeypatch.setattr(instead, "attention", attention)
    found: list[Any] = []
    STAGES["eager"](load("patients:sick_leak"), lambda **x: found.append(x.get("finding")), "")
    (leak,) = {x.tried for x in found if x is not None and x.kind == "leak"}
    assert leak == "with this mask, the step raises RuntimeError: no kernel here"


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a lock")


def test_a_model_that_cannot_be_copied_is_not_changed() -> None:
    model = Uncopied(4, 4)
    model.calls = 3
    finding = Finding("recompile", "again", (Place("a.py", 1),), ("guard that failed: self.calls == 3",))
    found = Trials(CompilerLog(), Subject(model, [torch.ones(2, 4)]), "eager").of_recompile(finding)
    assert found.tried == "no change: the model cannot be copied (TypeError: holds a lock)"
    assert model.calls == 3


def test_a_script_that_exits_says_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit('no such data')\n")
    with pytest.raises(ValueError, match="before the script ended with 'no such data'"):
        load(str(path))


_BENCHMARK = """
import time, torch

def products(x):
    (x @ x).sum()

compiled = torch.compile(products, backend="eager")
xs = [torch.ones(8, 8)]
for _ in range(3):
    start = time.perf_counter()
    compiled(xs[0])
    print(time.perf_counter() - start)
"""


def test_an_argument_that_the_doctor_cannot_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bench.py"
    path.write_text(_BENCHMARK)
    _, facts = examine_benchmark(str(path), seconds=0.03, limit=12)
    topic = "work that the compiler leaves out"
    assert facts["unchecked"] == {topic: "line 11 calls products with an argument that is no plain name"}
    path.write_text(
        _BENCHMARK.replace("xs[0]", "x").replace("xs = [torch.ones(8, 8)]", "x = torch.ones(8, 8)")
    )
    findings, facts = examine_benchmark(str(path), seconds=0.03, limit=12)
    assert facts["unchecked"] == {}
    assert "result-unused" in {x.kind for x in findings}
