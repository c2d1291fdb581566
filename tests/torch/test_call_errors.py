"""A wrong call of `attention` or of the drop-in: expected, got, remedy; the same text eager and compiled."""

# ruff: noqa: ARG005  (functions of a fixed signature)

import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything
from torch import Tensor, nn

import attnspan as a
from attnspan import library as lib
from attnspan.torch import _eager, attention
from attnspan.torch import scaled_dot_product_attention as sdpa

BATCH, HEADS, Q_LEN, K_LEN, DIM = 2, 4, 7, 9, 16
Q, K = torch.zeros(BATCH, HEADS, Q_LEN, DIM), torch.zeros(BATCH, 2, K_LEN, DIM)
SEED, META = torch.tensor(11), torch.device("meta")


def _z(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _bounds(*shape: int, **options: Any) -> a.Spans:
    return a.Spans(torch.zeros(shape, **{"dtype": torch.int32, **options}), K_LEN)


def _prepared(q_len: int, k_len: int, batch: int = 1, heads: int = 1) -> a.Prepared:
    mask = a.segments(_ids(batch, k_len))
    mask = mask if heads == 1 else lib.per_head([a.causal(), mask])
    return mask.prepare(q_len, k_len, batch=batch, heads=heads)


_EIGHT = _z(1, 2, 8, 16)
_PACKED = {"q": _z(8, 2, 16), "k": _z(8, 2, 16), "layout": "thd"}
_WITH_BIAS = {"bias": (a.alibi, torch.ones(4))}
_SDPA = {"attend": sdpa, "q": _EIGHT, "k": _EIGHT}
_CU = torch.tensor([0, 3, 8])

#: Keywords of a call and its error. q, k and v (k by default) are keywords too. A tuple is a function and its
#: arguments, which is called inside: the arrays may then have symbols for sizes.
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"q": _z(2, 4, 16)}, r"q: expected 4 dims .* got \(2, 4, 16\)"),
    "layout": ({"layout": "sbhd"}, "layout: expected one of bhsd, bshd, thd, got 'sbhd'"),
    "layout of another kind": ({"layout": ["bhsd"]}, "layout: expected one of bhsd, bshd, thd"),
    "batch": ({"k": _z(3, 2, 9, 16)}, "batch: expected the same batch size"),
    "head_dim": ({"k": _z(2, 2, 9, 8), "v": K}, "head_dim: expected the same for q and k"),
    "k and v heads": ({"v": _z(2, 4, 9, 16)}, "expected as many value as key heads"),
    "k and v length": ({"v": _z(2, 2, 8, 16)}, "expected as many values as keys"),
    "groups": ({"q": _z(2, 3, 7, 16)}, "heads: expected a multiple of the key heads"),
    "no heads": ({"q": _z(2, 0, 7, 16)}, "expected at least one query and one key head"),
    "no key heads": ({"k": _z(2, 0, 9, 16)}, "at least one query and one key head"),
    "no head_dim": ({"q": _z(2, 4, 7, 0)}, "head_dim: expected at least one element"),
    "devices": ({"k": K.to(META), "v": K}, "expected one device, got cpu, meta, cpu"),
    "length beyond the kernels": (
        {"q": _z(1, 1, 1, 8, device=META), "k": _z(1, device=META).expand(1, 1, 2**31 - 64, 8)},
        "k_len: expected at most 2147483583",
    ),
    "scale nan": ({"scale": math.nan}, "scale: expected a finite float32 number, got nan"),
    "scale inf": ({"scale": -math.inf}, "scale: expected a finite float32 number, got -inf"),
    "scale beyond float32": ({"scale": 1e300}, r"scale: expected a finite float32 number, got 1e\+300"),
    "backend": (
        {"backend": "cuda"},
        "backend: expected None or one of cpu, vendor, flex, triton, math, got 'cuda'",
    ),
    "backend that cannot": (
        {"q": _z(1, 1, 4, 584), "k": _z(1, 1, 4, 584), "backend": "cpu"},
        "to 576, not 584",
    ),
    "q_index": ({"q_index": _ids(8)}, r"q_index: expected"),
    "k_index": ({"k_index": torch.arange(10)}, r"k_index: expected one index per key, 9, got 10"),
    # Masks.
    "ids, length": ({"mask": (a.segments, _ids(2, 11))}, "describe 9 keys, got 11"),
    "ids, batch": ({"mask": (a.segments, _ids(3, 9))}, "1 or 2 along the batch axis, got 3"),
    "ids, queries": ({"mask": (a.segments, _ids(8), _ids(9))}, "one entry per query row, 7, got 8"),
    "ids, rank": ({"mask": (a.segments, _ids(1, 2, 9))}, "1 or 2 axes"),
    "lengths, batch": ({"mask": (a.key_padding, _ids(3))}, "along the batch axis, got 3"),
    "lengths, int": ({"mask": (a.key_padding, 10)}, "at most 9"),
    "cache, batch": ({"mask": (lambda x: a.causal() & a.cache(x), _ids(3))}, "along the batch axis, got 3"),
    "two anchors": (
        {"mask": (lambda x, y: a.cache(x) & a.documents(y, y), _ids(2), torch.tensor([0, 3]))},
        "q_index: expected one default",
    ),
    "offsets": ({"mask": (a.documents, _ids(1))}, "at least 2 offsets"),
    "offsets, keys": ({"mask": (a.documents, _ids(4), _ids(5))}, "as many documents for keys"),
    "prefixes": ({"mask": (a.prefix, _ids(4), _ids(7))}, "one length per document"),
    "spans, rows": ({"mask": (a.spans, _ids(1, 1, 8, 1, 2))}, "one entry per query row, 7, got 8"),
    "spans, batch": ({"mask": (a.spans, _ids(3, 1, 7, 1, 2))}, "along the batch axis, got 3"),
    "dense, keys": ({"mask": (a.from_dense, _ids(7, 10) > 0)}, "describe 9 keys, got 10"),
    "predicate": (
        {"mask": (lambda: a.from_predicate(lambda b, h, q, k: q.flatten() >= 0),)},
        r"from_predicate\(<lambda>\): expected",
    ),
    "library, chosen": (
        {"mask": (lambda x: lib.selected_blocks(x, 4), _ids(3, 1, 2, 1))},
        "batch axis, got 3",
    ),
    "library, canvas": ({"mask": (lambda: lib.natten((3, 4), (3, 3)),)}, "describe 9 keys, got 12"),
    "library, prefix": ({"mask": (lib.shared_prefix, _ids(4), _ids(4))}, "one number per document"),
    "library, rows": ({"mask": (lambda: lib.per_row([a.causal()] * 3),)}, "along the batch axis, got 3"),
    "prepared, q_len": ({"mask": _prepared(8, 9)}, "q_len=7"),
    "prepared, batch": ({"mask": _prepared(7, 9, 3)}, "B=2"),
    "prepared, heads": ({"mask": _prepared(7, 9, heads=2)}, "H=4"),
    "spans of other keys": ({"mask": a.causal().spans(7, 8)}, "expected spans over k_len=9 keys"),
    "spans of other queries": ({"mask": a.causal().spans(6, 9)}, r"bounds: expected .*q_len=7, got \("),
    "spans of another batch": ({"mask": _bounds(3, 1, 7, 1, 2)}, r"bounds: expected \(B\|1, .* with B=2"),
    "no spans": ({"mask": _bounds(1, 1, 7, 0, 2)}, "bounds: expected"),
    "bounds elsewhere": ({"mask": _bounds(1, 1, 7, 1, 2, device=META)}, "bounds: expected device cpu"),
    "indices twice": (
        {"mask": a.causal().prepare(7, 9), "q_index": torch.arange(7)},
        "q_index, k_index: expected None with a mask that is already lowered and no option",
    ),
    "indices twice, an option that has none": (
        {"mask": a.causal().prepare(7, 9), "q_index": torch.arange(7), "softcap": 3.0},
        "q_index, k_index: expected None with a mask that is already lowered and no option that goes by",
    ),
    **{
        f"packed, {mask!r}": (
            {**_PACKED, "mask": mask},
            rf"keeps packed documents apart, got {re.escape(repr(mask))}.*Combine it by & with documents",
        )
        for mask in (
            a.key_padding(8) & a.causal(),
            a.keys(torch.ones(8, dtype=torch.bool)) & a.causal(),
            a.cache(8) & a.causal(),
            a.prefix(2) | a.causal(),
            a.causal() | a.documents(_CU),
        )
    },
    # Options.
    "slopes of documents": (
        {**_PACKED, "mask": a.documents(_CU), "bias": a.alibi(torch.ones(2, 2))},
        r"alibi: slopes: expected \(2,\) or \(1, 2\).*those of packed documents are not taken: pad",
    ),
    "softcap 0": ({"softcap": 0.0}, "softcap: expected a positive, finite number .* got 0.0"),
    "softcap": ({"softcap": -1.0}, "softcap: expected a positive, finite number .* got -1.0"),
    "softcap tiny": ({"softcap": 1e-40}, "softcap: expected a positive, finite .*1e-30.* got 1e-40"),
    "softcap nan": ({"softcap": math.nan}, "softcap: expected a positive, finite .* got nan"),
    "softcap inf": ({"softcap": math.inf}, "softcap: expected a positive, finite .* got inf"),
    "sinks": ({"sinks": _z(3)}, r"sinks: expected \(4,\): .* got \(3,\)"),
    "sinks rank": ({"sinks": _z(4, 1)}, r"sinks: expected \(4,\)"),
    "sinks device": ({"sinks": _z(4, device=META)}, "sinks: expected device cpu"),
    "alibi": ({"bias": (a.alibi, _z(3))}, r"slopes: expected \(4,\) or \(2, 4\)"),
    "slopes batch": ({"bias": (a.alibi, _z(3, 4))}, r"slopes: expected .* got \(3, 4\)"),
    "slopes device": ({"bias": (a.alibi, _z(4, device=META))}, "bias: slopes: expected device cpu"),
    "relative": ({"bias": (a.relative, _z(3, 9))}, r"relative: table: expected \(4, n\)"),
    "bias": ({"bias": _z(7, 8)}, r"dense bias: expected .*k_len=9, got \(7, 8\)"),
    "dense one key": ({"bias": _z(7, 1)}, "dense bias: expected"),
    "dense heads": ({"bias": (a.dense_bias, _z(2, 7, 9))}, "dense bias: expected"),
    "dropout 1": ({"dropout_p": 1.0}, "dropout_p: expected at least 0 and below 1, got 1.0"),
    "dropout below 0": ({"dropout_p": -0.1}, "dropout_p: expected at least 0"),
    "dropout nan": ({"dropout_p": math.nan, "dropout_seed": SEED}, "dropout_p: expected at least"),
    "no seed": ({"dropout_p": 0.1}, "dropout_seed: expected an integer tensor with"),
    "seed": (
        {"dropout_p": 0.1, "dropout_seed": _ids(4)},
        r"dropout_seed: expected shape \(\) or \(B, H\) = \(2, 4\), got \(4,\). .*dropout_seeds\(",
    ),
    "seed device": (
        {"dropout_p": 0.1, "dropout_seed": SEED.to(META)},
        "dropout_seed: expected device cpu",
    ),
    "index length": (
        {"mask": a.causal().prepare(7, 9), "q_index": torch.arange(6), **_WITH_BIAS},
        r"q_index: expected \(7,\) or \(2, 7\), got \(6,\)",
    ),
    "index batch": (
        {"mask": a.causal().spans(7, 9), "k_index": _ids(3, 9), **_WITH_BIAS},
        r"k_index: expected \(9,\) or \(2, 9\)",
    ),
    "index beyond int32": (
        {"mask": a.causal().spans(7, 9), "k_index": torch.arange(9) + 2**40, **_WITH_BIAS},
        "k_index: expected int32 indices, got 1099511627776 to 1099511627784",
    ),
    "unsigned index beyond int32": (
        {
            "mask": a.causal().prepare(7, 9),
            "q_index": (torch.arange(7) + 2**31).to(torch.uint32),
            **_WITH_BIAS,
        },
        "q_index: expected int32 indices",
    ),
    # The drop-in.
    "sdpa, mask": ({**_SDPA, "attn_mask": _z(8, 7)}, r"a shape that broadcasts .*\(1, 2, 8, 8\)"),
    "sdpa, mask of five dims": ({**_SDPA, "attn_mask": _z(1, 1, 2, 8, 8)}, "attn_mask: .* broadcasts"),
    "sdpa, booleans": ({**_SDPA, "attn_mask": _z(8, 7) == 0}, "attn_mask: expected a shape that broadcasts"),
    "sdpa, two masks": (
        {**_SDPA, "attn_mask": a.causal(), "is_causal": True},
        "expected no attn_mask with it",
    ),
    "sdpa, heads": ({**_SDPA, "k": _EIGHT[:, :1]}, "enable_gqa=True"),
    "sdpa, dims": ({**_SDPA, "k": _EIGHT[0, 0, 0]}, "at least 2 dims, .*, got .*, 16"),
    "sdpa, batch": (
        {**_SDPA, "q": _EIGHT.expand(3, 2, 8, 16), "k": _EIGHT.expand(2, 2, 8, 16)},
        "expected batch dims that broadcast",
    ),
    "sdpa, values": ({**_SDPA, "v": _z(1, 2, 9, 16)}, "expected"),
    "sdpa, dropout": ({**_SDPA, "dropout_p": 1.5}, r"dropout_p: expected at least 0 and below 1, got 1\.5"),
}

TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "q, str": ({"q": "q"}, r"q: expected a torch\.Tensor, got str"),
    "k, NumPy": ({"k": K.numpy(), "v": K}, r"k: expected a torch\.Tensor, got ndarray"),
    "dtypes": ({"k": K.bfloat16(), "v": K}, "expected one dtype, got float32, bfloat16, float32"),
    "integers": ({"q": Q.long(), "k": K.long()}, r"q: expected a floating dtype .* got int64"),
    "sparse": ({"k": K.to_sparse(), "v": K}, r"k: expected a dense tensor, got one of torch.sparse_coo"),
    "scale tensor": ({"scale": torch.tensor(1.0)}, "scale: expected a Python number, got Tensor"),
    "no mask": ({"mask": torch.ones(7, 9)}, "mask: expected a mask expression.*got Tensor.*from_dense"),
    "long bounds": ({"mask": _bounds(1, 1, 7, 1, 2, dtype=torch.int64)}, "bounds: expected int32, got int64"),
    "dense, dtype": ({"mask": (a.from_dense, _ids(7, 9))}, "from_dense: visible: expected a bool"),
    "predicate, floats": (
        {"mask": (lambda: a.from_predicate(lambda b, h, q, k: (q - k).float()),)},
        r"torch.float32\. .*bias=",
    ),
    "softcap tensor": ({"softcap": torch.tensor(3.0)}, "softcap: expected a Python number"),
    "sinks dtype": ({"sinks": _ids(4)}, "sinks: expected a floating tensor, got"),
    "sinks kind": ({"sinks": [0.0] * 4}, "sinks: expected a floating tensor, got list"),
    "sinks of NumPy": (
        {"sinks": np.zeros(4, "float32")},
        "sinks: expected a floating tensor, got ndarray. Convert it with torch.as_tensor",
    ),
    "dense dtype": ({"bias": _z(7, 9).bool()}, "dense_bias: expected a floating array"),
    "bias kind": ({"bias": lambda s, *_: s}, "bias: expected a tensor, or what .* got function"),
    "dropout tensor": ({"dropout_p": torch.tensor(0.1)}, "dropout_p: expected a Python number"),
    "seed number": (
        {"dropout_p": 0.1, "dropout_seed": 3},
        r"dropout_seed: expected an integer tensor, got int. Pass torch.tensor\(seed\)",
    ),
    "seed dtype": ({"dropout_p": 0.1, "dropout_seed": torch.tensor(0.5)}, "got torch.float32"),
    "seed without dropout": ({"dropout_seed": torch.tensor(True)}, "dropout_seed: .* got torch.bool"),
    "index dtype": (
        {"mask": a.causal().spans(7, 9), "k_index": _z(9), **_WITH_BIAS},
        "k_index: expected an integer tensor, got torch.float32",
    ),
    "index of NumPy": (
        {"mask": a.causal().prepare(7, 9), "q_index": np.arange(7), **_WITH_BIAS},
        "q_index: expected an integer tensor, got ndarray. Convert it with torch.as_tensor",
    ),
    "sdpa, integers": ({**_SDPA, "attn_mask": _ids(8, 8)}, "expected torch.bool, a floating .*torch.int64"),
    "sdpa, NumPy": ({**_SDPA, "k": _EIGHT.numpy(), "v": _EIGHT}, "key: .* got ndarray. Convert it"),
}
CASES = VALUES | TYPES


def _call(given: dict[str, Any]) -> Any:
    given = {n: x[0](*x[1:]) if isinstance(x, tuple) else x for n, x in given.items()}
    q, k = given.pop("q", Q), given.pop("k", K)
    return given.pop("attend", attention)(q, k, given.pop("v", k), **given)


def _error(function: Callable[..., Any], *inputs: Any) -> Exception:
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*inputs)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_says_what_how_and_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, message = CASES[name]
    error = _error(_call, given)
    assert isinstance(error, TypeError if name in TYPES else ValueError)
    assert re.search(message, str(error), re.DOTALL), error
    assert re.search("[,;] got ", str(error))
    assert str(error).endswith(".")
    # The short way of eager calls finds nothing that the ordinary one does not.
    monkeypatch.setattr(_eager, "attend", lambda *_: None)
    other = _error(_call, given)
    assert (type(other), str(other)) == (type(error), str(error))


#: What a compiler does not hand on: sparse tensors, values of indices; numbers that it takes for symbols.
EAGER_ONLY = {"sparse", "scale nan", "index beyond int32", "unsigned index beyond int32", "sdpa, batch"}
EAGER_ONLY |= {name for name in CASES if re.match("packed, .*(cache|padding|prefix)", name)}
#: Those of the ordinary run: one of each check.
COMPILED = [
    *("k and v length", "dtypes", "softcap", "bias", "relative", "seed", "q_index", "no mask", "ids, length"),
    *("cache, batch", "two anchors", "offsets, keys", "prefixes", "spans, rows", "dense, keys", "predicate"),
    *(
        "predicate, floats",
        "prepared, heads",
        "packed, key_padding(8) & causal()",
        "library, chosen",
        "sdpa, mask",
    ),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [x for x in CASES if x not in EAGER_ONLY] if everything() else COMPILED)
def test_errors_are_whole_when_compiled(name: str, dynamic: bool) -> None:
    given, _ = CASES[name]
    wanted = _error(_call, given)
    arrays = {keyword: x for keyword, x in given.items() if not isinstance(x, int | float)}
    # Numbers are written in the code, as users do: a compiler takes those of a closure for symbols.
    numbers = ", ".join(
        f"{n}=float('{x!r}')" if isinstance(x, float) else f"{n}={x!r}"
        for n, x in given.items()
        if n not in arrays
    )
    code = eval(f"lambda given: call({{**given, **dict({numbers})}})", {"call": _call})
    run = torch.compile(code, fullgraph=True, backend="eager", dynamic=dynamic)
    got = _error(run, arrays)
    # The compiler adds where the user's code is.
    assert str(got).splitlines()[0] == str(wanted)
    assert isinstance(got, type(wanted))


def test_values_that_a_compiled_program_lacks_are_named() -> None:
    compiled = torch.compile(_call, fullgraph=True, backend="eager")
    error = _error(compiled, {"mask": (lambda x: lib.tree(x), _ids(4) - 1)})
    assert str(error).startswith("tree: depth: expected")


def test_a_prepared_mask_shows_itself_without_a_length_that_is_a_symbol() -> None:
    compiled = torch.compile(lambda mask: mask and a.causal(), fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(a.errors.UsageError, match=r"^bool\(Prepared\(B=1.*Write a & b or a \| b"):
        compiled(_prepared(Q_LEN, K_LEN))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_is_caught_around_a_whole_graph_and_inside_of_others(fullgraph: bool) -> None:
    @torch.compile(fullgraph=fullgraph, backend="eager")
    def attempt(given: dict[str, Any]) -> str:
        try:
            _call(given)
        except a.errors.ShapeError as error:
            return str(error)
        return ""

    given, _ = CASES["sinks"]
    if fullgraph:
        with pytest.raises(a.errors.ShapeError, match="sinks: expected"):
            attempt(given)
    else:
        assert attempt(given) == str(_error(_call, given))


@pytest.mark.parametrize("way", ["recomputed", "exported", pytest.param("strict", marks=pytest.mark.long)])
def test_errors_are_whole_where_activations_are_recomputed_in_export_and_pickled(way: str) -> None:
    class Module(nn.Module):
        def forward(self, given: dict[str, Any]) -> Any:
            return _call(given)

    def recomputed(given: dict[str, Any]) -> Any:
        return torch.utils.checkpoint.checkpoint(_call, given, use_reentrant=False)

    def export(given: dict[str, Any]) -> Any:
        return torch.export.export(Module(), (given,), strict=way == "strict")

    given, _ = CASES["sinks"]
    compiled = torch.compile(recomputed, fullgraph=True, backend="eager")
    got = _error(compiled if way == "recomputed" else export, given)
    assert str(got).splitlines()[0] == str(_error(_call, given))
    back = pickle.loads(pickle.dumps(got))
    assert type(back) is a.errors.ShapeError
    assert str(back) == str(got)


@pytest.mark.parametrize(
    "mask", [x["mask"] for n, (x, _) in VALUES.items() if n.startswith("packed")], ids=repr
)
def test_packed_documents_are_kept_apart_by_documents(mask: a.Mask) -> None:
    x = torch.randn(8, 2, 16)
    assert attention(x, x, x, mask=mask & a.documents(_CU), layout="thd").shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    parts = [torch.randn(4, 8, 16), torch.randn(4, 5, 16)]
    jagged = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=torch.jagged)
    for nested in (torch.nested.nested_tensor(parts), jagged):
        with pytest.raises(
            TypeError, match=r"q: .* got a nested tensor. Call scaled_.*x.values\(\).*documents"
        ):
            attention(nested, nested, nested)


def test_bare_spans_do_not_say_where_their_rows_are() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    mask, bias = a.causal(), a.relative(torch.randn(2, 9))
    bare = mask.spans(3, 9, like=q).lowered
    for given in (bare, a.spans(bare)):
        with pytest.raises(ValueError, match=r"q_index: expected the rows' indices with bare spans.*prepare"):
            attention(q, k, k, mask=given, bias=bias)
    wanted = attention(q, k, k, mask=mask, bias=bias)
    for lowered in (mask.spans(3, 9, like=q), mask.prepare(3, 9, like=q)):
        torch.testing.assert_close(attention(q, k, k, mask=lowered, bias=bias), wanted)
