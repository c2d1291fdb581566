"""Wrong calls of `attention` and of the drop-in in PyTorch: the same text eager and compiled."""

import pickle
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything
from samples import mistakes
from samples.mistakes import CU, MIXING, PREPARED, SPANS, call, error_of, ids, of_framework
from torch import Tensor, nn

import attnspan as a
from attnspan import library as lib
from attnspan.torch import _eager, attention
from attnspan.torch import scaled_dot_product_attention as sdpa


def _on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


Q, K = torch.zeros(2, 4, 7, 16), torch.zeros(2, 2, 9, 16)
SLOPES = (a.alibi, torch.ones(4))

# What tensors alone can be: elsewhere, sparse, or not tensors at all.
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no head_dim": ({"q": torch.zeros(2, 4, 7, 0)}, "head_dim: expected at least one element"),
    "devices": ({"k": _on_meta(*K.shape), "v": K}, "expected one device, got cpu, meta, cpu"),
    "length beyond the kernels": (
        {"q": _on_meta(1, 1, 1, 8), "k": _on_meta(1).expand(1, 1, 2**31 - 64, 8)},
        "k_len: expected at most 2147483583",
    ),
    "bounds elsewhere": (
        {"mask": a.Spans(_on_meta(1, 1, 7, 1, 2, dtype=torch.int32), 9)},
        "bounds: expected device cpu",
    ),
    "sinks device": ({"sinks": _on_meta(4)}, "sinks: expected device cpu"),
    "slopes device": ({"bias": (a.alibi, _on_meta(4))}, "bias: slopes: expected device cpu"),
    "seed device": (
        {"dropout_p": 0.1, "dropout_seed": _on_meta(dtype=torch.int64)},
        "dropout_seed: expected device cpu",
    ),
    "index device": (
        {"q_index": _on_meta(7, dtype=torch.int64)},
        r"q_index: expected device cpu \(as q\), got meta",
    ),
    "seed": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(4).long()},
        r"dropout_seed: expected shape \(\) or \(B, H\) = \(2, 4\), got \(4,\). .*dropout_seeds\(",
    ),
    "index beyond int32": (
        {"mask": SPANS, "k_index": torch.arange(9) + 2**40, "bias": SLOPES},
        "k_index: expected int32 indices, got 1099511627776 to 1099511627784",
    ),
    "unsigned index beyond int32": (
        {"mask": PREPARED, "q_index": (torch.arange(7) + 2**31).to(torch.uint32), "bias": SLOPES},
        "q_index: expected int32 indices",
    ),
}
TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "seed number": (
        {"dropout_p": 0.1, "dropout_seed": 3},
        r"dropout_seed: expected an integer tensor, got int. Pass torch.tensor\(seed\)",
    ),
    "k, NumPy": ({"k": K.numpy(), "v": K}, r"k: expected a torch\.Tensor, got ndarray"),
    "dtypes": ({"k": K.bfloat16(), "v": K}, "one dtype, got float32, bfloat16, float32"),
    "sparse": ({"k": K.to_sparse(), "v": K}, "k: expected a dense tensor, got one of torch.sparse_coo"),
    "long bounds": (
        {"mask": a.Spans(torch.zeros(1, 1, 7, 1, 2).long(), 9)},
        "bounds: expected int32, got int64",
    ),
    "sinks of NumPy": (
        {"sinks": np.zeros(4, "float32")},
        "sinks: expected a floating tensor, got ndarray. Convert it with torch.as_tensor",
    ),
    "index of NumPy": (
        {"mask": PREPARED, "q_index": np.arange(7), "bias": SLOPES},
        "q_index: expected an integer tensor, got ndarray. Convert it with torch.as_tensor",
    ),
}
EIGHT = torch.zeros(1, 2, 8, 16)
SDPA_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"attn_mask": torch.zeros(8, 7)}, r"a shape that broadcasts .*\(1, 2, 8, 8\)"),
    "mask of five dims": ({"attn_mask": torch.zeros(1, 1, 2, 8, 8)}, "attn_mask: .* broadcasts"),
    "mask of six dims": (
        {**dict.fromkeys(("query", "key", "value"), EIGHT[None]), "attn_mask": torch.zeros(3, 1, 1, 2, 8, 8)},
        r"attn_mask: expected a shape that broadcasts to \(1, 1, 2, 8, 8\), got \(3, 1, 1, 2, 8, 8\)",
    ),
    "booleans": ({"attn_mask": torch.zeros(8, 7) == 0}, "attn_mask: expected a shape that broadcasts"),
    "two masks": ({"attn_mask": a.causal(), "is_causal": True}, "expected no attn_mask with it"),
    "heads": ({"key": EIGHT[:, :1], "value": EIGHT[:, :1]}, "enable_gqa=True"),
    "dims": ({"key": EIGHT[0, 0, 0]}, "at least 2 dims, .*, got .*, 16"),
    "batch": ({"query": EIGHT.expand(3, -1, -1, -1), "key": EIGHT.expand(2, -1, -1, -1)}, "that broadcast"),
    "values": ({"value": torch.zeros(1, 2, 9, 16)}, "expected"),
    "dropout": ({"dropout_p": 1.5}, r"dropout_p: expected at least 0 and below 1, got 1\.5"),
}
SDPA_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"attn_mask": torch.zeros(8, 8).long()}, "expected torch.bool, a floating .*torch.int64"),
    "NumPy": ({"key": EIGHT.numpy()}, "key: .* got ndarray. Convert it"),
}
CASES = {n: (of_framework(given, torch.from_numpy), *x) for n, (given, *x) in mistakes.of("tensor").items()}
for name, (given, *rest) in mistakes.of_kinds(VALUES, TYPES).items():
    CASES[name] = {"q": Q, "k": K, "v": given.get("k", K), **given}, *rest
for name, (given, *rest) in mistakes.of_kinds(SDPA_VALUES, SDPA_TYPES).items():
    CASES[f"sdpa, {name}"] = {"query": EIGHT, "key": EIGHT, "value": EIGHT, **given}, *rest


def _call(given: dict[str, Any]) -> Any:
    return call(sdpa if "query" in given else attention, given)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_says_what_how_and_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, *wanted = CASES[name]
    error = error_of(_call, given)
    mistakes.check(error, *wanted)
    # The short way of eager calls finds nothing that the ordinary one does not.
    monkeypatch.setattr(_eager, "attend", lambda *_: None)
    other = error_of(_call, given)
    assert (type(other), str(other)) == (type(error), str(error))


#: What a compiler does not hand on: sparse tensors, values of indices; numbers that it takes for symbols.
EAGER_ONLY = {"sparse", "scale nan", "index beyond int32", "unsigned index beyond int32", "sdpa, batch"}
EAGER_ONLY |= {name for name in CASES if name.startswith("packed") and name != "packed, joined"}
#: Those of the ordinary run: one of each check.
COMPILED = [
    *("k and v length", "dtypes", "softcap", "bias", "relative", "seed", "q_index", "no mask", "ids, length"),
    *("cache, batch", "two anchors", "offsets, keys", "prefixes", "spans, rows", "dense, keys", "predicate"),
    *("predicate, floats", "prepared, heads", "packed, key_padding(8) & causal()", "library, chosen"),
    "sdpa, mask",
]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [x for x in CASES if x not in EAGER_ONLY] if everything() else COMPILED)
def test_errors_are_whole_when_compiled(name: str, dynamic: bool) -> None:
    given, *_ = CASES[name]
    wanted = error_of(_call, given)
    arrays = {keyword: x for keyword, x in given.items() if not isinstance(x, int | float)}
    # Numbers are written in the code, as users do: a compiler takes those of a closure for symbols.
    numbers = ", ".join(
        f"{n}=float('{x!r}')" if isinstance(x, float) else f"{n}={x!r}"
        for n, x in given.items()
        if n not in arrays
    )
    code = eval(f"lambda given: call({{**given, **dict({numbers})}})", {"call": _call})
    run = torch.compile(code, fullgraph=True, backend="eager", dynamic=dynamic)
    got = error_of(run, arrays)
    # The compiler adds where the user's code is.
    assert str(got).splitlines()[0] == str(wanted)
    # The compiled kernel, which alone sees some values, knows no class of ours.
    assert isinstance(got, type(wanted)) or (type(got) is ValueError and isinstance(wanted, ValueError))


def test_values_that_a_compiled_program_lacks_are_named() -> None:
    compiled = torch.compile(_call, fullgraph=True, backend="eager")
    error = error_of(compiled, of_framework({"mask": (lib.tree, ids(4) - 1)}, torch.from_numpy))
    assert str(error).startswith("tree: depth: expected")


def test_a_prepared_mask_shows_itself_without_a_length_that_is_a_symbol() -> None:
    compiled = torch.compile(lambda mask: mask and a.causal(), fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(a.errors.UsageError, match=r"^bool\(Prepared\(B=1.*Write a & b or a \| b"):
        compiled(a.segments(torch.zeros(1, 9).int()).prepare(7, 9))


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_is_caught_around_a_whole_graph_and_inside_of_others(fullgraph: bool) -> None:
    @torch.compile(fullgraph=fullgraph, backend="eager")
    def attempt(given: dict[str, Any]) -> str:
        try:
            _call(given)
        except a.errors.ShapeError as error:
            return str(error)
        return ""

    given, *_ = CASES["head_dim"]
    if fullgraph:
        with pytest.raises(a.errors.ShapeError, match="head_dim: expected"):
            attempt(given)
    else:
        assert attempt(given) == str(error_of(_call, given))


@pytest.mark.slow
def test_an_error_after_a_graph_break_names_the_line_of_the_call() -> None:
    @torch.compile(backend="eager")
    def model(given: dict[str, Any]) -> Any:
        return _call(given)

    given, *_ = CASES["head_dim"]
    names = [frame.name for frame in traceback.extract_tb(error_of(model, given).__traceback__)]
    assert "model" in names


@pytest.mark.parametrize("way", ["recomputed", "exported", pytest.param("strict", marks=pytest.mark.long)])
def test_errors_are_whole_where_activations_are_recomputed_in_export_and_pickled(way: str) -> None:
    class Module(nn.Module):
        def forward(self, given: dict[str, Any]) -> Any:
            return _call(given)

    def recomputed(given: dict[str, Any]) -> Any:
        return torch.utils.checkpoint.checkpoint(_call, given, use_reentrant=False)

    def export(given: dict[str, Any]) -> Any:
        return torch.export.export(Module(), (given,), strict=way == "strict")

    given, *_ = CASES["sinks"]
    compiled = torch.compile(recomputed, fullgraph=True, backend="eager")
    got = error_of(compiled if way == "recomputed" else export, given)
    assert str(got).splitlines()[0] == str(error_of(_call, given))
    back = pickle.loads(pickle.dumps(got))
    assert type(back) is a.errors.ShapeError
    assert str(back) == str(got)


@pytest.mark.parametrize("mask", [*MIXING, a.causal() | a.documents(CU)], ids=repr)
def test_packed_documents_are_kept_apart_by_documents(mask: a.Mask) -> None:
    x = torch.randn(8, 2, 16)
    assert attention(x, x, x, mask=mask & a.documents(torch.from_numpy(CU)), layout="thd").shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    parts = [torch.randn(4, 8, 16), torch.randn(4, 5, 16)]
    jagged = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=torch.jagged)
    for nested in (torch.nested.nested_tensor(parts), jagged):
        with pytest.raises(
            TypeError, match=r"q: .* got a nested tensor. Call scaled_.*x.values\(\).*documents"
        ):
            attention(nested, nested, nested)


def test_what_is_lowered_says_where_its_rows_are() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    mask, bias = a.causal(), a.relative(torch.randn(2, 9))
    with pytest.raises(ValueError, match=r"q_index: expected the queries' indices with bare spans.*prepare"):
        attention(q, k, k, mask=a.spans(mask.spans(3, 9).lowered), bias=bias)
    wanted = attention(q, k, k, mask=mask, bias=bias)
    for lowered in (mask.spans(3, 9, like=q), mask.prepare(3, 9, like=q)):
        torch.testing.assert_close(attention(q, k, k, mask=lowered, bias=bias), wanted)
