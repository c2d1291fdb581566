"""Models with two sequences of tokens, and models that return only a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, LENGTH, VOCABULARY, Block, Model, fused, tokens
from torch import Tensor, nn

SHORTER = 15  # tokens of the decoder
DOCUMENTS = torch.arange(LENGTH).expand(2, -1) // 9
VALID = (torch.arange(LENGTH) < 20).long().expand(2, -1)


def shows_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)  # sick, if tokens are padding


def shows_all_to_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)  # sick


def shows_all_documents(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)  # sick


def shows_own_document(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril())


class Translator(nn.Module):
    """An encoder, and a decoder that also sees the encoder's results."""

    def __init__(self, attend: Any, source: str, target: str, *, only_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target, self.only_loss = source, target, only_loss
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.encoder, self.decoder = Block(shows_all), Block(attend)
        self.cross = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, labels: Tensor | None = None, **given: Tensor) -> Tensor:
        memory = self.encoder(self.embed(given[self.source]))
        x = self.decoder(self.embed(given[self.target]))
        x = self.head(x + self.cross(x, memory, memory, need_weights=False)[0])
        if labels is not None:
            return F.cross_entropy(x.transpose(1, 2), labels)
        return x.square().mean() if self.only_loss else x


def translator(
    attend: Any,
    source: str = "input_ids",
    target: str = "decoder_input_ids",
    length: int = SHORTER,
    **options: bool,
) -> Any:
    batch = tokens()[0]["input_ids"]
    given = {source: batch, target: batch.flip(1)[:, :length], "labels": batch[:, :length]}
    return Translator(attend, source, target, **options), [given], CAUSAL


class Trained(Model):
    """A language model that returns its loss. It returns results without labels, or none at all."""

    def __init__(self, attend: Any, label: str, *, needs_labels: bool) -> None:
        super().__init__(attend)
        self.label, self.needs_labels = label, needs_labels

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        labels = given.pop(self.label) if self.needs_labels else given.pop(self.label, None)
        logits = super().forward(input_ids, **given)
        return logits if labels is None else F.cross_entropy(logits.transpose(1, 2), labels)


def trained(attend: Any, label: str = "labels", *, needs_labels: bool = False, **more: Any) -> Any:
    labels = tokens()[0]["input_ids"].roll(-1, 1)
    made = tokens(**{label: labels}, **more)
    return Trained(attend, label, needs_labels=needs_labels), made, CAUSAL


#: Names and length of the encoder's and the decoder's tokens.
NAMES: dict[str, Any] = {
    "of transformers": {},
    "of one length": {"length": LENGTH},
    "short": {"source": "src", "target": "tgt"},
    "short, of one length": {"source": "src", "target": "tgt", "length": LENGTH},
    "unknown, of one length": {"source": "question", "target": "answer", "length": LENGTH},
}
WELL = {
    "fused": lambda: trained(fused),
    "documents": lambda: trained(shows_own_document, segment_ids=DOCUMENTS),
}
