"""Remedies in JAX state the layout of the user's arrays. Here they are followed literally."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_runner import examined, of_kind
from jax_samples import BATCH, HEADS, SIZE, below, dense, model, plain, same, tokens, variables

import attnspan
from attnspan.jax import attention
from attnspan_lab.doctor.jax import JaxSubject

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
LENGTH = HEADS  # A wrong layout then raises no error.
IDS = jnp.asarray([[0, 0, 1, 1], [0, 1, 1, 1]])
VALID = jnp.asarray([[1, 1, 1, 0], [1, 1, 1, 1]])
Attend = Callable[..., Any]


def of_jax(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return plain(q, k, v, mask=mask)


def heads_first(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = jnp.where(mask, q @ k.swapaxes(2, 3) / math.sqrt(SIZE), -1e30)
    return jax.nn.softmax(scores) @ v


def mapped(q: Any, k: Any, v: Any, mask: Any) -> Any:
    def head(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.softmax(jnp.where(mask, q @ k.T / math.sqrt(SIZE), -1e30)) @ v

    return jax.vmap(jax.vmap(head, (1, 1, 1, None), 1))(q, k, v, jnp.broadcast_to(mask[:, 0], (BATCH, 4, 4)))


CAUSAL, KEYS = below(LENGTH)[None, None], VALID[:, None, None] > 0
#: Kind of the finding, mask of the sick step, right mask, and more arguments of the step.
CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "unfused": ("unfused", CAUSAL, CAUSAL, {}),
    "leak": ("leak", CAUSAL, CAUSAL & same(IDS), {"segment_ids": IDS}),
    "mask-lost": ("mask-lost", KEYS | True, KEYS, {"attention_mask": VALID}),
    "causality-lost": ("causality-lost", CAUSAL | True, CAUSAL, {}),
    "documents": ("unfused", CAUSAL & same(IDS), CAUSAL & same(IDS), {"segment_ids": IDS}),
}


def followed(remedy: str, given: dict[str, Any]) -> Attend:
    """Make the call that a remedy describes."""
    code = re.search(r"mask=((?:\w+\([^()]*\)(?: [&|] )?)+)", remedy)
    layout = re.search(r'layout="(\w+)"', remedy)
    assert code is not None, remedy
    assert layout is not None, remedy
    mask = eval(code[1].strip(), {**vars(attnspan), **given})
    return lambda q, k, v: attention(q, k, v, mask=mask, layout=layout[1])


@pytest.mark.parametrize("attend", [of_jax, dense, heads_first, mapped])
@pytest.mark.parametrize("name", CASES)
def test_a_remedy_that_is_followed_literally_is_right(name: str, attend: Attend) -> None:
    kind, mask, right_mask, given = CASES[name]
    axes = (0, 2, 1, 3) if attend is heads_first else (0, 1, 2, 3)

    def step(inner: Any) -> Any:
        turn = lambda x: x.transpose(axes)  # noqa: E731
        return model(lambda q, k, v, **given: turn(inner(*map(turn, (q, k, v)), **given)))

    batch = {"tokens": tokens(LENGTH)} | given
    sick = step(lambda q, k, v, **_: attend(q, k, v, mask))
    own = of_kind(JaxSubject(sick, [batch], variables(), causal=name != "mask-lost"), kind)
    right = step(lambda q, k, v, **_: attend(q, k, v, right_mask))
    cured = step(lambda q, k, v, **given: followed(own.remedy, given)(q, k, v))
    with jax.enable_x64(True):
        w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), variables())
        results = [np.asarray(x(w, **batch)) for x in (right, cured)]
    assert np.abs(results[0] - results[1]).max() < 1e-6


def test_arrays_without_a_known_layout_are_to_be_brought_into_one() -> None:
    """A single head (B, S, D) has no layout of attnspan."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x[:, :, 0] for x in (q, k, v))
        scores = jnp.where(below(q.shape[1]), q @ k.swapaxes(1, 2), -1e30)
        return jnp.repeat(jax.nn.softmax(scores) @ v, HEADS, -1)

    batch = {"tokens": jnp.ones((BATCH, LENGTH), int)}
    found, _ = examined(JaxSubject(model(attend), [batch], variables(), causal=True), "eager")
    assert 'Bring q, k and v to (B, S, H, D), and pass layout="bshd" to attnspan' in found[0].remedy
