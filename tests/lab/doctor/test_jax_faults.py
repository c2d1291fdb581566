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
from jax.sharding import PartitionSpec as P
from jax_patients import LENGTH, below, dense, model, padding, sharded, tokens, variables
from test_jax_right import examined
from virtual_devices import on_devices

from attnspan import causal, keys
from attnspan.jax import attention
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax import JaxSubject
from attnspan_lab.doctor.jax.float64_reference import difference, reference
from attnspan_lab.doctor.jax.subject import Traced

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


#: Shortest mask for a captured mask, by the name of the fault.
FORMS = {
    "mask_of_the_longest_context": "without mask, to jax.nn.dot_product_attention. Or: Pass mask=causal()",
    "mask_of_later_tokens": "without mask, to jax.nn.dot_product_attention. Or: Pass mask=causal()",
    "window_longer_than_the_batch": "Pass mask=window(100) & segments(segment_ids)",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_captured_mask_is_a_dense_mask_at_the_line_that_passes_it(name: str) -> None:
    made = getattr(jax_faults, name)
    found, _ = examined(made, "eager")
    (mask,) = [x for x in found if x.kind == "dense-mask"]
    source, start = inspect.getsourcelines(made)
    assert source[mask.places[0].line - start].rstrip().endswith("# sick")
    assert FORMS[name] in mask.remedy
    assert mask.tried.startswith("this form: it hides the same pairs in ")


def test_a_captured_bias_of_distances_is_not_replaced_by_a_mask() -> None:
    distance = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    bias = np.where(distance < 0, -1e9, -0.1 * distance).astype(np.float32)
    made = jax_faults.step_of(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, bias=bias[None, None]))
    (mask,) = [x for x in examined(lambda: made, "eager")[0] if x.kind == "dense-mask"]
    assert "is captured by the step" in mask.what
    assert "is_causal" not in mask.remedy + mask.tried


def test_captured_ids_and_indices_of_a_bias_are_no_captured_mask() -> None:
    """A table of trained biases is read at captured indices of pairs. Its numbers are no mask."""
    ids = np.arange(LENGTH) // 9 + np.zeros((2 * LENGTH, 1), int)
    index = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))

    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            own = jnp.asarray(ids)[: len(segment_ids)]
            same = own[:, None, :, None] == own[:, None, None]
            bias = w["bias"][:, index][None]
            return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=same, is_causal=True)

        return model(attend)(w, tokens)

    w = variables() | {"bias": jnp.sin(jnp.arange(4.0 * LENGTH)).reshape(4, LENGTH)}
    batch = {"tokens": tokens(), "segment_ids": jnp.asarray(ids[:2])}
    subject = JaxSubject(step, [batch], w, causal=True)
    found, _ = examined(lambda: subject, "eager")
    # XLA may store the bias that the step makes.
    assert [x.what for x in found if "captured" in x.what] == []


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


def test_a_copy_to_the_hosts_memory_is_named() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        k = jax.device_put(k, jax.memory.Space.Host)
        return dense(q, jax.device_put(k, jax.memory.Space.Device), v, below(LENGTH))

    found, _ = examined(lambda: jax_faults.step_of(attend), "eager")
    (sync,) = [x for x in found if x.kind == "sync"]
    assert "Space.Host" in sync.places[0].text
    assert "another kind of memory" in sync.cause


def test_an_argument_that_is_none_first_gets_an_array_that_changes_nothing() -> None:
    step = jax.jit(
        lambda w, tokens, mask=None: model(lambda *x: dense(*x, True if mask is None else mask))(w, tokens)
    )
    mask = jnp.ones((2, 1, LENGTH, LENGTH), bool)
    batches = [{"tokens": tokens(), "mask": x} for x in (None, mask)]
    found, _ = examined(lambda: JaxSubject(step, batches, variables(), causal=False), "compiled")
    assert found[0].evidence == (f"mask: None, then bool of shape {mask.shape}",)
    assert "a mask of True" in found[0].remedy


def test_padded_lengths_that_change_results_are_said() -> None:
    """Lengths padded to one must be hidden. The trial compares the results."""

    def step(w: Any, tokens: Any) -> Any:
        return model(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))(w, tokens)

    batches = [{"tokens": tokens(n)} for n in (8, 9, 10)]
    found, _ = examined(lambda: JaxSubject(step, batches, variables(), causal=False), "compiled")
    assert "BUT OTHER RESULTS: the step must hide the padding" in found[0].tried


def test_nan_that_only_single_operators_make_is_a_note() -> None:
    """XLA may compute a chain of float16 operators in float32, which does not overflow."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        large = jnp.exp(q * 0 + 12)
        return dense(q + large / (large * large) * 0, k, v, below(LENGTH))

    subject = JaxSubject(model(attend), [{"tokens": tokens()}], variables(dtype=jnp.float16), causal=True)
    (nan,) = [x for x in examined(lambda: subject, "eager")[0] if x.kind == "nan"]
    assert nan.severity == "note"
    assert nan.evidence == ("not confirmed: the compiled step returns no NaN, only its operators one by one",)


def _cached(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None] + 16
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def _with_cache(attend: Any) -> JaxSubject:
    subject = jax_faults.causal_with_a_cache()

    def step(w: Any, tokens: Any, cache: Any) -> Any:
        longer = lambda x: jnp.concatenate([cache, x], 1)  # noqa: E731
        return model(lambda q, k, v: attend(q, longer(k), longer(v)))(w, tokens)

    return replace(subject, fn=step)


def _padded(attend: Any) -> JaxSubject:
    return jax_faults.step_of(attend, causal=False, attention_mask=jax_faults.MASK)


#: Remedies of the faults, each with the same step whose mask is written out.
CURES: dict[str, tuple[Any, Any]] = {
    "causal() with a cache": (
        lambda: _with_cache(lambda q, k, v: attention(q, k, v, mask=causal(), layout="bshd")),
        lambda: _with_cache(lambda q, k, v: dense(q, k, v, jnp.tri(4, 20, 16, dtype=bool))),
    ),
    "a mask with a cache": (
        lambda: _with_cache(_cached),
        lambda: _with_cache(lambda q, k, v: dense(q, k, v, jnp.tri(4, 20, 16, dtype=bool))),
    ),
    "a boolean mask": (
        lambda: _padded(
            lambda q, k, v, attention_mask: jax.nn.dot_product_attention(
                q, k, v, mask=(attention_mask > 0)[:, None, None, :]
            )
        ),
        lambda: _padded(
            lambda q, k, v, attention_mask: dense(q, k, v, (attention_mask > 0)[:, None, None, :])
        ),
    ),
    "keys(valid)": (
        lambda: _padded(
            lambda q, k, v, attention_mask: attention(q, k, v, mask=keys(attention_mask != 0), layout="bshd")
        ),
        lambda: _padded(
            lambda q, k, v, attention_mask: dense(q, k, v, (attention_mask > 0)[:, None, None, :])
        ),
    ),
    "an added mask": (
        lambda: _padded(
            lambda q, k, v, attention_mask: jax.nn.dot_product_attention(
                q, k, v, bias=jnp.where(attention_mask > 0, 0, -jnp.inf)[:, None, None, :]
            )
        ),
        lambda: _padded(
            lambda q, k, v, attention_mask: dense(q, k, v, (attention_mask > 0)[:, None, None, :])
        ),
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_the_remedy_of_a_fault_is_right(name: str) -> None:
    subject, exact = (x() for x in CURES[name])
    found, _ = examined(lambda: subject, "eager")
    assert [x.kind for x in found if x.severity == "wrong"] == []
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        runs = [Traced.of(x, x.batches[0]) for x in (subject, exact)]
        own = [np.asarray(x, np.float64) for x in runs[0].run(*runs[0].leaves)]
        assert difference(own, reference(runs[1]).results) < 1e-5


def on_the_mesh(name: str) -> tuple[list[Finding], dict[str, str]]:
    """Examine a step on a mesh: with NaN in its results, in bfloat16, or with a sum that counts twice."""

    def step(w: Any, tokens: Any) -> Any:
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w) if name == "bfloat16" else w
        out = model(lambda q, k, v: dense(q, k, v, below(LENGTH)))(w, tokens)
        # Each device rounds its part of the sum.
        out = jax.lax.reduce(out, jnp.bfloat16(0), jax.lax.add, (0, 1)) if name == "bfloat16" else out
        return out * jnp.float32("nan") if name == "nan" else out

    def twice(w: Any, tokens: Any) -> Any:
        add = jax.shard_map(lambda x: jax.lax.psum(x, "cp"), mesh=made.mesh, in_specs=P(), out_specs=P())
        return add(step(w, tokens))

    made = sharded(step, P(None, "cp"))
    if name == "sum":
        made = replace(made, fn=twice, one_device=step)
    return examined(lambda: made, "ranks")


def test_nan_on_one_device_is_not_a_difference_of_the_mesh() -> None:
    found, unchecked = on_devices(on_the_mesh)("nan")
    assert "rank-rows" not in {x.kind for x in found}
    assert "NaN" in unchecked["the mesh against one device"]


def test_rounding_in_bfloat16_is_not_a_difference_of_the_mesh() -> None:
    assert "rank-rows" not in {x.kind for x in on_devices(on_the_mesh)("bfloat16")[0]}


def test_a_difference_without_cut_ids_is_not_blamed_on_ids() -> None:
    (found,) = [x for x in on_devices(on_the_mesh)("sum")[0] if x.kind == "rank-rows"]
    assert "finds no line that cuts" in found.cause
    assert "results differ from one device by 1.0e+00" in found.evidence[0]
