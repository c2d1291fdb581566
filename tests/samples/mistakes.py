"""What users get wrong in calls of attention, and what the error says; mistaken_objects.py has the rest.

Each table has one mistake a line: code => type of the error: text, a regular expression. An indented line
continues the one above. The code is the keywords of a call, or all of it. Each front end runs `CALLS` with
its own arrays, which `zeros`, `ones`, `ids`, `arange` and `array` make. `*` marks calls that the ordinary
run compiles. `~` marks those that nothing compiles: a compiler knows no values of indices, and takes no masks
that are prepared inside.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnspan as a
from attnspan import errors
from attnspan import library as lib

CALLS = r"""
q=zeros(2, 4, 16) => ValueError: q: expected 4 dims .* got \(2, 4, 16\)
layout='sbhd' => ValueError: layout: expected one of bhsd, bshd, thd, got 'sbhd'
layout=['bhsd'] => ValueError: layout: expected one of bhsd, bshd, thd
k=zeros(3, 2, 9, 16) => ValueError: batch: expected the same batch size
k=zeros(2, 2, 9, 8), v=K => ValueError: head_dim: expected the same for q and k
v=zeros(2, 4, 9, 16) => ValueError: expected as many value as key heads
* v=zeros(2, 2, 8, 16) => ValueError: expected as many values as keys
* q=zeros(2, 3, 7, 16) => ValueError: heads: expected a multiple of the key heads
q=zeros(2, 0, 7, 16) => ValueError: expected at least one query and one key head
~ scale=math.nan => ValueError: scale: expected a finite float32 number, got nan
scale=1e+300 => ValueError: scale: expected a finite float32 number, got 1e\+300
backend='cuda' => ValueError: backend: expected None or one of cpu, .*, math, .*got 'cuda'
q=zeros(1, 1, 4, 584), k=zeros(1, 1, 4, 584), backend='cpu' => ValueError: to 576, not 584
* q_index=ids(8) => ValueError: q_index: expected
k_index=arange(10) => ValueError: k_index: expected one index for each key, 9, got 10
* mask=a.segments(ids(2, 11)) => ValueError: describe 9 keys, got 11
mask=a.segments(ids(8), ids(9)) => ValueError: one entry for each query, 7, got 8
mask=a.segments(ids(1, 2, 9)) => ValueError: 1 or 2 axes
mask=a.key_padding(10) => ValueError: at most 9
* mask=a.causal() & a.cache(ids(3)) => ValueError: along the batch axis, got 3
* mask=a.cache(ids(2)) & a.documents(array([0, 3]), array([0, 3]))
    => ValueError: q_index: expected one default
mask=a.documents(ids(1)) => ValueError: at least 2 offsets
* mask=a.documents(ids(4), ids(5)) => ValueError: as many documents for keys
* mask=a.prefix(ids(4), ids(7)) => ValueError: one length per document
* mask=a.spans(ids(1, 1, 8, 1, 2)) => ValueError: one entry for each query, 7, got 8
* mask=a.from_predicate(lambda b, h, q, k: q.flatten() >= 0)
    => ValueError: from_predicate\(<lambda>\): expected
* mask=lib.selected_blocks(ids(3, 1, 2, 1), 4) => ValueError: axis, got 3
mask=lib.natten((3, 4), (3, 3)) => ValueError: describe 9 keys, got 12
mask=lib.shared_prefix(ids(4), ids(4)) => ValueError: one number for each document
mask=lib.per_row([a.causal()] * 3) => ValueError: along the batch axis, got 3
~ mask=prepared(8, 9) => ValueError: q_len=7
~ mask=prepared(7, 9, 3) => ValueError: B=2
* mask=BY_HEAD => ValueError: H=4
~ mask=a.causal().spans(7, 8) => ValueError: expected spans over k_len=9 keys
~ mask=a.causal().spans(6, 9) => ValueError: bounds: expected .*q_len=7, got \(
~ mask=bounds(3, 1, 7, 1, 2) => ValueError: bounds: expected \(B\|1, .* with B=2
~ mask=bounds(1, 1, 7, 0, 2) => ValueError: bounds: expected
mask=PREPARED, q_index=arange(7), softcap=3.0
    => ValueError: q_index, k_index: expected None with a mask that is already lowered and no option that
    depends on
~ **PACKED, mask=a.key_padding(8) & a.causal()
    => ValueError: keeps packed documents apart, got key_padding\(8\) & causal\(\).*Combine it by & with
    documents
~ **PACKED, mask=a.cache(8) & a.causal()
    => ValueError: keeps packed documents apart, got cache\(8\) & causal\(\).*Combine it by & with
    documents
**PACKED, mask=a.causal() | a.documents(array([0, 3, 8]))
    => ValueError: keeps packed documents apart, got causal\(\) \| documents.*Combine it by & with
    documents
~ **PACKED, mask=a.documents(array([0, 3, 8])), bias=a.alibi(ones(2, 2))
    => ValueError: alibi: slopes: expected \(B\|1, H\) with B=1, H=2.*Slopes for each packed document are not
    supported: pad
* softcap=-1.0 => ValueError: softcap: expected a positive, finite number .* got -1.0
softcap=1e-40 => ValueError: softcap: expected a positive, finite .*1e-30.* got 1e-40
~ softcap=math.nan => ValueError: softcap: expected a positive, finite .* got nan
sinks=zeros(3) => ValueError: sinks: expected \(H,\) with H=4: a logit .* got \(3,\)\. .* sinks\[:q_heads\]
bias=a.alibi(zeros(3)) => ValueError: slopes: expected \(B\|1, H\) with B=2, H=4
* bias=a.relative(zeros(3, 9)) => ValueError: relative: table: expected \(H, n\) with H=4
* bias=zeros(7, 8) => ValueError: dense bias: expected .*k_len=9: .*got \(7, 8\)
bias=a.dense_bias(zeros(2, 7, 9)) => ValueError: dense bias: expected
dropout_p=1.0 => ValueError: dropout_p: expected at least 0 and below 1, got 1.0
~ dropout_p=math.nan, dropout_seed=array(11) => ValueError: dropout_p: expected at least
dropout_p=0.1 => ValueError: dropout_seed: expected an integer .* got None
mask=PREPARED, q_index=arange(6), bias=SLOPES
    => ValueError: q_index: expected \(B\|1, q_len\) with .*q_len=7: .*got \(6,\)
mask=SPANS, k_index=ids(3, 9), bias=SLOPES => ValueError: k_index: expected \(B\|1, k_len\) with B=2, k_len=9
mask=PREPARED.lowered, bias=SLOPES
    => ValueError: q_index: expected the queries' indices with bare spans.*prepare
q='q' => TypeError: q: expected a .*got str
q=ids(2, 4, 7, 16), k=ids(2, 2, 9, 16) => TypeError: q: expected a floating dtype .* got int
scale=array(1.0) => TypeError: scale: expected a Python number, got .*Multiply q by it
* mask=ones(7, 9) => TypeError: mask: expected a mask expression.*got \w+.*from_dense
mask=a.from_dense(ids(7, 9)) => TypeError: from_dense: visible: expected a bool
* mask=a.from_predicate(lambda b, h, q, k: (q - k) * 0.5) => TypeError: float32\. .*bias=
softcap=array(3.0) => TypeError: softcap: expected a Python number
sinks=ids(4) => TypeError: sinks: expected a floating ARRAY, got
sinks=[0.0] * 4 => TypeError: sinks: expected a floating ARRAY, got list
bias=ids(7, 9) > 0 => TypeError: dense_bias: expected a floating array
bias=lambda s, *_: s => TypeError: bias: expected an? ARRAY, or the result .* got function
dropout_p=array(0.1) => TypeError: dropout_p: expected a Python number
dropout_p=0.1, dropout_seed=array(0.5) => TypeError: dropout_seed: expected .*got .*float
dropout_seed=array(True) => TypeError: dropout_seed: .* got .*bool
mask=SPANS, k_index=zeros(9), bias=SLOPES => TypeError: k_index: expected an integer ARRAY, got .*float32
"""

#: Of PyTorch alone: elsewhere, sparse, or no tensors at all.
TENSORS = r"""
q=torch.zeros(2, 4, 7, 0) => ValueError: head_dim: expected at least one element
k=on_meta(*K.shape), v=K => ValueError: expected one device, got cpu, meta, cpu
q=on_meta(1, 1, 1, 8), k=on_meta(1).expand(1, 1, 2 ** 31 - 64, 8)
    => ValueError: k_len: expected at most 2147483583
mask=a.Spans(on_meta(1, 1, 7, 1, 2, dtype=torch.int32), 9) => ValueError: bounds: expected device cpu
bias=a.alibi(on_meta(4)) => ValueError: bias: slopes: expected device cpu
q_index=on_meta(7, dtype=torch.int64) => ValueError: q_index: expected device cpu \(as q\), got meta
dropout_p=0.1, dropout_seed=torch.zeros(4).long()
    => ValueError: dropout_seed: expected shape \(\) or \(B, H\) = \(2, 4\), got \(4,\). .*dropout_seeds\(
~ mask=SPANS, k_index=torch.arange(9) + 2 ** 40, bias=SLOPES
    => ValueError: k_index: expected int32 indices, got 1099511627776 to 1099511627784
~ mask=PREPARED, q_index=(torch.arange(7) + 2 ** 31).to(torch.uint32), bias=SLOPES
    => ValueError: q_index: expected int32 indices
dropout_p=0.1, dropout_seed=3
    => TypeError: dropout_seed: expected an integer tensor, got int. Pass torch.tensor\(seed\)
k=K.numpy(), v=K => TypeError: k: expected a torch\.Tensor, got ndarray
k=K.bfloat16(), v=K => TypeError: one dtype, got float32, bfloat16, float32
~ k=K.to_sparse(), v=K => TypeError: k: expected a dense tensor, got one of torch.sparse_coo
mask=a.Spans(torch.zeros(1, 1, 7, 1, 2).long(), 9) => TypeError: bounds: expected int32, got int64
sinks=np.zeros(4)
    => TypeError: sinks: expected a floating tensor, got ndarray. Convert it with torch.as_tensor
mask=PREPARED, q_index=np.arange(7), bias=SLOPES
    => TypeError: q_index: expected an integer tensor, got ndarray. Convert it with torch.as_tensor
"""

#: Of the drop-in for torch's scaled_dot_product_attention.
SDPA = r"""
attn_mask=torch.zeros(8, 7) => ValueError: a shape that broadcasts .*\(1, 2, 8, 8\)
**dict.fromkeys(('query', 'key', 'value'), EIGHT[None]), attn_mask=torch.zeros(3, 1, 1, 2, 8, 8)
    => ValueError: attn_mask: expected a shape that broadcasts to \(1, 1, 2, 8, 8\), got \(3, 1, 1, 2, 8,
    8\)
attn_mask=a.causal(), is_causal=True => ValueError: expected no attn_mask with it
key=EIGHT[:, :1], value=EIGHT[:, :1] => ValueError: enable_gqa=True
key=EIGHT[0, 0, 0] => ValueError: at least 2 dims, .*, got .*, 16
~ query=EIGHT.expand(3, -1, -1, -1), key=EIGHT.expand(2, -1, -1, -1) => ValueError: that broadcast
value=torch.zeros(1, 2, 9, 16) => ValueError: expected
dropout_p=1.5 => ValueError: dropout_p: expected at least 0 and below 1, got 1\.5
attn_mask=torch.zeros(8, 8).long() => TypeError: expected torch.bool, a floating .*torch.int64
key=EIGHT.numpy() => TypeError: key: .* got ndarray. Convert it
"""

#: Of JAX alone; the seeds are those of dropout.
ARRAYS = r"""
k=K.astype(jnp.float8_e4m3fn) => TypeError: k: expected a floating dtype .*float8_e4m3fn
* k=K.astype(jnp.bfloat16), v=K
    => TypeError: q, k and v: expected one dtype, got float32, bfloat16, float32\. Convert them .*\.astype
dropout_p=0.5 => ValueError: dropout_seed: .*got None.*fold_in
dropout_p=0.5, dropout_seed=3
    => TypeError: dropout_seed: .*expected an integer array or a jax\.random\.key, got int
* dropout_p=0.5, dropout_seed=ids(2, 4)
    => ValueError: expected shape \(\) or uint32 \(B, H, 2\) = \(2, 4, 2\), got int32 \(2, 4\)\. Pass one
dropout_p=0.5, dropout_seed=jax.random.key(0, impl='rbg')
    => TypeError: dropout_seed: .*expected a key of two words
dropout_p=0.5, dropout_seed=RAW_KEY
    => ValueError: dropout_seed: .*got uint32 \(2,\)\. If it is a raw .*jax\.random\.wrap_key_data\(key\)\.$
mask=__import__('torch').ones(7, 9) > 0
    => TypeError: mask: expected .*got Tensor of bool.*from_dlpack.*\. Wrap booleans.*from_dense
backend='pallas' => ValueError: backend='pallas': expected .* got pallas: it runs on TPUs, not on cpu
"""

#: Of the drop-in for jax.nn.dot_product_attention: two batch elements, T = 6 queries, S = 9 keys.
DROP_IN = r"""
query=[[1.0]] => TypeError: query: expected a JAX or NumPy array, got list
query=QKV[0][0, 0] => ValueError: query: expected \(batch, .*got shape \(4, 16\)
mask=jnp.zeros((T, S)) => TypeError: mask: expected a boolean array or a mask .*, got float32.*as bias
mask='causal' => TypeError: mask: expected a boolean array.*got str
mask=jnp.ones((T, S + 1), bool)
    => ValueError: mask: expected a shape that broadcasts to .*\(2, 4, 6, 9\), got \(1, 1, 6, 10\)
mask=causal(), is_causal=True => ValueError: mask: expected no is_causal .* Combine masks with causal
bias=jnp.zeros((3, T, S)) => ValueError: bias: expected a shape that broadcasts
bias=1.0 => TypeError: bias: expected an array, got float
local_window_size=(-1, 3) => ValueError: window: left: expected 0 to .*got -1
query_seq_lengths=jnp.zeros(3, int) => ValueError: query_seq_lengths: expected \(2,\), got shape \(3,\)
key_value_seq_lengths=jnp.zeros(2) => TypeError: key_value_seq_lengths: expected int32, got float32
implementation='flash' => ValueError: backend: .*got 'flash'
"""


@dataclass(frozen=True)
class Mistake:
    """One row of a table. `mark` is "*", "~" or empty."""

    code: str
    kind: type[Exception]
    text: str
    mark: str

    def __repr__(self) -> str:
        return self.code


def rows(table: str) -> list[Mistake]:
    """The mistakes of a table."""
    found = []
    for line in re.sub(r"\n +", " ", table).strip().splitlines():
        (parts,) = re.findall(r"^(?:([*~]) )?(.*?) => (\w+): (.*)$", line)
        mark, code, kind, text = parts
        found.append(Mistake(code, getattr(errors, kind, None) or getattr(builtins, kind), text, mark))
    return found


def _prepared(q_len: int, k_len: int, batch: int = 1, heads: int = 1) -> a.Prepared:
    mask = a.segments(np.zeros((batch, k_len), int))
    mask = mask if heads == 1 else lib.per_head([a.causal(), mask])
    return mask.prepare(q_len, k_len, batch=batch, heads=heads)


def namespace(**made: Any) -> dict[str, Any]:
    """The names that the code of calls uses, with the functions that make a framework's arrays."""
    common = {"a": a, "lib": lib, "math": math, "np": np, "prepared": _prepared}
    common |= {"SPANS": a.causal().spans(7, 9), "PREPARED": a.causal().prepare(7, 9)}
    common |= {"BY_HEAD": _prepared(7, 9, heads=2)}
    common["bounds"] = lambda *shape: a.Spans(np.zeros(shape, "int32"), 9)
    zeros = made["zeros"]
    packed = {"q": zeros(8, 2, 16), "k": zeros(8, 2, 16), "layout": "thd"}
    arrays = {"Q": zeros(2, 4, 7, 16), "K": zeros(2, 2, 9, 16), "SLOPES": a.alibi(made["ones"](4))}
    return common | made | arrays | {"PACKED": packed}


def call(mistake: Mistake, attend: Callable[..., Any], names: dict[str, Any]) -> Callable[[], Any]:
    """A function of the call, with keys as values, and with what is right where the row says nothing."""

    def run(given: dict[str, Any]) -> Any:
        given = {"q": names["Q"], "k": names["K"], **given}
        return attend(**{"v": given["k"], **given})

    return eval(f"lambda: run(dict({mistake.code}))", {**names, "run": run})  # type: ignore[no-any-return]


def error_of(function: Callable[..., Any], *inputs: Any) -> Exception:
    try:
        function(*inputs)
    except (ValueError, TypeError) as error:
        return error
    raise AssertionError("no error")


def check(error: Exception, mistake: Mistake, array: str = "") -> None:
    """An error says what was expected, what it got, and ends with a remedy."""
    assert isinstance(error, mistake.kind)
    assert re.search(mistake.text.replace("ARRAY", array), str(error), re.DOTALL), error
    assert re.search("[,;] got ", str(error)), error
    assert str(error).endswith("."), error
