"""The registered operators: their contract with everything that traces torch."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from covering import everything
from samples.parts import ALL
from samples.torch_calls import OPERATOR_ERROR, OPTIONS, counted_kernel_calls, small
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attnspan import causal, documents
from attnspan.call.options import DENSE, Options
from attnspan.kernels import cpu
from attnspan.torch import attention
from attnspan.torch.ops import backward_op, forward_op, read_options

GIVEN = ("queries given", "keys given")

#: Shapes, dtypes and masks; each value of a factor comes once or more. The last ones are for the long run.
SAMPLES: dict[str, dict[str, Any]] = {
    "mqa": {"dtype": torch.bfloat16, "heads": 6, "kv_heads": 1, "runs": 4, "mask_batch": 2, "mask_heads": 6},
    "decode": {"q_len": 1, "k_len": 33, "empty": False, "mask_batch": 2},
    "no queries": {"q_len": 0},
    "fp32": {},
    "mha": {"dtype": torch.float16, "heads": 2, "v_dim": 24, "runs": 2, "stored": "bhsd", "mask_heads": 2},
    "no batch": {"batch": 0},
    "no keys": {"k_len": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAMPLES][: None if everything() else 3])
def test_opcheck(name: str) -> None:
    sample = small(**SAMPLES[name])
    torch.library.opcheck(forward_op, sample.requires_grad().arguments)
    out, lse = forward_op(*sample.arguments)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).float()
    for lse_gradient in (dlse, None) if everything() else (dlse if name == "no queries" else None,):
        arguments = (dout, lse_gradient, *sample.arguments[:4], out, lse, sample.case.factor)
        torch.library.opcheck(backward_op, arguments)


@pytest.mark.slow
def test_opcheck_with_the_k_len_of_a_mask() -> None:
    sample = small().requires_grad()
    torch.library.opcheck(forward_op, sample.arguments, {"k_len": torch.tensor(9)})
    with pytest.raises(OPERATOR_ERROR, match=r"over k_len=9 keys .* got spans over 8"):
        forward_op(*sample.arguments, k_len=torch.tensor(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", OPTIONS if everything() else ["all", "dense, all heads, float16", "dropout by seeds"]
)
def test_opcheck_with_options(name: str) -> None:
    positional = "dropout" in name or "alibi" in name or name in ("distance table", "T5", "all")
    sample = small(*(ALL if name == "all" else (name,)), *(GIVEN if positional else ()))
    torch.library.opcheck(forward_op, sample.requires_grad().arguments)
    out, lse = forward_op(*sample.arguments)
    arguments = (torch.randn_like(out), None, *sample.arguments[:4], out, lse, *sample.arguments[4:])
    torch.library.opcheck(backward_op, (*arguments, sample.options[1] is not None))


@pytest.mark.parametrize(
    "name", ["dense", "dense, per key and head, float32", "alibi, per batch row", "distance table", "sinks"]
)
@pytest.mark.parametrize("empty", [False, True])
def test_gradients_of_parameters_have_one_layout(name: str, empty: bool) -> None:
    sample = small(name, q_len=0 if empty else 7)
    out, lse = forward_op(*sample.arguments)
    for want_dbias in (False, True):
        arguments = (out, None, *sample.arguments[:4], out, lse, *sample.arguments[4:], want_dbias)
        *_, dbias, dsinks = backward_op(*arguments)
        _, bias, _, sinks, *_ = sample.options
        assert dbias.shape == (bias.shape if want_dbias and bias is not None else (0,))
        assert dsinks.shape == ((0,) if sinks is None else sinks.shape)
        assert dbias.dtype == dsinks.dtype == torch.float32
        # Those of a dense bias have contiguous queries: backward goes through them for each block of keys.
        assert dbias.is_contiguous()
        if empty:
            assert not dbias.any()
            assert not dsinks.any()


def test_options_of_any_strides_are_taken() -> None:
    sample = small(*ALL, *GIVEN)
    wanted = forward_op(*sample.arguments)[0]

    def strided(x: object) -> object:
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            return x
        return torch.stack([x, x], -1)[..., 0]

    strided_options = [strided(x) for x in sample.options]
    assert not strided_options[1].is_contiguous()
    assert torch.equal(forward_op(*sample.arguments[:5], *strided_options)[0], wanted)
    dense = small("dense")
    wanted = forward_op(*dense.arguments)[0]
    turned = dense.options[1].transpose(2, 3).contiguous().transpose(2, 3)
    got = forward_op(*dense.arguments[:5], 0.0, turned, *dense.options[2:])[0]
    assert torch.equal(got, wanted)


def test_results_are_stored_as_bshd_whatever_comes_in() -> None:
    for stored, v_dim in itertools.product(("bshd", "bhsd", "mixed"), (16, 24)):
        sample = small(stored=stored, v_dim=v_dim)
        out, lse = forward_op(*sample.arguments)
        gradients = backward_op(
            torch.ones_like(out), None, *sample.arguments[:4], out, lse, sample.case.factor
        )
        for x in (out, *gradients[:3]):
            assert x.transpose(1, 2).is_contiguous()
        assert lse.is_contiguous()
        assert lse.dtype == torch.float64


def test_an_expanded_gradient_is_taken() -> None:
    sample = small().requires_grad()
    inputs = (sample.q, sample.k, sample.v)
    expanded = torch.autograd.grad(forward_op(*sample.arguments)[0].sum(), inputs)
    out = forward_op(*sample.arguments)[0]
    plain = torch.autograd.grad(out, inputs, torch.ones(out.shape))
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


def test_only_lse_used_or_only_some_inputs_differentiable() -> None:
    sample = small(empty=False).requires_grad()
    dq, dv = torch.autograd.grad(forward_op(*sample.arguments)[1].sum(), (sample.q, sample.v))
    assert dq.abs().sum() > 0
    assert dv.abs().sum() == 0
    frozen = small()
    q = frozen.q.clone().requires_grad_()
    with counted_kernel_calls() as calls:
        forward_op(q, *frozen.arguments[1:])[0].sum().backward()
    assert q.grad is not None
    assert calls == ["forward", "backward"]


def test_second_derivatives_raise_by_name() -> None:
    sample = small().requires_grad()
    out, _ = forward_op(*sample.arguments)
    (dq,) = torch.autograd.grad(out.square().sum(), sample.q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivatives.*backend\("math"'):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own
@pytest.mark.parametrize("differentiable", [True, False])
def test_forward_mode_raises_by_name(differentiable: bool) -> None:
    sample = small()
    k = sample.k.requires_grad_(differentiable)

    def call(q: torch.Tensor) -> torch.Tensor:
        return forward_op(q, k, *sample.arguments[2:])[0]

    with pytest.raises(NotImplementedError, match=r'forward-mode.*backend\("math"'):
        torch.func.jvp(call, (sample.q,), (torch.ones_like(sample.q),))


def test_threads_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Core:
        def attend(self, *args: Any) -> Any:
            asked.append(args[6])
            return core.attend(*args)

    core = cpu.core
    monkeypatch.setattr(cpu, "core", Core())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    x = torch.randn(1, 1, 2, 8)
    attention(x, x, x)
    assert asked == [7]


def _count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, *, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, mask=mask)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


def test_visible_pairs_are_counted() -> None:
    q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 24)
    q.requires_grad_()
    pairs = 2 * 4 * (6 * 7 // 2 + 4 * 5 // 2)
    mask = causal() & documents(torch.tensor([0, 6, 10]))
    forward = 2 * pairs * (16 + 24)
    assert _count(q, k, v, mask, backward=False) == forward
    assert _count(q, k, v, mask, backward=True) == forward + forward * 5 // 2


def test_fake_tensors_give_the_dense_bound() -> None:
    with FakeTensorMode():
        q = torch.randn(2, 4, 10, 16)
        assert _count(q, q, q, causal(), backward=False) == 2 * 2 * 4 * 10 * 10 * 32


@pytest.mark.parametrize("old", [False, True], ids=["by name", "operators of 0.2"])
def test_other_checkpointing_policies_save_attention(old: bool) -> None:
    names = torch.ops.attnspan.forward.default, torch.ops.attnspan.backward.default
    assert names == (forward_op, backward_op)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        found = op == torch.ops.attnspan.forward.default if old else "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE

    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    with counted_kernel_calls() as calls:
        out = checkpoint(
            lambda q: attention(q, q, q, mask=causal()), q, use_reentrant=False, context_fn=contexts
        )
        out.sum().backward()
    assert sorted(calls) == ["backward", "forward"]


def test_an_expanded_dense_bias_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.randn(1, 1, 1, 5).expand(2, 3, 4, 5)
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x, *_: copies.append(x) or x)
    found = read_options(Options(bias=bias, bias_kind=DENSE))
    assert found is not None
    assert found.bias is bias
    assert not copies
