"""`wrap`: the contract with a foreign kernel, its derivative, and one clear error for each broken word."""

import functools
import gc
import weakref

import pytest
import torch
from closeness import relative_error
from foreign_kernel import QKV, Library, eager, fresh_name, inputs, wrap_foreign
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode

from attnspan import causal
from attnspan.torch import DeclarationError, Wrapped, attention, wrap


@pytest.mark.parametrize(("q_len", "k_len"), [(6, 6), (3, 7), (1, 9)])
def test_results_and_gradients_against_float64(foreign: Library, q_len: int, k_len: int) -> None:
    given = inputs(q_len, k_len, grad=True)
    exact = [x.detach().double().requires_grad_() for x in given]
    mask, options = causal(), {"layout": "bshd", "return_lse": True, "backend": "math"}
    got, wanted = wrap_foreign(foreign)(*given, causal=True), attention(*exact, mask=mask, **options)
    gradients = [torch.randn(x.shape) for x in got]
    got = (*got, *torch.autograd.grad(got, given, gradients))
    wanted = (*wanted, *torch.autograd.grad(wanted, exact, [x.double() for x in gradients]))
    for a, b in zip(got, wanted, strict=True):
        # Sums in float64, one rounding of the result; that of lse is of a number that may be far above it.
        assert relative_error(a, b) <= 2 * torch.finfo(torch.float32).eps


def test_one_output_is_a_tensor_and_lse_may_be_unused(foreign: Library) -> None:
    q, k, v = inputs(grad=True)
    alone = wrap(foreign.out, name=fresh_name(), layout="bshd", strides="contiguous")
    wrapped = wrap_foreign(foreign)
    both = wrapped(q, k, v)
    assert torch.equal(alone(q.detach(), k, v), both[0])
    dense = torch.autograd.grad(both[0], (q, k, v), torch.ones(q.shape))
    (exact,) = torch.autograd.grad(sdpa(*(x.transpose(1, 2) for x in (q, k, v))).sum(), k)
    assert relative_error(dense[1], exact) <= 8 * torch.finfo(torch.float32).eps
    # Gradients arrive as the contract says, however autograd stores them.
    expanded = torch.autograd.grad(wrapped(q, k, v)[0].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_recompute_gives_the_kernels_own_gradients() -> None:
    q, k, v = inputs(grad=True)
    wrapped = wrap(eager, name=fresh_name(), backward="recompute")
    dout = torch.randn(q.shape)
    for wanted in ((q, k, v), (k,), (q, v)):
        got = torch.autograd.grad(wrapped(q, k, v, causal=True, scale=0.3), wanted, dout)
        plain = torch.autograd.grad(eager(q, k, v, causal=True, scale=0.3), wanted, dout)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    q, k, v = inputs()
    by_func = [torch.func.grad(lambda q, f=f: f(q, k, v).square().sum())(q) for f in (wrapped, eager)]
    assert torch.equal(*by_func)


def test_optional_tensors_with_and_without_gradients() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return sdpa(q, k, v, attn_mask=bias)

    q, k, v = inputs(grad=True)
    bias = torch.randn(6 // 2, 3, requires_grad=True)
    named = ("q", "k", "v", "bias")
    wrapped = wrap(biased, name=fresh_name(), backward="recompute", differentiable=named)
    assert torch.equal(wrapped(q, k, v), biased(q, k, v))
    got = torch.autograd.grad(wrapped(q, k, v, bias).square().sum(), (q, bias))
    wanted = torch.autograd.grad(biased(q, k, v, bias).square().sum(), (q, bias))
    for a, b in zip(got, wanted, strict=True):
        # Torch chooses its kernel by which inputs have gradients, and k and v have none in the run again.
        assert relative_error(a, b) <= 8 * torch.finfo(torch.float32).eps
    constant = wrap(biased, name=fresh_name(), backward="recompute")
    with pytest.raises(DeclarationError, match="input 'bias': expected an input without gradient"):
        constant(q, k, v, bias)
    assert torch.equal(constant(q, k, v, bias.detach()), wrapped(q, k, v, bias))


def test_parameters_are_the_kernels() -> None:
    seen: list[tuple] = []

    def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
              alibi_slopes=None, deterministic=False, workspace=None):  # type: ignore[no-untyped-def]  # fmt: skip
        seen.append((dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic))
        return torch.empty_like(q)

    wrapped = wrap(flash, name=fresh_name(), layout="bshd")
    q, k, v = inputs()
    wrapped(q, k, v)
    wrapped(q, k=k, v=v, window_size=(3, 0), softmax_scale=0.5, causal=True, alibi_slopes=torch.ones(3))
    assert seen[0] == (0.0, None, False, (-1, -1), 0.0, None, False)
    assert seen[1][:5] == (0.0, 0.5, True, (3, 0), 0.0)
    assert torch.equal(seen[1][5], torch.ones(3))
    unknown = "unknown or repeated"
    for args, options, text in (
        ((q, k, v), {"workspace": q}, f"{unknown} workspace.*Annotate parameters without a type, or"),
        ((q, k, v), {"casual": True}, f"expected arguments among q, .*, got 3 by .*, {unknown} casual"),
        ((q, k, v), {"q": q}, f"got 3 by position, {unknown} q"),
        ((q, k), {}, "got 2 by position, no v"),
        ((q, k, v, *[None] * 8), {}, "got 11 by position"),
    ):
        with pytest.raises(TypeError, match=text):
            wrapped(*args, **options)


def test_no_position_means_another_parameter_than_in_the_kernel() -> None:
    def kernel(q, k, v, cache=None, softmax_scale=None, softcap: float | None = None):  # type: ignore[no-untyped-def]
        return eager(q, k, v, scale=softmax_scale)

    def keyword(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None) -> Tensor:
        return eager(q, k, v, scale=softmax_scale)

    q, k, v = inputs()
    for function, args in ((kernel, (None, 0.5)), (kernel, (0.5,)), (keyword, (0.5,))):
        wrapped = wrap(function, name=fresh_name())
        with pytest.raises(TypeError, match=f"at most 3 by position, got {3 + len(args)} by position"):
            wrapped(q, k, v, *args)
        assert torch.equal(wrapped(q, k, v, softmax_scale=0.5), eager(q, k, v, scale=0.5))


def test_a_schema_names_the_kernels_parameters() -> None:
    def kernel(q, k, v, scale=None, causal=False):  # type: ignore[no-untyped-def]
        return eager(q, k, v, causal, scale=scale)

    q, k, v = inputs()
    for schema, options in (
        ("Tensor q, Tensor k, Tensor v, bool causal", {"causal": True}),
        ("Tensor v, Tensor q, Tensor k, bool causal=False", {}),
    ):
        out = {"out": lambda q: torch.empty_like(q)}
        wrapped = wrap(kernel, name=fresh_name(), schema=schema, outputs=out)
        assert torch.equal(wrapped(q=q, k=k, v=v, **options), kernel(q, k, v, **options))
        with pytest.raises(TypeError, match=f"at most {3 * len(options)} by position"):
            wrapped(q, k, v, True)


def test_functions_without_signature_take_a_schema() -> None:
    q, k, v = inputs()
    # A builtin; it takes its mask and what follows by keyword or position.
    schema = "Tensor query, Tensor key, Tensor value, Tensor? mask=None, float p=0.0, bool is_causal=False"
    builtin = torch._C._nn.scaled_dot_product_attention
    wrapped = wrap(builtin, name=fresh_name(), schema=schema)
    assert torch.equal(wrapped(q, k, v, is_causal=True), builtin(q, k, v, is_causal=True))
    with pytest.raises(ValueError, match="expected a function whose signature Python can read"):
        wrap(builtin, name=fresh_name())
    keywords = wrap(functools.partial(eager, scale=0.125), name=fresh_name())
    assert torch.equal(keywords(q, k, v, causal=True), eager(q, k, v, True, scale=0.125))


def test_inputs_are_copied_only_where_they_break_the_contract() -> None:
    plain, by_head = torch.randn(2, 4, 3, 8), torch.randn(2, 3, 4, 8).transpose(1, 2)
    slices, columns = torch.randn(2, 4, 3, 3, 8)[:, :, 1], torch.randn(2, 4, 8, 3).transpose(2, 3)
    kept = {
        "any": (plain, by_head, slices, columns),
        "unit": (plain, by_head, slices),
        "contiguous": (plain,),
        "bshd": (plain,),
        "bhsd": (by_head,),
    }
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return torch.zeros(q.shape)

    for strides, given in kept.items():
        wrapped = wrap(spy, name=fresh_name(), strides=strides, layout="bshd")
        for x in (plain, by_head, slices, columns):
            wrapped(x, x, x)
            assert torch.equal(seen[-1], x)
            same = any(x is y for y in given)
            assert (seen[-1].data_ptr() == x.data_ptr()) == same, (strides, x.stride())
            if not same:
                assert seen[-1].stride() == (by_head if strides == "bhsd" else plain).stride()


@pytest.mark.parametrize("strides", ["any", "unit", "contiguous", "bshd", "bhsd"])
def test_like_q_speaks_of_what_the_kernel_sees(strides: str) -> None:
    options = {"outputs": "out like q", "strides": strides, "schema": QKV}
    wrapped = wrap(lambda *x: torch.empty_like(x[0]), name=fresh_name(), **options)
    for x in (torch.randn(2, 4, 3, 8), torch.randn(2, 3, 4, 8).transpose(1, 2), torch.randn(2, 4, 8, 3).mT):
        real = wrapped(x, x, x)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert wrapped(*[mode.from_tensor(x)] * 3).stride() == real.stride()


@pytest.mark.slow
def test_autocast() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        seen.append((q.dtype, bias.dtype))
        assert (q.float()[0, 0] @ k.float()[0, 0].mT).dtype == torch.float32, "autocast reaches the kernel"
        return torch.zeros(q.shape, dtype=q.dtype)

    half = [x.half() for x in inputs()]
    rules = {
        False: (half[0].dtype, torch.float32),
        True: (torch.bfloat16,) * 2,
        torch.float32: (torch.float32,) * 2,
    }
    for rule, wanted in rules.items():
        wrapped = wrap(spy, name=fresh_name(), autocast=rule)
        for given, dtype in zip((half, inputs()), wanted, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                wrapped(*given, torch.ones(1))
            assert seen[-1] == (dtype, torch.float32)
        wrapped(*half, torch.ones(1))
        assert seen[-1][0] == torch.float16, "outside of autocast nothing is cast"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(wrapped, fullgraph=True, backend="aot_eager")(*half, torch.ones(1))
    assert seen[-1] == (torch.float32,) * 2


def test_flops(foreign: Library) -> None:
    def counted(wrapped: Wrapped, **options: object) -> int:
        with FlopCounterMode(display=False) as counter:
            found = wrapped(*inputs(grad=True), **options)
            (found if isinstance(found, Tensor) else found[0]).sum().backward()
        return counter.get_total_flops()

    pairs = 2 * 3 * 6 * 6 * 2 * (8 + 8)
    rerun = wrap(lambda q, k, v: q + k + v, name=fresh_name(), backward="recompute", layout="bshd")
    assert counted(rerun) == pairs * 4.5
    assert counted(wrap_foreign(foreign)) == pairs * 3.5
    assert counted(wrap_foreign(foreign), causal=True) == pairs * 21 // 36 * 3.5
    own = wrap_foreign(foreign, flops=lambda q, causal: 8 * q.shape[0] + 2 * causal)
    assert counted(own, causal=True) == 18 * 3.5


def test_it_runs_once_per_call_and_keeps_nothing_alive(foreign: Library) -> None:
    wrapped = wrap_foreign(foreign)
    q, k, v = inputs(grad=True)
    before = foreign.calls
    out, lse = wrapped(q, k, v)
    out.sum().backward()
    assert foreign.calls - before == 1
    left = [weakref.ref(x) for x in (q, out, lse)]
    del q, k, v, out, lse
    gc.collect()
    assert [x() for x in left] == [None] * 3
