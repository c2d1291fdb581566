"""What users get wrong: calls of attention, masks and caches, each with its error and what the error says.

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
k=zeros(2, 0, 9, 16) => ValueError: at least one query and one key head
~ scale=math.nan => ValueError: scale: expected a finite float32 number, got nan
~ scale=-math.inf => ValueError: scale: expected a finite float32 number, got -inf
scale=1e+300 => ValueError: scale: expected a finite float32 number, got 1e\+300
backend='cuda' => ValueError: backend: expected None or one of cpu, .*, math, .*got 'cuda'
q=zeros(1, 1, 4, 584), k=zeros(1, 1, 4, 584), backend='cpu' => ValueError: to 576, not 584
* q_index=ids(8) => ValueError: q_index: expected
k_index=arange(10) => ValueError: k_index: expected one index for each key, 9, got 10
* mask=a.segments(ids(2, 11)) => ValueError: describe 9 keys, got 11
mask=a.segments(ids(3, 9)) => ValueError: 1 or 2 along the batch axis, got 3
mask=a.segments(ids(8), ids(9)) => ValueError: one entry for each query, 7, got 8
mask=a.segments(ids(1, 2, 9)) => ValueError: 1 or 2 axes
mask=a.key_padding(ids(3)) => ValueError: along the batch axis, got 3
mask=a.key_padding(10) => ValueError: at most 9
* mask=a.causal() & a.cache(ids(3)) => ValueError: along the batch axis, got 3
* mask=a.cache(ids(2)) & a.documents(array([0, 3]), array([0, 3]))
    => ValueError: q_index: expected one default
mask=a.documents(ids(1)) => ValueError: at least 2 offsets
* mask=a.documents(ids(4), ids(5)) => ValueError: as many documents for keys
* mask=a.prefix(ids(4), ids(7)) => ValueError: one length per document
* mask=a.spans(ids(1, 1, 8, 1, 2)) => ValueError: one entry for each query, 7, got 8
~ mask=a.spans(ids(3, 1, 7, 1, 2)) => ValueError: along the batch axis, got 3
* mask=a.from_dense(ids(7, 10) > 0) => ValueError: describe 9 keys, got 10
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
mask=PREPARED, q_index=arange(7)
    => ValueError: q_index, k_index: expected None with a mask that is already lowered and no option
mask=PREPARED, q_index=arange(7), softcap=3.0
    => ValueError: q_index, k_index: expected None with a mask that is already lowered and no option that
    depends on
~ **PACKED, mask=a.key_padding(8) & a.causal()
    => ValueError: keeps packed documents apart, got key_padding\(8\) & causal\(\).*Combine it by & with
    documents
~ **PACKED, mask=a.keys([True] * 8) & a.causal()
    => ValueError: keeps packed documents apart, got keys\(bool\[8\]\) & causal\(\).*Combine it by & with
    documents
~ **PACKED, mask=a.cache(8) & a.causal()
    => ValueError: keeps packed documents apart, got cache\(8\) & causal\(\).*Combine it by & with
    documents
~ **PACKED, mask=a.prefix(2) | a.causal()
    => ValueError: keeps packed documents apart, got prefix\(2\) \| causal\(\).*Combine it by & with
    documents
**PACKED, mask=a.causal() | a.documents(array([0, 3, 8]))
    => ValueError: keeps packed documents apart, got causal\(\) \| documents.*Combine it by & with
    documents
~ **PACKED, mask=a.documents(array([0, 3, 8])), bias=a.alibi(ones(2, 2))
    => ValueError: alibi: slopes: expected \(2,\) or \(1, 2\).*Slopes for each packed document are not
    supported: pad
softcap=0.0 => ValueError: softcap: expected a positive, finite number .* got 0.0
* softcap=-1.0 => ValueError: softcap: expected a positive, finite number .* got -1.0
softcap=1e-40 => ValueError: softcap: expected a positive, finite .*1e-30.* got 1e-40
~ softcap=math.nan => ValueError: softcap: expected a positive, finite .* got nan
~ softcap=math.inf => ValueError: softcap: expected a positive, finite .* got inf
sinks=zeros(3) => ValueError: sinks: expected \(4,\): .* got \(3,\)
sinks=zeros(4, 1) => ValueError: sinks: expected \(4,\)
bias=a.alibi(zeros(3)) => ValueError: slopes: expected \(4,\) or \(2, 4\)
bias=a.alibi(zeros(3, 4)) => ValueError: slopes: expected .* got \(3, 4\)
* bias=a.relative(zeros(3, 9)) => ValueError: relative: table: expected \(4, n\)
* bias=zeros(7, 8) => ValueError: dense bias: expected .*k_len=9, got \(7, 8\)
bias=zeros(7, 1) => ValueError: dense bias: expected
bias=a.dense_bias(zeros(2, 7, 9)) => ValueError: dense bias: expected
dropout_p=1.0 => ValueError: dropout_p: expected at least 0 and below 1, got 1.0
dropout_p=-0.1 => ValueError: dropout_p: expected at least 0
~ dropout_p=math.nan, dropout_seed=array(11) => ValueError: dropout_p: expected at least
dropout_p=0.1 => ValueError: dropout_seed: expected an integer .* got None
mask=PREPARED, q_index=arange(6), bias=SLOPES => ValueError: q_index: expected \(7,\) or \(2, 7\), got \(6,\)
mask=SPANS, k_index=ids(3, 9), bias=SLOPES => ValueError: k_index: expected \(9,\) or \(2, 9\)
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
sinks=on_meta(4) => ValueError: sinks: expected device cpu
bias=a.alibi(on_meta(4)) => ValueError: bias: slopes: expected device cpu
dropout_p=0.1, dropout_seed=on_meta(dtype=torch.int64) => ValueError: dropout_seed: expected device cpu
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
attn_mask=torch.zeros(1, 1, 2, 8, 8) => ValueError: attn_mask: .* broadcasts
**dict.fromkeys(('query', 'key', 'value'), EIGHT[None]), attn_mask=torch.zeros(3, 1, 1, 2, 8, 8)
    => ValueError: attn_mask: expected a shape that broadcasts to \(1, 1, 2, 8, 8\), got \(3, 1, 1, 2, 8,
    8\)
attn_mask=torch.zeros(8, 7) == 0 => ValueError: attn_mask: expected a shape that broadcasts
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

#: `low` lowers for four queries and keys; `x` makes an array of a list, in each way.
MASKS = r"""
a.window(-1, -1) => OptionError: left: expected 0 to 2147483647, got -1. .*None for all keys of a side
a.window(2**31) => OptionError: window: left: expected 0 to 2147483647, got 2147483648
a.global_keys(-1) => OptionError: global_keys: n: expected 0 to
a.prefix(-2) => OptionError: prefix: lengths: expected 0 to
a.key_padding(3, side='top') => OptionError: key_padding: side: expected "right" or "left", got 'top'
a.key_padding(3, start=-1) => OptionError: key_padding: start: expected 0 to
a.key_padding(3, start=4, stop=2) => OptionError: stop: expected 4 to .* Pass the first key after
a.from_block_mask(BLOCKS, -1) => OptionError: from_block_mask: max_runs: expect
a.Spans(ONE_SPAN, -1) => OptionError: Spans: k_len: expected at least 0, got -1
low(a.segments(IDS), q_index=np.array([0, 1, 2, 4])) => OptionError: q_index: expected indices below 4
low(a.documents([0, 3, 2])) => OptionError: cu_seqlens_q: expected ascending offsets that start at 0 and
low(a.documents([1, 4])) => OptionError: ascending offsets that start at 0
low(a.documents([0, -1, 4])) => OptionError: ascending offsets that start at 0
low(a.documents([0, 5])) => OptionError: end at 4 or before, .* pass layout='bshd'
low(a.documents([0, 4], [0, 5])) => OptionError: cu_seqlens_k: expected ascending offsets .* end at 4
low(a.prefix([-1, 2])) => OptionError: prefix: lengths: expected lengths of at least 0, got
low(a.prefix([-1], [0, 4])) => OptionError: prefix: lengths: expected lengths of at least 0, got
low(a.key_padding([5, 4])) => OptionError: lengths of at least 0 and at most 4, .* pass layout='bshd'
low(a.key_padding(5)) => OptionError: expected a length of at least 0 and at most 4.*, got 5
low(a.key_padding(1, stop=5)) => OptionError: expected a part of the 4 keys, got keys 0 to 5
low(a.key_padding(1, start=5)) => OptionError: expected a part of the 4 keys, got keys 5 to 4
low(a.key_padding([3, 0], start=2)) => OptionError: expected lengths of at least 0 and at most 2
low(a.keys([True, False, True, True], 1)) => OptionError: keys: expected at most max_runs=1 runs
low(a.cache([5, 4])) => OptionError: cache: lengths: expected lengths of at least 0 and at most 4
low(a.cache(2) & a.cache(3)) => OptionError: q_index: .* got one from cache\(2\) and another
low(a.cache([2, 2]) & a.documents([0, 4], [0, 4])) => OptionError: q_index: expected one default
low(a.from_predicate(lambda b, h, q, k: q > k and k > 2)) => OptionError: <lambda>\): .* Write it with &
low(a.spans(np.full((1, 1, 4, 1, 2), 5))) => OptionError: query 0: .* in \[0, 4\], got \(5, 5\). Clip
low(a.causal(), q_index=np.full(4, 2**31)) => OptionError: q_index: expected int32 indices
low(a.causal(), k_index=np.array([0, 1, 1, 2])) => OptionError: k_index: expected strictly ascending
low(a.segments(IDS), q_index=IDS, k_index=np.array([0, 1, 2, 4])) => OptionError: indices in \[0, 4\)
low(EVERY, k_index=np.arange(4)) => OptionError: from_predicate\(<lambda>\): .* k_index alone
a.causal().spans(2**31, 4) => OptionError: q_len: expected 0 to 2147483647, got 2147483648
a.causal().spans(4, 2**31) => OptionError: k_len: expected 0 to 2147483647, got 2147483648
a.causal().spans(-1, 4) => OptionError: q_len: expected 0 to 2147483647, got -1
low(a.documents(x([0, 2**32 + 4]))) => OptionError: cu_seqlens_q: expected at most 2147483647, got 4294967300
low(a.documents(x([0, 4]), x([0, 2**32 + 4]))) => OptionError: cu_seqlens_k: expected at most 2147483647
low(a.key_padding(x([2**32 + 3, 2]))) => OptionError: key_padding: lengths: expected at most 2147483647
low(a.key_padding(x([-(2**32) + 3, 2]))) => OptionError: key_padding: lengths: .* got -4294967293
low(a.cache(x([2**32 + 3, 2]))) => OptionError: cache: lengths: expected at most 2147483647
low(a.prefix(x([2**32 + 3, 2]))) => OptionError: prefix: lengths: expected at most 2147483647
low(a.prefix(x([2**32 + 3, 2]), x([0, 2, 4]))) => OptionError: prefix: lengths: expected at most 2147483647
lib.dilated(4, 0) => OptionError: dilated: dilation: expected 1 to
low(lib.shared_prefix([0, 2, 4], [0, 2])) => OptionError: prefix_of: expected numbers of documents, 0 to 1
lib.tree([-1, 2, 0]) => OptionError: tree: parents: expected a parent before each .*, got 2 for node 1\.
lib.tree([[-1, 0], [-1, 1]]) => OptionError: got 1 for node 1 of batch element 1
lib.tree([-1, 0, 1], depth=2) => OptionError: tree: depth: expected at least 3, got 2
low(lib.tree([-1, 0], prefix=[1, 3])) => OptionError: tree: prefix: lengths: .* at least 0 and at most 2
lib.tree([-1, 0, 0], prefix=3).spans(3, 5) => OptionError: at most 2, got 3
lib.natten((4, 4), (3, 5)) => OptionError: kernel: expected at most the canvas \(4, 4\), got \(3, 5\)
lib.natten(8, 3, dilation=3) => OptionError: canvas \(8,\) with its dilation, got \(3,\) times \(3,\)
lib.natten(8, 3, stride=4) => OptionError: natten: stride: expected at most 3, the kernel, got 4
lib.natten((2**16, 2**16), 3)
    => OptionError: number of tokens: expected 1 to 2147483647, got 4294967296
lib.sta((6, 6), (4, 4), (4, 2)) => OptionError: sta: canvas: expected multiples of the tile \(4, 2\), got
lib.tiled_natten((4, 6), 3, 4) => OptionError: tile_order: canvas: expected multiples of the tile \(4, 4\)
lib.morton_natten(6, 3) => OptionError: morton_order: canvas: expected one power of two .*, got \(6, 6\)
low(lib.flamingo([3, 3], 2)) => OptionError: flamingo: positions: expected strictly ascending places
low(lib.selected_blocks(np.full((1, 1, 2, 1), 2), 2))
    => OptionError: selected_blocks: chosen: expected numbers of blocks of keys, below 2, or negative for none
low(lib.per_row([a.cache(2), a.full()]), k_index=np.array([0, 1, 2, 3]))
    => OptionError: q_index: expected q_index, because its default differs from mask to mask
lib.per_head([a.cache([2]), a.cache([1])]).spans(1, 2, heads=2)
    => OptionError: q_index: expected one default q_index for all masks
lib.per_document(a.cache(3), [0, 3]) => OptionError: a mask that depends only on indices, got cache
lib.reordered(a.causal(), [0, 2, 2]) => OptionError: reordered: order: expected a permutation of 0\.\.2
of_a_written_order() => OptionError: reordered: order: expected a permutation of 0\.\.3
lib.global_sliding(1, [True, False, True]).spans(3, 3) => OptionError: at most max_runs=1 runs
a.window((3, 0)) => DtypeError: window: left: expected an int, got tuple. Write window\(left, right\)
a.segments(torch.zeros(4)) => DtypeError: q_ids: expected an integer array, got torch.float32
a.segments(IDS > 0) => DtypeError: expected an integer array, got bool
a.key_padding(IDS > 0) => DtypeError: lengths: expected integers, got bool. Use keys\(valid\)
a.keys(IDS) => DtypeError: keys: valid: expected a bool array, got int64. Compare: .* mask != 0
a.from_dense(IDS) => DtypeError: from_dense: visible: expected a bool array, got int64
a.from_block_mask(3) => DtypeError: from_block_mask: mask_mod: expected a function
a.Spans(ONE_SPAN, 3.5) => DtypeError: Spans: k_len: expected an int, got float
a.Spans(ONE_SPAN, True) => DtypeError: Spans: k_len: expected an int, got bool
a.Spans(ONE_SPAN, None) => DtypeError: Spans: k_len: expected an int, got NoneType
a.Spans(np.zeros((1, 1, 4, 1, 2)), 3) => DtypeError: Spans: expected an int32 array, got float64
a.Spans([[0, 1]], 3) => DtypeError: Spans: expected an int32 array, got list
low(a.causal(), q_index=np.zeros(4)) => DtypeError: q_index: expected an integer array, got float64
low(a.causal(), like='cpu') => DtypeError: like: expected an array, got str
lib.global_sliding(1, np.arange(4)) => DtypeError: tokens: expected a bool array, got int64
lib.per_row([]) => DtypeError: per_row: expected a list of masks, got none
lib.per_head([a.causal(), None]) => DtypeError: per_head: expected masks, got NoneType
a.segments([[0, 1], [2]]) => ShapeError: segments: q_ids: expected rows of one length
a.segments(IDS[None, None]) => ShapeError: an array with 1 or 2 axes, got \(1, 1, 4\)
a.keys(IDS[None, None, None] > 0) => ShapeError: one axis of keys, got \(1, 1, 1, 4\).*mask\[:, 0, 0\]
a.from_dense(IDS > 0) => ShapeError: with 2 or 3 or 4 axes, got \(4,\)
a.spans(np.zeros((2, 2), int)) => ShapeError: Spans: expected bounds of shape .*, got \(2, 2\)
low(a.segments(np.zeros((3, 4), int))) => ShapeError: q_ids: expected 1 or 2 along the batch axis, got 3
low(a.segments(IDS[:3], IDS)) => ShapeError: segments: q_ids: expected one entry for each query, 4, got 3
low(a.keys(np.ones(3, bool))) => ShapeError: keys\(bool\[3\]\): .* that describe 4 keys, got 3
low(a.from_dense(np.ones((1, 3, 4, 4), bool))) => ShapeError: 1 along the heads axis, got 3. .*heads=
low(a.causal().prepare(3, 4)) => ShapeError: expected .* = \(2, 1, 4, 4\), got \(1, 1, 3, 4\)
low(a.causal(), q_index=IDS[:3]) => ShapeError: q_index: expected one global index for each query, 4, got
lib.shared_prefix([0, 2, 4], [0])
    => ShapeError: prefix_of: expected one number for each document, 2, got 1
lib.tree([]) => ShapeError: tree: parents: expected at least one node
low(lib.block_diffusion(4, 2)) => ShapeError: block_diffusion\(4, 2\): .* describe 4 keys, got 8
lib.natten((4, 4), (3, 3, 3)) => ShapeError: natten: kernel: expected 2 sizes, one for each axis, got 3
lib.natten((), ()) => ShapeError: natten: canvas: expected at least one axis, got none
low(lib.natten((4, 4), 3)) => ShapeError: natten\(\(4, 4\), \(3, 3\)\): .* describe 4 keys, got 16
low(lib.flamingo([0, 3], 3)) => ShapeError: flamingo\(int64\[2\], 3\): .* describe 4 keys, got 6
lib.vision_cross_attention(np.zeros((3, 3), int), 2)
    => ShapeError: vision_cross_attention: intervals: expected shape \(n, 2\) or \(B, n, 2\), n at least 1
lib.selected_blocks(np.zeros((1, 1, 2, 0), int), 2)
    => ShapeError: selected_blocks: chosen: expected \(B\|1, H\|1, query blocks, k\), none of them 0
low(lib.per_row([a.full()] * 3)) => ShapeError: per_row: expected 1 or 2 along the batch axis, got 3
low(lib.per_row([a.segments(IDS), a.segments(IDS[:3])])) => ShapeError: describe 4 keys, got 3
lib.per_document(a.segments(IDS), [0, 3]) => ShapeError: a mask without arrays for keys, got segments
lib.batchify(a.segments(IDS), 5) => ShapeError: batchify: expected arrays that describe 5 keys, got segme
"""

#: Of masks, spans and biases in expressions; `mask` is causal().
OPERATORS = r"""
~mask => TypeError: causal\(\): expected & .* or \| .*, got another operator.* have no ~
mask + mask => TypeError: causal\(\): expected & .* or \| .*, got another operator.* have no ~
mask - a.window(2) => TypeError: causal\(\): expected & .*, got another operator
mask * 2 => TypeError: causal\(\): expected & .*, got another operator
mask ^ mask => TypeError: causal\(\): expected & .*, got another operator
VISIBLE.float() + mask => TypeError: causal\(\): expected & .*, got another operator
np.ones((4, 4)) + mask => TypeError: causal\(\): expected & .*, got another operator
mask & VISIBLE => TypeError: & .*: expected two masks, got Tensor of bool, .*\. Wrap .* in from_dense
VISIBLE | mask => TypeError: \| .*: expected two masks, got Tensor of bool, .*\. Wrap .* in from_dense
mask | VISIBLE.numpy() => TypeError: expected two masks, got ndarray of bool, .*\. Wrap .* in from_dense
VISIBLE.numpy() & mask => TypeError: expected two masks, got ndarray of bool, .*\. Wrap .* in from_dense
IDS & mask => TypeError: expected two masks, got Tensor of int64, shape \(1, 4\)\. .*segments\(\.\.\.\)
mask | SPANS => TypeError: \| .*: expected two masks, got Spans\(.*\)\. Wrap it in spans
mask & a.window => TypeError: expected two masks, got the function window\. Call it: window\(left\)
1 | mask => TypeError: expected two masks, got int
mask & None => TypeError: expected two masks, got NoneType
SPANS & SPANS => TypeError: & .*: expected two masks, got Spans\(.*Wrap it in spans
SPANS | VISIBLE => TypeError: \| .*: expected two masks, got Spans\(.*Wrap it in spans
VISIBLE.numpy() & SPANS => TypeError: expected two masks, got Spans\(.*Wrap it in spans
1 | SPANS => TypeError: expected two masks, got Spans\(.*Wrap it in spans
"""

#: What users pass as a mask, in torch; arrays of torch are no arrays to JAX.
NO_MASKS = r"""
a.causal => TypeError: got the function causal\. Call it: causal\(\)\.
a.window => TypeError: got the function window\. Call it: window\(left\)\.
lib.natten => TypeError: got the function natten\. Call it: natten\(canvas, kernel\)\.
lambda _b, _h, q, k: q >= k => TypeError: got the function <lambda>\. Wrap a mask_mod in from_predicate
'causal' => TypeError: got 'causal'\. Read it by attnspan\.parse\('causal'\)\.
True => TypeError: got True\. Pass causal\(\) or full\(\)\.
a.causal | a.window => TypeError: got two masks without their parentheses\. Call them
VISIBLE.numpy() => TypeError: got ndarray of bool, shape \(4, 4\)\. Wrap booleans, .* from_dense
VISIBLE => TypeError: got Tensor of bool, shape \(4, 4\)\. Wrap booleans, .* from_dense
np.zeros((1, 1, 4, 1, 2), np.int32) => TypeError: got ndarray of int32.*Wrap bounds .* in spans
torch.zeros(1, 1, 4, 1, 2).int() => TypeError: got Tensor of int32.*Wrap bounds .* in spans
np.array([0, 4]) => TypeError: got ndarray of int64, shape \(2,\)\. .*documents\(\.\.\.\)
"""

#: Of biases; SIZES are those of a call.
BIASES = r"""
a.alibi(np.arange(4)) => DtypeError: alibi: slopes: expected a floating array, got int64
a.alibi(np.ones((1, 2, 4))) => ShapeError: 1 or 2 axes, got \(1, 2, 4\)
a.alibi_slopes(0) => OptionError: alibi_slopes: heads: expected 1 to
a.alibi_slopes(2.0) => DtypeError: alibi_slopes: heads: expected an int
a.relative(np.ones(4)) => ShapeError: relative: table: expected 2 axes
a.relative(np.ones((4, 32))) => ShapeError: relative: table.*2L \+ 1.*got \(4, 32\)
a.relative(np.ones((4, 32)), np.zeros(256, int))
    => ShapeError: relative: buckets: expected \(2L \+ 1,\).*got \(256,\)
a.relative(np.ones((4, 32)), np.zeros(5)) => DtypeError: relative: buckets
a.relative(np.ones((4, 16)), a.t5_buckets())
    => OptionError: relative: buckets: expected columns of the table, 0 to 15, got 0 to 31. Make
a.relative(torch.ones(4, 3), torch.tensor([0, -1, 2])) => OptionError: 0 to 2, got -1 to 2
a.relative(np.ones((5, 3))).lower(**SIZES)
    => ShapeError: relative: table: expected \(4, n\).*got \(5, 3\). Pass one row per query head.
    Transpose
a.t5_buckets(3) => OptionError: t5_buckets: num_buckets: expected 4 to
a.t5_buckets(33) => OptionError: t5_buckets: expected .* even number
a.t5_buckets(32, 8) => OptionError: max_distance beyond the 8 distances .*max_distance=8
a.dense_bias(np.ones(5)) => ShapeError: dense_bias: expected 2 or 3 or 4 axes
a.dense_bias(np.ones((3, 4))).lower(**SIZES)
    => ShapeError: dense bias: expected \(B\|1, H\|1, q_len\|1, k_len\) with B=2, H=4, .*, got \(3, 4\)
"""

#: Of mask functions, which are called on indices of 5 queries and 7 keys.
PREDICATES = r"""
lambda b, h, q, k: None => TypeError: from_predicate\(<lambda>\): expected .*got NoneType. End it with return
lambda b, h, q, k: 1 => TypeError: from_predicate\(<lambda>\): expected .*got int\. Compare: x != 0
lambda b, h, q, k: 0.5 => TypeError: from_predicate\(<lambda>\): expected .*got float\. Compare: x != 0
lambda b, h, q, k: q - k
    => TypeError: from_predicate\(<lambda>\): expected .*got an array of torch.int64\. Compare: x != 0
lambda b, h, q, k: -(q - k).abs().float()
    => TypeError: from_predicate\(<lambda>\): expected .*got an array of torch.float32\. .* pass bias=
lambda b, h, q, k: 'yes'
    => TypeError: from_predicate\(<lambda>\): expected .*got str\. Return the result of comparisons
lambda b, h, q, k: (q >= k)[..., :-1]
    => ValueError: from_predicate\(<lambda>\): expected .*raised IndexError: too many indices .* Index
    captured arrays within
lambda b, h, q, k: (q >= k)[None]
    => ValueError: from_predicate\(<lambda>\): expected .*one boolean for a pair, got \(1,\)\. Reduce or
    index
lambda b, h, q, k: torch.zeros(7) == k
    => ValueError: from_predicate\(<lambda>\): expected .*one boolean for a pair, got \(7,\)\. Reduce or
    index
_raises => ValueError: from_predicate\(_raises\): .* raised KeyError: 'no such document'\. Try it on one pair
lambda b, h, q, k: k if q > k else q
    => ValueError: raised RuntimeError: .*data-dependent control flow.*Write it with &
lambda b, h, q, k: q > k and k > 2
    => ValueError: raised RuntimeError: .*data-dependent control flow.*Write it with &
lambda b, h, q, k: _TABLE[b][q] == 0 => ValueError: raised IndexError: .*Index captured arrays within
partial(_within, hight=3) => ValueError: from_predicate\(_within\): .* raised TypeError: .*hight
lambda b, h, q: q > 0 => ValueError: raised TypeError: .* takes 3 positional arguments but 4 were given
"""

#: Of a cache `c` of 8 tokens, whose two batch elements hold 3 and 6.
CACHES = r"""
c.update(new(3), new(3)) => ValueError: element 1: expected room for 3 more tokens, got 6 of 8
c.update(new(9), new(9)) => ValueError: k_new: expected at most 8 tokens, got 9.*max_len
c.update(new(2), new(2), torch.tensor([1, 3])) => ValueError: counts\[1\]: expected 0 to 2.*got 3
c.update(new(2), new(2), torch.tensor([-1, 0])) => ValueError: counts\[0\].*got -1
c.update(new(2), new(2), torch.tensor([1])) => ValueError: counts: .*shape \(2,\), got
c.update(new(2), new(2), torch.ones(2)) => TypeError: counts: expected integers
c.update(new(1, heads=3), new(1)) => ValueError: k_new: expected batch 2, 2 heads and head dim 16
c.update(new(1), new(1, dim=8)) => ValueError: v_new: expected batch 2
c.update(new(1)[0], new(1)) => ValueError: k_new: .*got \(2, 1, 16\)
c.update(new(1), new(2)) => ValueError: v_new: expected as many tokens as k_new, got 2
c.update(new(1, dtype=torch.bfloat16), new(1)) => TypeError: k_new: expected torch.float32
c.update(new(1).to('meta'), new(1)) => ValueError: k_new: expected device cpu, as the cache, got meta
c.update([[1.0]], new(1)) => TypeError: k_new: expected a torch.Tensor, got list
c.update(new(1), new(1).requires_grad_()) => ValueError: without gradients.*no_grad
c.mask(9) => ValueError: mask: expected at most 8 queries, got 9
c.truncate(5) => ValueError: lengths\[0\]: expected 0 to 3, .*got 5
c.truncate(-1) => ValueError: lengths\[0\]: expected 0 to 3, .*got -1
c.truncate(torch.tensor([1])) => ValueError: one entry per batch element
c.truncate(torch.ones(2)) => TypeError: lengths: expected integers
c.truncate(True) => TypeError: lengths: expected an int, got bool
c.mask(1.5) => TypeError: mask: expected an int, got float
c.mask(-1) => ValueError: mask: expected 0 or more queries, got -1
c.positions(2, torch.tensor([1])) => ValueError: one entry per batch element
c.reset(torch.ones(2)) => TypeError: rows: expected integers
c.reset([0, 2]) => ValueError: indices from 0 to 1, got \[0, 2\]
c.reset([1, 1]) => ValueError: indices, got \[1, 1\]\. .*A mask of batch elements must be bool
c.reset(1) => TypeError: a list or a tensor of indices, got 1\. Pass \[1\]
c.reorder([0]) => ValueError: expected shape \(2,\), one for each batch element, got
c.reorder(torch.tensor([0, -1])) => ValueError: indices from 0 to 1
c.reorder([0.0, 1.0]) => TypeError: expected an int, got float
c.reset(torch.tensor([True])) => ValueError: reset: rows: expected one entry
"""

NEW_CACHES = r"""
StaticCache(1, 1, 0, 8) => ValueError: max_len: expected 1 to
StaticCache(1, 1, 8.0, 8) => TypeError: max_len: expected an int, got float
RollingCache(1, 1, -1, 8) => ValueError: window: expected 0 to
RollingCache(1, 1, 4, 8, keep=-1) => ValueError: keep: expected 0 to
PagedCache(2, 2, 1, 8, batch=1, max_len=2, dtype=torch.int32) => TypeError: floating
StaticCache(1, 1, 8, 8, dtyp=torch.half) => TypeError: got dtyp\. Leave it out
PagedCache(2, 2, 1, 8, batch=1, max_len=2).reserve(1) => TypeError: Pass a list
RollingCache(1, 1, 4, 8, chunk=0) => ValueError: chunk: expected 1 to
StaticCache(1, 1, 8, 8, layout='thd') => ValueError: bhsd or bshd, got 'thd'
StaticCache(1, 1, 8, 8, dtype=torch.int8) => TypeError: floating dtype, got torch.int8
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
