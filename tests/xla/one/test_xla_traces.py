"""Nothing is traced twice: programs go by what is static, whatever objects masks and options are."""

import torch
import torch_xla
from torch_xla.core.xla_builder import _jax_to_xla_computation_cache_elements as traced
from xla_cells import on_xla

import attnspan as a
from attnspan.xla import attention


def step(cut: int, slope: float) -> None:
    q = on_xla(torch.randn(1, 2, 12, 8)).requires_grad_()
    ids = on_xla((torch.arange(12) >= cut).long()[None])
    bias = a.alibi(on_xla(torch.full((2,), slope)))
    seed = on_xla(torch.tensor(1000 + cut))  # torch_xla makes constants of 0 and 1.
    out = attention(q, q, q, mask=a.causal() & a.segments(ids), bias=bias, dropout_p=0.1, dropout_seed=seed)
    out.sum().backward()
    torch_xla.sync()


def test_new_masks_biases_and_seeds_are_not_traced_again() -> None:
    from torch_xla.debug import metrics

    step(3, 0.5)
    before = traced()
    metrics.clear_all()
    for cut in range(1, 9):
        step(cut, cut / 10)
    assert traced() == before
    assert metrics.counter_value("UncachedCompile") is None


def test_other_statics_and_shapes_are_traced_once_each() -> None:
    q = on_xla(torch.randn(1, 2, 12, 8))
    attention(q, q, q, mask=a.window(3))
    before = traced()
    attention(q, q, q, mask=a.window(4))
    assert traced() == before + 1  # The lowering of another mask; the attention is the same.
    attention(q, q, q, mask=a.window(4), softcap=3.0)
    assert traced() == before + 2
    attention(q[:, :, :8], q, q, mask=a.window(4))
    attention(q[:, :, :8], q, q, mask=a.window(4))
    assert traced() == before + 4
