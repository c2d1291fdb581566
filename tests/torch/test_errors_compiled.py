"""A wrong call says the same whether it is compiled or not, and whatever the compiler knows of sizes."""

# ruff: noqa: ARG005  (functions of a fixed signature)

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnspan as a
from attnspan import library as lib
from attnspan.torch import attention, scaled_dot_product_attention
from attnspan.torch._watched import constant_when_traced

BATCH, HEADS, Q_LEN, K_LEN, DIM = 2, 4, 6, 9, 8


def _q(*shape: int) -> Tensor:
    return torch.zeros(shape or (BATCH, HEADS, Q_LEN, DIM))


def _k(*shape: int) -> Tensor:
    return torch.zeros(shape or (BATCH, 2, K_LEN, DIM))


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _masked(make: Callable[..., a.Mask]) -> Callable[..., Any]:
    return lambda q, k, *arrays: attention(q, k, k, mask=make(*arrays))


def _option(name: str) -> Callable[..., Any]:
    return lambda q, k, x: attention(q, k, k, **{name: x})


def _given(q: Tensor, k: Tensor, mask: Any) -> Any:
    return attention(q, k, k, mask=mask)


def _prepared(q_len: int, k_len: int, batch: int = 1, heads: int = 1) -> a.Prepared:
    ids = _ids(batch, k_len)
    mask = a.segments(ids) if heads == 1 else lib.per_head([a.causal(), a.segments(ids)])
    return mask.prepare(q_len, k_len, batch=batch, heads=heads)


Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]


def _two() -> tuple[Tensor, Tensor]:
    return _q(), _k()


#: Functions and their arguments. Arrays are arguments, so that their sizes may be symbols.
CALLS: dict[str, Case] = {
    "values": (lambda q, k, v: attention(q, k, v), lambda: (*_two(), _k(BATCH, 2, K_LEN - 1, DIM))),
    "dtypes": (lambda q, k: attention(q, k, k), lambda: (_q(), _k().double())),
    "softcap": (lambda q, k: attention(q, k, k, softcap=-1.0), _two),
    "bias": (_option("bias"), lambda: (*_two(), torch.zeros(HEADS, Q_LEN, K_LEN + 1))),
    "relative": (
        lambda q, k, x: attention(q, k, k, bias=a.relative(x)),
        lambda: (*_two(), torch.zeros(HEADS - 1, 7)),
    ),
    "seed": (
        lambda q, k, x: attention(q, k, k, dropout_p=0.5, dropout_seed=x),
        lambda: (*_two(), _ids(BATCH, 3)),
    ),
    "q_index": (_option("q_index"), lambda: (*_two(), _ids(Q_LEN + 1))),
    "no mask": (_given, lambda: (*_two(), torch.zeros(Q_LEN, K_LEN) > 0)),
    "ids, length": (_masked(a.segments), lambda: (*_two(), _ids(BATCH, K_LEN + 2))),
    "cache, batch": (_masked(lambda x: a.causal() & a.cache(x)), lambda: (*_two(), _ids(BATCH + 1))),
    "two anchors": (
        _masked(lambda x, y: a.cache(x) & a.documents(y, y)),
        lambda: (*_two(), _ids(BATCH), torch.tensor([0, 3])),
    ),
    "offsets, keys": (_masked(a.documents), lambda: (*_two(), _ids(4), _ids(5))),
    "prefixes": (_masked(a.prefix), lambda: (*_two(), _ids(4), _ids(7))),
    "spans, rows": (_masked(a.spans), lambda: (*_two(), _ids(1, 1, Q_LEN + 1, 1, 2))),
    "dense, keys": (_masked(a.from_dense), lambda: (*_two(), _ids(Q_LEN, K_LEN + 1) > 0)),
    "predicate": (_masked(lambda: a.from_predicate(lambda b, h, q, k: q.flatten() >= 0)), _two),
    "predicate, floats": (_masked(lambda: a.from_predicate(lambda b, h, q, k: (q - k).float())), _two),
    "prepared, heads": (_given, lambda: (*_two(), _prepared(Q_LEN, K_LEN, heads=2))),
    "packed": (
        lambda q, k: attention(q, k, k, mask=a.causal(), layout="thd"),
        lambda: (_q(Q_LEN, HEADS, DIM), _k(K_LEN, 2, DIM)),
    ),
    "library, chosen": (
        _masked(lambda x: lib.selected_blocks(x, 4)),
        lambda: (*_two(), _ids(BATCH + 1, 1, 2, 1)),
    ),
    "sdpa, mask": (
        scaled_dot_product_attention,
        lambda: (_q(), *[_k(BATCH, HEADS, K_LEN, DIM)] * 2, torch.zeros(Q_LEN, K_LEN + 1)),
    ),
}

#: Those of the long run.
MORE: dict[str, Case] = {
    "batch": (lambda q, k: attention(q, k, k), lambda: (_q(), _k(3, 2, K_LEN, DIM))),
    "heads": (lambda q, k: attention(q, k, k), lambda: (_q(), _k(BATCH, 3, K_LEN, DIM))),
    "rank": (lambda q, k: attention(q, k, k), lambda: (_q(3, 4, 5), _k())),
    "layout": (lambda q, k: attention(q, k, k, layout="sbhd"), _two),
    "scale": (lambda q, k: attention(q, k, k, scale=float("inf")), _two),
    "sinks": (_option("sinks"), lambda: (*_two(), torch.zeros(3))),
    "alibi": (
        lambda q, k, x: attention(q, k, k, bias=a.alibi(x)),
        lambda: (*_two(), torch.zeros(HEADS + 1)),
    ),
    "no seed": (lambda q, k: attention(q, k, k, dropout_p=0.5), _two),
    "dropout_p": (lambda q, k: attention(q, k, k, dropout_p=1.5), _two),
    "k_index": (_option("k_index"), lambda: (*_two(), torch.arange(K_LEN + 1))),
    "backend": (lambda q, k: attention(q, k, k, backend="fast"), _two),
    "ids, batch": (_masked(a.segments), lambda: (*_two(), _ids(BATCH + 1, K_LEN))),
    "ids, queries": (_masked(a.segments), lambda: (*_two(), _ids(Q_LEN + 1), _ids(K_LEN))),
    "ids, rank": (_masked(a.segments), lambda: (*_two(), _ids(1, 2, K_LEN))),
    "lengths, batch": (_masked(a.key_padding), lambda: (*_two(), _ids(BATCH + 1))),
    "lengths, int": (_masked(lambda: a.key_padding(K_LEN + 1)), _two),
    "offsets": (_masked(a.documents), lambda: (*_two(), _ids(1))),
    "spans, batch": (_masked(a.spans), lambda: (*_two(), _ids(BATCH + 1, 1, Q_LEN, 1, 2))),
    "dense, dtype": (_masked(a.from_dense), lambda: (*_two(), _ids(Q_LEN, K_LEN))),
    "prepared, q_len": (_given, lambda: (*_two(), _prepared(Q_LEN + 1, K_LEN))),
    "prepared, batch": (_given, lambda: (*_two(), _prepared(Q_LEN, K_LEN, BATCH + 1))),
    "library, canvas": (_masked(lambda: lib.natten((3, 4), (3, 3))), _two),
    "library, prefix": (_masked(lib.shared_prefix), lambda: (*_two(), _ids(4), _ids(4))),
    "library, rows": (_masked(lambda: lib.per_row([a.causal()] * 3)), _two),
    "sdpa": (scaled_dot_product_attention, lambda: (_q(), _k(BATCH, HEADS, K_LEN, DIM), _k())),
    "sdpa, heads": (scaled_dot_product_attention, lambda: (*_two(), _k())),
}
SINKS, SINKS_INPUTS = MORE["sinks"]


def _error(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Exception:
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*inputs)
    return caught.value


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(x, marks=pytest.mark.long) for x in MORE)])
def test_errors_are_whole_when_compiled(name: str, dynamic: bool) -> None:
    function, inputs = (CALLS | MORE)[name]
    wanted = _error(function, inputs())
    compiled = torch.compile(lambda *x: function(*x), fullgraph=True, backend="eager", dynamic=dynamic)
    got = _error(compiled, inputs())
    assert str(wanted).startswith(f"{name.partition(',')[0]}: expected") or ": expected " in str(wanted)
    # The compiler adds where the user's code is.
    assert str(got).splitlines()[0] == str(wanted)
    assert isinstance(got, type(wanted))


def test_values_that_a_compiled_program_lacks_are_named() -> None:
    compiled = torch.compile(_masked(lambda x: lib.tree(x)), fullgraph=True, backend="eager")
    assert str(_error(compiled, (*_two(), _ids(4) - 1))).startswith("tree: depth: expected")


def test_a_prepared_mask_shows_itself_without_a_length_that_is_a_symbol() -> None:
    compiled = torch.compile(lambda mask: mask and a.causal(), fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(a.errors.UsageError, match=r"^bool\(Prepared\(B=1.*Write a & b or a \| b"):
        compiled(_prepared(Q_LEN, K_LEN))


def test_under_fullgraph_the_error_is_caught_around_the_call() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def attempt(q: Tensor) -> Tensor:
        try:
            return attention(q, q, q, softcap=-1.0)
        except ValueError:
            return q

    with pytest.raises(a.errors.OptionError, match="softcap: expected"):
        attempt(_q())


def test_without_fullgraph_the_error_is_the_eager_one() -> None:
    @torch.compile(backend="eager")
    def attempt(*x: Any) -> str:
        try:
            SINKS(*x)
        except a.errors.ShapeError as error:
            return str(error)
        return ""

    assert attempt(*SINKS_INPUTS()) == str(_error(SINKS, SINKS_INPUTS()))


@pytest.mark.parametrize("way", ["recomputed", "exported", pytest.param("strict", marks=pytest.mark.long)])
def test_errors_are_whole_where_activations_are_recomputed_in_export_and_pickled(way: str) -> None:
    class Module(nn.Module):
        def forward(self, *x: Any) -> Any:
            return SINKS(*x)

    def recomputed(*x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(SINKS, *x, use_reentrant=False)

    def export(*x: Any) -> Any:
        return torch.export.export(Module(), x, strict=way == "strict")

    compiled = torch.compile(recomputed, fullgraph=True, backend="eager")
    got = _error(compiled if way == "recomputed" else export, SINKS_INPUTS())
    assert str(got).splitlines()[0] == str(_error(SINKS, SINKS_INPUTS()))
    back = pickle.loads(pickle.dumps(got))
    assert type(back) is a.errors.ShapeError
    assert str(back) == str(got)


def test_constants_are_marked_as_torch_marks_them() -> None:
    ours, theirs = (lambda: 0), (lambda: 0)
    assert vars(constant_when_traced(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
