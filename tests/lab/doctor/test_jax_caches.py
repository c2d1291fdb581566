"""The doctor names the jitted function that copies its cache, and tries to donate the cache."""

from __future__ import annotations

import inspect

import jax_caches
import pytest
from test_jax_right import examined

from attnspan_lab.doctor.findings import Finding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SICK = {"jitted_by_a_call": 3, "jitted_by_a_decorator": 1, "layers_in_a_loop": 1}
WELL = (
    "donated_by_number",
    "donated_by_name",
    "layers_of_a_donated_cache",
    "read_only",
    "used_twice",
    "returned_too",
    "new_weights",
)


def copies(name: str) -> list[Finding]:
    return [x for x in examined(getattr(jax_caches, name), "compiled")[0] if x.kind == "copy"]


def lines(name: str, end: str = "# sick") -> set[int]:
    source, start = inspect.getsourcelines(getattr(jax_caches, name))
    return {start + i for i, x in enumerate(source) if x.rstrip().endswith(end)}


@pytest.mark.parametrize("name", SICK)
def test_a_cache_that_each_call_copies_is_found_at_its_jit(name: str) -> None:
    (found,) = copies(name)
    writes = lines("decode", "# write")
    assert (found.severity, found.count) == ("slow", SICK[name])
    assert {found.places[0].line} == lines(name)
    assert {x.line for x in found.places[1:3]} == writes
    size = "128 KiB" if name == "layers_in_a_loop" else "64.0 KiB"
    assert found.evidence[0].startswith(f"{size} in 2 arrays")
    assert found.evidence[1] == "the compiled program writes 0 B of its results into arguments"
    assert 'donate_argnames=("cache",)' in found.remedy
    assert f"writes {size} into arguments, and results on made-up arrays are equal" in found.tried


@pytest.mark.parametrize("name", WELL)
def test_a_cache_that_is_donated_or_kept_is_no_finding(name: str) -> None:
    assert copies(name) == []


def test_weights_in_the_same_argument_are_not_donated() -> None:
    (found,) = copies("one_argument_for_all")
    assert {found.places[0].line} == lines("one_argument_for_all")
    assert "an argument of its own" in found.remedy
    assert found.tried == ""


def test_a_step_that_is_not_jitted_gets_a_note() -> None:
    found = copies("not_jitted")
    assert [x.severity for x in found] == ["note", "note"]
    assert {x.places[0].line for x in found} == lines("decode", "# write")
    assert 'donate_argnames=("cache",)' in found[0].remedy
