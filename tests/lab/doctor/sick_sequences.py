"""Models with two sequences of tokens, and models that return only a loss."""

import torch.nn.functional as F
from small_models import (
    CAUSAL,
    DIM,
    IDS,
    INDEX,
    LENGTH,
    SDPA,
    VOCABULARY,
    Block,
    Model,
    builder,
    fused,
    tokens,
)
from torch import nn
from torch_runner import sick

SHORTER = 15  # tokens of the decoder
VALID = (INDEX < 20).long().expand(2, -1)


def shows_all(q, k, v):
    return SDPA(q, k, v)  # sick, if tokens are padding


def shows_all_to_tokens(q, k, v):
    return SDPA(q, k, v)  # sick


def shows_all_documents(q, k, v, **_):
    return SDPA(q, k, v)  # sick


def shows_own_document(q, k, v, segment_ids):
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
    return SDPA(q, k, v, attn_mask=same.tril())


class Translator(nn.Module):
    """An encoder, and a decoder that also sees the encoder's results."""

    def __init__(self, attend, source, target, *, only_loss=False):
        super().__init__()
        self.source, self.target, self.only_loss = source, target, only_loss
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.encoder, self.decoder = Block(shows_all), Block(attend)
        self.cross = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, labels=None, **given):
        memory = self.encoder(self.embed(given[self.source]))
        x = self.decoder(self.embed(given[self.target]))
        x = self.head(x + self.cross(x, memory, memory, need_weights=False)[0])
        if labels is not None:
            return F.cross_entropy(x.transpose(1, 2), labels)
        return x.square().mean() if self.only_loss else x


@builder
def translator(attend, source="input_ids", target="decoder_input_ids", length=SHORTER, valid=None, **options):
    batch = tokens()[0]["input_ids"]
    given = {source: batch, target: batch.flip(1)[:, :length], "labels": batch[:, :length]}
    if valid is not None:
        given["attention_mask"] = valid
    return Translator(attend, source, target, **options), [given], CAUSAL


class Trained(Model):
    """A language model that returns its loss. It returns results without labels, or none at all."""

    def __init__(self, attend, label, *, needs_labels):
        super().__init__(attend)
        self.label, self.needs_labels = label, needs_labels

    def forward(self, input_ids, **given):
        labels = given.pop(self.label) if self.needs_labels else given.pop(self.label, None)
        logits = super().forward(input_ids, **given)
        return logits if labels is None else F.cross_entropy(logits.transpose(1, 2), labels)


@builder
def trained(attend, label="labels", *, needs_labels=False, **more):
    labels = tokens()[0]["input_ids"].roll(-1, 1)
    made = tokens(**{label: labels}, **more)
    return Trained(attend, label, needs_labels=needs_labels), made, CAUSAL


#: Names and length of the encoder's and the decoder's tokens.
NAMES = {
    "of transformers": {},
    "of one length": {"length": LENGTH},
    "short": {"source": "src", "target": "tgt"},
    "short, of one length": {"source": "src", "target": "tgt", "length": LENGTH},
    "unknown, of one length": {"source": "question", "target": "answer", "length": LENGTH},
}
_BUILT = {x: (translator, options) for x, options in NAMES.items()}
_BUILT |= {x: (trained, {"label": x}) for x in ("labels", "targets")}
for _name, (_build, _options) in _BUILT.items():
    _made, _well = (_build(x, **_options) for x in (shows_all_to_tokens, fused))
    _proof = "changing these tokens changes"
    sick("causality-lost", shows_all_to_tokens, _made, _well, name=_name, evidence=_proof)
_LOSS = "not confirmed by changing tokens: the model returned only a scalar loss"
_made = trained(shows_all_to_tokens, needs_labels=True)
sick("causality-lost", shows_all_to_tokens, _made, name="only a loss", evidence=_LOSS)
_made, _well = (trained(x, segment_ids=IDS) for x in (shows_all_documents, shows_own_document))
_says = {"remedy": "mask=causal() & segments(segment_ids)", "tried": "changes no other result"}
sick("leak", shows_all_documents, _made, _well, beside=("causality-lost",), **_says)
