"""Models in JAX whose masks are wrong, lost or stored. See jax_runner.py for their form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_runner import attends, fault
from jax_samples import (
    BATCH,
    DOCUMENTS,
    HEADS,
    LENGTH,
    LENGTHS,
    MASK,
    SIZE,
    VALID,
    below,
    cached,
    dense,
    in_blocks,
    model,
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

from attnspan import causal, keys, segments, window
from attnspan_lab.doctor.jax import JaxSubject

IDS = {"segment_ids": DOCUMENTS}
BOTH = "mask=causal() & segments(segment_ids)"

# Masks that are stored


@attends(
    "dense-mask", "", "Pass mask=causal() to attnspan.jax.attention", "Pass is_causal=True, without mask,"
)
def mask_of_numpy(well: int, q: Any, k: Any, v: Any) -> Any:
    if well:
        return spans(q, k, v) if well == 1 else plain(q, k, v, is_causal=True)
    mask = np.tril(np.ones((q.shape[1], q.shape[1]), bool))
    return dense(q, k, v, mask)  # sick


@fault("dense-mask", "", "for example as causal()", "compute the mask from jnp.arange")
def mask_argument(well: int) -> JaxSubject:
    if well:
        return step_of(spans if well == 1 else written)
    step = model(lambda q, k, v, mask: dense(q, k, v, mask))  # sick
    return subject(step, mask=jnp.broadcast_to(below(LENGTH), (BATCH, 1, LENGTH, LENGTH)))


@attends("dense-mask", applied=False)
def bias_that_is_sorted(well: int, q: Any, k: Any, v: Any) -> Any:
    """XLA does not compute a sort again inside of other loops."""
    index = jnp.arange(q.shape[1])
    bias = jnp.sort(-jnp.abs(index[:, None] - index).astype(q.dtype), axis=-1)  # sick
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    weights = jax.nn.softmax(jnp.where(below(q.shape[1]), scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


LONGEST = 1024
CAUSAL = jnp.tril(jnp.ones((1, 1, LONGEST, LONGEST), bool))
FUTURE = ~np.tri(LONGEST, dtype=bool)
CAPTURED = "arrays that are not its arguments"


@fault("constant", CAPTURED, "is_causal=True")
def mask_of_the_longest_context(well: int = 0) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        n = q.shape[1]
        return plain(q, k, v, is_causal=True) if well else plain(q, k, v, mask=CAUSAL[:, :, :n, :n])  # sick

    return subject(jax.jit(scanned(attend, jax.checkpoint)), w=variables(layers=2))


@fault("constant", CAPTURED, "is_causal=True")
def mask_of_later_tokens(well: int = 0) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        if well:
            return plain(q, k, v, is_causal=True, scale=1.0)
        hidden = jax.lax.dynamic_slice(FUTURE, (0, 0), (q.shape[1], q.shape[1]))  # sick
        scores = jnp.where(hidden, -1e30, jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return step_of(jax.vmap(lambda *x: attend(*(y[None] for y in x))[0]))


@fault("constant", CAPTURED, "is_causal=True")
def window_longer_than_the_batch(well: int = 0) -> JaxSubject:
    near = CAUSAL & ~jnp.tri(LONGEST, k=-101, dtype=bool)

    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        if well:
            return spans(q, k, v, window(100) & segments(segment_ids))
        mask = near[:, :, : q.shape[1], : q.shape[1]]  # sick
        return plain(q, k, v, mask=mask & same(segment_ids))

    return step_of(attend, **IDS)


# Documents


@attends("leak", "", BOTH, given=IDS)
def no_mask_of_documents(well: int, q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return spans(q, k, v, causal() & segments(segment_ids) if well else None)  # sick


@attends("leak", "", BOTH, given=IDS, parity=True)
def documents_and_the_next(well: int, q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    """The mask compares each document with the next one as well."""
    if well:
        return spans(q, k, v, causal() & segments(segment_ids))
    near = jnp.abs(segment_ids[:, None, :, None] - segment_ids[:, None, None, :]) < 2
    return dense(q, k, v, near & below(q.shape[1]))  # sick


@attends("leak", given=IDS, at="in_blocks", applied=False)
def blocks_without_documents(well: int, q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return in_blocks(q, k, v)


@fault("leak", "takes the first axis of a mask with 3 axes as heads", "segments(segment_ids)")
def mask_of_three_axes(well: int) -> JaxSubject:
    ids = np.stack([np.arange(LENGTH) // n for n in (5, 7, 11, LENGTH)])

    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        mask = same(segment_ids) if well else same(segment_ids)[:, 0]
        return plain(q, k, v, mask=mask, is_causal=True)  # sick

    return step_of(attend, tokens=tokens(batch=4), segment_ids=ids)


@fault("leak", "A mask made from segment_ids reaches this call", "segments(segment_ids)")
def ids_of_the_next_token(well: int) -> JaxSubject:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        mask = same(segment_ids[:, :-1] if well else segment_ids[:, 1:])
        return model(lambda q, k, v: plain(q, k, v, mask=mask, is_causal=True))(w, tokens[:, :-1])  # sick

    return subject(step, **IDS)


class Dropped(nnx.Module):
    """Dropout makes random keys in the step."""

    def __init__(self, well: int, rngs: nnx.Rngs) -> None:
        self.embed, self.drop, self.well = nnx.Embed(50, 32, rngs=rngs), nnx.Dropout(0.3, rngs=rngs), well
        self.attend = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)

    def __call__(self, tokens: Any, segment_ids: Any) -> Any:
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        if self.well:
            mask = nnx.combine_masks(mask, nnx.make_attention_mask(segment_ids, segment_ids, jnp.equal))
        return x + self.drop(self.attend(x, mask=mask))  # sick


@fault("leak", "No mask that separates documents", "segments(segment_ids)", at=Dropped)
def causal_mask_of_flax_only(well: int) -> Any:
    return Dropped(well, nnx.Rngs(0)), [{"tokens": tokens()} | IDS], {"causal": True}


# Later tokens


@attends("causality-lost", "", "mask=causal()")
def no_causal_mask(well: int, q: Any, k: Any, v: Any) -> Any:
    return spans(q, k, v) if well else plain(q, k, v)  # sick


@attends("causality-lost", "", "mask=causal()")
def one_key_too_far(well: int, q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), 0 if well else 1)
    return dense(q, k, v, mask)  # sick


@attends("causality-lost", "up to 6 later tokens", "window(6)")
def window_to_both_sides(well: int, q: Any, k: Any, v: Any) -> Any:
    return spans(q, k, v, window(6)) if well else plain(q, k, v, local_window_size=6)  # sick


class Encoder(nn.Module):
    """Padding is found in the tokens: its queries see no key."""

    causal: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x, valid = nn.Embed(50, 32)(tokens), tokens > 0
        for _ in range(2):
            mask = nn.make_attention_mask(valid, valid)
            mask = nn.combine_masks(mask, nn.make_causal_mask(tokens)) if self.causal else mask
            x = x + nn.MultiHeadDotProductAttention(4)(x, mask=mask)  # sick
        return nn.Dense(50)(x)


@fault("causality-lost", "The call has no causal mask", "causal()", at=Encoder)
def encoder_as_a_decoder(well: int) -> Any:
    module, batch = Encoder(well), {"tokens": tokens() * VALID[[1, 1]]}
    return module.bind(module.init(jax.random.key(0), **batch)), [batch], {"causal": True}


@fault(
    "causal-alignment",
    "their own keys have higher numbers",
    "mask=causal()",
    "number of cached keys",
)
def causal_with_a_cache(well: int) -> JaxSubject:
    def step(w: Any, tokens: Any, cache: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (jnp.concatenate([cache, x], 1) for x in (k, v))
            if well == 1:
                return spans(q, k, v)
            seen = jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None] + 16
            return plain(q, k, v, mask=seen[None, None]) if well else plain(q, k, v, is_causal=True)  # sick

        return model(attend)(w, tokens)

    return subject(step, tokens=tokens(4), cache=cached(16))


# Padding

PADDED = {"attention_mask": MASK}


@attends("mask-lost", given={"padding_mask": ~VALID}, causal=None)
def no_mask_of_padding(well: int, q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
    if well:
        return plain(q, k, v, mask=~padding_mask[:, None, None, :])
    return dense(q, k, v, below(q.shape[1]).T)  # sick


@attends("mask-lost", "are added to the scores", "Pass it as a boolean mask", given=PADDED, causal=False)
def padding_of_0_and_1_is_added(well: int, q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    mask = attention_mask[:, None, None, :]
    return plain(q, k, v, mask=mask > 0) if well else plain(q, k, v, bias=mask.astype(q.dtype))  # sick


BUT_FIVE = np.stack([~VALID[1], ~VALID[1]])


@attends(
    "mask-lost",
    "is inverted: only padding is visible",
    "Invert the mask",
    given={"padding_mask": BUT_FIVE},
    causal=False,
)
def padding_mask_is_inverted(well: int, q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
    mask = ~padding_mask if well else padding_mask
    return plain(q, k, v, mask=mask[:, None, None, :])  # sick


@attends("mask-lost", "is inverted: only padding is visible", "Invert the mask", given=PADDED)
def valid_queries_see_no_key(well: int, q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    """Padding is behind the tokens, so that no query sees a valid token, and no valid token sees a key."""
    shown = (attention_mask != 0 if well else attention_mask == 0)[:, None, None, :]
    return dense(q, k, v, shown & below(q.shape[1]))  # sick


INVERTED = "valid queries see exactly the pairs that it must hide"


@attends("causality-lost", INVERTED, "Invert the mask")
def causal_mask_is_inverted(well: int, q: Any, k: Any, v: Any) -> Any:
    shown = below(q.shape[1])
    return dense(q, k, v, shown if well else ~shown)  # sick


@attends("mask-lost", INVERTED, "Invert the mask", given=PADDED)
def whole_mask_is_inverted(well: int, q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    """The finding is the only one: queries without a key and later tokens follow from it."""
    shown = below(q.shape[1]) & (attention_mask != 0)[:, None, None, :]
    return dense(q, k, v, shown if well else ~shown)  # sick


@attends("mask-lost", "", "mask=causal() & keys(attention_mask != 0)", given=PADDED, also=("causality-lost",))
def window_is_inverted(well: int, q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    """The mask hides the last five tokens. With one more mask, the first queries would see no key."""
    valid = attention_mask != 0
    if well:
        return spans(q, k, v, causal() & keys(valid))
    near = below(q.shape[1]) & ~jnp.tri(q.shape[1], k=-5, dtype=bool)
    return dense(q, k, v, ~(near & valid[:, None, None, :]))  # sick


@attends(
    "mask-lost",
    "A mask made from lengths reaches this call",
    "keys(valid)",
    given={"lengths": LENGTHS},
    causal=False,
)
def lengths_of_queries_only(well: int, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    if well:
        return spans(q, k, v, keys(jnp.arange(q.shape[1]) < lengths[:, None]))
    return plain(q, k, v, query_seq_lengths=lengths)  # sick


@attends(
    "mask-lost",
    "hides queries instead of keys",
    "mask=(attention_mask != 0)[:, None, None, :]",
    given=PADDED,
    causal=False,
)
def own_mask_on_queries(well: int, q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    mask = (attention_mask != 0)[:, None, None, :] if well else (attention_mask != 0)[:, None, :, None]
    return plain(q, k, v, mask=mask)  # sick


FRAMES = "mask=keys(frame_mask != 0) to attnspan.jax.attention"


def cross(masked: Callable[..., Any]) -> JaxSubject:
    """Decoder tokens see frames of the same length. Some frames are padding."""

    def step(w: Any, tokens: Any, frames: Any, frame_mask: Any) -> Any:
        x = w["embed"][tokens]
        (q, _, _), (_, k, v) = projected(w, x), projected(w, frames)
        out = plain(q, k, v, mask=masked(frame_mask))  # sick: cross
        return (x + out.reshape(x.shape)) @ w["head"]

    frames = jnp.sin(jnp.arange(BATCH * LENGTH * 32.0)).reshape(BATCH, LENGTH, 32)
    return subject(step, False, frames=frames, frame_mask=VALID)


def on_keys(mask: Any) -> Any:
    return mask[:, None, None, :]


@fault("mask-lost", "hides queries instead of keys", FRAMES, at="cross")
def frame_mask_on_queries(well: int) -> JaxSubject:
    return cross(on_keys if well else lambda mask: mask[:, None, :, None])


@fault("mask-lost", "No mask that is made from frame_mask", FRAMES, at="cross", applied=False)
def no_mask_of_frames(well: int) -> JaxSubject:
    return cross(lambda _: None)


@fault("mask-lost", "still shows these keys", FRAMES, at="cross", applied=False)
def frame_mask_that_is_shifted(well: int) -> JaxSubject:
    return cross(lambda mask: jnp.roll(mask, 3, 1)[:, None, None, :])


ON_KEYS = "No mask that is made from attention_mask", "mask=keys(attention_mask != 0)"


@fault("mask-lost", *ON_KEYS, at="queries")
def fewer_queries_than_padded_tokens(well: int) -> JaxSubject:
    """The results have the length of the queries, not of the tokens."""

    def step(w: Any, tokens: Any, attention_mask: Any, queries: Any) -> Any:
        (q, _, _), (_, k, v) = projected(w, queries), projected(w, w["embed"][tokens])
        mask = (attention_mask != 0)[:, None, None, :] if well else None
        return plain(q, k, v, mask=mask).reshape(queries.shape) @ w["head"]  # sick: queries

    queries = jnp.sin(jnp.arange(BATCH * 9 * 32.0)).reshape(BATCH, 9, 32)
    return subject(step, False, queries=queries, **PADDED)


@fault("mask-lost", *ON_KEYS, at="probe")
def probe_that_sees_padding(well: int) -> JaxSubject:
    """One query pools the tokens of each sample."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        _, k, v = projected(w, w["embed"][tokens])
        q = jnp.broadcast_to(w["embed"][0], (BATCH, 1, 32)).reshape(BATCH, 1, HEADS, SIZE)
        mask = (attention_mask != 0)[:, None, None, :] if well else None
        return plain(q, k, v, mask=mask).reshape(BATCH, -1) @ w["head"]  # sick: probe

    return subject(step, False, **PADDED)


# Queries without keys


@attends("hidden-rows", parity=True)
def first_query_without_keys(well: int, q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), -1)
    if well:
        return jnp.where(mask.any(1)[:, None, None], dense(q, k, v, mask.at[0, 0].set(True)), 0)
    return dense(q, k, v, mask)  # sick


@attends("hidden-rows", causal=None, applied=False)
def first_query_is_nan(well: int, q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), -1)
    return dense(q, k, v, mask, -jnp.inf)  # sick


@fault("hidden-rows", "If all scores are -inf", "see its own key")
def left_padding_in_a_scan(well: int) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, valid: Any) -> Any:
        mask = below(LENGTH) & valid[:, None, None, :] | (jnp.eye(LENGTH, dtype=bool) if well else False)
        scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8), -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)  # sick

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        logits = scanned(attend)(w, tokens, valid=attention_mask > 0)
        return jnp.where(attention_mask[..., None] > 0, logits, 0)

    return subject(step, w=variables(layers=2), attention_mask=MASK[:, ::-1])
