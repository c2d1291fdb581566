"""torch's own samples of attention, read from the installed package, by our function and by torch's.

torch's suites run operators and modules on these samples: `scaled_dot_product_attention`,
`multi_head_attention_forward` and the modules above it, here with ours in place of that function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
modules = pytest.importorskip("torch.testing._internal.common_modules")

from attnspan.kernels import cpu  # noqa: E402
from attnspan.torch import scaled_dot_product_attention as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::attnspan.kernels.SlowPathWarning")  # of float64

theirs = F.scaled_dot_product_attention
OPS = {op.name: op for op in common.op_db if op.name.startswith("nn.functional.") and "attention" in op.name}
SDPA, HEADS = (
    OPS["nn.functional.scaled_dot_product_attention"],
    OPS["nn.functional.multi_head_attention_forward"],
)
MODULES = [m for m in modules.module_db if "Attention" in m.name or "Transformer" in m.name]
SHARP = {"atol": 2e-4, "rtol": 1e-4}  # of single elements in float32, with scores of up to 200
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _samples(
    dtype: torch.dtype, *, dropout: bool, grad: bool = True
) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    for sample in SDPA.sample_inputs("cpu", dtype, requires_grad=grad):
        if bool(sample.kwargs["dropout_p"]) == dropout:
            yield [sample.input, *sample.args], sample.kwargs


def _run(fn: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*given, **options)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, given, torch.randn(out.shape).to(out.dtype))]


def _assert_as_exact(cases: Iterable[tuple[Any, Any, Any]], dtype: torch.dtype, factor: float = 1.5) -> None:
    """Over all cases of (ours, torch's, exact), our error is at most `factor` times that of torch's function.

    Samples hold numbers up to 9, so that scores reach 200, and a row may have all its weight on one key: what
    one sample errs by is luck.
    """
    squares = []
    for case in cases:
        leaves = [list(filter(_is_tensor, pytree.tree_leaves(x))) for x in case]  # others' gradients are None
        size = sum(float(x.norm()) ** 2 for x in leaves[2])
        for got, other, exact in zip(*leaves, strict=True):
            assert (got.dtype, got.shape) == (other.dtype, other.shape)
            squares.append([float((x.detach() - exact).norm()) ** 2 / size for x in (got, other)])
    error, of_peer = (math.sqrt(sum(x) / len(squares)) for x in zip(*squares, strict=True))
    assert error <= max(factor * of_peer, 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _exact(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        given = {
            k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in options.items()
        }
        return _run(theirs, [x.double() for x in inputs], given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(dtype: torch.dtype) -> None:
    cases = [
        (*(_run(fn, inputs, options) for fn in (ours, theirs)), _exact(inputs, options))
        for inputs, options in _samples(dtype, dropout=False)
    ]
    _assert_as_exact(cases, dtype)


def test_gradients_are_those_of_differences() -> None:
    for inputs, options in _samples(torch.float64, dropout=False):
        assert torch.autograd.gradcheck(
            lambda *x, options=options: ours(*x, **options), inputs, fast_mode=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype: torch.dtype) -> None:
    for inputs, options in _samples(dtype, dropout=True):
        drawn = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            drawn.append(ours(*inputs, **options))
        assert drawn[0].shape == theirs(*inputs, **options).shape
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([torch.full_like(x[:1], torch.nan), x])[1:],
    "shared rows": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("place", STRIDES.values(), ids=STRIDES)
def test_arrays_that_are_not_contiguous(place: Callable[[Tensor], Tensor]) -> None:
    for inputs, options in _samples(torch.float32, dropout=False, grad=False):
        placed = [place(x) for x in inputs]
        torch.testing.assert_close(ours(*placed, **options), theirs(*placed, **options), **SHARP)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, -1, -1)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """As torch's suite does: one more axis, anywhere, of some inputs."""
    for inputs, options in _samples(torch.float32, dropout=False, grad=False):
        mapped = [
            x if d is None else torch.stack([x, 2 * x, x - 1], d)
            for x, d in zip(inputs, in_dims, strict=True)
        ]
        if len({x.dim() for x in inputs}) > 1 and None in in_dims:
            continue  # batch axes that are broadcast come after the one that is mapped
        found = torch.vmap(lambda *x, options=options: ours(*x, **options), in_dims)(*mapped)
        exact = [
            theirs(
                *(x if d is None else x.select(d, i) for x, d in zip(mapped, in_dims, strict=True)), **options
            )
            for i in range(3)
        ]
        torch.testing.assert_close(found, torch.stack(exact), **SHARP)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_compiled(backend: str) -> None:
    cases = []
    for inputs, options in list(_samples(torch.float32, dropout=False))[::2]:  # each kind comes twice
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *x, options=options: ours(*x, **options), backend=backend, fullgraph=True
        )
        found = _run(compiled, inputs, {})
        cases.append((found, _run(theirs, inputs, options), _exact(inputs, options)))
    _assert_as_exact(cases, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_multi_head_attention_forward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    cases = []
    for sample in HEADS.sample_inputs("cpu", dtype):
        whole = inspect.signature(F.multi_head_attention_forward).bind(
            sample.input, *sample.args, **sample.kwargs
        )
        found = []
        for fn, wanted in ((ours, dtype), (theirs, dtype), (theirs, torch.float64)):

            def counted(*args: Any, fn: Any = fn, **keywords: Any) -> Tensor:
                calls.append(fn)
                return fn(*args, **keywords)

            monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
            options = {**whole.arguments, "dropout_p": 0.0, "need_weights": False}
            for name, x in options.items():
                if isinstance(x, Tensor) and x.is_floating_point():
                    options[name] = x.detach().to(wanted).requires_grad_()
            out = F.multi_head_attention_forward(**options)[0]
            torch.manual_seed(1)
            given = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
            weights = torch.randn(out.shape).to(out.dtype)
            found.append([out.detach(), *torch.autograd.grad(out, given, weights, allow_unused=True)])
        cases.append(tuple(found))
    # Of 192 samples the same four, with scores of 5,000, decide: 3.2 on matrix tiles, below 2 without.
    _assert_as_exact(cases, dtype, factor=4 if cpu.isa().startswith("amx") else 2)
    assert 2 * calls.count(ours) == calls.count(theirs) > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("info", MODULES, ids=[m.name for m in MODULES])
@pytest.mark.parametrize("training", [False, True])
def test_modules(info: Any, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a module's constructor takes, with what torch's suite calls it on."""
    calls = 0

    def counted(*args: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return ours(*args, **options)

    for sample in info.module_inputs_func(info, "cpu", torch.float64, True, training):
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs).double().train(training)
        for part in module.modules():
            for name in {"p", "dropout"} & vars(part).keys():
                setattr(part, name, 0.0)
        found = []
        for fn in (theirs, counted):
            monkeypatch.setattr(F, "scaled_dot_product_attention", fn)
            inputs, keywords = given.args, dict(given.kwargs)
            if info.module_cls is torch.nn.MultiheadAttention:
                keywords["need_weights"] = False
            out = pytree.tree_leaves(module(*inputs, **keywords))[0]
            torch.manual_seed(1)
            leaves = [*module.parameters(), *(x for x in inputs if isinstance(x, Tensor) and x.requires_grad)]
            gradients = torch.autograd.grad(out, leaves, torch.randn_like(out), allow_unused=True)
            found.append([out, *gradients])
        torch.testing.assert_close(found[1], found[0])
    assert calls > 0
