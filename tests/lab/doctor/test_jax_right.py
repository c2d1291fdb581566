"""The doctor prints nothing wrong about right models in JAX that could look sick."""

from __future__ import annotations

from typing import Any

import jax
import jax_right
import pytest

from attnspan_lab.doctor.findings import Finding, merged
from attnspan_lab.doctor.jax import STAGES
from attnspan_lab.doctor.jax.subject import jax_subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def examined(made: Any, *stages: str) -> tuple[list[Finding], dict[str, str]]:
    """List the findings, and what could not be checked."""
    found: list[Finding] = []
    unchecked: dict[str, str] = {}

    def say(**what: Any) -> None:
        found.extend([what["finding"]] if "finding" in what else [])
        unchecked.update(what.get("facts", {}).get("unchecked", {}))

    # The suite's own settings are stricter than a user's settings.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        subject = jax_subject(made(), "made")
        for stage in stages:
            STAGES[stage](subject, say, "")
    return list(merged(found)), unchecked


@pytest.mark.parametrize("name", sorted(jax_right.RIGHT))
def test_nothing_is_wrong_with_a_right_model(name: str) -> None:
    stages = ("eager", "compiled") if name == "donated" else ("eager",)
    found, unchecked = examined(jax_right.RIGHT[name], *stages)
    assert [(x.kind, x.what) for x in found if x.severity in ("stops", "wrong", "compile")] == []
    assert {x.kind for x in found if x.severity == "slow"} <= {"unfused", "dense-mask"}
    assert not any("doctor" in x and "failed" in x for x in unchecked.values())
    assert "attention" not in unchecked
