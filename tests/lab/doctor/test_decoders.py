"""Decode steps, state between calls and growing caches are found at their line, and twins are healthy."""

from __future__ import annotations

import inspect
from typing import Any

import decoders
import pytest
import torch
from test_masked import examined

from attnspan_lab.doctor import Finding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
_KINDS = ("decode", "state", "cache-cat")


def line_of(code: Any, mark: str = "# sick") -> int:
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if mark in x)


def found_in(factory: Any, kind: str) -> list[Finding]:
    return [x for x in examined(factory())[0] if x.kind == kind]


def wrong(factory: Any) -> list[str]:
    found, _ = examined(factory())
    return [x.kind for x in found if x.severity in ("wrong", "stops") or x.kind in _KINDS[:2]]


@pytest.mark.parametrize("name", decoders.DECODE)
def test_a_decode_step_that_differs_is_found_at_its_line(name: str) -> None:
    code, sick, remedy, _ = decoders.DECODE[name]
    (found,) = found_in(sick, "decode")
    mark = "# sick" if "# sick" in inspect.getsource(code) else "# cat"
    assert found.severity == "wrong"
    assert found.places[0].line == line_of(code, mark)
    assert remedy in found.remedy
    assert "with the prefill's results in these calls" in found.tried
    assert wrong(sick) == ["decode"]


@pytest.mark.parametrize("name", decoders.DECODE)
def test_a_decoder_whose_steps_equal_a_prefill_is_healthy(name: str) -> None:
    for twin in decoders.DECODE[name][3]:
        found, facts = examined(twin())
        assert [x.kind for x in found if x.severity == "wrong" or x.kind in _KINDS[:2]] == []
        assert "equal one prefill" in facts["checked"]["decode steps"]


@pytest.mark.parametrize("name", decoders.WELL)
def test_other_healthy_decoders_are_checked(name: str) -> None:
    found, facts = examined(decoders.WELL[name]())
    assert [x.kind for x in found if x.severity == "wrong" or x.kind in _KINDS[:2]] == []
    assert "equal one prefill" in facts["checked"]["decode steps"]
    assert ("rounding" in facts["checked"]["decode steps"]) == (name == "quantized")


@pytest.mark.parametrize("name", decoders.UNCOMPARED)
def test_a_decoder_that_cannot_be_compared_is_named(name: str) -> None:
    factory, why = decoders.UNCOMPARED[name]
    found, facts = examined(factory())
    assert [x.kind for x in found if x.kind == "decode"] == []
    assert why in facts["unchecked"]["decode steps"]


@pytest.mark.parametrize("name", decoders.STATE)
def test_state_between_calls_is_found_where_it_is_written(name: str) -> None:
    code, attribute, sick, twins = decoders.STATE[name]
    (found,) = found_in(sick, "state")
    assert found.severity == "wrong"
    assert found.places[0].line == line_of(code)
    assert found.what.endswith(f"block.{attribute} keeps data of it")
    assert found.tried.endswith("the results do not differ")
    for twin in twins:
        assert wrong(twin) == []
        assert "state between calls" in examined(twin())[1]["checked"]


def test_a_state_with_a_reset_is_a_note() -> None:
    (found,) = found_in(decoders.stacked(decoders.Resettable), "state")
    assert (found.severity, found.remedy) == ("note", "Call reset_cache() before each new sequence")


@pytest.mark.parametrize("name", decoders.CATS)
def test_a_cache_that_grows_by_a_copy_is_a_cost(name: str) -> None:
    code, sick, twins = decoders.CATS[name]
    (found,) = found_in(sick, "cache-cat")
    assert (found.severity, found.places[0].line) == ("slow", line_of(code, "# cat"))
    layers, bytes_of_keys = 2, 2 * 4 * decoders.LENGTH * 8 * 4
    assert f"copies {2 * layers * bytes_of_keys / 1024:.1f} KiB" in found.evidence[0]
    assert "index_copy_" in found.remedy
    for twin in twins:
        assert found_in(twin, "cache-cat") == []


def test_a_joint_sequence_is_no_cache() -> None:
    assert found_in(decoders.JOINT, "cache-cat") == []


def test_the_remedies_give_right_results() -> None:
    """Twins are the sick models with the remedy, and equal a prefill in float64."""
    for sick, well in (("positions by an argument", 0), ("wrong slot", 0)):
        model, (batch, *_), _ = decoders.DECODE[sick][3][well]()
        model = model.double()
        ids = batch["input_ids"]
        whole = model(ids)
        if isinstance(whole, tuple):
            _, cache = model(ids[:, :-1])
            step = model(ids[:, -1:], cache)[0]
            whole = whole[0]
        else:
            model(ids[:, :-1], 0)
            step = model(ids[:, -1:], ids.shape[1] - 1)
        assert torch.allclose(step[:, 0], whole[:, -1], atol=1e-12)
