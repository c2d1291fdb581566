"""The compiled kernel inside XLA: its buffers, its threads, its errors."""

import re
import threading

import numpy as np
import pytest
from programs import run_program

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from attnspan import Spans, causal, window  # noqa: E402
from attnspan.jax import attention  # noqa: E402

RNG = np.random.default_rng(0)


def _qkv(batch=1, heads=2, length=33, dim=16, dtype="float32"):
    return [jnp.asarray(RNG.standard_normal((batch, heads, length, dim)), dtype) for _ in range(3)]


def test_illegal_bounds_raise_by_row():
    q, k, v = _qkv()
    bounds = causal().spans(33, 33).bounds.copy()
    bounds[0, 0, 7] = (5, 40)
    attend = jax.jit(lambda b: attention(q, k, v, mask=Spans(b, 33), backend="cpu"))
    with pytest.raises(Exception, match=r"mask bounds: expected spans .* query 7 \(batch 0, head 0\)"):
        attend(jnp.asarray(bounds)).block_until_ready()
    gradient = jax.jit(jax.grad(lambda q, b: attention(q, k, v, mask=Spans(b, 33)).sum()))
    with pytest.raises(Exception, match="query 7"):
        gradient(q, jnp.asarray(bounds)).block_until_ready()


def test_bshd_is_read_and_written_without_a_copy():
    def loss(q, k, v):
        return attention(q, k, v, mask=causal(), layout="bshd").sum()

    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().as_text()
    assert text.count("custom-call(") == 2, text
    assert not re.findall(r"= \S+ (transpose|copy)\(", text), text
    # The same question where there is something to find.
    turned = jax.jit(lambda q: attention(*(x.swapaxes(1, 2) for x in (q, q, q)))).lower(x).compile().as_text()
    assert re.findall(r"(transpose|copy)", turned), turned


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "xla", "math"])
@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 3), (1, 0, 3), (1, 5, 0)])
def test_nothing_to_do(batch, q_len, k_len, backend):
    q, k = jnp.ones((batch, 2, q_len, 8)), jnp.ones((batch, 2, k_len, 8))
    sinks = jnp.array([0.5, -jnp.inf])

    def call(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)

    (out, lse), pull = jax.vjp(call, q, k, k, sinks)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == sinks[None, :, None]).all()
    *gradients, dsinks = pull((out + 1, jnp.ones_like(lse)))
    for gradient, x in zip(gradients, (q, k, k), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()
    # A sink alone is the lse of its row.
    assert dsinks.tolist() == ([q_len, 0] if not k_len else [0, 0])


@pytest.mark.slow
def test_calls_at_once_do_not_mix():
    # More Python threads than XLA has: loops of one call must not wait for threads that others hold.
    problems = [_qkv(length=257 + 8 * i) for i in range(8)]
    attend = jax.jit(lambda q, k, v: attention(q, k, v, mask=window(50)))
    alone = [np.asarray(attend(*p)) for p in problems]
    found = [[] for _ in problems]

    def work(i):
        for _ in range(20):
            found[i].append(np.asarray(attend(*problems[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
        assert not t.is_alive()
    for i, results in enumerate(found):
        assert len(results) == 20
        for x in results:
            np.testing.assert_array_equal(x, alone[i])


def test_several_kernels_of_one_program_share_its_threads():
    q, k, v = _qkv(heads=4, length=300)

    @jax.jit
    def many(q, k, v):
        # Independent of each other: XLA may run them at the same time.
        return [attention(q + i, k, v, mask=causal()) for i in range(6)]

    for i, x in enumerate(many(q, k, v)):
        np.testing.assert_array_equal(x, attention(q + i, k, v, mask=causal()))


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == 'attnspan._core': raise ImportError('built without a compiler')
sys.meta_path.insert(0, Block())
import jax.numpy as jnp
from attnspan.jax import attention, explain
x = jnp.ones((1, 2, 8, 16))
print(attention(x, x, x).shape, explain(x, x, x).backend, explain(x, x, x).refusals['cpu'])
"""


@pytest.mark.slow
def test_without_the_compiled_module_xla_code_runs():
    printed = run_program("-c", WITHOUT)
    assert "(1, 2, 8, 16) xla the compiled module attnspan._core is missing" in printed
