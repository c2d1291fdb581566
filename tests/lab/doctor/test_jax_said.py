"""The doctor for JAX says only what it measured: sizes, counts, and the lists of checks."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_patients import BATCH, HEADS, LENGTH, SIZE, below, dense, in_blocks, model, tokens, variables
from jax_right import VALID
from test_jax_right import examined

from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.jax import STAGES, JaxSubject
from attnspan_lab.doctor.jax.subject import jax_subject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def facts_of(subject: Any, *stages: str) -> dict[str, Any]:
    """Collect the facts of stages. The lists of checks are joined, as in the output."""
    found: dict[str, Any] = {"checked": {}, "unchecked": {}, "findings": []}

    def say(**what: Any) -> None:
        found["findings"] += [what["finding"]] if "finding" in what else []
        for name, value in what.get("facts", {}).items():
            found[name] = found[name] | value if name in ("checked", "unchecked") else value

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for stage in stages:
            STAGES[stage](jax_subject(subject, "made"), say, "")
    return found


def causal(q: Any, k: Any, v: Any) -> Any:
    return dense(q, k, v, below(q.shape[1]))


def step_of(attend: Any, **options: Any) -> JaxSubject:
    return JaxSubject(model(attend), [{"tokens": tokens()}], variables(), **({"causal": True} | options))


# Sizes


def latents(q: Any, k: Any, v: Any) -> Any:
    """As many latents as tokens. They do not grow."""
    own = jnp.sin(jnp.arange(float(LENGTH * HEADS * SIZE))).reshape(1, LENGTH, HEADS, SIZE)
    return dense(jnp.broadcast_to(own, q.shape), k, v, True)


def few_keys(q: Any, k: Any, v: Any) -> Any:
    return dense(q, k[:, :6], v[:, :6], True)


@pytest.mark.parametrize(("attend", "grows"), [(causal, True), (latents, False), (few_keys, False)])
def test_only_pairs_of_tokens_grow_with_the_length(attend: Any, grows: bool) -> None:
    found, _ = examined(lambda: step_of(attend, causal=grows), "eager")
    (stored,) = [x for x in found if x.kind == "unfused"]
    assert any("32,768 tokens" in x for x in stored.evidence) == grows
    assert ("pairs of tokens" in stored.what) == grows


def mapped_blocks(q: Any, k: Any, v: Any) -> Any:
    """vmap turns the slices of blocks into gathers."""

    def head(q: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, start: Any) -> Any:
            top, total, out = carry
            own, values = (lax.dynamic_slice_in_dim(x, start, 8) for x in (k, v))
            scores = q @ own.T / math.sqrt(SIZE)
            scores = jnp.where(start + jnp.arange(8) <= jnp.arange(len(q))[:, None], scores, -1e30)
            new = jnp.maximum(top, scores.max(-1))
            weights, factor = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
            return (new, total * factor + weights.sum(-1), out * factor[:, None] + weights @ values), None

        first = jnp.full(len(q), -1e30), jnp.zeros(len(q)), jnp.zeros_like(q)
        (_, total, out), _ = lax.scan(step, first, jnp.arange(0, len(k), 8))
        return out / total[:, None]

    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


@pytest.mark.parametrize("attend", [mapped_blocks, in_blocks])
def test_blocks_store_no_scores_of_all_pairs(attend: Any) -> None:
    found = facts_of(step_of(attend), "eager")
    assert found["findings"] == []
    assert [x[1] for x in found["sites"]] == ["written out in blocks"]
    assert "each block counts" in found["checked"]["attention"]


# Loops


def layers(remat: bool) -> JaxSubject:
    w = variables()
    w |= {n: jnp.stack([w[n]] * 3) for n in "qkv"}

    def loss(w: Any, tokens: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
            return x + causal(q, k, v).reshape(x.shape), None

        layer = jax.checkpoint(layer) if remat else layer
        x, _ = lax.scan(layer, w["embed"][tokens], {n: w[n] for n in "qkv"})
        return (x @ w["head"]).std()

    return JaxSubject(jax.value_and_grad(loss), [{"tokens": tokens()}], w, causal=True)


@pytest.mark.parametrize("remat", [False, True])
def test_calls_of_the_backward_pass_are_no_calls_in_blocks(remat: bool) -> None:
    found = facts_of(layers(remat), "eager")
    again = ". The backward pass computes 3 again" if remat else ""
    assert found["checked"]["attention"] == f"3 calls a step{again}"
    (stored,) = [x for x in merged(found["findings"]) if x.kind == "unfused"]
    assert stored.count == 3
    assert stored.evidence[0].startswith("3 calls a step")
    assert [x[1:] for x in found["sites"]] == [["written out, which stores all scores", "3"]]


def test_a_cache_of_layers_in_a_scan_is_not_in_blocks() -> None:
    """One step of decoding. Each layer gets its part of the cache."""
    w = variables()
    w |= {n: jnp.stack([w[n]] * 3) for n in "qkv"}

    def step(w: Any, tokens: Any, cache: Any, index: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            w, keys, values = own
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
            keys, values = (
                lax.dynamic_update_slice_in_dim(a, b, index, 1) for a, b in ((keys, k), (values, v))
            )
            seen = (jnp.arange(keys.shape[1]) <= index)[None, None, None]
            return x + dense(q, keys, values, seen).reshape(x.shape), (keys, values)

        own = {n: w[n] for n in "qkv"}, cache, cache
        x, cache = lax.scan(layer, w["embed"][tokens], own)
        return x @ w["head"], cache

    cache = jnp.zeros((3, BATCH, 12, HEADS, SIZE))
    batch = {"tokens": tokens(1), "cache": cache, "index": 5}
    found = facts_of(JaxSubject(step, [batch], w, causal=True), "eager")
    assert [x[1] for x in found["sites"]] == ["written out, which stores all scores"]
    assert not any("visible pairs" in x for x in found["unchecked"])
    assert "documents" not in found["unchecked"]


def test_a_mask_in_a_scan_is_not_said_to_be_fused() -> None:
    w = variables()
    w |= {n: jnp.stack([w[n]] * 3) for n in "qkv"}

    def step(w: Any, tokens: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
            return x + dense(q, k, v, jnp.tri(LENGTH, dtype=bool)).reshape(x.shape), None

        return lax.scan(layer, w["embed"][tokens], {n: w[n] for n in "qkv"})[0] @ w["head"]

    subject = JaxSubject(step, [{"tokens": tokens()}], w, causal=True)
    found = facts_of(subject, "eager")["findings"]
    masks = [x for x in found if x.kind == "dense-mask"]
    assert masks
    assert not any("so that XLA does not store it" in x.remedy for x in masks)


# Counts and checks


def test_the_number_of_a_finding_is_for_one_step() -> None:
    batches = [{"tokens": tokens(n)} for n in (8, 12, 16)]
    found = facts_of(JaxSubject(model(causal), batches, variables(), causal=True), "eager", "compiled")
    (stored,) = [x for x in merged(found["findings"]) if x.kind == "unfused"]
    assert (stored.count, found["attention calls"]) == (1, 1)
    assert found["checked"]["attention"] == "1 call a step"
    assert found["note"] == "3 shapes in 3 batches"


def test_clean_checks_are_listed() -> None:
    def attend(q: Any, k: Any, v: Any, segment_ids: Any, attention_mask: Any) -> Any:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
        return dense(q, k, v, same & below(LENGTH) & (attention_mask > 0)[:, None, None])

    ids = jnp.broadcast_to(jnp.arange(LENGTH) // 9, (BATCH, LENGTH))
    batch = {"tokens": tokens(), "segment_ids": ids, "attention_mask": jnp.asarray(VALID, jnp.int32)}
    subject = JaxSubject(model(attend), [batch], variables(), causal=True)
    found = facts_of(subject, "eager", "parity")
    for topic in ("causality", "documents", "padding"):
        assert found["checked"][topic] == "changed tokens change no result of others"
    for topic in ("results", "gradients"):
        assert found["checked"][topic].startswith("compared with float64: they differ by ")
    assert found["unchecked"] == {}


def test_an_encoder_without_padding_says_what_was_not_checked() -> None:
    subject = step_of(lambda q, k, v: dense(q, k, v, True), causal=False)
    found = facts_of(subject, "eager")
    assert found["checked"]["causality"] == "you declared that tokens may see later tokens"
    assert found["unchecked"] == {"padding": "the tokens have no mask (B, S) and no lengths (B,)"}


def test_a_loop_without_gradients_is_still_compared() -> None:
    def step(w: Any, tokens: Any) -> Any:
        logits = lambda x: model(causal)(w, x)  # noqa: E731
        body = lambda s: (s[0] + 1, s[1].at[:, s[0]].set(logits(s[1])[:, s[0] - 1].argmax(-1)))  # noqa: E731
        return logits(lax.while_loop(lambda s: s[0] < 8, body, (5, tokens))[1])

    subject = JaxSubject(step, [{"tokens": tokens(8)}], variables(), causal=True)
    found = facts_of(subject, "parity")
    assert found["checked"]["results"].startswith("compared with float64")
    assert found["unchecked"] == {}


# Right functions that could look sick


def with_sinks(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(LENGTH), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)
    return (out / (weights.sum(-1, keepdims=True) + jnp.exp(0.5 - top))).swapaxes(1, 2)


def with_dropout(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(LENGTH), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    kept = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape), weights / 0.8, 0)
    return (jnp.einsum("bhqk,bkhd->bhqd", kept, v) / weights.sum(-1, keepdims=True)).swapaxes(1, 2)


def with_sigmoid(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(LENGTH), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.sigmoid(scores), v)


def with_positions(q: Any, k: Any, v: Any) -> Any:
    """Distances of a bias in bfloat16 are no angles. Few positions fit."""
    index = jnp.arange(LENGTH, dtype=jnp.bfloat16)
    q = q * jnp.sin(index)[:, None, None].astype(q.dtype)
    return causal(q, k, v)


def with_two_keys(q: Any, k: Any, v: Any) -> Any:
    key = jax.random.key(1)
    q = jnp.where(jax.random.bernoulli(key, 0.9, q.shape), q, 0)
    return causal(q, jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1), 0.9, k.shape), k, 0), v)


def with_an_unused_slice(q: Any, k: Any, v: Any) -> Any:
    """The slice that does not fit is computed, and no result uses it."""
    far = lax.dynamic_slice_in_dim(v, jnp.int32(LENGTH - 2), 4, 1)
    return causal(q, k, v) + jnp.where(False, far.sum(), 0.0)


def with_a_gate(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(LENGTH), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v) * jax.nn.sigmoid(q.swapaxes(1, 2))
    return (out / weights.sum(-1, keepdims=True)).swapaxes(1, 2)


def normalized_over_both(q: Any, k: Any, v: Any) -> Any:
    """Slot attention: a softmax over queries, then a weighted mean over keys."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2) + 1e-8
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    "attend",
    [
        with_sinks,
        with_dropout,
        with_sigmoid,
        with_positions,
        with_two_keys,
        with_an_unused_slice,
        with_a_gate,
    ],
)
def test_right_attention_is_not_called_wrong(attend: Any) -> None:
    found, _ = examined(lambda: step_of(attend), "eager")
    assert [x.what for x in found if x.severity == "wrong"] == []


def test_a_random_key_may_be_passed_through_loops() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        def drop(carry: Any, _: Any) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            return (jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x, 0), key), None

        q, key = lax.scan(drop, (q, jax.random.key(1)), None, 3)[0]
        k = lax.fori_loop(0, 3, lambda _, x: drop(x, None)[0], (k, key))[0]
        return causal(q, k, v)

    found = facts_of(step_of(attend), "eager")
    assert {x.kind for x in found["findings"]} == {"unfused"}
    assert "the stage eager" not in found["unchecked"]


def test_as_many_heads_as_tokens_are_no_wrong_split() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return causal(*(x.reshape(*x.shape[:2], -1).reshape(*x.shape[:2], HEADS, SIZE) for x in (q, k, v)))

    subject = JaxSubject(model(attend), [{"tokens": tokens(HEADS)}], variables(), causal=True)
    assert {x.kind for x in examined(lambda: subject, "eager")[0]} == {"unfused"}


def test_slot_attention_is_not_called_wrong() -> None:
    found, _ = examined(lambda: step_of(normalized_over_both, causal=False), "eager")
    assert [x.what for x in found if x.severity == "wrong"] == []
