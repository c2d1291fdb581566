"""Sick models whose positions are wrong, are counted in too few digits, or are turned in the wrong pairs."""

import torch
from small_models import (
    CAUSAL,
    DIM,
    EARLIER,
    HEADS,
    IDS,
    INDEX,
    LENGTH,
    SDPA,
    SIZE,
    VOCABULARY,
    Attend,
    Model,
    builder,
    fused,
    heads_of,
    merged_heads,
    model_of,
    of_segments,
    tokens,
    written,
)
from torch import nn
from torch_runner import sick

from attnspan import keys
from attnspan.torch import attention

# Positions that continue from document to document


class Learned(Model):
    """`restarts` says whether positions start again in each document."""

    def __init__(self, restarts):
        super().__init__(of_segments)
        self.position, self.restarts = nn.Embedding(LENGTH, DIM), restarts

    def places(self, segment_ids):
        index = torch.arange(segment_ids.shape[1])  # The doctor runs documents alone too.
        starts = torch.zeros_like(segment_ids)
        starts[:, 1:] = index[1:] * (segment_ids[:, 1:] != segment_ids[:, :-1])
        return index - starts.cummax(1).values if self.restarts else index.expand_as(segment_ids)

    def forward(self, input_ids, segment_ids):
        x = self.encode(self.embed(input_ids), segment_ids)
        return self.head(self.mixed(x, segment_ids=segment_ids))

    def encode(self, x, segment_ids):
        return x + self.position(self.places(segment_ids))  # sick


class Sinusoidal(Learned):
    def encode(self, x, segment_ids):
        return x + (self.places(segment_ids)[..., None] * 0.5 ** torch.arange(DIM)).sin()

    def mixed(self, x, **given):
        return self.blocks[0](x, **given)  # sick


class Slopes(Sinusoidal):
    def encode(self, x, segment_ids):
        return x * (1 + 0.01 * self.places(segment_ids)[..., None])


class Given(Learned):
    """The caller may give positions."""

    def forward(self, input_ids, segment_ids, position_ids=None):
        index = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.embed(input_ids) + self.position(index)
        return self.head(self.mixed(x, segment_ids=segment_ids))


class OfLength(Learned):
    """A factor that depends on the length of a row, or on the length of a document."""

    def encode(self, x, segment_ids):
        same = segment_ids[:, :, None] == segment_ids[:, None]
        size = same.sum(-1, keepdim=True) if self.restarts else torch.tensor(x.shape[1])
        return x * size.log()

    def mixed(self, x, **given):
        return self.blocks[0](x, **given)  # sick


@builder
def packed(model, restarts=False, expected=CAUSAL, **more):
    return model(restarts), tokens(segment_ids=IDS, **more), expected


_FIRST = Model.mixed, "block(x, **given)"  # the first module whose input is wrong
_AGAIN = packed(Given, position_ids=INDEX.expand(2, -1) - IDS * 9)
_OF_LENGTH = {
    "remedy": "length of each document",
    "cause": "The results depend on the length of the row",
    "tried": "=at the front of the row, the document has the same results",
}
_GIVEN = {"remedy": "Pass position_ids", "tried": "it has the same results as alone"}
for _model, _code, _says in (
    (Learned, Learned.encode, {"remedy": "torch.where(starts, index, 0)"}),
    (Sinusoidal, Sinusoidal.mixed, {}),
    (Slopes, Sinusoidal.mixed, {}),
    (Given, _FIRST, _GIVEN),
    (OfLength, OfLength.mixed, _OF_LENGTH),
):
    _well = _AGAIN if _model is Given else packed(_model, restarts=True)
    _right = _AGAIN if _model is Learned else _well
    sick("positions", _code, packed(_model), _well, name=_model.__name__, right=_right, **_says)
_NOTE = {"severity": "note", "evidence": "positions may continue, and this is right"}
sick("positions", _FIRST, packed(Given, expected={}), name="no next token", **_NOTE)


# Padding in front of the tokens


class PaddedInFront(Model):
    """Learned positions. `moves` says whether padding in front moves them."""

    def __init__(self, moves):
        super().__init__(self.attended)
        self.position, self.moves, self.drop = nn.Embedding(LENGTH, DIM), moves, nn.Dropout(0.1)

    @staticmethod
    def attended(q, k, v, attention_mask):
        own = torch.eye(q.shape[2], dtype=torch.bool)
        seen = attention_mask[:, None, None].bool() & torch.ones_like(own).tril()
        return SDPA(q, k, v, attn_mask=seen | own)

    def forward(self, input_ids, attention_mask, **given):
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        if not self.moves:
            places = given.get("position_ids", (attention_mask.cumsum(-1) - 1).clamp(min=0))
        x = self.drop(self.embed(input_ids) + self.encode(places))
        return self.head(self.mixed(x, attention_mask=attention_mask))

    def encode(self, places):
        return self.position(places)  # sick


class RelativeInFront(PaddedInFront):
    """Without absolute positions, padding may move tokens."""

    def encode(self, places):
        return 0 * self.position(places)


@builder
def in_front(model=PaddedInFront, moves=False, positions=False):
    mask = (torch.tensor([[6], [0]]) <= INDEX).long()
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    return model(moves), tokens(attention_mask=mask, **more), CAUSAL


_UNMOVED = in_front(), in_front(positions=True), in_front(RelativeInFront, moves=True)
sick("positions", PaddedInFront.encode, in_front(moves=True), *_UNMOVED, name="padding in front")


# Positions that a 16-bit float counts

MANY = 300


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Counted(nn.Module):
    """One layer with rotary positions, in bfloat16. `how` says in which dtype positions are counted."""

    def __init__(self, how):
        super().__init__()
        self.how, self.embed, self.qkv = how, nn.Embedding(64, DIM), nn.Linear(DIM, 3 * DIM)
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, SIZE))
        self.bfloat16()

    def angles(self, n):
        if self.how == "counted":
            t = torch.arange(n, dtype=self.inv_freq.dtype)  # sick: counted
            return torch.outer(t, self.inv_freq)
        if self.how == "converted":
            t = torch.arange(n).to(self.inv_freq)  # sick: converted
            return torch.outer(t.float(), self.inv_freq.float())
        angles = torch.outer(torch.arange(n).float(), self.inv_freq.float())
        return angles.bfloat16() if self.how == "rounded" else angles

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        angles = torch.cat([self.angles(x.shape[1])] * 2, -1)
        cos, sin = angles.cos().to(x), angles.sin().to(x)  # sick: rounded
        out = SDPA(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return x + merged_heads(out)


@builder
def counted(how):
    return Counted(how), [{"input_ids": torch.randint(64, (2, MANY))}]


_COLLIDE = "=Positions collide: bfloat16 distinguishes 279 of 300 positions"
_ROUNDED = "=Angles of positions are rounded to multiples of 2 rad in bfloat16"
for _how, _what in (("counted", _COLLIDE), ("converted", _COLLIDE), ("rounded", _ROUNDED)):
    _says = {"what": _what, "cause": "16 bits", "remedy": "float32"}
    sick("positions", (Counted, f"# sick: {_how}"), counted(_how), counted("well"), name=_how, **_says)


# Rotary positions


class Rotary(Attend):
    """Halves are turned with tables for neighbours."""

    def of_heads(self, q, k, v):
        return self.attend(self.turn(q), self.turn(k), v)

    def angles(self, x):
        rates = 0.3 ** torch.arange(x.shape[-1] // 2)
        return torch.outer(torch.arange(x.shape[-2]), rates).to(x)

    def tables(self, x):
        return self.angles(x).repeat_interleave(2, -1)

    def turn(self, x):
        angles = self.tables(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()  # sick


class RotaryHalves(Rotary):
    def tables(self, x):
        return torch.cat([self.angles(x)] * 2, -1)


class Neighbours(RotaryHalves):
    """Neighbours are turned with tables for halves."""

    def turn(self, x):
        angles = self.tables(x)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angles.cos() + other * angles.sin()  # sick


class NeighboursRight(Neighbours):
    tables = Rotary.tables


class Reflected(RotaryHalves):
    """A sign is wrong, so pairs are not turned."""

    def turn(self, x):
        angles = self.tables(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([b, a], -1) * angles.sin()  # sick


class Complex(Rotary):
    """The rotation as a product of complex numbers, of halves."""

    def turn(self, x):
        angles = self.angles(x)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)


class Sines(nn.Module):
    """Positions are added to queries and keys in each layer, as in DETR."""

    def __init__(self, _):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(DIM)).to(x)
        q, k, v = heads_of(self.q(x + angles.sin())), heads_of(self.k(x + angles.sin())), heads_of(self.v(x))
        return x + merged_heads(SDPA(q, k, v, is_causal=True))


def written_causally(q, k, v):
    return written(q, k, v, EARLIER)


_ALIKE = {"evidence": "with the same token at all positions"}
_OTHER = "with tables of the other order of pairs, scores"
for _bad, _attend, _wells, _right, _says in (
    (Rotary, fused, (RotaryHalves, Sines), Complex, {"remedy": "cat([angles, angles], -1)"}),
    (Neighbours, fused, (NeighboursRight, Complex), NeighboursRight, {"tried": _OTHER}),
    (Rotary, written_causally, (RotaryHalves,), Complex, {}),
    (Reflected, fused, (RotaryHalves,), Complex, {"tried": "", "remedy": "Compute p"}),
):
    _made, _right, *_twins = (model_of(_attend, x) for x in (_bad, _right, *_wells))
    _name = f"{_bad.__name__}, {_attend.__name__}"
    sick("rope", _bad.turn, _made, *_twins, name=_name, right=_right, **_ALIKE, **_says)


# Slots of a cache

ROOM, WRITTEN = 32, 11  # keys that a static cache has room for, and keys that were written


class StaticCache(Attend):
    """Decoding with a cache that has room for more keys than were written."""

    def __init__(self, attend):
        super().__init__(attend)
        kept = torch.zeros(2, 1, HEADS, ROOM, SIZE)
        kept[..., :WRITTEN, :] = torch.randn(kept[..., :WRITTEN, :].shape)
        self.register_buffer("kept", kept)

    def of_heads(self, q, k, v):
        return self.attend(q, *(self.update(i, y) for i, y in enumerate((k, v))))

    def update(self, number, x):
        kept = self.kept[number].expand(len(x), -1, -1, -1).to(x.dtype)
        return kept.index_copy(2, torch.arange(WRITTEN, WRITTEN + x.shape[2]), x)


def filled(q):
    return torch.arange(ROOM) <= WRITTEN + torch.arange(q.shape[2])[:, None]


def masked(q, k, v):
    return SDPA(q, k, v, attn_mask=filled(q))


def unmasked(q, k, v):
    return SDPA(q, k, v)  # sick


def half_masked(q, k, v):
    """The mask hides later tokens of this step, and shows the empty slots behind them."""
    mask = filled(q) | (torch.arange(ROOM) >= WRITTEN + q.shape[2])
    return SDPA(q, k, v, attn_mask=mask)  # sick


def measured(q, k, v):
    return attention(q, k, v, mask=keys(torch.arange(ROOM) < WRITTEN + q.shape[2]))


class ZeroKey(nn.Module):
    """One key of zeros that is meant."""

    def __init__(self, _):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True, add_zero_attn=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def decoding(attend=SDPA, length=1, block=StaticCache):
    return model_of(attend, block, lengths=(length,), expected={})


sick(
    "empty-slots",
    unmasked,
    *map(decoding, (unmasked, masked, measured)),
    evidence="20 keys of 32, from key 12 on, are zeros and visible",
    remedy="attn_mask=(torch.arange(k_len) < written)[None, None, None]",
    tried="if hidden, their contents change no result",
)
sick("empty-slots", written, decoding(written, 3), decoding(length=9, block=ZeroKey))
sick("empty-slots", half_masked, decoding(half_masked, 3), decoding(masked, 3), remedy="attn_mask=mask & (")


class Decoder(nn.Module):
    """A prefill, and three decode steps with a cache. `shows` says whether keys see themselves in each."""

    def __init__(self, shows, window=LENGTH, adds=False):
        super().__init__()
        self.shows, self.window, self.adds = shows, window, adds
        self.embed, self.attend = nn.Embedding(VOCABULARY, DIM), DecoderAttention()
        self.head = nn.Linear(DIM, VOCABULARY)

    def mask(self, positions, k_len, shows_own):
        distance = positions[:, None] - torch.arange(k_len)
        shown = (distance >= (0 if shows_own else 1)) & (distance < self.window)
        shown[:, 0] |= positions == 0  # The first query needs a key.
        return torch.zeros(shown.shape).masked_fill(~shown, -torch.inf) if self.adds else shown

    def forward(self, input_ids):
        x, index = self.embed(input_ids), torch.arange(input_ids.shape[1])
        x, size = x + (index[:, None] / torch.arange(1, DIM + 1)).sin(), len(index) - 3
        self.attend.cache = x.new_zeros(2, *x.shape)
        out = [self.attend(x[:, :size], index[:size], self.mask(index[:size], size, self.shows[0]))]
        for i in range(size, len(index)):
            mask = self.mask(index[i : i + 1], len(index), self.shows[1])
            out.append(self.attend(x[:, i : i + 1], index[i : i + 1], mask))
        return self.head(torch.cat(out, 1))


class DecoderAttention(Attend):
    def forward(self, x, positions, mask):
        q, *written = self.qkv(self.norm(x)).chunk(3, -1)
        self.cache[:, :, positions] = torch.stack(written)
        k, v = self.cache[:, :, : mask.shape[1]]
        out = SDPA(heads_of(q), heads_of(k), heads_of(v), attn_mask=mask)  # sick
        return x + self.out(merged_heads(out))


@builder
def decoded(*shows, **options):
    return Decoder(shows, **options).requires_grad_(False), tokens(), CAUSAL


_TRIED = "with the own key visible, results differ from those without a cache by", "instead of"
_LAST = "the last query of this call sees keys up to 20, and its own key is 21 of 24"
for _name, _options, _evidence in (
    ("plain", {}, _LAST),
    ("in a window", {"window": 6}, ()),
    ("by added numbers", {"adds": True}, ()),
):
    # A model may hide own keys on purpose, everywhere.
    _shows = (True, False), (True, True), (False, False)
    _made, *_twins = (decoded(*x, **_options) for x in _shows)
    sick("own-key", DecoderAttention, _made, *_twins, name=_name, evidence=_evidence, tried=_TRIED)
