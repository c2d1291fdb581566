"""The doctor for JAX says only what it measured: masks, sizes, counts, trials, and lists of checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax_costs
import jax_masks
import jax_meshes
import jax_numbers  # noqa: F401
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax_runner import FAULTS, examined, facts_of, marked, of_attention, of_kind, sick
from jax_samples import (
    BATCH,
    DOCUMENTS,
    HEADS,
    INDEX,
    LENGTH,
    MASK,
    SIZE,
    VALID,
    below,
    by_scan,
    cached,
    dense,
    heads,
    in_blocks,
    model,
    online,
    plain,
    projected,
    same,
    scanned,
    spans,
    step_of,
    subject,
    tokens,
    variables,
    written,
)
from virtual_devices import on_devices

from attnspan_lab.doctor.jax import JaxSubject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


# Masks

#: Shortest mask for a captured mask, by the name of the fault.
FORMS = {
    "mask_of_the_longest_context": "without mask, to jax.nn.dot_product_attention. Or: Pass mask=causal()",
    "mask_of_later_tokens": "without mask, to jax.nn.dot_product_attention. Or: Pass mask=causal()",
    "window_longer_than_the_batch": "Pass mask=window(100) & segments(segment_ids)",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_captured_mask_is_a_dense_mask_at_the_line_that_passes_it(name: str) -> None:
    mask = of_kind(sick(name), "dense-mask")
    assert mask.places[0].line in FAULTS[name].lines
    assert FORMS[name] in mask.remedy
    assert mask.tried.startswith("this form: it hides the same pairs in ")


def test_a_captured_bias_of_distances_is_not_replaced_by_a_mask() -> None:
    distance = np.subtract.outer(INDEX, INDEX)
    bias = np.where(distance < 0, -1e9, -0.1 * distance).astype(np.float32)
    mask = of_kind(step_of(lambda q, k, v: plain(q, k, v, bias=bias[None, None])), "dense-mask")
    assert "is captured by the step" in mask.what
    assert "is_causal" not in mask.remedy + mask.tried
    assert mask.what.startswith("An array of a bias with an entry for each pair of tokens")
    assert "Pass these numbers as bias= to attnspan.jax.attention" in mask.remedy
    assert "in this batch, its numbers depend only on the distance between query and key" in mask.evidence


def test_a_captured_pattern_of_a_bias_is_no_mask() -> None:
    """One call has a trained bias of distances, from a captured one-hot array. No call has a mask."""
    hot = (np.abs(np.subtract.outer(INDEX, INDEX)) == np.arange(LENGTH)[:, None, None]).astype(np.float32)

    def step(w: Any, tokens: Any) -> Any:
        x = w["embed"][tokens]
        for bias in (jnp.einsum("hn,nqk->hqk", w["table"], hot)[None], 0.0):
            q, k, v = projected(w, x)
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5 + bias)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return x

    w = variables() | {"table": jnp.sin(jnp.arange(4.0 * LENGTH)).reshape(4, LENGTH)}
    found = of_kind(subject(step, False, w), "dense-mask")
    assert found.what.startswith("An array of a bias")
    assert "bias=" in found.remedy
    assert "causal()" not in found.remedy
    assert found.count == 1


def test_a_mask_of_0_and_1_that_scores_are_multiplied_with_is_no_bias() -> None:
    mask = np.tri(LENGTH, dtype=np.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
        weights = jax.nn.softmax(scores * mask - 1e9 * (1 - mask))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    assert "of a bias" not in of_kind(step_of(attend), "dense-mask").what


def test_captured_ids_and_indices_of_a_bias_are_no_captured_mask() -> None:
    """A table of trained biases is read at captured indices of pairs. Its numbers are no mask."""
    ids = INDEX // 9 + np.zeros((2 * LENGTH, 1), int)
    index = np.abs(np.subtract.outer(INDEX, INDEX))

    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            mask = same(jnp.asarray(ids)[: len(segment_ids)])
            return plain(q, k, v, bias=w["bias"][:, index][None], mask=mask, is_causal=True)

        return model(attend)(w, tokens)

    w = variables() | {"bias": jnp.sin(jnp.arange(4.0 * LENGTH)).reshape(4, LENGTH)}
    found, _ = examined(subject(step, w=w, segment_ids=ids[:2]), "eager")
    # XLA may store the bias that the step makes.
    assert [x.what for x in found if "captured" in x.what] == []


def test_no_mask_is_offered_that_keeps_a_fault() -> None:
    stored = of_kind(sick("no_causal_mask"), "unfused")
    assert "full()" not in stored.remedy


def calls_of_one_line(*masks: Any, loop: bool = False) -> JaxSubject:
    """Layers whose attention is in one function. The masks differ."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        x, own = w["embed"][tokens], [make(attention_mask > 0) for make in masks]
        if loop:
            for mask in own:
                x = x + dense(*projected(w, x), mask).reshape(x.shape)
            return x
        x = x + dense(*projected(w, x), own[0]).reshape(x.shape)  # sick: first call
        return x + dense(*projected(w, x), own[1]).reshape(x.shape)  # sick: second call

    return subject(step, False, attention_mask=MASK)


def of_keys(valid: Any) -> Any:
    return valid[:, None, None, :]


def causal_keys(valid: Any) -> Any:
    return of_keys(valid) & below(LENGTH)


def test_calls_of_one_line_with_different_masks_get_one_mask_each() -> None:
    remedy = of_kind(calls_of_one_line(of_keys, causal_keys), "unfused").remedy
    first, second = (min(marked(calls_of_one_line, f"{x} call")) for x in ("first", "second"))
    assert "need different masks, so pass the mask to its function" in remedy
    assert f"mask=keys(attention_mask != 0) at test_jax_findings.py:{first}; " in remedy
    assert f"mask=causal() & keys(attention_mask != 0) at test_jax_findings.py:{second}" in remedy
    assert "shows the same pairs" not in remedy


def test_calls_of_a_loop_with_different_masks_are_numbered() -> None:
    made = calls_of_one_line(causal_keys, of_keys, causal_keys, loop=True)
    remedy = of_kind(made, "unfused").remedy
    assert "mask=causal() & keys(attention_mask != 0) in call 1, 3 of 3; " in remedy
    assert "mask=keys(attention_mask != 0) in call 2 of 3" in remedy


def test_a_lost_mask_of_one_call_is_not_mended_in_the_others() -> None:
    remedy = of_kind(calls_of_one_line(causal_keys, lambda _: True), "mask-lost").remedy
    assert "mask=causal() & keys(attention_mask != 0) at" in remedy
    assert "mask=keys(attention_mask != 0) at" in remedy


def test_a_mask_of_one_head_is_not_offered_for_all_heads() -> None:
    near = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-3, dtype=bool)
    by_head = jnp.asarray(np.stack([np.tri(LENGTH, dtype=bool), *[near] * (HEADS - 1)]))[None]
    stored = of_kind(step_of(lambda q, k, v: dense(q, k, v, by_head)), "unfused")
    assert "mask=causal()" not in stored.remedy


def test_scores_of_different_shapes_are_all_named() -> None:
    def step(w: Any, tokens: Any) -> Any:
        x = w["embed"][tokens]
        for part in (x, x[:, :16]):
            out = written(*projected(w, part))
        return out

    (text, *_) = of_kind(subject(step), "unfused").evidence
    assert text == "2 calls a step; scores of shapes (2, 4, 24, 24), (2, 4, 16, 16) take 26.0 KiB in all"


def test_a_mask_in_a_scan_is_not_said_to_be_fused() -> None:
    step = scanned(lambda q, k, v: dense(q, k, v, jnp.tri(LENGTH, dtype=bool)))
    found, _ = examined(subject(step, w=variables(layers=3)), "eager")
    masks = [x for x in found if x.kind == "dense-mask"]
    assert masks
    assert not any("so that XLA does not store it" in x.remedy for x in masks)


# Slices that are moved


def blocks_of_a_bias(made: Any) -> Any:
    """Attention in blocks of 8 queries, each with its part of an array."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        q, k, v = projected(w, w["embed"][tokens])
        array = made(attention_mask)

        def block(i: Any) -> Any:
            own, size = lax.dynamic_slice_in_dim(q, i * 8, 8, 1), min(8, array.shape[2])
            part = lax.dynamic_slice_in_dim(array, i * 8, size, 2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", own, k) / SIZE**0.5 + part
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

        return jnp.moveaxis(lax.map(block, jnp.arange(LENGTH // 8)), 0, 1)

    return subject(step, False, attention_mask=MASK)


def test_a_slice_of_an_axis_with_one_entry_is_always_right() -> None:
    made = blocks_of_a_bias(lambda mask: jnp.where(mask[:, None, None, :] > 0, 0.0, -1e9))
    assert {x.kind for x in examined(made, "eager")[0]} <= {"unfused", "dense-mask"}


def test_rounding_is_no_change_of_results() -> None:
    """The last block of the bias is moved. A constant more in all scores of a query changes no result."""
    made = blocks_of_a_bias(lambda _: jnp.zeros((1, 1, 16, 1)))
    assert "clamped-slice" not in {x.kind for x in examined(made, "eager")[0]}


def test_a_moved_slice_of_a_bias_is_found() -> None:
    bias = jnp.sin(jnp.arange(16.0 * LENGTH)).reshape(1, 1, 16, LENGTH)
    assert of_kind(blocks_of_a_bias(lambda _: bias), "clamped-slice").severity == "note"


# Typed random keys


def dropped(q: Any, k: Any, v: Any, key: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
    scores = jnp.where(below(q.shape[1]), scores, -1e30)
    weights = jnp.where(jax.random.bernoulli(key, 0.9, scores.shape), jax.nn.softmax(scores) / 0.9, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def lengths_with_a_key(*more: int) -> JaxSubject:
    """The step returns its next key, and chooses the key of the layer."""

    def step(w: Any, tokens: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        own = jnp.where(tokens.sum() > 3, own, jax.random.fold_in(own, 1))
        return model(dropped)(w, tokens, key=own), key

    batches = [{"tokens": tokens(n), "key": jax.random.key(n)} for n in (8, 9, *more)]
    return JaxSubject(step, batches, variables(), causal=True)


def test_a_typed_key_of_the_batch_is_passed_in_all_stages() -> None:
    found, unchecked = examined(lengths_with_a_key(), "eager", "compiled", "parity")
    assert {x.kind for x in found} == {"unfused"}
    assert set(unchecked) == {"documents", "padding"}


def test_a_recompilation_beside_a_typed_key_is_tried() -> None:
    found = of_kind(lengths_with_a_key(10, 11), "recompile", "compiled")
    assert found.tried.startswith("with all batches padded to 11: 0 recompilations instead of 3")


def test_a_captured_typed_key_is_passed() -> None:
    key = jax.random.key(3)
    made = subject(lambda w, tokens: model(dropped)(w, tokens, key=key), tokens=tokens(8))
    assert examined(made, "compiled") == ([], {})


def test_the_remedy_of_a_call_with_dropout_keeps_the_dropout() -> None:
    made = step_of(lambda q, k, v: dropped(q, k, v, jax.random.key(1)))
    remedy = of_kind(made, "unfused").remedy
    assert "Also pass dropout_p and dropout_seed" in remedy
    assert "mask=causal() shows the same pairs" in remedy
    assert "dropout" not in of_kind(step_of(written), "unfused").remedy


# Trials


def test_without_results_of_tokens_visible_pairs_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that no trial confirmed is a note, and says so."""
    monkeypatch.setattr("attnspan_lab.doctor.jax.changes._Rows.of", lambda *_: [])
    first = of_kind(sick("window_to_both_sides"), "causality-lost")
    assert first.severity == "note"
    assert any("not confirmed" in x for x in first.evidence)


def test_a_loss_of_a_kernel_of_attnspan_is_a_proof() -> None:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        return model(spans)(w, tokens).mean()

    found, _ = examined(subject(step, None, segment_ids=DOCUMENTS), "eager")
    assert [(x.kind, x.severity) for x in found] == [("leak", "wrong")]
    assert "rows of attention's results" in found[0].evidence[1]


def test_a_loss_that_uses_queries_without_keys_is_wrong() -> None:
    """Rows of padding that no result uses are right. The same rows in a mean are wrong."""

    def attend(q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
        valid = ~padding_mask
        return dense(q, k, v, valid[:, None, :, None] & valid[:, None, None, :])

    rows = step_of(attend, causal=False, padding_mask=~VALID)
    assert "hidden-rows" not in {x.kind for x in examined(rows, "eager")[0]}

    def mean(w: Any, tokens: Any) -> Any:
        return model(attend)(w, tokens, padding_mask=tokens == 0).mean()

    whole = replace(rows, fn=mean, batches=[{"tokens": tokens() * VALID}])
    assert of_kind(whole, "hidden-rows").severity == "wrong"


def pooled(pool: Any) -> JaxSubject:
    """An encoder that hides padding, and a function behind it."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        hide = lambda *x: dense(*x, (attention_mask > 0)[:, None, None])  # noqa: E731
        return pool(model(hide)(w, tokens), attention_mask[..., None] > 0)

    return subject(step, False, attention_mask=MASK)


@pytest.mark.parametrize("pool", [lambda x, _: x.mean(1), lambda x, _: x[:, -1]])
def test_padding_that_changes_results_of_samples_is_wrong(pool: Any) -> None:
    found = of_kind(pooled(pool), "mask-lost")
    assert (found.severity, found.places) == ("wrong", ())
    assert "x.mean(1, where=(attention_mask != 0)[..., None])" in found.remedy


@pytest.mark.parametrize("pool", [lambda x, valid: x.mean(1, where=valid), lambda x, _: x[:, 0]])
def test_results_of_samples_without_padding_are_checked(pool: Any) -> None:
    found = facts_of(pooled(pool), "eager")
    assert {x.kind for x in found["findings"]} == {"unfused"}
    assert found["checked"]["padding"] == "changed tokens change no result of others"


@pytest.mark.parametrize(
    "pool",
    [
        lambda x, _: x.reshape(BATCH, 12, -1),
        lambda x, _: x.reshape(BATCH, 12, -1).mean(2),
        lambda x, _: (x**2).mean(),
    ],
)
def test_results_that_may_be_padding_are_not_checked(pool: Any) -> None:
    found = facts_of(pooled(pool), "eager")
    assert {x.kind for x in found["findings"]} == {"unfused"}
    assert "padding" not in found["checked"]
    assert "does not know if they belong to padding" in found["unchecked"]["padding"]


def test_padded_queries_of_another_sequence_are_no_finding() -> None:
    """Padding is token 0. Its queries see no key, no query sees it, and only its own results depend on it."""

    def step(w: Any, source: Any, target: Any) -> Any:
        def attend(x: Any, y: Any, mask: Any) -> Any:
            (q, _, _), (_, k, v) = projected(w, x), projected(w, y)
            return x + dense(q, k, v, mask[:, None]).reshape(x.shape)

        x, y, a, b = w["embed"][source], w["embed"][target], source > 0, target > 0
        y = attend(y, y, b[:, :, None] & b[:, None] & below(9))
        return attend(y, x, b[:, :, None] & a[:, None]) @ w["head"]

    batch = {"source": tokens() * MASK, "target": tokens(9).at[1, 6:].set(0)}
    found, _ = examined(JaxSubject(step, [batch], variables(), causal=False), "eager")
    assert {x.kind for x in found} == {"unfused"}


def test_nan_of_the_batch_is_not_blamed_on_an_operator() -> None:
    nan = of_kind(step_of(lambda q, k, v, bias: written(q, k, v) * bias, bias=np.float32("nan")), "nan")
    assert nan.what == "The argument bias contains NaN"
    assert "No operator" in nan.cause


def test_nan_that_only_single_operators_make_is_a_note() -> None:
    """XLA may compute a chain of float16 operators in float32, which does not overflow."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        large = jnp.exp(q * 0 + 12)
        return written(q + large / (large * large) * 0, k, v)

    nan = of_kind(replace(step_of(attend), variables=variables(dtype=jnp.float16)), "nan")
    assert nan.severity == "note"
    assert nan.evidence == ("not confirmed: the compiled step returns no NaN, only its operators one by one",)


def test_a_copy_to_the_hosts_memory_is_named() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        k = jax.device_put(k, jax.memory.Space.Host)
        return written(q, jax.device_put(k, jax.memory.Space.Device), v)

    sync = of_kind(step_of(attend), "sync")
    assert "Space.Host" in sync.places[0].text
    assert "another kind of memory" in sync.cause


def test_an_argument_that_is_none_first_gets_an_array_that_changes_nothing() -> None:
    step = jax.jit(
        lambda w, tokens, mask=None: model(lambda *x: dense(*x, True if mask is None else mask))(w, tokens)
    )
    mask = jnp.ones((2, 1, LENGTH, LENGTH), bool)
    batches = [{"tokens": tokens(), "mask": x} for x in (None, mask)]
    found, _ = examined(JaxSubject(step, batches, variables(), causal=False), "compiled")
    assert found[0].evidence == (f"mask: None, then bool of shape {mask.shape}",)
    assert "a mask of True" in found[0].remedy


def test_padded_lengths_that_change_results_are_said() -> None:
    """Lengths padded to one must be hidden. The trial compares the results."""
    batches = [{"tokens": tokens(n)} for n in (8, 9, 10)]
    found, _ = examined(JaxSubject(model(plain), batches, variables(), causal=False), "compiled")
    assert "BUT OTHER RESULTS: the step must hide the padding" in found[0].tried


def test_a_wrong_forward_function_is_not_blamed_on_the_backward_rule() -> None:
    fault = FAULTS["results_not_rescaled"]
    parity = of_kind(sick("results_not_rescaled"), "parity", "parity")
    assert parity.places[0].line in fault.lines
    assert "softmax weights do not add up to 1" in parity.cause
    assert "The backward rule may be right" in parity.remedy


# Caches


def test_lines_that_write_into_a_cache_follow_its_jit() -> None:
    found = of_kind(sick("cache_of_a_decorated_function"), "copy", "compiled")
    assert {x.line for x in found.places[1:3]} == marked(jax_costs.decode, "write")


def test_weights_in_the_same_argument_are_not_donated() -> None:
    found = of_kind(jax_costs.one_argument_for_all, "copy", "compiled")
    assert {found.places[0].line} == marked(jax_costs.decode, "one argument")
    assert "an argument of its own" in found.remedy
    assert found.tried == ""


def test_a_step_that_is_not_jitted_gets_a_note() -> None:
    found = [x for x in examined(jax_costs.not_jitted, "compiled")[0] if x.kind == "copy"]
    assert [x.severity for x in found] == ["note", "note"]
    assert {x.places[0].line for x in found} == marked(jax_costs.decode, "write")
    assert 'donate_argnames=("cache",)' in found[0].remedy


# Meshes


@on_devices
def on_the_mesh(name: str, stage: str = "ranks", *given: Any) -> tuple[list[Any], dict[str, str]]:
    return examined(lambda: getattr(jax_meshes, name)(*given), stage)


@pytest.mark.parametrize(("name", "why"), [("ring_of_four", "ppermute"), ("random_bits", "random_")])
def test_a_step_that_depends_on_the_number_of_devices_is_not_compared(name: str, why: str) -> None:
    found, unchecked = on_the_mesh(name)
    assert [x.what for x in found if x.severity == "wrong"] == []
    assert why in unchecked["the mesh against one device"]
    assert '"one_device"' in unchecked["the mesh against one device"]


@pytest.mark.parametrize(
    ("name", "given", "kinds"),
    [("right_documents", (), {"unfused"}), ("positions_of_one_device", (1,), set())],
)
def test_attention_on_a_mesh_is_watched_on_one_device(name: str, given: Any, kinds: set[str]) -> None:
    found, unchecked = on_the_mesh(name, "eager", *given)
    assert {x.kind for x in found} == kinds
    assert "attention" not in unchecked


def test_both_lines_of_keys_and_values_get_the_spec_of_the_queries() -> None:
    """The default stages find it, behind a helper that all constraints call."""
    found = [x for x in on_the_mesh("keys_and_values_of_all_heads", "parity", 0)[0] if x.stage == "ranks"]
    assert len({x.places[0].line for x in found}) == 2
    for x in found:
        assert x.remedy == "Split the operand along the axis: P('data', None, 'model', None)"
        assert "times the work of one device" in x.evidence[-1]


def test_nan_on_one_device_is_not_a_difference_of_the_mesh() -> None:
    found, unchecked = on_the_mesh("difference_of_the_mesh", "ranks", "nan")
    assert "rank-rows" not in {x.kind for x in found}
    assert "NaN" in unchecked["the mesh against one device"]


def test_rounding_in_bfloat16_is_not_a_difference_of_the_mesh() -> None:
    assert "rank-rows" not in {x.kind for x in on_the_mesh("difference_of_the_mesh", "ranks", "bfloat16")[0]}


def test_a_difference_without_cut_ids_is_not_blamed_on_ids() -> None:
    (found,) = [x for x in on_the_mesh("difference_of_the_mesh", "ranks", "sum")[0] if x.kind == "rank-rows"]
    assert "finds no line that cuts" in found.cause
    assert "results differ from one device by 1.0e+00" in found.evidence[0]


# Sizes and counts


def latents(q: Any, k: Any, v: Any) -> Any:
    """As many latents as tokens. They do not grow."""
    return dense(jnp.broadcast_to(cached(LENGTH)[:1], q.shape), k, v, True)


def few_keys(q: Any, k: Any, v: Any) -> Any:
    return dense(q, k[:, :6], v[:, :6], True)


@pytest.mark.parametrize(("attend", "grows"), [(written, True), (latents, False), (few_keys, False)])
def test_only_pairs_of_tokens_grow_with_the_length(attend: Any, grows: bool) -> None:
    stored = of_kind(step_of(attend, causal=grows), "unfused")
    assert any("32,768 tokens" in x for x in stored.evidence) == grows
    assert ("pairs of tokens" in stored.what) == grows


def mapped_blocks(q: Any, k: Any, v: Any) -> Any:
    """vmap turns the slices of blocks into gathers."""

    def add(total: Any, out: Any, factor: Any, weights: Any, values: Any) -> Any:
        return total * factor + weights.sum(-1), out * factor[:, None] + weights @ values

    def head(*qkv: Any) -> Any:
        _, total, out = online(*qkv, add, by_scan)
        return out / total[:, None]

    return heads(head)(q, k, v)


@pytest.mark.parametrize("attend", [mapped_blocks, in_blocks])
def test_blocks_store_no_scores_of_all_pairs(attend: Any) -> None:
    found = facts_of(step_of(attend), "eager")
    assert found["findings"] == []
    assert [x[1] for x in found["sites"]] == ["written out in blocks"]
    assert "each block counts" in found["checked"]["attention"]


@pytest.mark.parametrize("remat", [False, True])
def test_calls_of_the_backward_pass_are_no_calls_in_blocks(remat: bool) -> None:
    step = scanned(written, jax.checkpoint if remat else lambda x: x)
    grad = jax.value_and_grad(lambda w, tokens: step(w, tokens).std())
    found = facts_of(subject(grad, w=variables(layers=3)), "eager")
    again = ". The backward pass computes 3 again" if remat else ""
    assert found["checked"]["attention"] == f"3 calls a step{again}"
    (stored,) = [x for x in found["findings"] if x.kind == "unfused"]
    assert stored.count == 3
    assert stored.evidence[0].startswith("3 calls a step")
    assert [x[1:] for x in found["sites"]] == [["written out, which stores all scores", "3"]]


def test_a_cache_of_layers_in_a_scan_is_not_in_blocks() -> None:
    """One step of decoding. Each layer gets its part of the cache."""

    def step(w: Any, tokens: Any, cache: Any, index: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            w, keys, values = own
            q, k, v = projected(w, x)
            keys, values = (
                lax.dynamic_update_slice_in_dim(a, b, index, 1) for a, b in ((keys, k), (values, v))
            )
            seen = (jnp.arange(keys.shape[1]) <= index)[None, None, None]
            return x + dense(q, keys, values, seen).reshape(x.shape), (keys, values)

        own = {n: w[n] for n in "qkv"}, cache, cache
        x, cache = lax.scan(layer, w["embed"][tokens], own)
        return x @ w["head"], cache

    cache = jnp.zeros((3, BATCH, 12, HEADS, SIZE))
    own = {"tokens": tokens(1), "cache": cache, "index": 5}
    found = facts_of(subject(step, w=variables(layers=3), **own), "eager")
    assert [x[1] for x in found["sites"]] == ["written out, which stores all scores"]
    assert not any("visible pairs" in x for x in found["unchecked"])
    assert "documents" not in found["unchecked"]


def test_the_number_of_a_finding_is_for_one_step() -> None:
    batches = [{"tokens": tokens(n)} for n in (8, 12, 16)]
    found = facts_of(JaxSubject(model(written), batches, variables(), causal=True), "eager", "compiled")
    (stored,) = [x for x in found["findings"] if x.kind == "unfused"]
    assert (stored.count, found["attention calls"]) == (1, 1)
    assert found["checked"]["attention"] == "1 call a step"
    assert found["note"] == "3 shapes in 3 batches"


# Lists of checks


def test_clean_checks_are_listed() -> None:
    def attend(q: Any, k: Any, v: Any, segment_ids: Any, attention_mask: Any) -> Any:
        return dense(q, k, v, same(segment_ids) & below(LENGTH) & (attention_mask > 0)[:, None, None])

    found = facts_of(step_of(attend, segment_ids=DOCUMENTS, attention_mask=MASK), "eager", "parity")
    for topic in ("causality", "documents", "padding"):
        assert found["checked"][topic] == "changed tokens change no result of others"
    for topic in ("results", "gradients"):
        assert found["checked"][topic].startswith("compared with float64: they differ by ")
    assert found["unchecked"] == {}


def test_an_encoder_without_padding_says_what_was_not_checked() -> None:
    found = facts_of(step_of(lambda q, k, v: dense(q, k, v, True), causal=False), "eager")
    assert found["checked"]["causality"] == "you declared that tokens may see later tokens"
    assert found["unchecked"] == {"padding": "the tokens have no mask (B, S) and no lengths (B,)"}


def test_a_loop_without_gradients_is_still_compared() -> None:
    def step(w: Any, tokens: Any) -> Any:
        logits = lambda x: model(written)(w, x)  # noqa: E731
        body = lambda s: (s[0] + 1, s[1].at[:, s[0]].set(logits(s[1])[:, s[0] - 1].argmax(-1)))  # noqa: E731
        return logits(lax.while_loop(lambda s: s[0] < 8, body, (5, tokens))[1])

    found = facts_of(subject(step, tokens=tokens(8)), "parity")
    assert found["checked"]["results"].startswith("compared with float64")
    assert found["unchecked"] == {}


def test_an_encoder_may_see_later_tokens() -> None:
    """Causality is about the decoder. The doctor cannot tell the two apart, and says so."""
    embed = jax.random.normal(jax.random.key(0), (20, 16))

    def step(weights: Any, src: Any, tgt: Any) -> Any:
        memory, x = weights[src][:, :, None], weights[tgt][:, :, None]
        memory = plain(memory, memory, memory)
        x = plain(x, x, x, is_causal=True)
        return plain(x, memory, memory)

    batch = {"src": np.arange(18).reshape(2, 9), "tgt": np.arange(12).reshape(2, 6)}
    found, unchecked = examined(JaxSubject(step, [batch], causal=True, variables=embed), "eager")
    assert {x.kind for x in found} <= {"unfused"}
    assert "several sequences" in unchecked["causality"]


def test_a_kernel_of_pallas_beside_a_cache_is_passed() -> None:
    """The kernel has more arguments than its equation has operands."""

    def copy(x: Any, out: Any) -> None:
        out[...] = x[...]

    @jax.jit
    def step(cache: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = pallas.pallas_call(copy, out_shape=shape, interpret=True)(x)
        return lax.dynamic_update_slice_in_dim(cache, x, 3, 0), x.sum()

    subject = JaxSubject(step, [{"cache": jnp.zeros((128, 128)), "x": jnp.ones((1, 128))}])
    assert [x.kind for x in facts_of(subject, "compiled")["findings"]] == ["copy"]


def test_a_remedy_is_for_all_calls_of_a_line_with_the_same_mask() -> None:
    def twice(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
        inner = jax_masks.window_is_inverted(0, q, k, v, attention_mask)
        return jax_masks.window_is_inverted(0, q, k, inner, attention_mask)

    found = of_kind(of_attention(twice, given=jax_masks.PADDED), "mask-lost")
    assert found.remedy.startswith(
        "Call attnspan.jax.attention with mask=causal() & keys(attention_mask != 0)"
    )
