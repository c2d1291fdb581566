"""Faults in JAX that people reported come first, with their line, their cause and a remedy that fits."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax_faults
import numpy as np
import pytest
from jax_patients import LENGTH, below, dense, model, padding, tokens, variables
from test_jax_right import examined

from attnspan.jax import attention
from attnspan_lab.doctor.jax import JaxSubject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("name", sorted(jax_faults.FAULTS))
def test_a_reported_fault_is_named(name: str) -> None:
    kind, cause, remedy = jax_faults.FAULTS[name]
    stage = "compiled" if kind in ("recompile", "constant") else "eager"
    found, unchecked = examined(getattr(jax_faults, name), stage)
    assert {x.kind for x in found if x.severity in ("stops", "wrong", "compile")} <= {kind}
    first = found[0]
    made = getattr(jax_faults, name)
    source, start = inspect.getsourcelines(jax_faults.CLASSES.get(name, made))
    line = start + next(i for i, x in enumerate(source) if x.rstrip().endswith("# sick"))
    assert (first.kind, first.places[0].line) == (kind, line)
    assert cause in first.cause
    assert remedy in first.remedy
    assert not any("doctor" in x for x in unchecked.values())


def test_without_results_of_tokens_visible_pairs_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that no trial confirmed is a note, and says so."""
    made = jax_faults.window_to_both_sides()
    monkeypatch.setattr("attnspan_lab.doctor.jax.changes._Rows.of", lambda *_: [])
    (first,) = [x for x in examined(lambda: made, "eager")[0] if x.kind == "causality-lost"]
    assert first.severity == "note"
    assert any("not confirmed" in x for x in first.evidence)


def test_a_loss_of_a_kernel_of_attnspan_is_a_proof() -> None:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        return model(lambda q, k, v: attention(q, k, v, layout="bshd"))(w, tokens).mean()

    batch = {"tokens": tokens(), "segment_ids": jnp.broadcast_to(jnp.arange(LENGTH) // 9, (2, LENGTH))}
    found, _ = examined(lambda: JaxSubject(step, [batch], variables()), "eager")
    assert [(x.kind, x.severity) for x in found] == [("leak", "wrong")]
    assert "rows of attention's results" in found[0].evidence[1]


def test_nan_of_the_batch_is_not_blamed_on_an_operator() -> None:
    subject = jax_faults.step_of(
        lambda q, k, v, bias: dense(q, k, v, below(LENGTH)) * bias, bias=np.float32("nan")
    )
    found, _ = examined(lambda: subject, "eager")
    (nan,) = [x for x in found if x.kind == "nan"]
    assert nan.what == "The argument bias contains NaN"
    assert "No operator" in nan.cause


def test_a_loss_that_uses_queries_without_keys_is_wrong() -> None:
    """Rows of padding that no result uses are right. The same rows in a mean are wrong."""

    def attend(q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
        valid = ~padding_mask
        return dense(q, k, v, valid[:, None, :, None] & valid[:, None, None, :])

    rows = JaxSubject(model(attend), [{"tokens": tokens()} | padding()], variables(), causal=False)
    assert "hidden-rows" not in {x.kind for x in examined(lambda: rows, "eager")[0]}

    def mean(w: Any, tokens: Any) -> Any:
        return model(attend)(w, tokens, padding_mask=tokens == 0).mean()

    whole = replace(rows, fn=mean, batches=[{"tokens": tokens() * ~padding()["padding_mask"]}])
    found, _ = examined(lambda: whole, "eager")
    assert [x.severity for x in found if x.kind == "hidden-rows"] == ["wrong"]


def test_padded_lengths_that_change_results_are_said() -> None:
    """Lengths padded to one must be hidden. The trial compares the results."""

    def step(w: Any, tokens: Any) -> Any:
        return model(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))(w, tokens)

    batches = [{"tokens": tokens(n)} for n in (8, 9, 10)]
    found, _ = examined(lambda: JaxSubject(step, batches, variables(), causal=False), "compiled")
    assert "BUT OTHER RESULTS: the step must hide the padding" in found[0].tried
