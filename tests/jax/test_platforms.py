"""The platform that a program is compiled for decides which backend is in it, whatever machine traces it."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnspan import causal, segments
from attnspan.backends import table
from attnspan.errors import BackendError
from attnspan.jax import SlowPathWarning, attention, explain
from attnspan.jax.backends import choice, cudnn
from attnspan.jax.part import JaxPart
from attnspan.kernels.cpu import MAX_HEAD_DIM

X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 16, 8)), jnp.bfloat16)
IDS = jnp.arange(16)[None] // 5


def _loss(x: Any, ids: Any = None, **options: Any) -> Any:
    mask = causal() if ids is None else causal() & segments(ids)
    return attention(x, x, x, mask=mask, **options).astype("float32").sum()


def _text(function: Any, platform: str, *args: Any) -> str:
    return str(jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text())


def _calls(text: str) -> list[str]:
    return re.findall(r"stablehlo\.custom_call @(\w+)", text)


@pytest.mark.parametrize(("platform", "calls"), [("cpu", 2), ("cuda", 0), ("rocm", 0), ("tpu", 0)])
def test_a_program_has_the_backend_of_its_platform(platform: str, calls: int) -> None:
    found = _calls(_text(jax.grad(_loss), platform, X, IDS))
    assert found == ["attnspan_forward", "attnspan_backward"][:calls]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, jax.vmap])
@pytest.mark.parametrize(
    ("backend", "platform", "reason"),
    [("cpu", "tpu", "it runs on CPU arrays, not on tpu"), ("pallas", "cpu", "it runs on TPUs, not on cpu")],
)
def test_a_named_backend_raises_where_it_does_not_run(
    backend: str, platform: str, reason: str, wrap: Any
) -> None:
    function = wrap(partial(_loss, backend=backend))
    x = jnp.stack([X, X]) if wrap is jax.vmap else X
    assert jax.eval_shape(function, x) is not None
    with pytest.raises(BackendError, match=f"backend='{backend}': expected .*{reason}"):
        _text(function, platform, x)


def test_a_call_that_no_platform_runs_raises_when_it_is_traced() -> None:
    x = jnp.zeros((1, 1, 4, 1024))
    with pytest.raises(BackendError, match=r"backend='pallas': expected .*got pallas: it "):
        jax.eval_shape(partial(_loss, backend="pallas"), x)


@pytest.mark.slow
def test_cudnn_is_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAX has CUDA, one program has cuDNN for GPUs and the kernel for CPUs, gradients too."""
    used = []
    plain = partial(jax.nn.dot_product_attention, implementation="xla")

    def instead(*arrays: Any, implementation: str, **given: Any) -> Any:
        used.append(implementation)
        return plain(*arrays, **given)

    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    step = jax.grad(_loss)
    assert _calls(_text(step, "cpu", X)) == ["attnspan_forward", "attnspan_backward"]
    assert used
    assert set(used) == {"cudnn"}
    for_gpus = _text(step, "cuda", X)
    assert not _calls(for_gpus)
    assert "while" not in for_gpus, "blocks of plain XLA code"
    assert "while" in _text(step, "tpu", X)
    got = jax.jit(step)(X)
    monkeypatch.undo()
    np.testing.assert_array_equal(got, jax.jit(partial(step, backend="cpu"))(X))


def test_what_was_never_measured_runs_by_name_only() -> None:
    found = explain(X, X, X, mask=causal())
    assert (found.backend, bool(found.isa), found.pairs) == ("cpu", True, 2 * 16 * 17 // 2)
    assert "xla: slower than cpu" in str(found)
    problem, part = found.problem, JaxPart(*[None] * 4, 1.0)
    for name in ("pallas", "math"):
        backend = replace(table("jax")[name], supports=lambda *_: None)
        for device in ("cpu", "gpu", "tpu"):
            assert "must be requested" in str(backend.against(replace(problem, device=device), part))


def test_slower_code_warns_once_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_warned", set())
    wide = jnp.zeros((1, 1, 4, MAX_HEAD_DIM + 1))
    with pytest.warns(SlowPathWarning, match=r"backend 'cpu' refused .*backend\(\"xla\""):
        _loss(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _loss(wide)
        _loss(wide, backend="xla")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["b, 2, 16, 8", "b, 2, s, 8"])
def test_sizes_may_be_symbols(sizes: str) -> None:
    """A batch for every platform, lengths where there is a kernel for them; other backends refuse by name."""
    unchecked = [
        jax.export.DisabledSafetyCheck.custom_call(f"attnspan_{way}") for way in ("forward", "backward")
    ]
    shape = jax.export.symbolic_shape(sizes)
    symbols = jax.ShapeDtypeStruct(shape, X.dtype)
    ids = jax.ShapeDtypeStruct((shape[0], shape[2]), IDS.dtype)
    platforms = ["cpu"] if "s" in sizes else ["cpu", "cuda", "tpu"]
    step = jax.jit(jax.grad(_loss))
    program = jax.export.export(step, platforms=platforms, disabled_checks=unchecked)(symbols, ids)
    read = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(read.call(X, IDS), step(X, IDS))
    for backend in ("cudnn", "pallas"):
        with pytest.raises(BackendError, match=f"{backend}: it (runs on|needs concrete sizes)"):
            jax.export.export(jax.jit(partial(_loss, backend=backend)), platforms=["cuda"])(symbols)
