"""The doctor compares a step with its own shard_map with one device, and names the line that is to blame."""

from __future__ import annotations

import inspect
from typing import Any

import jax_mapped
import pytest
from test_jax_right import examined
from virtual_devices import on_devices

from attnspan_lab.doctor.findings import Finding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Function with the sick line, and a part of the remedy, by the name of the step.
SICK = {
    "positions_of_one_device": ("positions_of_one_device", 'jax.lax.axis_index("cp") * n + jnp.arange(n)'),
    "ids_that_stay": ("ring", "Send the ids of the keys with the keys"),
    "own_maximum": ("own_maximum", 'm = jax.lax.pmax(m_here, "cp")'),
    "forgotten_sum": ("spread", 'jax.lax.psum(x, "cp")'),
    "wrong_offsets": ("spread", "axis_index"),
}
WELL = (
    "positions_of_all",
    "zigzag",
    "ids_that_travel",
    "one_maximum",
    "mean_over_four",
    "mean_over_the_mesh",
)


@on_devices
def on_the_mesh(name: str, stage: str = "ranks") -> tuple[list[Finding], dict[str, str]]:
    return examined(getattr(jax_mapped, name), stage)


def lines(name: str) -> set[int]:
    source, start = inspect.getsourcelines(getattr(jax_mapped, name))
    return {start + i for i, x in enumerate(source) if x.rstrip().endswith(("# sick", "# map"))}


@pytest.mark.parametrize("name", SICK)
def test_a_fault_inside_of_shard_map_is_wrong_at_its_line(name: str) -> None:
    place, remedy = SICK[name]
    wrong = [x for x in on_the_mesh(name)[0] if x.severity == "wrong"]
    assert [x.kind for x in wrong] == ["rank-rows"]
    found: Any = wrong[0]
    assert found.places[0].line in lines(place)
    assert remedy in found.remedy
    assert found.evidence[0].startswith("results differ from one device by")
    assert ("are equal" in found.tried) == (name == "positions_of_one_device")


@pytest.mark.parametrize("name", WELL)
def test_a_right_step_equals_one_device(name: str) -> None:
    found, unchecked = on_the_mesh(name)
    assert [x.what for x in found if x.severity == "wrong"] == []
    assert unchecked == {}


@pytest.mark.parametrize(("name", "why"), [("ring_of_four", "ppermute"), ("random_bits", "random_")])
def test_a_step_that_depends_on_the_number_of_devices_is_not_compared(name: str, why: str) -> None:
    found, unchecked = on_the_mesh(name)
    assert [x.what for x in found if x.severity == "wrong"] == []
    assert why in unchecked["the mesh against one device"]
    assert '"one_device"' in unchecked["the mesh against one device"]


def test_attention_inside_of_shard_map_is_watched_on_one_device() -> None:
    found, unchecked = on_the_mesh("positions_of_all", "eager")
    assert [x.what for x in found] == []
    assert "attention" not in unchecked


def test_tokens_that_see_later_ones_only_on_the_mesh_are_evidence() -> None:
    (found,) = (x for x in on_the_mesh("wrong_offsets")[0] if x.severity == "wrong")
    assert any("rows of results of others" in x for x in found.evidence)
