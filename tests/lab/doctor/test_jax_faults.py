"""Faults in JAX are named first, at their line. A remedy ends the finding, and its results are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax_costs
import jax_masks  # noqa: F401
import jax_meshes
import jax_numbers  # noqa: F401
import jax_right
import pytest
from jax_runner import FAULTS, RIGHT, SEVERE, check_fault, check_remedy, examined
from virtual_devices import on_devices

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

REMEDIES = [
    (name, 1 + number)
    for name, fault in FAULTS.items()
    for number in range(max(1, len(fault.remedies)) if fault.applied else 0)
]
#: Kinds whose remedy a test applies.
APPLIED = {FAULTS[name].kind for name, _ in REMEDIES}
MESHES = sorted(x for x in dir(jax_meshes) if x.startswith("right_"))


@on_devices
def on_the_mesh(check: Callable[..., Any], *given: Any) -> Any:
    return check(*given)


def run(check: Callable[..., Any], name: str, *given: Any) -> None:
    """Run where there are four devices if the fault needs them."""
    mesh = FAULTS[name].kind.startswith("rank-")
    (on_the_mesh if mesh else lambda check, *given: check(*given))(check, name, *given)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first_at_its_line(name: str) -> None:
    run(check_fault, name)


@pytest.mark.parametrize(("name", "number"), REMEDIES)
def test_a_remedy_is_right(name: str, number: int) -> None:
    run(check_remedy, name, number)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_wrong_with_a_right_model(name: str) -> None:
    stages = {"donated": ["compiled"], "numbers_of_one_type": ["compiled"]}.get(name, [])
    found, unchecked = examined(RIGHT[name], "eager", *stages)
    assert [x.what for x in found if x.severity in (*SEVERE, "limited")] == []
    assert {x.kind for x in found if x.severity == "slow"} <= {
        "unfused",
        "dense-mask",
        *(["upcast"] if name == "with_positions" else []),
    }
    assert not any("doctor" in x and "failed" in x for x in unchecked.values())
    assert not {"attention", "the stage eager"} & set(unchecked)


@pytest.mark.parametrize("name", jax_right.WHOLE)
def test_a_whole_model_only_stores_scores_at_the_users_own_line(name: str) -> None:
    found, _ = examined(RIGHT[name], "eager", "compiled", "parity")
    assert [(x.kind, x.places[0].file) for x in found] == [("unfused", jax_right.__file__)]


@pytest.mark.parametrize("name", MESHES)
def test_a_right_step_on_a_mesh_equals_one_device(name: str) -> None:
    found, unchecked = on_the_mesh(examined, getattr(jax_meshes, name), "ranks")
    # All devices compute the mean of the same results.
    assert {x.kind for x in found} == ({"rank-replicated"} if "mean" in name else set())
    assert unchecked == {}


@pytest.mark.parametrize("made", jax_costs.KEPT)
def test_a_cache_that_must_be_kept_is_no_finding(made: Any) -> None:
    assert "copy" not in {x.kind for x in examined(made, "compiled")[0]}
