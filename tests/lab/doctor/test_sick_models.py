"""Each sick model has its finding on its line. Its twins have none, and the remedy mends it."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch_runner import CASES, assert_says, examined, grave, lines_of

from attnspan_lab.doctor.findings import KINDS
from attnspan_lab.doctor.torch.subject import Subject

for _path in sorted(Path(__file__).parent.glob("sick_*.py")):
    import_module(_path.stem)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TWINS = {twin: name for name, x in reversed(CASES.items()) for twin in x.twins}
MENDED = [name for name, x in CASES.items() if x.right is not None and x.twins]

#: What the doctor says of a twin that it checked.
CHECKED = {"decode": "equal one prefill", "state": "the same results behind another batch"}

#: Kinds whose remedy other tests apply, by the file or the reason.
ELSEWHERE = {
    "no remedy in the model's code": (
        *("subject", "hang", "crash", "error", "parity", "combination", "environment"),
    ),
    "the remedies of recompile": ("recompile-limit",),
    "test_compiler_findings.py": ("graph-break",),
    "test_ranks_compared.py": [x for x in KINDS if x.startswith("rank-")],
    "test_jax_*.py": ("weight-sum", "clamped-slice", "reused-key", "discarded", "constant"),
    "test_honest_benchmarks.py": (
        *("no-timing", "compile-counted", "not-waited", "result-unused", "result-constant", "inputs-counted"),
        *("processor-clock", "first-call-counted", "waited-each-call", "wide-samples", "few-samples"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sick_model_has_its_finding_alone(name, capsys):
    kind, code, made, _, _, severity, stage, beside, says = CASES[name]
    found, _ = examined(made, stage)
    capsys.readouterr()
    own = next(x for x in found if x.kind == kind)
    assert own.severity == severity
    wrong = [x for x in grave(found) if x not in beside]
    assert wrong == ([kind] if severity in ("wrong", "stops") else [])
    if code is not None:
        lines = lines_of(code)
        assert {x.line for x in own.places[: len(lines)]} == set(lines)
    assert own.cause or says["cause"] == ""
    assert own.remedy
    assert_says(own, says)


@pytest.mark.parametrize(("twin", "name"), TWINS.items(), ids=TWINS.values())
def test_a_twin_is_healthy(twin, name):
    case = CASES[name]
    found, facts = examined(twin, case.stage)
    own = {x.kind for x in CASES.values() if twin in x.twins}
    assert [x for x in grave(found) if x not in case.beside] == []
    assert [x.kind for x in found if x.kind in own] == []
    if case.kind in CHECKED:
        assert CHECKED[case.kind] in facts["checked"]["state" if case.kind == "state" else "decoding"]
    unchecked = facts.get("unchecked", {})
    assert not any("cannot be copied" in x for x in unchecked.values())
    # A decode step of one token has nothing to follow. Windows and channels have layouts of their own.
    assert any(x in unchecked.get("axes", "no module around") for x in ("no module around", "this layout"))


def steps(factory):
    """Results of all batches in evaluation mode, and gradients of the last one in the model's own mode."""
    subject = Subject(*factory())
    results = []
    with torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        subject.step(subject.model, subject.batches[0])
        gradients = {k: x for k, x in subject.gradients().items() if k.startswith("blocks")}
        subject = Subject(*factory())
        subject.model.eval()
        for batch in subject.batches:
            results += subject.step(subject.model, batch, backward=False).values()
    return results, gradients


def far(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-9))


@pytest.mark.parametrize("name", MENDED)
def test_the_mended_model_is_right(name):
    """Results and gradients of the first twin, which has the remedy."""
    case = CASES[name]
    (results, gradients), (wanted, others) = steps(case.twins[0]), steps(case.right)
    near = 3e-2 if results[0].dtype == torch.bfloat16 else 1e-5
    assert max(far(a, b) for a, b in zip(results, wanted, strict=True)) < near
    random = case.kind in ("recompute-random", "dropout-in-eval")
    for x in gradients.keys() & others.keys() if not random else ():
        assert far(gradients[x], others[x]) < 10 * near or float(others[x].norm()) < 1e-4, x


def test_each_kind_has_a_remedy_that_is_applied():
    applied = {x.kind for x in CASES.values() if x.twins}
    elsewhere = {kind for kinds in ELSEWHERE.values() for kind in kinds}
    assert applied & elsewhere == set()
    assert applied | elsewhere == set(KINDS)
