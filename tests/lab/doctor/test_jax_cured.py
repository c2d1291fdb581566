"""The remedy of a finding in JAX, applied by the test, makes the finding vanish and leaves results right."""

from __future__ import annotations

import jax
import jax_cured as cured
import jax_patients as patients
import numpy as np
import pytest
from test_jax_right import examined
from virtual_devices import on_devices

from attnspan_lab.doctor.jax.float64_reference import difference, reference
from attnspan_lab.doctor.jax.subject import Traced, floats

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Patient, stage, and words of the remedy that the cure applies.
CURES = {
    "sick_constant_mask": ("eager", "Pass mask=causal() to attnspan.jax.attention"),
    "sick_constant_mask_in_jax": (
        "eager",
        "Pass is_causal=True, without mask,",
    ),
    "sick_mask_argument": ("eager", "for example as causal()"),
    "sick_mask_argument_in_jax": ("eager", "compute the mask from jnp.arange"),
    "sick_norm": ("eager", "Check the range of this line's inputs"),
    "sick_overflow": ("eager", "Check the range of this line's inputs"),
    "sick_gradient_of_root": ("parity", "jnp.where must select safe inputs before the operator"),
    "sick_print": ("eager", "Return the value from the step"),
    "sick_callback": ("eager", "compute it with jax.numpy"),
    "sick_captured": ("compiled", "Pass the arrays as arguments"),
    "sick_gathered": ("ranks", "shard heads or batch elements instead of the sequence"),
    "sick_gathered_with_a_plan": ("ranks", "mask=plan.on(mesh, ...)"),
    "sick_constraint": ("ranks", "remove the constraint"),
    "sick_whole_batch": ("ranks", "Shard the batch"),
}
#: Patients whose own results are NaN.
NAN = ("sick_norm", "sick_overflow")


def patient_of(name: str) -> str:
    return name.removesuffix("_in_jax").removesuffix("_with_a_plan")


def both(name: str, stage: str) -> tuple[list[str], set[str], dict[str, str]]:
    """The patient's remedies, the kinds of findings that the cure leaves, and its unchecked topics."""
    sick, _ = examined(getattr(patients, patient_of(name)), stage)
    left, unchecked = examined(getattr(cured, name), stage)
    kind = patients.KINDS[patient_of(name)]
    return [x.remedy for x in sick if x.kind == kind], {x.kind for x in left}, unchecked


def error_of(name: str) -> float:
    """Relative error of the cure's results: against float64, and against the results of the patient."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        steps = [x() for x in (getattr(cured, name), getattr(patients, patient_of(name)))]
        runs = [Traced.of(x, x.batches[0]) for x in steps]
        found, own = ([np.asarray(y, np.float64) for y in floats(x.run(*x.leaves))] for x in runs)
        wanted = [cured.exact(name)] if name in NAN else own
        exact = wanted if name in NAN else reference(runs[0]).results
    return max(difference(found, exact), difference(found[: len(wanted)], wanted))


@pytest.mark.parametrize("name", [x for x, (stage, _) in CURES.items() if stage != "ranks"])
def test_the_remedy_cures(name: str) -> None:
    stage, words = CURES[name]
    remedies, left, _ = both(name, stage)
    assert any(words in x for x in remedies)
    assert patients.KINDS[patient_of(name)] not in left
    assert error_of(name) < (5e-3 if name == "sick_overflow" else 1e-5)


@pytest.mark.parametrize("name", [x for x, (stage, _) in CURES.items() if stage == "ranks"])
def test_the_remedy_cures_on_a_mesh(name: str) -> None:
    """The stage compares results with one device: "rank-rows" is a difference."""
    stage, words = CURES[name]
    remedies, left, unchecked = on_devices(both)(name, stage)
    assert any(words in x for x in remedies)
    assert left == set()
    assert "the mesh against one device" not in unchecked
