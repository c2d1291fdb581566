"""What users get wrong with masks, biases and caches: tables as those of mistakes.py."""

#: `low` lowers for four queries and keys; `x` makes an array of a list, in each way.
MASKS = r"""
a.window(-1, -1) => OptionError: left: expected 0 to 2147483647, got -1. .*None for all keys of a side
a.window(2**31) => OptionError: window: left: expected 0 to 2147483647, got 2147483648
a.key_padding(3, side='top') => OptionError: key_padding: side: expected "right" or "left", got 'top'
a.key_padding(3, start=4, stop=2) => OptionError: stop: expected 4 to .* Pass the first key after
a.Spans(ONE_SPAN, -1) => OptionError: Spans: k_len: expected at least 0, got -1
low(a.segments(IDS), q_index=np.array([0, 1, 2, 4])) => OptionError: q_index: expected indices below 4
low(a.documents([0, 3, 2])) => OptionError: cu_seqlens_q: expected ascending offsets that start at 0 and
low(a.documents([1, 4])) => OptionError: ascending offsets that start at 0
low(a.documents([0, 5])) => OptionError: end at 4 or before, .* pass layout='bshd'
low(a.documents([0, 4], [0, 5])) => OptionError: cu_seqlens_k: expected ascending offsets .* end at 4
low(a.prefix([-1, 2])) => OptionError: prefix: lengths: expected lengths of at least 0, got
low(a.key_padding([5, 4])) => OptionError: lengths of at least 0 and at most 4, .* pass layout='bshd'
low(a.key_padding(5)) => OptionError: expected a length of at least 0 and at most 4.*, got 5
low(a.key_padding(1, stop=5)) => OptionError: expected a part of the 4 keys, got keys 0 to 5
low(a.key_padding([3, 0], start=2)) => OptionError: expected lengths of at least 0 and at most 2
low(a.keys([True, False, True, True], 1)) => OptionError: keys: expected at most max_runs=1 runs
low(a.cache(2) & a.cache(3)) => OptionError: q_index: .* got one from cache\(2\) and another
low(a.from_predicate(lambda b, h, q, k: q > k and k > 2)) => OptionError: <lambda>\): .* Write it with &
low(a.spans(np.full((1, 1, 4, 1, 2), 5))) => OptionError: query 0: .* in \[0, 4\], got \(5, 5\). Clip
low(a.causal(), q_index=np.full(4, 2**31)) => OptionError: q_index: expected int32 indices
low(a.causal(), k_index=np.array([0, 1, 1, 2])) => OptionError: k_index: expected strictly ascending
low(EVERY, k_index=np.arange(4)) => OptionError: from_predicate\(<lambda>\): .* k_index alone
a.causal().spans(2**31, 4) => OptionError: q_len: expected 0 to 2147483647, got 2147483648
low(a.documents(x([0, 2**32 + 4]))) => OptionError: cu_seqlens_q: expected at most 2147483647, got 4294967300
low(a.documents(x([0, 4]), x([0, 2**32 + 4]))) => OptionError: cu_seqlens_k: expected at most 2147483647
low(a.key_padding(x([2**32 + 3, 2]))) => OptionError: key_padding: lengths: expected at most 2147483647
low(a.key_padding(x([-(2**32) + 3, 2]))) => OptionError: key_padding: lengths: .* got -4294967293
low(a.prefix(x([2**32 + 3, 2]))) => OptionError: prefix: lengths: expected at most 2147483647
low(lib.shared_prefix([0, 2, 4], [0, 2])) => OptionError: prefix_of: expected numbers of documents, 0 to 1
lib.tree([-1, 2, 0]) => OptionError: tree: parents: expected a parent before each .*, got 2 for node 1\.
lib.tree([[-1, 0], [-1, 1]]) => OptionError: got 1 for node 1 of batch element 1
lib.tree([-1, 0, 1], depth=2) => OptionError: tree: depth: expected at least 3, got 2
low(lib.tree([-1, 0], prefix=[1, 3])) => OptionError: tree: prefix: lengths: .* at least 0 and at most 2
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
a.window((3, 0)) => DtypeError: window: left: expected an int, got tuple. Write window\(left, right\)
a.segments(torch.zeros(4)) => DtypeError: q_ids: expected an integer array, got torch.float32
a.key_padding(IDS > 0) => DtypeError: lengths: expected integers, got bool. Use keys\(valid\)
a.keys(IDS) => DtypeError: keys: valid: expected a bool array, got int64. Compare: .* mask != 0
a.from_dense(IDS) => DtypeError: from_dense: visible: expected a bool array, got int64
a.from_block_mask(3) => DtypeError: from_block_mask: mask_mod: expected a function
a.Spans(ONE_SPAN, 3.5) => DtypeError: Spans: k_len: expected an int, got float
a.Spans(np.zeros((1, 1, 4, 1, 2)), 3) => DtypeError: Spans: expected an int32 array, got float64
low(a.causal(), q_index=np.zeros(4)) => DtypeError: q_index: expected an integer array, got float64
low(a.causal(), like='cpu') => DtypeError: like: expected an array, got str
lib.per_row([]) => DtypeError: per_row: expected a list of masks, got none
a.segments([[0, 1], [2]]) => ShapeError: segments: q_ids: expected rows of one length
a.keys(IDS[None, None, None] > 0) => ShapeError: one axis of keys, got \(1, 1, 1, 4\).*mask\[:, 0, 0\]
a.from_dense(IDS > 0) => ShapeError: with 2 or 3 or 4 axes, got \(4,\)
a.spans(np.zeros((2, 2), int)) => ShapeError: Spans: expected bounds of shape .*, got \(2, 2\)
low(a.from_dense(np.ones((1, 3, 4, 4), bool))) => ShapeError: 1 along the heads axis, got 3. .*heads=
low(a.causal().prepare(3, 4)) => ShapeError: expected .* = \(2, 1, 4, 4\), got \(1, 1, 3, 4\)
low(a.causal(), q_index=IDS[:3]) => ShapeError: q_index: expected one global index for each query, 4, got
lib.tree([]) => ShapeError: tree: parents: expected at least one node
low(lib.block_diffusion(4, 2)) => ShapeError: block_diffusion\(4, 2\): .* describe 4 keys, got 8
lib.natten((4, 4), (3, 3, 3)) => ShapeError: natten: kernel: expected 2 sizes, one for each axis, got 3
lib.natten((), ()) => ShapeError: natten: canvas: expected at least one axis, got none
lib.vision_cross_attention(np.zeros((3, 3), int), 2)
    => ShapeError: vision_cross_attention: intervals: expected shape \(n, 2\) or \(B, n, 2\), n at least 1
lib.selected_blocks(np.zeros((1, 1, 2, 0), int), 2)
    => ShapeError: selected_blocks: chosen: expected \(B\|1, H\|1, query blocks, k\), none of them 0
lib.per_document(a.segments(IDS), [0, 3]) => ShapeError: a mask without arrays for keys, got segments
lib.batchify(a.segments(IDS), 5) => ShapeError: batchify: expected arrays that describe 5 keys, got segme
"""

#: Of masks, spans and biases in expressions; `mask` is causal().
OPERATORS = r"""
~mask => TypeError: causal\(\): expected & .* or \| .*, got another operator.* have no ~
mask + mask => TypeError: causal\(\): expected & .* or \| .*, got another operator.* have no ~
mask ^ mask => TypeError: causal\(\): expected & .*, got another operator
VISIBLE.float() + mask => TypeError: causal\(\): expected & .*, got another operator
np.ones((4, 4)) + mask => TypeError: causal\(\): expected & .*, got another operator
mask & VISIBLE => TypeError: & .*: expected two masks, got Tensor of bool, .*\. Wrap .* in from_dense
mask | VISIBLE.numpy() => TypeError: expected two masks, got ndarray of bool, .*\. Wrap .* in from_dense
IDS & mask => TypeError: expected two masks, got Tensor of int64, shape \(1, 4\)\. .*segments\(\.\.\.\)
mask | SPANS => TypeError: \| .*: expected two masks, got Spans\(.*\)\. Wrap it in spans
mask & a.window => TypeError: expected two masks, got the function window\. Call it: window\(left\)
1 | mask => TypeError: expected two masks, got int
mask & None => TypeError: expected two masks, got NoneType
SPANS & SPANS => TypeError: & .*: expected two masks, got Spans\(.*Wrap it in spans
VISIBLE.numpy() & SPANS => TypeError: expected two masks, got Spans\(.*Wrap it in spans
"""

#: What users pass as a mask, in torch and JAX.
NO_MASKS = r"""
a.causal => TypeError: got the function causal\. Call it: causal\(\)\.
a.window => TypeError: got the function window\. Call it: window\(left\)\.
lib.natten => TypeError: got the function natten\. Call it: natten\(canvas, kernel\)\.
lambda _b, _h, q, k: q >= k => TypeError: got the function <lambda>\. Wrap a mask_mod in from_predicate
'causal' => TypeError: got 'causal'\. Read it by attnspan\.parse\('causal'\)\.
True => TypeError: got True\. Pass causal\(\) or full\(\)\.
a.causal | a.window => TypeError: got two masks without their parentheses\. Call them
VISIBLE.numpy() => TypeError: got ndarray of bool, shape \(4, 4\)\. Wrap booleans, .* from_dense
VISIBLE => TypeError: got Tensor of bool, shape \(4, 4\)\..* Wrap booleans, .* from_dense
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
    => ShapeError: relative: table: expected \(H, n\) with H=4.*got \(5, 3\). Pass one row per query head.
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
lambda b, h, q, k: torch.zeros(7) == k
    => ValueError: from_predicate\(<lambda>\): expected .*one boolean for a pair, got \(7,\)\. Reduce or
    index
_raises => ValueError: from_predicate\(_raises\): .* raised KeyError: 'no such document'\. Try it on one pair
lambda b, h, q, k: k if q > k else q
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
StaticCache(1, 1, 8, 8, layout='thd') => ValueError: bhsd or bshd, got 'thd'
"""
