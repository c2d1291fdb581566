"""Attention on one XLA device: every option, every mask, every dtype against the oracle in float64."""

from dataclasses import replace

import pytest
import torch
import torch_xla
from samples.conformance import OPTIONS, SHAPES, SMALL
from samples.parts import MASKS
from samples.problems import DTYPES
from xla_cells import check, on_xla

import attnspan as a
from attnspan import reference
from attnspan.call.dropout import dropout_seeds, kept
from attnspan.xla import attention


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str) -> None:
    check(replace(SMALL, options=OPTIONS[option], mask="segments"))


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    check(replace(SMALL, options=("alibi",), mask=mask))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_dtype(dtype: str) -> None:
    check(replace(SMALL, options=OPTIONS["everything, dense"], mask="cache", dtype=DTYPES[dtype]))


@pytest.mark.parametrize("shape", ["one query", "more queries than keys", "odd head dims"])
def test_shapes(shape: str) -> None:
    check(replace(SHAPES[shape], options=OPTIONS["everything"]))


def test_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = a.causal() & a.window(4)
    inputs = [on_xla(x).requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, mask=mask, return_lse=True)
    gradients = torch.autograd.grad(out.sum(), inputs)
    bounds = mask.spans(9, 9).bounds
    exact, exact_lse = reference.forward(q, k, v, bounds, 8**-0.5)
    assert lse.dtype == torch.float64
    assert abs(out.detach().cpu().numpy() - exact).max() < 1e-13
    assert abs(lse.detach().cpu().numpy() - exact_lse).max() < 1e-13
    expected = reference.backward(torch.ones_like(q), None, q, k, v, bounds, 8**-0.5)
    for gradient, value in zip(gradients, expected, strict=True):
        assert abs(gradient.cpu().numpy() - value).max() < 1e-13


@pytest.mark.parametrize("seed", [5, -(2**62) + 12345])
def test_dropout_drops_what_torch_drops(seed: int) -> None:
    # Equal scores and values of one: the output counts the weights that are kept.
    batch, heads, length = 2, 3, 40
    q = torch.zeros(batch, heads, length, 4)
    values = torch.eye(length).expand(batch, heads, length, length)
    out = attention(
        *on_xla((q, q, values)),
        dropout_p=0.3,
        dropout_seed=on_xla(torch.tensor(seed)),
    )
    index = torch.arange(length).numpy()[None]
    expected = kept(0.3, dropout_seeds(seed, batch, heads), index, index)
    assert ((out.cpu().numpy() != 0) == expected).all()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts(layout: str) -> None:
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    cu = on_xla(torch.tensor([0, 2, 6]))
    mask = a.causal() & a.documents(cu)
    wanted, lse = attention(
        *on_xla((q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))), mask=mask, return_lse=True
    )
    packed = layout == "thd"
    inputs = [x[0] if packed else x for x in (q, k, k)]
    got, got_lse = attention(*on_xla(inputs), mask=mask, layout=layout, return_lse=True)
    wanted = wanted.transpose(1, 2)
    assert torch.equal(got.cpu(), (wanted[0] if packed else wanted).cpu())
    assert torch.equal(got_lse.cpu(), (lse[0] if packed else lse).cpu())


def test_functions_as_masks_are_called_on_xla_tensors() -> None:
    q = on_xla(torch.randn(1, 2, 12, 8))
    ids = on_xla(torch.tensor([0] * 5 + [1] * 7))
    devices = set()

    def same(b, h, i, j):
        devices.add(i.device.type)
        return (ids[i] == ids[j]) & (i >= j)

    got = attention(q, q, q, mask=a.from_predicate(same, max_runs=1))
    assert torch.equal(got.cpu(), attention(q, q, q, mask=a.causal() & a.segments(ids)).cpu())
    assert devices == {"xla"}


def test_masks_of_the_library() -> None:
    from attnspan import library

    q = torch.randn(1, 1, 16, 8)
    for mask in (library.natten((4, 4), 3), library.block_causal(4)):
        got = attention(*on_xla((q, q, q)), mask=mask)
        exact, _ = reference.forward(q, q, q, mask.spans(16, 16).bounds, 8**-0.5)
        assert abs(got.cpu().numpy() - exact).max() < 1e-6


def test_rows_of_a_broken_promise_are_nan() -> None:
    q = on_xla(torch.randn(1, 1, 6, 8))
    ids = on_xla(torch.tensor([[0, 0, 1, 0, 2, 2]]))
    out = attention(q, q, q, mask=a.segments(ids)).cpu()[0, 0].isnan().all(-1)
    assert out.tolist() == [True, True, False, True, False, False]


def test_autocast() -> None:
    q = on_xla(torch.randn(1, 2, 8, 8))
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16


def test_a_second_derivative_raises() -> None:
    q = on_xla(torch.randn(1, 1, 4, 8)).requires_grad_()
    (gradient,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(gradient.sum(), q)


def test_nothing_waits_for_the_device() -> None:
    from torch_xla.debug import metrics

    ids = on_xla(torch.tensor([[0] * 8 + [1] * 16]))
    q = on_xla(torch.randn(1, 2, 24, 8)).requires_grad_()
    torch_xla.sync()
    metrics.clear_all()
    attention(q, q, q, mask=a.causal() & a.segments(ids)).sum().backward()
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert metrics.counter_value("ExecuteComputation") is None
    assert q.grad is not None
    torch_xla.sync(wait=True)
    assert metrics.counter_value("ExecuteComputation") == 1
