"""Scales of scores in JAX: probable mistakes are asked about, and scales that may be a choice are not."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_runner import as_users_do
from jax_samples import HEADS, LENGTH, SIZE, below, model, plain, tokens, variables

from attnspan.jax import attention
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax import JaxSubject
from attnspan_lab.doctor.jax.scale_factors import scale_findings
from attnspan_lab.doctor.jax.subject import Traced
from attnspan_lab.doctor.jax.watch import watched

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
WIDTH = HEADS * SIZE


def written(q: Any, k: Any, v: Any, scale: Any = 1.0, bias: Any = 0.0) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(below(LENGTH), scores, -1e30)), v)


def rotated(x: Any) -> Any:
    angle = jnp.arange(x.shape[1])[:, None, None] * 0.1 ** jnp.arange(SIZE // 2)
    a, b = jnp.split(x, 2, -1)
    both = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.concatenate(both, -1)


def scaled_queries(q: Any, k: Any, v: Any) -> Any:
    q = q * SIZE**-0.5  # sick
    return plain(q, k, v, is_causal=True)  # sick


def scaled_and_rotated(q: Any, k: Any, v: Any) -> Any:
    q = q / jnp.sqrt(SIZE)  # sick
    return plain(rotated(q), rotated(k), v, is_causal=True)  # sick


def scaled_for_attnspan(q: Any, k: Any, v: Any) -> Any:
    q, k = (x * SIZE**-0.25 for x in (q, k))  # sick
    return attention(q, k, v, layout="bshd")  # sick


def unscaled(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)  # sick


def of_width(q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v, scale=WIDTH**-0.5)  # sick


def found_in(attend: Any, **more: Any) -> list[Finding]:
    w = variables() | {k: jnp.asarray(x, jnp.float32) for k, x in more.items()}

    def step(w: Any, tokens: Any) -> Any:
        own = [w[k] for k in more]
        return model(lambda q, k, v: attend(q, k, v, *own))(w, tokens)

    with as_users_do():
        subject = JaxSubject(step, [{"tokens": tokens()}], w)
        traced = Traced.of(subject, subject.batches[0])
        watcher, _ = watched(traced, subject.size(subject.batches[0]))
    assert watcher.calls
    return list(scale_findings(watcher.calls))


@pytest.mark.parametrize(
    ("attend", "total", "remedy"),
    [
        (scaled_queries, "0.125", "Keep one of the factors"),
        (scaled_and_rotated, "0.125", "Keep one of the factors"),
        (scaled_for_attnspan, "0.125", "Keep one of the factors"),
        (unscaled, "1,", "Multiply the scores by 0.3536"),
        (of_width, "0.1768", "use head_dim**-0.5 = 0.3536 instead of 0.1768"),
    ],
)
def test_a_scale_that_is_probably_a_mistake_is_asked_about(attend: Any, total: str, remedy: str) -> None:
    (found,) = found_in(attend)
    source, first = inspect.getsourcelines(attend)
    lines = [first + i for i, x in enumerate(source) if x.rstrip().endswith("# sick")]
    assert (found.kind, found.severity) == ("scale", "note")
    assert [x.line for x in found.places] == lines
    assert found.evidence[0] == f"the effective scale is {total.strip(',')}, and 1/sqrt(head dim 8) is 0.3536"
    assert remedy in found.remedy


def normal(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: plain(q, k, v),
        lambda q, k, v: plain(rotated(q) * SIZE**-0.5, rotated(k), v, scale=1.0),
        lambda q, k, v: plain(q, k, v, scale=1 / SIZE),
        lambda q, k, v: attention(q * SIZE**-0.5, k, v, scale=1.0, layout="bshd"),
        lambda q, k, v: written(q * 12**-0.5, k, v),
        lambda q, k, v: written(normal(q), normal(k), v),
        lambda q, k, v: plain(normal(q) * SIZE**-0.5, k, v),
        lambda q, k, v: written(q * SIZE**-0.5, k, v),
    ],
)
def test_a_scale_that_may_be_a_choice_is_not(attend: Any) -> None:
    assert found_in(attend) == []


def test_learned_scales_and_biases_are_a_choice() -> None:
    assert found_in(lambda q, k, v, t: written(q, k, v, jnp.exp(t)), temperature=2.0) == []
    assert found_in(lambda q, k, v, b: written(q, k, v, bias=b[:, None, None]), bias=[0.1] * HEADS) == []
    assert found_in(lambda q, k, v, w: written(q * w, k, v), gain=[1.0] * SIZE) == []
