"""Findings of the compiler: causes, settings that are tried, known issues, and features together."""

import json
from pathlib import Path

import pytest
import torch
from sick_compiler import SIZES, CuttingCache, calls_of, reading_a_value, sizes
from sick_masks import PACKED, documents_unseen
from small_models import model_of
from torch import nn
from torch_runner import examined

from attnspan_lab.doctor import Finding, Place, run
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.guarded import guarded
from attnspan_lab.doctor.timing import examine_benchmark, unused
from attnspan_lab.doctor.torch import matrix
from attnspan_lab.doctor.torch.cost.gradients import TOPIC, gradient_findings
from attnspan_lab.doctor.torch.cost.recompiles import Trials
from attnspan_lab.doctor.torch.masks import replacement
from attnspan_lab.doctor.torch.matrix import Cell
from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog, compile_error
from attnspan_lab.doctor.torch.steps import run_compiled
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow


# Settings and marks that remedies name


@SLOW
@pytest.mark.parametrize(
    ("made", "setting"),
    [
        (model_of(reading_a_value, **SIZES), {"capture_scalar_outputs": True}),
        (calls_of(CuttingCache), {"allow_unspec_int_on_nn_module": True}),
    ],
)
def test_a_setting_that_a_remedy_names_mends_the_model(made, setting):
    with torch._dynamo.config.patch(**setting):
        assert examined.__wrapped__(made, "compiled")[0] == ()


@SLOW
def test_sizes_that_a_remedy_marks_are_dynamic(monkeypatch):
    def marked(self, model, batch):
        x = batch["input_ids"].clone()
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        return model(input_ids=x)

    subject = Subject(*sizes((2, 24), (2, 30), (3, 30))())
    wanted = [subject.step(subject.model, x)["0"] for x in subject.batches]
    monkeypatch.setattr(Subject, "call", marked)
    log, error, _ = run_compiled(subject, "aot_eager")
    assert (log.recompiles, error) == ([], None)
    compiled_model = torch.compile(subject.model, backend="aot_eager")
    for x, exact in zip(subject.batches, wanted, strict=True):
        torch.testing.assert_close(subject.step(compiled_model, x)["0"], exact)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("expected size 4==4, stride 8==192 at dim=1", "strides"),
        ("expected size 8192==512, stride 64==64 at dim=0", "shapes"),
    ],
)
def test_shapes_are_told_from_strides(text, what):
    found = compile_error(AssertionError(text))
    assert found.cause == f"An operator's fake kernel and its real kernel return different {what}"


def test_hints_are_sentences():
    log = CompilerLog()
    log._break(
        "Graph Break Reason: Kind\n  Explanation: Why.\n  Hint: Do this\n  Hint: Or that.\n"
        "  Hint: Resolving the earlier graph break may resolve this one.\n"
    )
    assert log.breaks[0].remedy == "Do this. Or that."


@pytest.mark.parametrize(
    ("cell", "what", "cause"),
    [
        (Cell(compile="block"), "The step fails with compile block alone", "without the others"),
        (Cell(), "The eager step fails without any feature: it raises", "from step to step"),
        (Cell("block", "full"), "with no smaller combination", ""),
    ],
)
def test_a_feature_that_fails_alone_is_no_combination(cell, what, cause):
    texts = matrix.explained(cell, "it raises")
    assert what in texts[0]
    assert texts[1].endswith(cause)
    assert ("Leave one" in Finding("combination", *texts[:1], (), (), *texts[1:]).remedy) == (not cause)


# Known issues


def test_known_issues_exist_and_say_when():
    issues = json.loads((Path(run.__file__).parent / "known.json").read_text())
    assert all(x["issue"].startswith("https://github.com/") for x in issues)
    # FlexAttention has no gradients on CPU, and transformers 5.23 makes no mask without padding.
    assert not {"parity", "dense-mask"} & {x["kind"] for x in issues}


@pytest.mark.parametrize(
    ("line", "known"), [("flash_attn(q, q.max().item())", 0), ("flash.PyCapsule.fwd", 1)]
)
def test_a_line_of_flash_attention_may_break_for_another_reason(line, known):
    (found,) = run._with_known_issues([Finding("graph-break", f"The graph breaks here: {line}")])
    assert len(found.known) == known


def test_known_issues_are_matched_by_kind_words_and_version(monkeypatch):
    error = Finding("error", "NotImplementedError: FlexAttention does not support backward on CPU")
    (found,) = run._with_known_issues([error])
    assert "148752" in found.known[0]
    assert run._with_known_issues([Finding("error", "another")])[0].known == ()
    assert run._with_known_issues([Finding("crash", error.what)])[0].known == ()
    old = Finding("graph-break", "call_id with args (NestedUserFunctionVariable(),)")
    assert run._with_known_issues([old])[0].known == ()
    monkeypatch.setattr(run, "version", lambda _: "2.7.1+cpu")
    assert "attention-gym/issues/94" in run._with_known_issues([old])[0].known[0]


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_dense_mask_of_an_eager_step_has_no_known_issue_of_compiled_steps(kind):
    place = Place("/x/site-packages/transformers/integrations/sdpa_attention.py", 3)
    what = f"A {kind} with an entry for each pair of tokens is made here, shape (8, 8)"
    (found,) = run._completed([Finding("dense-mask", what, (place,), stage="eager")], {})
    assert found.known == ()


# Trials that raise are named, with the reason

_NOISE = torch.Generator().manual_seed(0)


class Shifted(nn.Module):
    """Adds parameters that get no gradient."""

    def __init__(self, change, many):
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.shifts = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(many)])
        self.change = change

    def forward(self, x):
        return self.own(x) + sum(self.change(shift.detach()) for shift in self.shifts)


def only_ones(x):
    if not torch.equal(x, torch.ones(4)):
        raise ValueError("the shift must be 1")
    return x


def without_gradient(change, many=1):
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
        (
            lambda x: x + torch.rand(4, generator=_NOISE),
            "the step returns NaN, or different results for the same batch",
        ),
    ],
)
def test_parameters_that_cannot_be_changed_are_not_checked(change, why):
    assert without_gradient(change) == ([], {TOPIC: why})


def test_only_so_many_parameters_are_examined():
    found, unchecked = without_gradient(torch.neg, 18)
    assert [x.what.partition(":")[0] for x in found] == ["16 trainable parameters have no gradient"]
    assert unchecked == {TOPIC: "only 16 of the 18 without a gradient were examined"}
    assert without_gradient(torch.neg)[1] == {}


def test_a_gradient_that_cannot_be_tried_has_its_reason():
    ((found,), unchecked) = without_gradient(lambda x: x.add_(0.0))
    assert found.kind == "no-gradient"
    assert found.tried.startswith("without it, the step raises RuntimeError: a leaf Variable")
    assert unchecked == {}


def test_a_mask_that_cannot_be_tried_has_its_reason(monkeypatch):
    def attention(*_, **__):
        raise RuntimeError("no kernel here")

    monkeypatch.setattr(replacement, "attention", attention)
    found, _ = examined.__wrapped__(model_of(documents_unseen, **PACKED))
    (leak,) = {x.tried for x in found if x.kind == "leak"}
    assert leak == "with this mask, the step raises RuntimeError: no kernel here"


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("holds a lock")


def test_a_model_that_cannot_be_copied_is_not_changed():
    model = Uncopied(4, 4)
    model.calls = 3
    finding = Finding("recompile", "again", (Place("a.py", 1),), ("guard that failed: self.calls == 3",))
    found = Trials(CompilerLog(), Subject(model, [torch.ones(2, 4)]), "eager").of_recompile(finding)
    assert found.tried == "no change: the model cannot be copied (TypeError: holds a lock)"
    assert model.calls == 3


# Work that the compiler deletes in a benchmark


@SLOW
def test_work_whose_results_are_kept_elsewhere_is_not_deleted():
    model, x, kept = nn.Linear(4, 4), torch.randn(2, 4), []
    model.register_buffer("last", torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def backward():
        model.zero_grad()
        model(x).sum().backward()

    def step():
        backward()
        optimizer.step()

    def buffer():
        model.last.copy_(model(x).detach())

    def appends():
        kept.append(model(x))

    def nothing():
        model(x)

    deleted = [
        unused._of_torch(torch.compile(f, backend="aot_eager"), [], {})
        for f in (backward, step, buffer, appends, nothing)
    ]
    assert deleted == [0.0, 0.0, 0.0, 0.0, 1.0]


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


def test_an_argument_that_the_doctor_cannot_read_is_named(tmp_path):
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
