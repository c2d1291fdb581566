"""The drop-in against torch's own function."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import relative_error
from covering import everything
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import checkpoint
from watching import Watching, tensors_of

from attnspan import causal, from_dense, window
from attnspan.errors import ShapeError
from attnspan.torch import attention
from attnspan.torch import scaled_dot_product_attention as ours

Q3, K3 = (3, 9, 16), (3, 7, 16)
Q4, K4 = (2, 4, 9, 16), (2, 4, 7, 16)
Q5, K5 = (2, 3, 4, 9, 16), (2, 3, 4, 7, 16)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict]] = {
    "plain": (Q4, Q4, {}),
    "causal": (Q4, Q4, {"is_causal": True}),
    "causal, more keys": ((2, 4, 5, 16), Q4, {"is_causal": True}),
    "causal, more queries": (Q4, (2, 4, 5, 16), {"is_causal": True}),
    "scale": (Q4, Q4, {"scale": 0.7}),
    "gqa": (Q4, (2, 2, 7, 16), {"enable_gqa": True}),
    "three dims": (Q3, K3, {}),
    "three dims, causal": (Q3, K3, {"is_causal": True}),
    "five dims": (Q5, K5, {"is_causal": True}),
    "one batch of keys": (Q4, (1, 4, 7, 16), {}),
    "one batch of keys, causal": (Q3, (1, 9, 16), {"is_causal": True}),
    "five dims, one batch of keys": (Q5, (2, 1, 4, 7, 16), {}),
    "one batch of queries": ((1, 4, 9, 16), K4, {}),
    "one batch of keys, mask": (Q4, (1, 4, 7, 16), {"attn_mask": (2, 1, 9, 7)}),
}
#: Of queries and keys, by the shape of a boolean mask or of a bias.
MASKS = {(2, 1, 9, 7): (Q4, K4), (9, 7): (Q4, K4), (4, 9, 7): (Q4, K4), (2, 1, 1, 7): (Q4, K4)}
MASKS |= {(3, 9, 7): (Q3, K3), (2, 3, 1, 9, 7): (Q5, K5), (3, 1, 9, 7): (Q5, K5)}
CASES |= {f"mask {shape}": (*given, {"attn_mask": shape}) for shape, given in MASKS.items()}
BIASES = {(2, 4, 9, 7): (Q4, K4), (9, 7): (Q4, K4), (4, 1, 7): (Q4, K4), (2, 1, 9, 1): (Q4, K4)}
BIASES |= {(3, 9, 7): (Q3, K3), (2, 1, 4, 9, 7): (Q5, K5), (1, 1, 4, 1, 7): (Q5, K5)}
CASES |= {f"bias {shape}": (*given, {"attn_mask": shape}) for shape, given in BIASES.items()}
CASES |= {"bias (9, 7), three dims": (Q3, K3, {"attn_mask": (9, 7)})}
CASES |= {"bias (9, 7), five dims": (Q5, K5, {"attn_mask": (9, 7)})}
CASES |= {f"{name}, hiding": x for name, x in CASES.items() if "bias" in name and ", 1)" not in name}


def _run(function: Callable[..., Tensor], inputs: list[Tensor], options: dict) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs, **options)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    q_shape, k_shape, options = CASES[name]
    torch.manual_seed(0)
    inputs, options = [torch.randn(shape) for shape in (q_shape, k_shape, k_shape)], dict(options)
    shape = options.pop("attn_mask", None)
    if "bias" in name:
        inputs.append(torch.randn(shape))
        if "hiding" in name:
            inputs[3][..., 2:4] = -torch.inf
    elif shape is not None:
        # One key of each row stays, as torch's own versions differ on rows without any.
        options["attn_mask"] = torch.rand(shape) < 0.5
        options["attn_mask"][..., 0] = True
    found = zip(_run(ours, inputs, options), _run(torchs, inputs, options), strict=True)
    for i, (got, wanted) in enumerate(found):
        if i == 4 and shape[-1] == 1:  # What is added to all scores of a row cancels.
            assert got.abs().max() < 1e-4
        else:
            # Each is within a few roundings of the exact result, per product of at most 16 terms.
            assert relative_error(got, wanted) <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 4, 24, 24), (1, 24, 4, 24, 24), (2, 24, 1, 1, 24)])
def test_what_batch_dims_share_is_not_expanded(shape: tuple[int, ...], boolean: bool) -> None:
    q, mask = torch.randn(2, 24, 4, 24, 8), torch.randn(shape)
    mask = mask < torch.tensor(9.0) if boolean else mask
    with Watching(lambda _, __, result: tensors_of(result)) as made:
        out = ours(q, q, q, attn_mask=mask)
    largest = max(x.untyped_storage().nbytes() for each in made.seen for x in each)
    assert largest <= 4 * max(q.numel(), mask.numel()), "bytes in memory of its own"
    assert relative_error(out, torchs(q, q, q, attn_mask=mask)) <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_repeated_by_torchs_seed(compiled: bool) -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 64, 16)
    v = torch.randn(2, 4, 64, 16, requires_grad=True)
    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours

    def run() -> Tensor:
        return function(q, k, v, dropout_p=0.5)

    torch.manual_seed(7)
    first, second = run(), run()
    torch.manual_seed(7)
    assert torch.equal(run(), first)
    assert not torch.equal(second, first)
    # The output is linear in v, so backward dropped the same weights exactly if this holds.
    (dv,) = torch.autograd.grad((first * second.detach()).sum(), v)
    torch.testing.assert_close((dv * v).sum(), (first * second).sum(), rtol=1e-4, atol=1e-3)
    torch.manual_seed(7)
    again = checkpoint(run, use_reentrant=False)
    assert torch.equal(torch.autograd.grad((again * second.detach()).sum(), v)[0], dv)
    # Without dropout nothing is drawn.
    torch.manual_seed(7)
    state = torch.get_rng_state()
    ours(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_dense_masks_in_a_compiled_function() -> None:
    def run(function: Callable[..., Tensor], masks: list[Tensor]) -> list[Tensor]:
        return [function(q, k, k, attn_mask=mask) for mask in masks]

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    q, k = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 9, 16)
    for seed in range(2):
        torch.manual_seed(seed)
        masks = [torch.rand(*shape, 9) < 0.7 for shape in ((8,), (2, 1, 8), (1,))]
        for visible in masks:
            visible[..., 0] = True  # Where a row sees nothing, torch's result is another.
        torch.testing.assert_close(compiled(ours, masks), run(torchs, masks))
    assert counter.frame_count == 1
    many = (torch.arange(9) % 2 == 0).expand(8, 9)
    with pytest.raises(ValueError, match=r"max_runs=4 .*got a query with 5\. Pass max_runs=5"):
        compiled(ours, [from_dense(many, max_runs=4)])
    mask = from_dense(many, max_runs=5)
    torch.testing.assert_close(compiled(ours, [mask]), run(torchs, [many]))
    mask = causal() & window(3)
    assert torch.equal(ours(q, k, k, attn_mask=mask), attention(q, k, k, mask=mask))


#: Options of a call by its heads, queries and keys.
EMPTY: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"is_causal": True},
    "mask": lambda _, q_len, k_len: {"attn_mask": torch.ones(q_len, k_len, dtype=torch.bool)},
    "whole mask": lambda size, *pairs: {"attn_mask": torch.ones(*size, *pairs, dtype=torch.bool)},
    "additive": lambda size, *pairs: {"attn_mask": torch.zeros(*size, *pairs)},
    "gqa": lambda *_: {"enable_gqa": True},
}


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch's own function, which ours is held to, divides by zero and ends the process in 2.11",
)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["3 dims", "4 dims", "5 dims"])
def test_sizes_of_zero(lead: tuple[int, ...], kind: str) -> None:
    """The shape and values of torch, or an error of ours."""
    if kind == "gqa" and not lead:
        return
    results = 0
    for batch, heads, *sizes in itertools.product((0, 2), (0, 2), (0, 3), (0, 3), (0, 4), (0, 4)):
        q_len, k_len, dim, v_dim = sizes
        size = (batch, *lead[1:], heads) if lead else (heads,)
        kv_size = (*size[:-1], heads // 2) if kind == "gqa" else size
        shapes = (*size, q_len, dim), (*kv_size, k_len, dim), (*kv_size, k_len, v_dim)
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        options = EMPTY[kind](size, q_len, k_len)
        want = torchs(*inputs, **options)
        try:
            got = ours(*inputs, **options)
        except ShapeError:
            assert lead
            assert heads == 0
            continue
        results += 1
        found, wanted = ([x, *torch.autograd.grad(x.sum(), inputs)] for x in (got, want))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y.nan_to_num(), atol=1e-5, rtol=1e-5)
    assert results == (32 if lead else 64)


def _jagged(*lengths: int, like: Tensor | None = None, heads: int = 2) -> Tensor:
    values, starts = torch.randn(sum(lengths), heads, 16), torch.tensor([0, *itertools.accumulate(lengths)])
    starts = starts if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(values, starts)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> list[Tensor]:
    return [
        torchs(*(x[None] for x in one), **options)[0]
        for one in zip(*(x.unbind() for x in (q, k, v)), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own
@pytest.mark.parametrize(("cross", "compiled"), [(False, False), (True, False), (False, True)])
def test_jagged_tensors_are_sequences_of_their_own(cross: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    q = _jagged(3, 5, 1)
    k = _jagged(4, 2, 6) if cross else _jagged(3, 5, 1, like=q)
    v = _jagged(*((4, 2, 6) if cross else (3, 5, 1)), like=k)
    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found: list[list[Tensor]] = []
    for attend in (function, _one_by_one):
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attend(*(x.transpose(1, 2) for x in inputs), is_causal=True)
        parts = (
            out if isinstance(out, list) else list((out + 0 * inputs[0].detach().transpose(1, 2)).unbind())
        )
        grads = torch.autograd.grad(sum(x.square().sum() for x in parts), inputs)
        found.append([torch.cat(parts, 1), *(x.values() for x in grads)])
    for got, wanted in zip(*found, strict=True):
        assert relative_error(got, wanted) <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.fx.experimental._config.patch(use_duck_shape=False)
def test_compiled_jagged_tensors_of_sizes_that_are_equal_by_chance() -> None:
    # The compiler takes equal sizes for one size. Inside of nested tensors it may forget to compare them.
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    # As many offsets as key heads, as many tokens as the head dim; then as many tokens as offsets.
    for heads, batches in ((12, ((9, 7), (9, 4))), (6, ((2,), (7,))))[: None if everything() else 1]:
        torch._dynamo.reset()
        for lengths in batches:
            q = _jagged(*lengths, heads=heads)
            k, v = (_jagged(*lengths, heads=3, like=q) for _ in range(2))
            inputs = [x.transpose(1, 2) for x in (q, k, v)]
            found, wanted = (f(*inputs, is_causal=True, enable_gqa=True).values() for f in (compiled, ours))
            torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_jagged_tensors_must_be() -> None:
    jagged, other = _jagged(3, 5), _jagged(4, 4)
    q, k = jagged.transpose(1, 2), other.transpose(1, 2)
    for call, text in [
        ((q, k, q), "value: expected the offsets of key, got others"),
        ((jagged, jagged, jagged), r"query: expected a jagged .* Call .transpose\(1, 2\)"),
        ((q, q, torch.ones(2, 2, 5, 16)), "value: expected a jagged tensor"),
        (
            (q, q, q, torch.ones(3, 3)),
            r"attn_mask: expected None with nested tensors, got Tensor. Mask the values",
        ),
        ((q, *[_jagged(4, 2, 2).transpose(1, 2)] * 2), "key: expected as many sequences as query, got 3"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            ours(*call)
