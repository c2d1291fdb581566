"""Every sick function in JAX is diagnosed: first comes the planted finding, on its line. Twins have none."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax_patients as patients
import numpy as np
import pytest
from virtual_devices import on_devices

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.jax import STAGES, JaxSubject

pytestmark = pytest.mark.filterwarnings("ignore")

SICK = sorted(patients.KINDS)
WELL = sorted(name for name in dir(patients) if name.startswith("well_"))
MESHES = {x for x in SICK if patients.KINDS[x].startswith("rank-")} | {"well_sharded", "well_mapped"}
#: Patients whose results are right, and whose gradients are NaN.
GRADIENTS = ("sick_gradient_of_root",)
#: What the doctor tried.
TRIED = {
    "sick_lengths": "with all batches padded to 11: 0 recompilations instead of 3",
    "sick_weak_type": "with scale as an array of float32: 0 recompilations instead of 1, the same results",
    "sick_static_number": "with window as an array of int32: 0 recompilations instead of 2, the same results",
    "sick_size_argument": 'with static_argnames=("length",): the step can be traced',
}
#: Masks that the doctor offers. They show exactly the right pairs. No mask stands where none is known.
OFFERED = {
    "sick_no_documents": "mask=causal() & segments(segment_ids)",
    "sick_documents_of_keys": "mask=causal() & segments(segment_ids)",
    "sick_written_out": "mask=causal() shows the same pairs",
    "sick_library_attention": "mask=causal() shows the same pairs",
    "sick_future": "mask=causal()",
}
#: Twins whose results and gradients are compared with float64, and twins that write attention out.
PARITY = ("well_backward", "well_documents", "well_grouped", "well_half", "well_mapped", "well_first_row")
DENSE = ("well_backward", "well_first_row", "well_padding", "well_sharded", "well_mapped")
STAGE_OF = {"recompile": "compiled", "compile-error": "compiled", "constant": "compiled", "parity": "parity"}
STAGE_OF |= dict.fromkeys(("rank-rows", "rank-gather", "rank-replicated"), "ranks")


def examined(name: str, *stages: str) -> tuple[Finding, ...]:
    found: list[Finding] = []

    def say(**what: object) -> None:
        if isinstance(x := what.get("finding"), Finding):
            found.append(x)

    # The suite's own settings are stricter than those of a user.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for stage in stages:
            STAGES[stage](getattr(patients, name)(), say, "")
    return merged(found)


def planted(name: str) -> list[int]:
    """Numbers of the lines that are marked for a patient."""
    lines = Path(patients.__file__).read_text().splitlines()
    own = [i for i, line in enumerate(lines, 1) if line.endswith(f"# sick: {name}")]
    if own:
        return own
    source, first = inspect.getsourcelines(getattr(patients, name))
    return [first + i for i, line in enumerate(source) if line.rstrip().endswith("# sick")]


def there(name: str, *stages: str) -> tuple[Finding, ...]:
    """Examine in the process with four devices if the patient has a mesh."""
    return examined_on_devices(name, *stages) if name in MESHES else examined(name, *stages)


examined_on_devices = on_devices(examined)


def test_there_are_enough_of_each() -> None:
    assert len(SICK) >= 25
    assert len(WELL) >= 10
    assert all(planted(name) for name in SICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_the_planted_cause_and_line_are_named(name: str) -> None:
    kind = patients.KINDS[name]
    found = there(name, STAGE_OF.get(kind, "parity" if name in GRADIENTS else "eager"))
    severe = [x for x in found if x.severity in ("stops", "wrong", "compile")]
    assert {x.kind for x in severe} <= {kind}
    first = next(x for x in found if x.kind == kind)
    inner, *outer = [x.line for x in first.places]
    # A helper's line comes before the line that calls it.
    assert inner in planted(name) or (inner in planted("dense") and set(outer) & set(planted(name)))
    assert first.cause
    assert first.remedy
    assert TRIED.get(name, "") in first.tried
    assert OFFERED.get(name, "") in first.remedy


@pytest.mark.slow
@pytest.mark.parametrize("name", WELL)
def test_healthy_twins_have_no_finding_but_stored_scores(name: str) -> None:
    """The twins apply the remedies. Their results and gradients equal float64."""
    stages = [
        "eager",
        *(["parity"] if name in PARITY else []),
        *(["compiled"] if name == "well_number" else []),
    ]
    found = there(name, *stages)
    assert {x.kind for x in found} <= ({"unfused"} if name in DENSE else set())


def test_no_mask_is_offered_that_keeps_a_fault() -> None:
    stored = [x for x in examined("sick_future", "eager") if x.kind == "unfused"]
    assert stored
    assert not any("full()" in x.remedy for x in stored)


def test_an_encoder_may_see_later_tokens() -> None:
    """Causality is about the decoder. The doctor cannot tell the two apart, and says so."""
    embed = jax.random.normal(jax.random.key(0), (20, 16))

    def step(weights: Any, src: Any, tgt: Any) -> Any:
        memory, x = weights[src][:, :, None], weights[tgt][:, :, None]
        memory = jax.nn.dot_product_attention(memory, memory, memory)
        x = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        return jax.nn.dot_product_attention(x, memory, memory)

    batch = {"src": np.arange(18).reshape(2, 9), "tgt": np.arange(12).reshape(2, 6)}
    found: list[Finding] = []
    unchecked: dict[str, str] = {}

    def say(**what: Any) -> None:
        found.extend([what["finding"]] if "finding" in what else [])
        unchecked.update(what.get("facts", {}).get("unchecked", {}))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        STAGES["eager"](JaxSubject(step, [batch], causal=True, variables=embed), say, "")
    assert {x.kind for x in found} <= {"unfused"}
    assert "several sequences" in unchecked["causality"]
