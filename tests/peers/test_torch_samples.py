"""torch's own samples of attention, read from the installed package, by our function and by torch's.

torch's suites run operators and modules on these samples: `scaled_dot_product_attention`,
`multi_head_attention_forward` and the modules above it, here with ours in place of that function.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from covering import few
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


def _samples(dtype: torch.dtype, grad: bool = True) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    for sample in SDPA.sample_inputs("cpu", dtype, requires_grad=grad):
        if not sample.kwargs["dropout_p"]:
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


def _wide(x: Any, dtype: torch.dtype = torch.float64) -> Any:
    return x.to(dtype) if _is_tensor(x) and x.is_floating_point() else x


def _exact(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return _run(theirs, [_wide(x) for x in inputs], {name: _wide(x) for name, x in options.items()})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(dtype: torch.dtype) -> None:
    cases = [
        (*(_run(fn, inputs, options) for fn in (ours, theirs)), _exact(inputs, options))
        for inputs, options in _samples(dtype)
    ]
    _assert_as_exact(cases, dtype)


@pytest.mark.slow
def test_gradients_are_those_of_differences() -> None:
    for inputs, options in _samples(torch.float64):
        assert torch.autograd.gradcheck(
            lambda *x, options=options: ours(*x, **options), inputs, fast_mode=True
        )


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, -1, -1)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """As torch's suite does: one more axis, anywhere, of some inputs."""
    for inputs, options in _samples(torch.float32, grad=False):
        pairs = zip(inputs, in_dims, strict=True)
        mapped = [x if d is None else torch.stack([x, 2 * x, x - 1], d) for x, d in pairs]
        if len({x.dim() for x in inputs}) > 1 and None in in_dims:
            continue  # batch axes that are broadcast come after the one that is mapped
        found = torch.vmap(partial(ours, **options), in_dims)(*mapped)
        for i, got in enumerate(found):
            pairs = zip(mapped, in_dims, strict=True)
            one = [x if d is None else x.select(d, i) for x, d in pairs]
            torch.testing.assert_close(got, theirs(*one, **options), **SHARP)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_multi_head_attention_forward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, calls = [], Counter[bool]()

    def step(fn: Any, wanted: torch.dtype, given: dict[str, Any]) -> list[Tensor | None]:
        def counted(*args: Any, **keywords: Any) -> Tensor:
            calls[fn is ours] += 1
            return fn(*args, **keywords)

        monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
        given = {name: _wide(x, wanted) for name, x in given.items()}
        floats = {n: x for n, x in given.items() if _is_tensor(x) and x.is_floating_point()}
        leaves = {name: x.detach().requires_grad_() for name, x in floats.items()}
        out = F.multi_head_attention_forward(**{**given, **leaves})[0]
        torch.manual_seed(1)
        weights = torch.randn(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, [*leaves.values()], weights, allow_unused=True)]

    for sample in HEADS.sample_inputs("cpu", dtype):
        taken = inspect.signature(F.multi_head_attention_forward)
        whole = taken.bind(sample.input, *sample.args, **sample.kwargs).arguments
        given = {**whole, "dropout_p": 0.0, "need_weights": False}
        cases.append([step(*x, given) for x in ((ours, dtype), (theirs, dtype), (theirs, torch.float64))])
    # Of 192 samples the same four, with scores of 5,000, decide: 3.2 on matrix tiles, below 2 without.
    _assert_as_exact(cases, dtype, factor=4 if cpu.isa().startswith("amx") else 2)
    assert 2 * calls[True] == calls[False] > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("info", MODULES, ids=[m.name for m in MODULES])
@pytest.mark.parametrize("training", [False, True])
def test_modules(info: Any, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a module's constructor takes, with what torch's suite calls it on."""
    calls = Counter[str]()

    def counted(*args: Any, **options: Any) -> Tensor:
        calls["ours"] += 1
        return ours(*args, **options)

    for sample in few(info.module_inputs_func(info, "cpu", torch.float64, True, training), 8):
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs).double().train(training)
        for part in module.modules():
            for name in {"p", "dropout"} & vars(part).keys():
                setattr(part, name, 0.0)
        leaves = [*module.parameters(), *(x for x in given.args if _is_tensor(x) and x.requires_grad)]
        keywords = {"need_weights": False} if info.module_cls is torch.nn.MultiheadAttention else {}
        found = []
        for fn in (theirs, counted):
            monkeypatch.setattr(F, "scaled_dot_product_attention", fn)
            out = pytree.tree_leaves(module(*given.args, **{**given.kwargs, **keywords}))[0]
            torch.manual_seed(1)
            found.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out), allow_unused=True)])
        torch.testing.assert_close(found[1], found[0])
    assert calls["ours"] > 0
