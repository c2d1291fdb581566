"""The doctor reads the mesh from the step and its arrays, and names the line that copies keys and values."""

from __future__ import annotations

import inspect

import jax_meshes
import pytest
from test_jax_right import examined
from virtual_devices import on_devices

from attnspan_lab.doctor.findings import Finding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Kind, by the name of the step.
SICK = {
    "keys_and_values_of_all_heads": "rank-replicated",
    "values_of_all_samples": "rank-replicated",
    "tokens_split_along_the_sequence": "rank-gather",
    "jitted_with_shardings": "rank-gather",
}
LINES_OF = {"jitted_with_shardings": "tokens_split_along_the_sequence"}
WELL = (
    "split_keys_and_values",
    "one_head_of_keys",
    "samples_on_two_devices",
    "weights_split_over_the_samples",
)


@on_devices
def on_the_mesh(name: str, stage: str = "ranks") -> list[Finding]:
    return examined(getattr(jax_meshes, name), stage)[0]


@pytest.mark.parametrize("name", SICK)
def test_a_copy_on_each_device_is_named_without_a_mesh_of_the_factory(name: str) -> None:
    found = on_the_mesh(name)
    source, start = inspect.getsourcelines(getattr(jax_meshes, LINES_OF.get(name, name)))
    sick = {start + i for i, x in enumerate(source) if x.rstrip().endswith("# sick")}
    assert {x.kind for x in found} == {SICK[name]}
    assert {x.places[0].line for x in found} <= sick
    assert not any(x.severity == "wrong" for x in found)


@pytest.mark.parametrize("name", WELL)
def test_a_step_that_shares_the_work_has_no_finding(name: str) -> None:
    assert [(x.kind, x.what) for x in on_the_mesh(name)] == []


def test_both_lines_of_keys_and_values_get_the_spec_of_the_queries() -> None:
    """The default stages find it, behind a helper that all constraints call."""
    found = [x for x in on_the_mesh("keys_and_values_of_all_heads", "parity") if x.stage == "ranks"]
    assert len({x.places[0].line for x in found}) == 2
    for x in found:
        assert x.remedy == "Split the operand along the axis: P('data', None, 'model', None)"
        assert "times the work of one device" in x.evidence[-1]
