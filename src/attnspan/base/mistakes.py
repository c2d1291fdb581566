"""Common mistakes and their remedies: keywords of other libraries, values that are not masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from attnspan.errors import DtypeError, NotAnArrayError, UsageError, shown

from .arrays import is_array, is_bool
from .plain import check_plain

_REMEDIES = {
    "is_causal causal use_causal_mask is_causal_bottom_right": "Pass mask=causal(), which aligns the last "
    "query with the last key",
    "attn_mask attention_mask dense_mask": "Pass mask=from_dense(visible) for booleans of shape "
    "(B|1, H|1, Sq, Sk), True for visible keys, mask=keys(valid) for booleans of shape (B, Sk), or bias= "
    "for numbers that are added to the scores",
    "key_padding_mask padding_mask valid_length valid_lens query_seq_lengths key_value_seq_lengths seq_lens "
    "seqlens": "Pass mask=key_padding(lengths), with the number of valid keys of each batch element, or "
    "mask=keys(valid), with booleans of shape (B, Sk), True for valid keys",
    "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_seq_q cu_seq_k cu_seq_lens_q "
    "cu_seq_lens_k": "Pass mask=documents(cu_seqlens_q, cu_seqlens_k), combined by & with causal() for a "
    "causal mask",
    "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv max_q max_k max_length_q "
    "max_length_k": "Leave it out: documents(cu_seqlens) knows the lengths",
    "window_size local_window_size window": "Pass mask=window(left, right), with None instead of -1 for all "
    "keys of a side",
    "sliding_window": "Pass mask=window(sliding_window - 1): it counts only the keys before the query",
    "segment_ids q_segment_ids kv_segment_ids document_ids doc_ids": "Pass mask=segments(q_ids, kv_ids), "
    "combined by & with causal() for a causal mask",
    "cache_seqlens seqused_k kv_lens": "Pass mask=causal() & cache(lengths), with the number of valid keys "
    "of each batch element",
    "score_mod": "Pass the change of the scores as softcap=, bias=alibi(slopes), bias=relative(table) or "
    "bias=dense_bias(values), and a function that hides keys as mask=from_predicate(mask_mod)",
    "mask_mod": "Pass mask=from_predicate(mask_mod)",
    "block_mask": "Pass mask=from_block_mask(block_mask)",
    "enable_gqa": "Leave it out: query heads share key heads if k and v have fewer heads",
    "softmax_scale sm_scale scale_factor scaling qk_scale": "Pass scale=",
    "alibi_slopes": "Pass bias=alibi(slopes)",
    "logits_soft_cap logit_soft_cap attn_logits_soft_cap soft_cap logits_softcap logit_softcap "
    "attn_logit_softcapping softcapping": "Pass softcap=, a positive number",
    "attn_bias bias_mask position_bias rel_pos_bias": "Pass bias=, a tensor, dense_bias(values), "
    "relative(table) or alibi(slopes)",
    "dropout dropout_rate attn_dropout attention_dropout": "Pass dropout_p= together with dropout_seed=",
    "dropout_rng dropout_key generator rng seed rng_seed": "Pass dropout_seed=, an integer tensor",
    "return_softmax_lse return_attn_probs return_aux return_residual": "Pass return_lse=True",
    "s_aux sink learnable_sink attention_sinks": "Pass sinks=, one logit for each query head",
    "qkv_format tensor_layout input_layout tensor_format": 'Pass layout="bhsd", "bshd" or "thd"',
    "implementation": "Pass backend=",
    "deterministic": "Leave it out: the same inputs give the same bits",
    "training": "Leave out dropout_p if you want no dropout. The module Attention does so in eval mode",
    "position_ids": "Apply rotary positions before the call. q_index= and k_index= are sequence indices",
}

#: Keyword of another library's attention -> the equivalent of attnspan.
REMEDIES: Mapping[str, str] = {name: text for names, text in _REMEDIES.items() for name in names.split()}

_TRUTH = "a test for truth, as `and`, `or`, `not` and `if` make"


def refuse_keywords(function: Callable[..., Any], mistaken: Mapping[str, Any]) -> NoReturn:
    """Raise for unknown keywords of a call, with the equivalent of attnspan.

    Example:
        >>> def attention(q, k, v, *, mask=None, scale=None, **mistaken): ...
        >>> refuse_keywords(attention, {"sclae": 1.0})
        Traceback (most recent call last):
        attnspan.errors.UsageError: attention(): expected no keywords but mask, scale, got sclae=. \
Write scale=.
    """
    name = next(iter(mistaken))
    # Compilers trace this code, so it uses neither difflib nor inspect.
    known = list(function.__kwdefaults__ or ())
    close = [x for x in known if 10 * len(set(x) & set(name)) >= 7 * len(set(x) | set(name))]
    expected = "attnspan's keywords" if name in REMEDIES else f"no keywords but {', '.join(known)}"
    remedy = REMEDIES.get(name) or (f"Write {close[0]}=" if close else "Leave it out")
    raise UsageError(f"{function.__name__}()", expected=expected, got=f"{name}=", remedy=remedy)


def not_a_mask(value: Any, what: str = "mask", convert: str = "") -> DtypeError:
    """Make the error for a value that is not a mask, with the mask that the user probably meant.

    ``convert`` is the remedy for an array of another framework.

    Example:
        >>> from attnspan import causal
        >>> raise not_a_mask(causal)
        Traceback (most recent call last):
        attnspan.errors.DtypeError: mask: expected a mask expression, a Prepared or a Spans, got the \
function causal. Call it: causal().
    """
    check_plain(what, value)
    got, remedy = _meant(value)
    remedy = f"{convert}. {remedy}" if convert else remedy
    return DtypeError(what, expected="a mask expression, a Prepared or a Spans", got=got, remedy=remedy)


def refuse_operand(sign: str, mask: Any, other: Any) -> NoReturn:
    """Raise for an operand of `&` or `|` that is not a mask."""
    got, remedy = _meant(other)
    raise UsageError(f"{mask!r} {sign} ...", expected="two masks", got=got, remedy=remedy)


def refuse_use_as_array(mask: Any) -> NoReturn:
    """Raise for a mask that other libraries combine with an array, as flax's modules do in decoding."""
    remedy = "Pass the mask to the layer: attention_fn=functools.partial(attention_fn, layer_mask=mask), "
    remedy += "or pass an array to code that reads ndim"
    raise NotAnArrayError(f"ndim of {mask!r}", expected="an array", got="a mask of attnspan", remedy=remedy)


def refuse_operator(mask: Any) -> NoReturn:
    """Raise for an operator that masks do not have."""
    wanted = "& (keys that both masks show) or | (keys that either shows)"
    remedy = "Masks have no ~, + or -. Describe the visible keys, for example by from_dense(visible) or"
    remedy += " from_predicate(fn)"
    raise UsageError(repr(mask), expected=wanted, got="another operator", remedy=remedy)


def refuse_truth(mask: Any) -> NoReturn:
    """Raise for a mask in a boolean test, because `and` and `or` would drop one of two masks."""
    remedy = "Write a & b or a | b. Test for a missing mask by `mask is None`"
    raise UsageError(f"bool({mask!r})", expected="masks combined by & and |", got=_TRUTH, remedy=remedy)


def refuse_truth_of_bias(bias: Any) -> NoReturn:
    """Raise for a bias in a boolean test."""
    wanted = "one bias, which is neither true nor false"
    remedy = "Test for a missing bias by `bias is None`. Add two biases by dense_bias(a + b)"
    raise UsageError(f"bool({bias!r})", expected=wanted, got=_TRUTH, remedy=remedy)


class OneMask:
    """Base of masks that cannot be combined: `&`, `|` and boolean tests raise."""

    # NumPy then uses the operators below, instead of calling them for each element.
    __array_ufunc__ = None

    def _refuse(self, *_: object) -> NoReturn:
        wanted, got = "one mask, which is not combined with others", f"`&`, `|`, or {_TRUTH}"
        remedy = "Combine masks by & and | before they are sharded. Test for a missing mask by"
        raise UsageError(type(self).__name__, expected=wanted, got=got, remedy=f"{remedy} `mask is None`")

    def __bool__(self) -> NoReturn:
        self._refuse()

    __and__ = __rand__ = __or__ = __ror__ = _refuse


def _meant(value: Any) -> tuple[str, str]:
    """Describe a value that is not a mask, and how to make the mask that the user probably meant."""
    kind = type(value).__name__
    if is_array(value):
        got = f"{kind} of {str(value.dtype).removeprefix('torch.')}, shape {shown(tuple(value.shape))}"
        return got, _meant_by_array(value, got)
    if kind == "UnionType":
        return "two masks without their parentheses", "Call them, as in causal() | window(2)"
    if kind == "Spans":
        return repr(value), "Wrap it in spans(...)"
    if kind in ("Plan", "LocalPlan"):
        return f"a {kind} without a mesh", "Pass plan.on(mesh, rows=rows)"
    if kind == "BlockMask":
        return kind, "Wrap it in from_block_mask(...)"
    if isinstance(value, str):
        return repr(value), f"Read it by attnspan.parse({value!r})"
    if isinstance(value, bool):
        return repr(value), "Pass causal() or full()"
    if not (callable(value) and hasattr(value, "__name__")):
        arrays = "Wrap a boolean array in from_dense(...), bounds in spans(...)"
        return kind, f"{arrays}, a function in from_predicate(...)"
    got = f"the function {value.__name__}"
    if not str(getattr(value, "__module__", "")).startswith("attnspan."):
        return got, "Wrap a mask_mod in from_predicate(...)"
    parameters = inspect.signature(value).parameters.values()
    needed = [x.name for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return got, f"Call it: {value.__name__}({', '.join(needed)})"


def _meant_by_array(x: Any, text: str) -> str:
    if is_bool(x):
        return "Wrap booleans, True for visible keys, in from_dense(...)"
    if len(x.shape) == 5:
        return "Wrap bounds of shape (B|1, H|1, Sq, R, 2) in spans(...)"
    if "float" in text:
        return "Pass numbers that are added to the scores as bias=, or wrap x > -inf in from_dense(...)"
    return "Wrap ids in segments(...), offsets in documents(...), lengths in key_padding(...)"
