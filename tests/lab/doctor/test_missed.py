"""Faults that hide well are found first, at their line. Their healthy twins have no such finding."""

import inspect
from functools import partial
from pathlib import Path

import missed
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnspan_lab.doctor import Finding, Place, run
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
_SOURCE = Path(missed.__file__).read_text().splitlines()
# Sick models whose line stands in a class or function with another name.
_CODE = {"forgets inputs": missed.Dropping, "kept": missed.Kept}


def examined(factory, stage="eager"):
    found = []
    STAGES[stage](Subject(*factory()), lambda **told: found.append(told.get("finding")), "aot_eager")
    return merged([x for x in found if x is not None])


def line_of(name):
    """Number of the line that is marked in the code of a sick model."""
    code = _CODE.get(name) or getattr(missed, name.removeprefix("forgets "))
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if "# sick" in x)


@pytest.mark.parametrize("name", missed.PAIRS)
def test_a_hidden_fault_is_found_first(name):
    kind, sick, _ = missed.PAIRS[name]
    found = examined(sick)
    assert [x.kind for x in found[:1]] == [kind], found
    assert found[0].places[0].line == line_of(name), found[0]


@pytest.mark.parametrize("name", missed.PAIRS)
def test_the_twin_of_a_hidden_fault_has_none(name):
    kind, _, well = missed.PAIRS[name]
    assert [x for x in examined(well) if x.kind == kind or x.severity == "wrong"] == []


def test_a_step_without_rows_is_not_the_models_fault():
    found = []
    model, batches, expected = missed.without_rows()
    subject = Subject(model, batches, expected, target="missed:without_rows")
    STAGES["ranks"](subject, lambda **told: found.append(told["finding"]), "aot_eager")
    assert [x.kind for x in found] == ["error"]
    assert "cannot be compared" in found[0].what
    assert found[0].remedy.startswith("Return rows['q_index'] too")


def read(file):
    return Finding("sync", "A value of a tensor is read on the host here", (Place(file, 3),), stage="eager")


@pytest.mark.parametrize(
    ("file", "facts", "left"),
    [
        ("/x/site-packages/transformers/a.py", {"compiled": {"breaks": 0}}, 0),
        ("/x/site-packages/transformers/a.py", {}, 1),
        ("/x/model.py", {"compiled": {"breaks": 0}}, 1),
    ],
)
def test_reads_that_a_library_guards_are_left_out(file, facts, left):
    assert len(run._completed([read(file)], facts)) == left


def test_reads_of_a_library_that_break_the_graph_stay():
    file = "/x/site-packages/transformers/a.py"
    broken = Finding("graph-break", "The graph breaks here", (Place(file, 3),), stage="compiled")
    assert len(run._completed([read(file), broken], {"compiled": {"breaks": 1}})) == 2


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_dense_mask_of_an_eager_step_has_no_known_issue_of_compiled_steps(kind):
    place = Place("/x/site-packages/transformers/integrations/sdpa_attention.py", 3)
    what = f"A {kind} with an entry for each pair of tokens is made here, shape (8, 8)"
    (found,) = run._completed([Finding("dense-mask", what, (place,), stage="eager")], {})
    assert found.known == ()


@pytest.mark.parametrize("name", missed.REFUSED)
def test_why_a_call_is_not_fused_is_tried(name):
    attend, cause, remedy = missed.REFUSED[name]
    found = next(x for x in examined(missed.model_of(attend)) if x.kind == "unfused")
    assert found.places[0].line == line_of(name)
    assert cause in found.cause
    assert "torch 2" in found.cause
    assert remedy in found.remedy
    assert "flash_attention_for_cpu runs" in found.tried


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_that_a_checkpoint_repeats_is_the_same_call(reentrant):
    """torch's function decomposes into products and a softmax, in the backward pass too."""

    class Repeated(missed.Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    found, measured = [], {}

    def say(finding=None, facts=None):
        found.append(finding)
        measured.update(facts or {})

    def attend(q, k, v):
        return missed.SDPA(q, k, v, dropout_p=0.1, is_causal=True)

    model = missed.Model(attend, layers=2, block=Repeated)
    STAGES["eager"](Subject(model, missed.tokens()), say, "aot_eager")
    costs = [x for x in found if x is not None and x.kind in ("unfused", "dense-mask", "recompute")]
    assert [x.kind for x in costs] == ["unfused", "recompute"]
    unfused, again = costs
    assert unfused.what.startswith("scaled_dot_product_attention ran its math kernel")
    assert measured["attention calls"] == 2
    assert again.evidence == ("2 calls in the forward pass, 2 more in the backward pass",)


def test_dropout_is_kept_in_training_and_dropped_in_evaluation():
    texts = []
    for training in (True, False):
        model = missed.Model(missed.dropout).train(training)
        given = model, missed.tokens()
        found = next(x for x in examined(partial(tuple, given)) if x.kind == "unfused")
        texts.append(found.remedy)
        assert found.tried.startswith("with dropout_p=0.0, ")
    assert texts[0].startswith("Call attnspan.torch.attention")
    assert "changes training" in texts[0]
    assert texts[1] == "Pass dropout_p=0.0"


@pytest.mark.parametrize(
    ("block", "tried"), [(missed.Multihead, "for_cpu runs"), (missed.MultiheadUsed, "the weights are used")]
)
def test_multihead_attention_is_told_to_drop_its_weights(block, tried):
    (found,) = examined(lambda: (missed.Model(missed.fused, block=block), missed.tokens()))
    assert found.kind == "unfused"
    assert "need_weights=False" in found.remedy
    assert tried in found.tried


def test_a_remedy_of_a_recompilation_may_not_break_the_graph():
    (found,) = examined(missed.counting(missed.Cached), "compiled")
    assert found.remedy == "Set torch._dynamo.config.allow_unspec_int_on_nn_module = True"
    assert "more graph break" not in found.tried
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert examined(missed.counting(missed.Cached), "compiled") == ()


def test_the_length_of_a_list_has_its_own_remedy():
    (found,) = examined(missed.counting(missed.Listed), "compiled")
    assert "number of entries" in found.remedy
    assert "len(" in found.cause
