"""Faults that look like results are named at their line. The remedy, applied, is right against float64."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
import jax_missed
import numpy as np
import pytest
from test_jax_right import examined

from attnspan_lab.doctor.jax.float64_reference import difference, reference
from attnspan_lab.doctor.jax.subject import Traced, floats

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Helper with the line of the fault, if another function has it.
HELPERS = {
    **dict.fromkeys(("mask_on_queries", "no_mask_of_frames", "mask_that_is_shifted"), "cross"),
    **{x: "split" for x in jax_missed.FAULTS if x.startswith("split_")},
    "cache_in_a_scan": "decode",
    "cache_in_a_while_loop": "decode",
    "angles_in_bfloat16": "turned",
    "one_key_in_a_scan": "dropped",
    "one_key_in_python": "dropped",
    "one_key_in_a_checkpointed_loop": "dropped",
}


def planted(name: str) -> int:
    if name in HELPERS:
        lines = Path(jax_missed.__file__).read_text().splitlines()
        return next(i for i, x in enumerate(lines, 1) if x.endswith(f"# sick: {HELPERS[name]}"))
    source, start = inspect.getsourcelines(getattr(jax_missed, name))
    return start + next(i for i, x in enumerate(source) if x.rstrip().endswith("# sick"))


@pytest.mark.parametrize("name", sorted(jax_missed.FAULTS))
def test_the_fault_is_named_first(name: str) -> None:
    kind, cause, remedy = jax_missed.FAULTS[name]
    found, _ = examined(lambda: jax_missed.MADE[name](False), "eager")
    # Equal random numbers may be on purpose, so they are a question.
    first = next(x for x in found if x.kind == kind) if kind == "reused-key" else found[0]
    assert (first.kind, first.severity) == (kind, "note" if kind == "reused-key" else "wrong")
    assert first.places[0].line == planted(name)
    assert cause in first.cause
    assert remedy in first.remedy
    # A softmax over queries also shows later tokens.
    assert {x.kind for x in found if x.severity == "wrong"} <= {kind, "causality-lost"}


@pytest.mark.parametrize("name", sorted(jax_missed.FAULTS))
def test_the_remedy_is_right(name: str) -> None:
    found, _ = examined(lambda: jax_missed.MADE[name](True), "eager")
    assert [x.what for x in found if x.severity in ("wrong", "stops")] == []
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        subjects = [jax_missed.MADE[name](well) for well in (True, False)]
        well, sick = (Traced.of(x, x.batches[0]) for x in subjects)
        exact = reference(well, gradients=False).results
        errors = [difference(_results(x), exact) for x in (well, sick)]
    assert errors[0] < 1e-5 < errors[1]


def _results(traced: Traced) -> list[Any]:
    return [np.asarray(x, np.float64) for x in floats(traced.run(*traced.leaves))]


def test_a_wrong_forward_function_is_not_blamed_on_the_backward_rule() -> None:
    found, _ = examined(lambda: jax_missed.MADE["results_not_rescaled"](False), "parity")
    (parity,) = [x for x in found if x.kind == "parity"]
    assert parity.places[0].line == planted("results_not_rescaled")
    assert "softmax weights do not add up to 1" in parity.cause
    assert "The backward rule may be right" in parity.remedy


@pytest.mark.parametrize("choose", jax_missed.DISCARDING)
def test_attention_that_is_thrown_away_is_named(choose: Any) -> None:
    found, _ = examined(lambda: jax_missed.kinds_of_layers(choose), "eager")
    (own,) = [x for x in found if x.kind == "discarded"]
    source, start = inspect.getsourcelines(choose)
    assert source[own.places[0].line - start].rstrip().endswith("# sick")
    assert own.count == 3
    assert "jax.lax.cond(condition, one, other, q, k, v)" in own.remedy


def test_a_choice_before_attention_runs_one_call() -> None:
    chosen = [jax_missed.kinds_of_layers(x) for x in (jax_missed.only_one, jax_missed.by_where)]
    found, _ = examined(lambda: chosen[0], "eager")
    assert {x.kind for x in found} <= {"unfused", "dense-mask"}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        well, sick = (Traced.of(x, x.batches[0]) for x in chosen)
        assert difference(_results(well), reference(sick, gradients=False).results) < 1e-5
