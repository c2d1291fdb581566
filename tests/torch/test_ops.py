"""The registered operators: their contract with everything that traces torch."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from covering import everything
from samples.parts import ALL
from samples.torch_calls import OPTIONS, counted_kernel_calls, small
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attnspan import causal, documents
from attnspan.call.options import DENSE, Options
from attnspan.torch import attention
from attnspan.torch.ops import backward_op, forward_op, read_options

GIVEN = ("queries given", "keys given")


#: Of the ordinary run, each value of a factor once or more; then those of the long run.
SHAPES: dict[str, dict[str, Any]] = {
    "mqa": {"dtype": torch.bfloat16, "heads": 6, "kv_heads": 1, "runs": 4, "mask_batch": 2, "mask_heads": 6},
    "no queries": {"q_len": 0},
    "fp32": {},
    "decode": {"q_len": 1, "k_len": 33, "empty": False, "mask_batch": 2},
    "mha": {"dtype": torch.float16, "heads": 2, "v_dim": 24, "runs": 2, "stored": "bhsd", "mask_heads": 2},
    "no batch": {"batch": 0},
    "no keys": {"k_len": 0},
}
SAMPLES = [*((name, "") for name in SHAPES), *(("fp32", name) for name in OPTIONS)]
SHORT = [("mqa", ""), ("no queries", ""), ("fp32", "all"), ("fp32", "dense, all heads, float16")]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "option"), SAMPLES if everything() else SHORT)
def test_opcheck(shape: str, option: str) -> None:
    positional = "dropout" in option or "alibi" in option or option in ("distance table", "T5", "all")
    names = ALL if option == "all" else (option,) if option else ()
    sample = small(*names, *(GIVEN if positional else ()), **SHAPES[shape])
    more = {} if option else {"k_len": torch.tensor(sample.case.k_len)}
    torch.library.opcheck(forward_op, sample.requires_grad().arguments, more)
    out, lse = forward_op(*sample.arguments)
    dlse = torch.randn_like(lse).float() if shape == "no queries" or everything() else None
    arguments = (torch.randn_like(out), dlse, *sample.arguments[:4], out, lse, *sample.arguments[4:])
    wanted = (sample.options[1] is not None,) if option else ()
    torch.library.opcheck(backward_op, (*arguments, *wanted))


def test_results_are_stored_as_bshd_whatever_comes_in() -> None:
    for stored, v_dim in itertools.product(("bshd", "bhsd", "mixed"), (16, 24)):
        sample = small(stored=stored, v_dim=v_dim).requires_grad()
        out, lse = forward_op(*sample.arguments)
        inputs = tuple(sample.inputs.values())
        gradients, plain = (
            torch.autograd.grad(out, inputs, x, retain_graph=True)
            for x in (torch.ones(()).expand(out.shape), torch.ones(out.shape))
        )
        for x in (out, *gradients):
            assert x.transpose(1, 2).is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
        assert lse.is_contiguous()
        assert lse.dtype == torch.float64


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own
def test_other_derivatives_raise_by_name() -> None:
    sample = small().requires_grad()
    out, _ = forward_op(*sample.arguments)
    (dq,) = torch.autograd.grad(out.square().sum(), sample.q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivatives.*backend\("math"'):
        dq.sum().backward()
    for x in (sample, small()):
        call = lambda q, x=x: forward_op(q, *x.arguments[1:])[0]  # noqa: E731
        with pytest.raises(NotImplementedError, match=r'forward-mode.*backend\("math"'):
            torch.func.jvp(call, (x.q.detach(),), (torch.ones_like(x.q),))


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
    with FakeTensorMode():  # The dense bound.
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
