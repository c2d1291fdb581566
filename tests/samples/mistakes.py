"""Wrong calls of `attention`: what every front end refuses, with which error, and what it must say."""

# ruff: noqa: ARG005  (functions of a fixed signature)

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

import attnspan as a
from attnspan import library as lib

#: Keywords of a call, the type of its error, and its text. Of arrays of NumPy a front end makes its own. A
#: tuple is a function and its arguments, which is called inside: the arrays may then be a compiler's.
Mistake = tuple[dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def ids(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


#: What is right where nothing else is given; v is k by default.
Q, K = zeros(2, 4, 7, 16), zeros(2, 2, 9, 16)
CU = np.array([0, 3, 8])
PACKED = {"q": zeros(8, 2, 16), "k": zeros(8, 2, 16), "layout": "thd"}
WITH_BIAS = {"bias": (a.alibi, np.ones(4, np.float32))}
SPANS, PREPARED = a.causal().spans(7, 9), a.causal().prepare(7, 9)
#: Masks that do not keep packed documents apart.
MIXING = (
    a.key_padding(8) & a.causal(),
    a.keys(np.ones(8, bool)) & a.causal(),
    a.cache(8) & a.causal(),
    a.prefix(2) | a.causal(),
)


def _prepared(q_len: int, k_len: int, batch: int = 1, heads: int = 1) -> a.Prepared:
    mask = a.segments(ids(batch, k_len))
    mask = mask if heads == 1 else lib.per_head([a.causal(), mask])
    return mask.prepare(q_len, k_len, batch=batch, heads=heads)


def _bounds(*shape: int) -> a.Spans:
    return a.Spans(zeros(*shape, dtype="int32"), 9)


_INDICES = "q_index, k_index: expected None with a mask that is already lowered and no option"
_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"q": zeros(2, 4, 16)}, r"q: expected 4 dims .* got \(2, 4, 16\)"),
    "layout": ({"layout": "sbhd"}, "layout: expected one of bhsd, bshd, thd, got 'sbhd'"),
    "layout of another kind": ({"layout": ["bhsd"]}, "layout: expected one of bhsd, bshd, thd"),
    "batch": ({"k": zeros(3, 2, 9, 16)}, "batch: expected the same batch size"),
    "head_dim": ({"k": zeros(2, 2, 9, 8), "v": K}, "head_dim: expected the same for q and k"),
    "k and v heads": ({"v": zeros(2, 4, 9, 16)}, "expected as many value as key heads"),
    "k and v length": ({"v": zeros(2, 2, 8, 16)}, "expected as many values as keys"),
    "groups": ({"q": zeros(2, 3, 7, 16)}, "heads: expected a multiple of the key heads"),
    "no heads": ({"q": zeros(2, 0, 7, 16)}, "expected at least one query and one key head"),
    "no key heads": ({"k": zeros(2, 0, 9, 16)}, "at least one query and one key head"),
    "scale nan": ({"scale": math.nan}, "scale: expected a finite float32 number, got nan"),
    "scale inf": ({"scale": -math.inf}, "scale: expected a finite float32 number, got -inf"),
    "scale beyond float32": ({"scale": 1e300}, r"scale: expected a finite float32 number, got 1e\+300"),
    "backend": ({"backend": "cuda"}, "backend: expected None or one of cpu, .*, math, .*got 'cuda'"),
    "backend that cannot": (
        {"q": zeros(1, 1, 4, 584), "k": zeros(1, 1, 4, 584), "backend": "cpu"},
        "to 576, not 584",
    ),
    "q_index": ({"q_index": ids(8)}, "q_index: expected"),
    "k_index": ({"k_index": np.arange(10)}, "k_index: expected one index for each key, 9, got 10"),
    # Masks.
    "ids, length": ({"mask": (a.segments, ids(2, 11))}, "describe 9 keys, got 11"),
    "ids, batch": ({"mask": (a.segments, ids(3, 9))}, "1 or 2 along the batch axis, got 3"),
    "ids, queries": ({"mask": (a.segments, ids(8), ids(9))}, "one entry for each query, 7, got 8"),
    "ids, rank": ({"mask": (a.segments, ids(1, 2, 9))}, "1 or 2 axes"),
    "lengths, batch": ({"mask": (a.key_padding, ids(3))}, "along the batch axis, got 3"),
    "lengths, int": ({"mask": (a.key_padding, 10)}, "at most 9"),
    "cache, batch": ({"mask": (lambda x: a.causal() & a.cache(x), ids(3))}, "along the batch axis, got 3"),
    "two anchors": (
        {"mask": (lambda x, y: a.cache(x) & a.documents(y, y), ids(2), np.array([0, 3]))},
        "q_index: expected one default",
    ),
    "offsets": ({"mask": (a.documents, ids(1))}, "at least 2 offsets"),
    "offsets, keys": ({"mask": (a.documents, ids(4), ids(5))}, "as many documents for keys"),
    "prefixes": ({"mask": (a.prefix, ids(4), ids(7))}, "one length per document"),
    "spans, rows": ({"mask": (a.spans, ids(1, 1, 8, 1, 2))}, "one entry for each query, 7, got 8"),
    "spans, batch": ({"mask": (a.spans, ids(3, 1, 7, 1, 2))}, "along the batch axis, got 3"),
    "dense, keys": ({"mask": (a.from_dense, ids(7, 10) > 0)}, "describe 9 keys, got 10"),
    "predicate": (
        {"mask": (lambda: a.from_predicate(lambda b, h, q, k: q.flatten() >= 0),)},
        r"from_predicate\(<lambda>\): expected",
    ),
    "library, chosen": ({"mask": (lambda x: lib.selected_blocks(x, 4), ids(3, 1, 2, 1))}, "axis, got 3"),
    "library, canvas": ({"mask": (lambda: lib.natten((3, 4), (3, 3)),)}, "describe 9 keys, got 12"),
    "library, prefix": ({"mask": (lib.shared_prefix, ids(4), ids(4))}, "one number for each document"),
    "library, rows": ({"mask": (lambda: lib.per_row([a.causal()] * 3),)}, "along the batch axis, got 3"),
    "prepared, q_len": ({"mask": _prepared(8, 9)}, "q_len=7"),
    "prepared, batch": ({"mask": _prepared(7, 9, 3)}, "B=2"),
    "prepared, heads": ({"mask": _prepared(7, 9, heads=2)}, "H=4"),
    "spans of other keys": ({"mask": a.causal().spans(7, 8)}, "expected spans over k_len=9 keys"),
    "spans of other queries": ({"mask": a.causal().spans(6, 9)}, r"bounds: expected .*q_len=7, got \("),
    "spans of another batch": ({"mask": _bounds(3, 1, 7, 1, 2)}, r"bounds: expected \(B\|1, .* with B=2"),
    "no spans": ({"mask": _bounds(1, 1, 7, 0, 2)}, "bounds: expected"),
    "indices twice": ({"mask": PREPARED, "q_index": np.arange(7)}, _INDICES),
    "indices twice, an option that has none": (
        {"mask": PREPARED, "q_index": np.arange(7), "softcap": 3.0},
        f"{_INDICES} that depends on",
    ),
    **{
        f"packed, {mask!r}": (
            {**PACKED, "mask": mask},
            rf"keeps packed documents apart, got {re.escape(repr(mask))}.*Combine it by & with documents",
        )
        for mask in MIXING
    },
    "packed, joined": (
        {**PACKED, "mask": (lambda cu: a.causal() | a.documents(cu), CU)},
        r"keeps packed documents apart, got causal\(\) \| documents.*Combine it by & with documents",
    ),
    # Options.
    "slopes of documents": (
        {**PACKED, "mask": (a.documents, CU), "bias": (a.alibi, np.ones((2, 2), np.float32))},
        r"alibi: slopes: expected \(2,\) or \(1, 2\).*Slopes for each packed document are not supported: pad",
    ),
    "softcap 0": ({"softcap": 0.0}, "softcap: expected a positive, finite number .* got 0.0"),
    "softcap": ({"softcap": -1.0}, "softcap: expected a positive, finite number .* got -1.0"),
    "softcap tiny": ({"softcap": 1e-40}, "softcap: expected a positive, finite .*1e-30.* got 1e-40"),
    "softcap nan": ({"softcap": math.nan}, "softcap: expected a positive, finite .* got nan"),
    "softcap inf": ({"softcap": math.inf}, "softcap: expected a positive, finite .* got inf"),
    "sinks": ({"sinks": zeros(3)}, r"sinks: expected \(4,\): .* got \(3,\)"),
    "sinks rank": ({"sinks": zeros(4, 1)}, r"sinks: expected \(4,\)"),
    "alibi": ({"bias": (a.alibi, zeros(3))}, r"slopes: expected \(4,\) or \(2, 4\)"),
    "slopes batch": ({"bias": (a.alibi, zeros(3, 4))}, r"slopes: expected .* got \(3, 4\)"),
    "relative": ({"bias": (a.relative, zeros(3, 9))}, r"relative: table: expected \(4, n\)"),
    "bias": ({"bias": zeros(7, 8)}, r"dense bias: expected .*k_len=9, got \(7, 8\)"),
    "dense one key": ({"bias": zeros(7, 1)}, "dense bias: expected"),
    "dense heads": ({"bias": (a.dense_bias, zeros(2, 7, 9))}, "dense bias: expected"),
    "dropout 1": ({"dropout_p": 1.0}, "dropout_p: expected at least 0 and below 1, got 1.0"),
    "dropout below 0": ({"dropout_p": -0.1}, "dropout_p: expected at least 0"),
    "dropout nan": ({"dropout_p": math.nan, "dropout_seed": np.array(11)}, "dropout_p: expected at least"),
    "no seed": ({"dropout_p": 0.1}, "dropout_seed: expected an integer .* got None"),
    "index length": (
        {"mask": PREPARED, "q_index": np.arange(6), **WITH_BIAS},
        r"q_index: expected \(7,\) or \(2, 7\), got \(6,\)",
    ),
    "index batch": (
        {"mask": SPANS, "k_index": ids(3, 9), **WITH_BIAS},
        r"k_index: expected \(9,\) or \(2, 9\)",
    ),
    "bare spans": (
        {"mask": PREPARED.lowered, **WITH_BIAS},
        r"q_index: expected the queries' indices with bare spans.*prepare",
    ),
}
#: ARRAY is what the front end calls its arrays.
_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "q, str": ({"q": "q"}, "q: expected a .*got str"),
    "integers": ({"q": Q.astype(int), "k": K.astype(int)}, "q: expected a floating dtype .* got int"),
    "scale array": ({"scale": np.array(1.0)}, "scale: expected a Python number, got .*Multiply q by it"),
    "no mask": ({"mask": np.ones((7, 9))}, r"mask: expected a mask expression.*got \w+.*from_dense"),
    "dense, dtype": ({"mask": (a.from_dense, ids(7, 9))}, "from_dense: visible: expected a bool"),
    "predicate, floats": (
        {"mask": (lambda: a.from_predicate(lambda b, h, q, k: (q - k) * 0.5),)},
        r"float32\. .*bias=",
    ),
    "softcap array": ({"softcap": np.array(3.0)}, "softcap: expected a Python number"),
    "sinks dtype": ({"sinks": ids(4)}, "sinks: expected a floating ARRAY, got"),
    "sinks kind": ({"sinks": [0.0] * 4}, "sinks: expected a floating ARRAY, got list"),
    "dense dtype": ({"bias": ids(7, 9) > 0}, "dense_bias: expected a floating array"),
    "bias kind": ({"bias": lambda s, *_: s}, "bias: expected an? ARRAY, or the result .* got function"),
    "dropout array": ({"dropout_p": np.array(0.1)}, "dropout_p: expected a Python number"),
    "seed dtype": ({"dropout_p": 0.1, "dropout_seed": np.array(0.5)}, "dropout_seed: expected .*got .*float"),
    "seed without dropout": ({"dropout_seed": np.array(True)}, "dropout_seed: .* got .*bool"),
    "index dtype": (
        {"mask": SPANS, "k_index": zeros(9), **WITH_BIAS},
        "k_index: expected an integer ARRAY, got .*float32",
    ),
}


def of_kinds(
    values: dict[str, tuple[dict[str, Any], str]], types: dict[str, tuple[dict[str, Any], str]]
) -> dict[str, Mistake]:
    """Those of two tables, which are errors of values and of types."""
    kinds = (ValueError, values), (TypeError, types)
    return {name: (given, kind, text) for kind, table in kinds for name, (given, text) in table.items()}


def of(array: str) -> dict[str, Mistake]:
    """Those of every front end; `array` is what this one calls its arrays."""
    found = of_kinds(_VALUES, _TYPES)
    return {name: (given, kind, text.replace("ARRAY", array)) for name, (given, kind, text) in found.items()}


def of_framework(given: dict[str, Any], convert: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """The keywords of a call with q, k and v, and with a framework's arrays."""

    def made(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(made, x))
        return convert(x) if isinstance(x, np.ndarray) else x

    given = {"q": Q, "k": K, **given}
    return {name: made(x) for name, x in ({"v": given["k"]} | given).items()}


def call(attend: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call what is to be called inside, and `attend`."""
    return attend(**{name: x[0](*x[1:]) if isinstance(x, tuple) else x for name, x in given.items()})


def error_of(function: Callable[..., Any], *inputs: Any) -> Exception:
    try:
        function(*inputs)
    except (ValueError, TypeError) as error:
        return error
    raise AssertionError("no error")


def check(error: Exception, kind: type[Exception], text: str) -> None:
    """An error says what was expected, what it got, and ends with a remedy."""
    assert isinstance(error, kind)
    assert re.search(text, str(error), re.DOTALL), error
    assert re.search("[,;] got ", str(error)), error
    assert str(error).endswith("."), error
