"""The code of each remedy, applied: the finding vanishes, and results and gradients are right."""

from __future__ import annotations

import pytest
import reaching
import remedied
import torch
import vain
import wasteful
import wired

from attnspan_lab.doctor.findings import KINDS, merged
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Kinds without code, with the place of the test of their advice. Timing and ranks have tests of their own.
ADVICE = {
    *("subject", "hang", "crash", "error", "nan", "parity", "combination", "environment", "constant"),
    # test_masked.py: FORMS, and the alignment. test_causes.py: PADDING and HIDDEN.
    *("dense-mask", "causal-alignment", "mask-lost", "hidden-rows"),
    "graph-break",  # test_texts.py
    "recompile-limit",  # It has the remedies of recompile.
}


def examined(factory, stage="eager"):
    found = []
    STAGES[stage](Subject(*factory()), lambda **told: found.append(told.get("finding")), "aot_eager")
    return merged([x for x in found if x is not None])


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


@pytest.mark.parametrize("name", remedied.REMEDIED)
def test_a_remedy_that_is_applied_mends_the_model(name):
    kind, stage, sick, said, well = remedied.REMEDIED[name]
    before = examined(sick, stage)
    known = {x.kind for x in before} - {kind}
    assert said in next(x for x in before if x.kind == kind).remedy
    after = examined(well, stage)
    assert [x.kind for x in after if x.kind == kind or (x.severity == "wrong" and x.kind not in known)] == []
    (results, gradients), (wanted, others) = steps(well), steps(remedied.RIGHT[name])
    dtype = results[0].dtype
    near = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert max(far(a, b) for a, b in zip(results, wanted, strict=True)) < near
    random = kind in ("recompute-random", "dropout-in-eval")
    for x in gradients.keys() & others.keys() if not random else ():
        assert far(gradients[x], others[x]) < 10 * near or float(others[x].norm()) < 1e-4, x


def test_each_kind_with_code_is_applied():
    applied = {kind for kind, *_ in remedied.REMEDIED.values()}
    timing = {
        *("no-timing", "compile-counted", "not-waited", "result-unused", "result-constant", "inputs-counted"),
        *("processor-clock", "first-call-counted", "waited-each-call", "wide-samples", "few-samples"),
    }
    ranks = {x for x in KINDS if x.startswith("rank-")}
    twins = {kind for kind, *_ in wired.PAIRS.values()}  # They have the remedies: test_wired.py runs them.
    # test_scales.py, test_wasteful.py, test_vain.py and test_reaching.py run these.
    pairs = (*wasteful.PAIRS.values(), *vain.PAIRS.values(), *reaching.PAIRS.values())
    twins |= {kind for kind, *_ in pairs} | {"scale"}
    in_jax = pytest.importorskip("test_jax_faults", exc_type=ImportError).APPLIED
    assert set(KINDS) - applied - ADVICE - timing - ranks - twins - in_jax == set()
