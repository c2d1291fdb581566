"""Small models whose mask, cache or batch once misled the doctor, and healthy twins.

``sick_...`` has a fault that is planted in the line with ``# sick``, ``costly_...`` only a dense mask, and
``well_...`` neither. A patient's mended form is the one that the doctor has to offer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, LENGTH, VOCABULARY, Model, fused, tokens
from torch import Tensor, nn

from attnspan import alibi, causal, keys, segments, window
from attnspan.torch import attention

Attend = Callable[..., Tensor]
CACHED = 11  # keys of a cache


# Dense masks. Each form is ``do``: what the remedy has to say.


def costly_causal() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Model(attend), tokens(), CAUSAL


class Cached(nn.Module):
    """Decoding: keys of earlier tokens are in a buffer, in front of the keys of these tokens."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.register_buffer(
            "cache", torch.randn(1, 4, CACHED, 8, generator=torch.Generator().manual_seed(1))
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.cache.to(k.dtype).expand(len(k), -1, -1, -1)
        return self.attend(q, torch.cat([cache, k], 2), torch.cat([cache, v], 2))


def cached(attend: Attend, length: int = 5) -> Any:
    return Model(Cached(attend)), tokens((length,)), CAUSAL


def bottom_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])  # sick
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def costly_decoding() -> Any:
    return cached(bottom_right)


def costly_window() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-6)  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Model(attend), tokens(), CAUSAL


def costly_documents() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
        mask = same.tril()  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Model(attend), tokens(segment_ids=torch.arange(LENGTH).expand(2, -1) // 9), CAUSAL


def costly_padding() -> Any:
    """Nothing is padded in this batch, but the next one may be."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        valid = attention_mask[:, None, None].bool().expand(-1, 1, q.shape[2], -1)
        mask = valid.tril()  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Model(attend), tokens(attention_mask=torch.ones(2, LENGTH, dtype=torch.long)), CAUSAL


def costly_alibi() -> Any:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        bias = slopes[:, None, None] * (index - index[:, None])
        bias = bias.masked_fill(index > index[:, None], float("-inf"))  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))

    return Model(attend), tokens(), CAUSAL


def costly_without_form() -> Any:
    """No short form: every query hides other keys."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(LENGTH, LENGTH, generator=generator) > 0.5) | torch.eye(LENGTH, dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = mask & True  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=own)

    return Model(attend), tokens()


def _attnspan(**options: Any) -> Attend:
    return lambda q, k, v, **_: attention(q, k, v, **options)


#: Text of the remedy, and attention with this remedy.
FORMS: dict[str, tuple[str, Attend]] = {
    "costly_causal": ("is_causal=True", fused),
    "costly_decoding": ("mask=causal()", Cached(_attnspan(mask=causal()))),
    "costly_window": ("mask=window(6)", _attnspan(mask=window(6))),
    "costly_documents": (
        "mask=causal() & segments(segment_ids)",
        lambda q, k, v, segment_ids: attention(q, k, v, mask=causal() & segments(segment_ids)),
    ),
    "costly_padding": (
        "mask=causal() & keys(attention_mask != 0)",
        lambda q, k, v, attention_mask: attention(q, k, v, mask=causal() & keys(attention_mask != 0)),
    ),
    "costly_alibi": (
        "mask=causal(), bias=alibi(slopes)",
        _attnspan(mask=causal(), bias=alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))),
    ),
}


# Masks that are aligned to the first key


def sick_top_left() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    return cached(attend)


def sick_top_left_of_one() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    return cached(attend, 1)


def sick_top_left_tril() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # sick

    return cached(attend)


class Static(nn.Module):
    """The first tokens of a static cache: its later keys are empty, and the first ones are these tokens'."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.pad(x, (0, 0, 0, CACHED)) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def well_static_cache() -> Any:
    return Model(Static()), tokens((5,)), CAUSAL


def well_decoding() -> Any:
    return cached(_attnspan(mask=causal()))


def well_cross() -> Any:
    """Keys of another sequence: no key is a token's own."""
    memory = torch.randn(1, 4, 9, 8, generator=torch.Generator().manual_seed(1))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = memory.expand(len(q), -1, -1, -1).to(q.dtype)
        return fused(q, k, v) + F.scaled_dot_product_attention(q, own, own)

    return Model(attend), tokens((5,)), CAUSAL


def sick_later_in_cache() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)  # sick

    return cached(attend)


# Documents in all their spellings


def documents_of(**batch: Any) -> tuple[Any, Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ids = torch.arange(LENGTH).expand(2, -1) // 9

    def separated(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return attention(q, k, v, mask=causal() & segments(ids))

    return (Model(attend), tokens(**batch), CAUSAL), (Model(separated), tokens(**batch), CAUSAL)


_IDS = torch.arange(LENGTH) // 9
_SAME = _IDS[:, None] == _IDS
#: Spellings of three documents of 9, 9 and 6 tokens in both rows.
SPELLINGS: dict[str, dict[str, Tensor]] = {
    "cu_seqlens of a row": {"cu_seqlens": torch.tensor([0, 9, 18, 24])},
    "cu_seq_lens_q of all rows": {"cu_seq_lens_q": torch.tensor([0, 9, 18, 24, 33, 42, 48])},
    "sequence_id": {"sequence_id": _IDS.expand(2, -1)},
    "1-D segment_ids": {"segment_ids": _IDS},
    "flat doc_ids": {"doc_ids": torch.cat([_IDS, _IDS + 3])},
    "1-D position_ids": {"position_ids": torch.arange(LENGTH) % 9},
    "4-D bool mask": {"attention_mask": _SAME.tril().expand(2, 1, -1, -1)},
    "4-D additive mask": {"attention_mask": torch.where(_SAME.tril(), 0.0, -1e9).expand(2, 1, -1, -1)},
    "3-D inverted mask": {"attn_mask": ~_SAME.tril().expand(2, -1, -1)},
}
_IN_TIME = torch.tensor([0, 1, 2, 2, 2, 2, 3, *range(4, 21)])
#: Tensors with such names that state nothing of the kind.
OTHERS: dict[str, dict[str, Tensor]] = {
    "one document": {"segment_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
    "a window of pairs": {"attention_mask": torch.ones(LENGTH, LENGTH).tril().triu(-6).bool()[None, None]},
    "which tokens have a loss": {"loss_mask": (torch.arange(LENGTH) % 3 != 0).long().expand(2, -1)},
    "positions in time": {"position_ids": _IN_TIME.expand(3, 2, -1)},
}


def sick_with_dropout() -> Any:
    (model, *rest), _ = documents_of(segment_ids=_IDS)
    model.head = nn.Sequential(nn.Dropout(0.1), model.head)
    return model, *rest


class Packed(nn.Module):
    """A model of tokens without a batch axis, which is called with a tuple."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attend = nn.Embedding(VOCABULARY, 32), attend

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        del cu_seqlens
        x = self.embed(input_ids)[None].unflatten(-1, (4, 8)).transpose(1, 2)
        return self.attend(x, x, x).transpose(1, 2).flatten(2)[0]


def packed(attend: Attend) -> Any:
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0))
    return Packed(attend), [(ids, torch.tensor([0, 9, 18, 24]))], CAUSAL


def sick_packed() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    return packed(attend)


def well_packed() -> Any:
    return packed(_attnspan(mask=causal() & segments(_IDS)))


def no_attention() -> Any:
    return nn.Linear(4, 4), [torch.ones(2, 3, 4)]


def undeclared() -> Any:
    """A GPT without a mask, and nobody says that it is one."""
    return Model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), tokens()
