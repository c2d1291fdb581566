"""Small sick models whose cause is easily mistaken, and twins. The line to name ends in ``# sick``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, HEADS, LENGTH, Model, tokens
from torch import Tensor

SDPA = F.scaled_dot_product_attention
Attend = Callable[..., Tensor]
INDEX = torch.arange(LENGTH)
SCALE = (DIM // HEADS) ** -0.5
EARLIER = INDEX[:, None] >= INDEX  # a query and the keys that it may see
NOT_OWN = INDEX[:, None] > INDEX  # query 0 sees nothing
VALID = torch.ones(2, LENGTH, dtype=torch.long)
VALID[0, 15:] = 0
VALID[1, 20:] = 0


def model_of(attend: Attend, dtype: torch.dtype = torch.float32, expected: Any = CAUSAL, **more: Any) -> Any:
    return lambda: (Model(attend).to(dtype), tokens(**more), expected)


def padded(attend: Attend, expected: Any = None) -> Any:
    return model_of(attend, attention_mask=VALID, expected=expected or {})


# Keys that are copied for query heads


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, 2, 1, 1)


def tiled_by_cat(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


def tiled_by_view(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 2, -1, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def tiled_before_transpose(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat(1, 1, 2, 1).transpose(1, 2)


def mirrored(x: Tensor) -> Tensor:
    return x[:, torch.tensor([0, 1, 1, 0])]


def swapped(x: Tensor) -> Tensor:
    return x[:, torch.tensor([1, 1, 0, 0])]


def uneven(x: Tensor) -> Tensor:
    return x[:, torch.tensor([0, 0, 0, 1])]


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def grouped_by_stack(x: Tensor) -> Tensor:
    return torch.stack([x, x], 2).flatten(1, 2)


def grouped_by_repeat(x: Tensor) -> Tensor:
    return x[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2)


def scaled(x: Tensor) -> Tensor:
    x = x.repeat(1, 2, 1, 1)
    return x.mul_(2)


_TILED = "torch.arange(4).view(2, 2).T.flatten()"
#: Copies, and the order of query heads in the remedy, or what else it says.
COPIED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **{x.__name__: (x, _TILED) for x in (tiled, tiled_by_cat, tiled_by_view, tiled_before_transpose)},
    "mirrored": (mirrored, "torch.tensor([0, 3, 1, 2])"),
    "swapped": (swapped, "torch.tensor([2, 3, 0, 1])"),
    "uneven": (uneven, "Keep the copy"),
    **{x.__name__: (x, "") for x in (interleaved, grouped_by_stack, grouped_by_repeat)},
    "scaled": (scaled, "Check first that the copy does so"),
}


# Queries that see no key: what the call returns for them


def hidden_in_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=NOT_OWN)  # sick


def hidden_by_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=torch.where(NOT_OWN, 0.0, -1e9))  # sick


def hidden_by_small_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=torch.where(NOT_OWN, 0.0, -1e4))  # sick


def hidden_in_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~NOT_OWN, -torch.inf)
    return scores.softmax(-1) @ v  # sick


def hidden_by_number_in_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~NOT_OWN, -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)  # sick


def hidden_and_cleared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~NOT_OWN, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v  # sick


def sees_own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=NOT_OWN | (INDEX[:, None] == INDEX))


#: What the call returns.
HIDDEN: dict[str, tuple[Attend, str]] = {
    "function": (hidden_in_function, ": 0"),
    "number": (hidden_by_number, ": the mean of all values"),
    "small number": (hidden_by_small_number, ": nearly the result without a mask"),
    "softmax": (hidden_in_softmax, ": NaN"),
    "number in softmax": (hidden_by_number_in_softmax, ": the mean of all values"),
    "cleared": (hidden_and_cleared, ": 0"),
}


# Padding that is seen: no mask, an inverted mask, a mask of 0 and 1


def valid_keys(attention_mask: Tensor) -> Tensor:
    return attention_mask[:, None, None].bool()


def unmasked(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v)  # sick


def unmasked_scores(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v  # sick


def only_causal(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~EARLIER.mT, -torch.inf)
    return scores.softmax(-1) @ v  # sick


def inverted(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=~valid_keys(attention_mask))  # sick


def inverted_fill(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(valid_keys(attention_mask), -torch.inf)
    return scores.softmax(-1) @ v  # sick


def inverted_numbers(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    bias = attention_mask[:, None, None].float() * -1e9
    return SDPA(q, k, v, attn_mask=bias)  # sick


def inverted_where(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = torch.where(~valid_keys(attention_mask), q @ k.mT, -torch.inf)
    return scores.softmax(-1) @ v  # sick


def inverted_pairs(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    valid = attention_mask.bool()
    hidden = ~(valid[:, None, :, None] & valid[:, None, None])
    return SDPA(q, k, v, attn_mask=hidden)  # sick


def inverted_and_causal(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """With padding at the end, valid tokens see nothing at all."""
    scores = (q @ k.mT).masked_fill(~EARLIER, -torch.inf).masked_fill(valid_keys(attention_mask), -torch.inf)
    return scores.softmax(-1) @ v  # sick


def too_small(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=(1 - attention_mask[:, None, None].to(q.dtype)) * -5)  # sick


def added(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=attention_mask[:, None, None].float())  # sick


def added_to_scores(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = q @ k.mT + attention_mask[:, None, None]
    return scores.softmax(-1) @ v  # sick


def added_inverted(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores + (1.0 - attention_mask[:, None, None].float())
    return scores.softmax(-1) @ v  # sick


def multiplied(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = q @ k.mT * attention_mask[:, None, None]
    return scores.softmax(-1) @ v  # sick


def hides_keys(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=valid_keys(attention_mask))


def hides_scores(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~valid_keys(attention_mask), -torch.inf)
    return scores.softmax(-1) @ v


def hides_numbers(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=(1 - attention_mask[:, None, None].to(q.dtype)) * -1e9)


#: Start of what is said, a part of the cause and of the remedy, and attention with this remedy.
PADDING: dict[str, tuple[Attend, str, str, str, Attend]] = {
    "unmasked": (
        unmasked,
        "Valid tokens",
        "this call has no mask",
        "mask=keys(attention_mask != 0)",
        hides_keys,
    ),
    "unmasked scores": (
        unmasked_scores,
        "Valid tokens",
        "has no mask",
        "keys(attention_mask != 0)",
        hides_keys,
    ),
    "only causal": (only_causal, "Valid tokens", "has no data of attention_mask", "", hides_scores),
    "inverted": (inverted, "The padding mask is inverted", "True for padding", "pass ~mask", hides_keys),
    "inverted fill": (inverted_fill, "The padding mask is inverted", "True for valid", "~mask", hides_scores),
    "inverted numbers": (
        inverted_numbers,
        "The padding mask is inverted",
        "adds 0 to padding and -1e+09 to valid tokens",
        "Add 0 to valid tokens",
        hides_numbers,
    ),
    "inverted where": (
        inverted_where,
        "The padding mask is inverted",
        "torch.where keeps",
        "~mask",
        hides_scores,
    ),
    "inverted pairs": (
        inverted_pairs,
        "The padding mask is inverted",
        "True for padding",
        "~mask",
        hides_keys,
    ),
    "too small": (
        too_small,
        "Valid tokens",
        "adds -5 to scores",
        "attn_mask=(attention_mask != 0)",
        hides_keys,
    ),
    "added": (added, "A mask of 0 and 1 is added", "at most 1", "attn_mask=(mask != 0)", hides_keys),
    "added to scores": (
        added_to_scores,
        "A mask of 0 and 1 is added",
        "at most 1",
        "masked_fill(mask == 0",
        hides_scores,
    ),
    "added inverted": (
        added_inverted,
        "A mask of 0 and 1 is added",
        "at most 1",
        "masked_fill(mask != 0",
        hides_scores,
    ),
    "multiplied": (
        multiplied,
        "A mask of 0 and 1 is multiplied",
        "only -inf",
        "masked_fill(mask == 0",
        hides_scores,
    ),
}


# Numbers that are too large for float16


def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 3000) @ (k * 3000).mT  # sick
    return scores.softmax(-1) @ v


def product_of_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = (~EARLIER).to(q.dtype)
    low = torch.tensor(-1e9, dtype=q.dtype)  # sick
    return (q @ k.mT + hidden * low).softmax(-1) @ v


def squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = SDPA(q, k, v, is_causal=True)
    size = ((out + 300) ** 2).sum(-1, keepdim=True)  # sick
    return out * (size - size)


def hidden_by_overflow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    low = (~NOT_OWN).to(q.dtype) * -1e9  # sick
    return (q @ k.mT + low).softmax(-1) @ v


def within_range(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    low = (~EARLIER).to(q.dtype) * torch.finfo(q.dtype).min
    return (q @ k.mT + low).softmax(-1) @ v


def hidden_by_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    low = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(~EARLIER, -torch.inf)
    return (q @ k.mT + low).softmax(-1) @ v


#: Kind of the finding, and the text about the number.
OVERFLOWS: dict[str, tuple[Attend, str, str]] = {
    "product": (product, "nan", "inf in float16 at"),
    "product of mask": (product_of_mask, "nan", "-1e+09 becomes -inf in float16"),
    "squares": (squares, "nan", "becomes inf in float16"),
    "hidden": (hidden_by_overflow, "hidden-rows", "-1e+09 becomes -inf in float16"),
}


# float32 inside of a bfloat16 model


def wide_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~EARLIER, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v  # sick


def wide_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).float()  # sick
    return scores.masked_fill(~EARLIER, -torch.inf).softmax(-1).to(v.dtype) @ v


def wide_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.float(), k.float()  # sick
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1).to(v.dtype) @ v


def narrow_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v


PAIRS = 2 * HEADS * LENGTH**2  # scores of a call
#: Text, and the bytes that are named.
WIDE: dict[str, tuple[Attend, str, int]] = {
    "softmax": (wide_softmax, "Scores of bfloat16 are computed in float32", 2 * 4 * PAIRS),
    "scores": (wide_scores, "Scores of bfloat16 are computed in float32", 3 * 4 * PAIRS),
    "product": (wide_product, "Attention runs in float32", 4 * PAIRS),
}


# The time to make a mask


def made_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each step uses the one before it twice. A sum over both operands would count it 2**8 times."""
    mask = EARLIER.clone()
    for _ in range(8):
        mask = mask & mask.logical_or(mask)
    return SDPA(q, k, v, attn_mask=mask)


def made_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    for _ in range(40):
        mask.masked_fill_(~EARLIER, -torch.inf)
    return SDPA(q, k, v, attn_mask=mask)


def made_slowly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.rand(1 << 22).cumsum(0)[: LENGTH**2].view(LENGTH, LENGTH) * 0
    return SDPA(q, k, v, attn_mask=mask.masked_fill(~EARLIER, -torch.inf))


TIMED = {"made of one": made_of_one, "made in place": made_in_place, "made slowly": made_slowly}


# Parameters without a gradient


def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.detach()  # sick
    return SDPA(q, k, v, is_causal=True)


def data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q.data, k, v, is_causal=True)  # sick


def untracked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        q = q * 0.5  # sick
        q = q + 1
    return SDPA(q, k, v, is_causal=True)


_LIBRARY = torch.library.Library("causes", "DEF")
_LIBRARY.define("halved(Tensor x) -> Tensor")
_LIBRARY.impl("halved", lambda x: x.detach() * 0.5, "CPU")
torch.library.register_fake("causes::halved", torch.empty_like, lib=_LIBRARY)


def without_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(torch.ops.causes.halved(q), k, v, is_causal=True)  # sick


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(*_: Any) -> None:
        return None


def drops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(Halved.apply(q), k, v, is_causal=True)  # sick


def detached_in_eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        q = q.detach()  # sick
    return SDPA(q, k, v, is_causal=True)


def detached_in_compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        q = q.detach()
    return SDPA(q, k, v, is_causal=True)


def scaled_by_its_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q / (1 + q.detach().abs().mean()), k, v, is_causal=True)


class Unused(Model):
    """A parameter that no result depends on, as an unused pooler."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.pooler = torch.nn.Linear(DIM, DIM)


#: A part of the cause, of the remedy, and of the trial.
CUT: dict[str, tuple[Attend, str, str, str]] = {
    "detach": (detached, "detach ends", "Remove detach()", "without it, 2 of 2"),
    "data": (data, ".data ends", "Remove detach() or .data", "without it, 2 of 2"),
    "no_grad": (untracked, "torch.no_grad", "out of torch.no_grad()", "without it, 2 of 2"),
    "operator": (without_backward, "causes.halved", "register_autograd", ""),
    "backward": (drops, "HalvedBackward", "Return a gradient", ""),
}
