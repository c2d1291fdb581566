"""Small sick models for faults that hide well, each with a healthy twin. The line to name ends in ``# sick``.

`PAIRS` has the kind of the finding, the sick factory and its twin.
"""

from typing import Any

import torch
import torch.nn.functional as F
from patients import CAUSAL, DIM, HEADS, LENGTH, Block, Model, fused, of_segments, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PAIRS: dict[str, tuple[str, Any, Any]] = {}
MAP = torch.tensor([0, 0, 1, 1])  # the key head of each query head
SDPA = F.scaled_dot_product_attention


def pair(kind: str, name: str, sick: Any, well: Any) -> None:
    PAIRS[name] = (kind, sick, well)


def model_of(attend: Any, **options: Any) -> Any:
    return lambda: (Model(attend, **options), tokens(), CAUSAL)


# Copies of keys and values for more heads


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True, enable_gqa=True)


def indexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, MAP], v[:, MAP]  # sick
    return SDPA(q, k, v, is_causal=True)


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = MAP.view(1, -1, 1, 1).expand(len(k), -1, *k.shape[2:])
    k, v = k.gather(1, index), v.gather(1, index)  # sick
    return SDPA(q, k, v, is_causal=True)


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (torch.stack([x, x], 2).flatten(1, 2) for x in (k, v))  # sick
    return SDPA(q, k, v, is_causal=True)


for attend in (indexed, gathered, stacked):
    pair("kv-copy", attend.__name__, model_of(attend, kv_heads=2), model_of(shared, kv_heads=2))


# Copies that only make operands contiguous


def into_empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = torch.empty(q.shape).copy_(q)  # sick
    return SDPA(q, k, v, is_causal=True)


def into_new(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v.new_empty(v.shape).copy_(v)  # sick
    return SDPA(q, k, v, is_causal=True)


def into_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    room = torch.zeros(k.shape)
    room[:] = k  # sick
    return SDPA(q, room, v, is_causal=True)


for attend in (into_empty, into_new, into_zeros):
    pair("copy", attend.__name__, model_of(attend), model_of(fused))


# Values that the host reads


def listed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.detach().abs().mean(dim=(0, 2, 3)).tolist()  # sick
    return SDPA(q / (1 + scale[0]), k, v, is_causal=True)


def numbered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.detach().abs().mean().numpy()  # sick
    return SDPA(q / (1 + float(scale)), k, v, is_causal=True)


def nonzero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = (q.detach() > 1e9).nonzero()  # sick
    return SDPA(q, k, v, is_causal=True) + len(rows)


def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    large = q[q.detach() > 1e9]  # sick
    return SDPA(q, k, v, is_causal=True) + large.sum()


def unique(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kinds = (q.detach() > 0).long().unique()  # sick
    return SDPA(q, k, v, is_causal=True) * (len(kinds) / len(kinds))


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    text = str(q.detach().sum())  # sick
    return SDPA(q, k, v, is_causal=True) + 0 * len(text)


for attend in (listed, numbered, nonzero, selected, unique, written):
    pair("sync", attend.__name__, model_of(attend), model_of(fused))


# Random numbers


class Forgetful(Block):
    keep = False

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        own = super().forward
        return checkpoint(own, x, use_reentrant=False, preserve_rng_state=self.keep, **given)


class Careful(Forgetful):
    keep = True


class Dropping(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training), **given)  # sick: forgets inputs


class ForgetfulDropping(Forgetful, Dropping):
    pass


class CarefulDropping(Careful, Dropping):
    pass


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = 0.3 if torch.is_grad_enabled() else 0.0
    return SDPA(q, k, v, dropout_p=p, is_causal=True)  # sick


def dropped_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(SDPA(q, k, v, is_causal=True), 0.3, torch.is_grad_enabled())  # sick


pair(
    "recompute-random",
    "forgets inputs",
    model_of(fused, block=ForgetfulDropping),
    model_of(fused, block=CarefulDropping),
)
for attend in (dropped, dropped_after):
    name = f"forgets {attend.__name__}"
    pair("recompute-random", name, model_of(attend, block=Forgetful), model_of(attend, block=Careful))


def always(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, dropout_p=0.1, is_causal=True)  # sick


def always_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(SDPA(q, k, v, is_causal=True), 0.1)  # sick


class AlwaysBefore(Block):
    active = True

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.active or self.training), **given)  # sick: AlwaysBefore


class OnlyInTraining(AlwaysBefore):
    active = False


pair("dropout-in-eval", "always", model_of(always), model_of(dropped))
pair("dropout-in-eval", "always_after", model_of(always_after), model_of(dropped_after))
pair(
    "dropout-in-eval",
    "AlwaysBefore",
    model_of(fused, block=AlwaysBefore),
    model_of(fused, block=OnlyInTraining),
)


# Positions that continue from document to document


class Learned(Model):
    """Positions that are learned. `restarts` says whether they start again in each document."""

    def __init__(self, restarts: bool) -> None:
        super().__init__(of_segments)
        self.position, self.restarts = nn.Embedding(LENGTH, DIM), restarts

    def places(self, segment_ids: Tensor) -> Tensor:
        index = torch.arange(segment_ids.shape[1])
        starts = torch.zeros_like(segment_ids)
        starts[:, 1:] = index[1:] * (segment_ids[:, 1:] != segment_ids[:, :-1])
        return index - starts.cummax(1).values if self.restarts else index.expand_as(segment_ids)

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.encode(self.places(segment_ids))
        for block in self.blocks:
            x = block(x, segment_ids=segment_ids)
        return self.head(x)

    def encode(self, places: Tensor) -> Tensor:
        return self.position(places)  # sick: Learned


class Sinusoidal(Learned):
    def encode(self, places: Tensor) -> Tensor:
        rates = 0.5 ** torch.arange(DIM)
        return (places[..., None] * rates).sin()

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.encode(self.places(segment_ids))
        return self.head(self.blocks[0](x, segment_ids=segment_ids))  # sick: Sinusoidal


class Slopes(Learned):
    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * (1 + 0.01 * self.places(segment_ids)[..., None])
        return self.head(self.blocks[0](x, segment_ids=segment_ids))  # sick: Slopes


def packed(kind: Any, restarts: bool) -> Any:
    ids = torch.arange(LENGTH).expand(2, -1) // 9
    return lambda: (kind(restarts), tokens(segment_ids=ids), CAUSAL)


for kind in (Learned, Sinusoidal, Slopes):
    pair("positions", kind.__name__, packed(kind, restarts=False), packed(kind, restarts=True))


# A mask that is kept for each length


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Tensor] = {}

    def mask_of(self, ids: Tensor) -> Tensor:
        same = ids[:, None, :, None] == ids[:, None, None]
        return same & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()

    def key(self, ids: Tensor) -> Any:
        return ids.shape[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
        key = self.key(segment_ids)
        if key not in self.known:
            self.known[key] = self.mask_of(segment_ids)
        return SDPA(q, k, v, attn_mask=self.known[key])  # sick: kept


class KeptByContent(Kept):
    def key(self, ids: Tensor) -> Any:
        return id(ids), tuple(ids.flatten().tolist())


def two_batches(attend: Any) -> Any:
    ids = [torch.arange(LENGTH).expand(2, -1) // n for n in (9, 5)]
    return lambda: (Model(attend()), [tokens(segment_ids=x)[0] for x in ids], CAUSAL)


pair("leak", "kept", two_batches(Kept), two_batches(KeptByContent))


# A sharded step that does not say which rows it holds


def without_rows() -> Any:
    def step(batch: Any, mesh: Any) -> dict[str, Tensor]:
        out = torch.arange(12.0).view(1, 12, 1)
        return {"out": out if mesh is None else out.chunk(2, 1)[mesh.get_rank()]}

    return Model(fused), tokens(), {"step": step}


# Calls of torch's function that its fused kernels refuse: the change that lets one run


def three_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(HEADS, q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return SDPA(q, k, v, attn_mask=mask)  # sick


def dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, dropout_p=0.1 * torch.is_grad_enabled(), is_causal=True)  # sick


def other_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = SDPA(q, k, v[..., :4], is_causal=True)  # sick
    return torch.cat([out, out], -1)


def columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.mT.contiguous().mT
    return SDPA(q, k, v, is_causal=True)  # sick


def two_reasons(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(HEADS, q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return SDPA(q, k, v[..., :4], attn_mask=mask).repeat(1, 1, 1, 2)  # sick


def learned_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[2], q.shape[2], requires_grad=True)
    return SDPA(q, k, v, attn_mask=mask)  # sick


class Multihead(nn.Module):
    weights = True

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=self.weights)[0]  # sick


class MultiheadUsed(Multihead):
    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.inner(x, x, x)  # sick
        return x + out * weights.sum()


class MultiheadFused(Multihead):
    weights = False


REFUSED = {
    "three_dims": (three_dims, "mask has 3 dims", "attn_mask=mask[None]"),
    "dropout": (
        dropout,
        "dropout_p is not 0",
        "Call attnspan.torch.attention, which stores no scores and",
    ),
    "other_dim": (other_dim, "different head dims", "Pad v"),
    "columns": (columns, "not contiguous", "Keep the head dim last"),
    "two_reasons": (two_reasons, "3 dims instead of 2 or 4; q and v", "attn_mask=mask[None]. Pad v"),
    "learned_mask": (learned_mask, "requires a gradient", "bias=mask"),
}


# Recompilations: a remedy that breaks the graph is not offered


class Cached(Block):
    """Counts its calls, and cuts a cache at this number."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.length = 0
        self.register_buffer("kept", torch.ones(LENGTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.length += 1
        return super().forward(x) + self.kept[: self.length].sum(0)  # sick


class Listed(Block):
    """Keeps the result of each call in a list."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + len(self.kept)  # sick
        self.kept.append(out.detach())
        return out


def counting(block: Any) -> Any:
    return lambda: (Model(fused, block=block), tokens((LENGTH,) * 6), CAUSAL)
