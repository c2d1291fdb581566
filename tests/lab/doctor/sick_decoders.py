"""Small decoders with a cache, most of them sick, and healthy twins. The line to name ends in ``# sick``.

`DECODE`, `STATE` and `CATS` have the class with the line, the sick factory and the healthy twins.
"""

# ruff: noqa: ARG002
# Methods of one name take the same arguments in all decoders.

import torch
from small_models import (
    CAUSAL,
    DIM,
    HEADS,
    INDEX,
    LENGTH,
    SDPA,
    VOCABULARY,
    Attend,
    builder,
    heads_of,
    merged_heads,
    tokens,
    written,
)
from torch import nn
from torch_runner import sick


def turned(x, positions):
    """Apply rotary position embeddings to (B, H, S, D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 10 ** torch.arange(half)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x)


class Layer(nn.Module):
    """Self-attention over cached and new keys."""

    window, attend = LENGTH, staticmethod(SDPA)

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, start, past, shown=None):
        q, k, v = (heads_of(y) for y in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = self.turn(q, k, start)
        k, v = self.join(k, v, start, past)
        out = self.attend(q, k, v, attn_mask=self.mask(start, x.shape[1], k.shape[2], shown))
        return x + self.out(merged_heads(out)), (k, v)

    def turn(self, q, k, start):
        positions = self.positions(start, q.shape[2])
        return turned(q, positions), turned(k, positions)

    def positions(self, start, many):
        return torch.arange(start, start + many)

    def join(self, k, v, start, past):
        if past is None:
            return k, v
        return torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)  # cat

    def mask(self, start, many, k_len, shown):
        distance = torch.arange(start, start + many)[:, None] - torch.arange(k_len)
        mask = (distance >= 0) & (distance < self.window)
        return mask if shown is None else mask & (shown[:, None, None, :k_len] != 0) | (distance == 0)


class Positionless(Layer):
    def positions(self, start, many):
        return torch.arange(many)  # sick


class Polar(Layer):
    """A table of complex numbers, which is no result of a step."""

    def __init__(self):
        super().__init__()
        angle = INDEX[:, None] / 10 ** torch.arange(DIM // HEADS // 2)
        self.table = torch.polar(torch.ones_like(angle), angle)

    def turn(self, q, k, start):
        table, pairs = self.angles(start, q.shape[2]), (x.unflatten(-1, (-1, 2)) for x in (q, k))
        return [torch.view_as_real(torch.view_as_complex(x) * table).flatten(-2) for x in pairs]

    def angles(self, start, many):
        return self.table[start : start + many]


class PolarAgain(Polar):
    def angles(self, start, many):
        return self.table[:many]  # sick


class PolarNarrow(Polar):
    def angles(self, start, many):
        return (self.table * 1).narrow(0, 0, many)  # sick


class WithKeysMoved(Layer):
    """Only keys have wrong positions."""

    def turn(self, q, k, start):
        places = torch.arange(k.shape[2])  # sick
        return turned(q, self.positions(start, q.shape[2])), turned(k, places)


class Twice(Layer):
    """Keys of the cache have positions, and get them again."""

    def join(self, k, v, start, past):
        k, v = super().join(k, v, start, past)
        if past is not None:
            k = turned(k, torch.arange(k.shape[2]) * (torch.arange(k.shape[2]) < start))  # sick
        return k, v


class Written(Layer):
    @staticmethod
    def attend(q, k, v, attn_mask):
        return written(q, k, v, attn_mask)


class WrittenApart(Layer):
    """Prefill and decode steps have a softmax of their own."""

    @staticmethod
    def attend(q, k, v, attn_mask):
        scores = q @ k.mT / 3
        if q.shape[2] == 1:
            return scores.softmax(-1) @ v
        return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ v


class ApartPositionless(WrittenApart, Positionless):
    pass


class WrittenPositionless(Written, Positionless):
    pass


class Late(Layer):
    """Keys are cached without positions, and get them in each step."""

    def turn(self, q, k, start):
        return turned(q, self.positions(start, q.shape[2])), k

    @staticmethod
    def attend(q, k, v, attn_mask):
        return SDPA(q, turned(k, torch.arange(k.shape[2])), v, attn_mask=attn_mask)


class Windowed(Layer):
    window = 6


class WindowForgotten(Windowed):
    """Decode steps have no window."""

    def mask(self, start, many, k_len, shown):
        return super().mask(start, many, k_len, shown) if many > 1 else torch.ones(1, k_len).bool()  # sick


class Rolling(Windowed):
    """The cache keeps the keys of one window."""

    def join(self, k, v, start, past):
        k, v = super().join(k, v, start, past)
        return (k[:, :, -6:], v[:, :, -6:]) if past is not None else (k, v)

    def mask(self, start, many, k_len, shown):
        return super().mask(start, many, k_len, shown) if many > 1 else torch.ones(1, k_len).bool()


class PaddingForgotten(Layer):
    def mask(self, start, many, k_len, shown):
        if not start:
            return super().mask(start, many, k_len, shown)
        return torch.arange(start, start + many)[:, None] >= torch.arange(k_len)  # sick


class Quantized(Layer):
    """Keys are cached in 8 bits."""

    def join(self, k, v, start, past):
        if past is None:
            return k, v
        scale = past[0].abs().amax(-1, keepdim=True) / 127
        return torch.cat([(past[0] / scale).round() * scale, k], 2), torch.cat([past[1], v], 2)


class Larger(Layer):
    """New keys of a decode step are larger by 2 %: less than rounding to 4 bits, and no rounding."""

    def join(self, k, v, start, past):
        if past is not None:
            k = k * 1.02  # sick
        return super().join(k, v, start, past)


class Sharper(Layer):
    """Only the values of decode steps are larger."""

    def join(self, k, v, start, past):
        if past is None:
            return k, v
        k = torch.cat([past[0], k], 2)
        return k, torch.cat([past[1], v * 1.05], 2)  # sick


class WrittenSharper(Written, Sharper):
    pass


class ByEinsum(Layer):
    """Tokens before heads, and queries in groups."""

    @staticmethod
    def attend(q, k, v, attn_mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k[:, ::2], v[:, ::2]))
        q = q.unflatten(2, (2, -1))
        scores = torch.einsum("bihgd, bjhd -> bhgij", q, k).masked_fill(~attn_mask[:, :, None], -torch.inf)
        out = torch.einsum("...gij,...jd->...gid", scores.softmax(-1), v.transpose(1, 2))
        return out.flatten(1, 2)

    def mask(self, *sizes):
        return super().mask(*sizes)[None, None]


class EinsumPositionless(ByEinsum, Positionless):
    pass


class EinsumSharper(ByEinsum, Sharper):
    pass


class OtherScale(Layer):
    """Scores of decode steps have another factor, behind their product."""

    scales = 0.3, 0.4

    def attend(self, q, k, v, attn_mask):
        scores = q @ k.mT * self.scales[q.shape[2] == 1]
        return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ v  # sick


class OneScale(OtherScale):
    scales = 0.3, 0.3


class Shifting(Layer):
    """Tokens see the token before them, which decode steps forget."""

    def forward(self, x, *more):
        x, kept = super().forward(x, *more)
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], kept  # sick


class Static(Layer):
    """A buffer with room for all tokens, written in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 2, HEADS, LENGTH, DIM // HEADS), persistent=False)

    def slot(self, start):
        return start

    def join(self, k, v, start, past):
        slots = torch.arange(self.slot(start), self.slot(start) + k.shape[2])
        self.kept[:, :, :, slots] = torch.stack((k, v))  # sick
        return self.kept[:, :, :, : start + k.shape[2]]


class Shifted(Static):
    """A decode step writes one slot too early."""

    def slot(self, start):
        return max(start - 1, 0)


class Model(nn.Module):
    """A decoder. Subclasses decode in other ways."""

    def __init__(self, layer=Layer, learned=False, layers=2):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.head, self.learned = nn.Linear(DIM, VOCABULARY), learned

    def run(self, ids, start, cache, shown=None):
        x, new = self.embed(ids), []
        if self.learned:
            x = x + self.place(self.places(start, ids.shape[1]))
        for i, layer in enumerate(self.layers):
            x, kept = layer(x, start, cache[i] if cache else None, shown)
            new.append(kept)
        return self.head(x), new

    def places(self, start, many):
        return torch.arange(start, start + many)


class ByArgument(Model):
    """The caller passes the cache, and gets the new one."""

    def forward(self, input_ids, cache=None, attention_mask=None):
        start = cache[0][0].shape[2] if cache else 0
        return self.run(input_ids, start, cache, attention_mask)


class OfOneLayer(ByArgument):
    def __init__(self, *more):
        super().__init__(*more, 1)


class CountingWindows(ByArgument):
    """The cache keeps one window of keys, and the number of tokens."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        start, cache = past_key_values or (0, None)
        logits, new = self.run(input_ids, start, cache)
        out = {"logits": logits}
        return out | {"past_key_values": (start + input_ids.shape[1], new)} if use_cache else out


class ByStart(Model):
    """The caller passes the number of cached tokens."""

    def forward(self, input_ids, start_pos=0):
        return self.run(input_ids, start_pos, None)[0]


class ByNumber(Model):
    """The number of cached tokens has an unusual name, and calls of layers have no hooks."""

    def forward(self, input_ids, so_far=0):
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer.forward(x, so_far, None)
        return self.head(x)


class ByMemory(Model):
    """The cache has an unusual name."""

    def forward(self, input_ids, notes=None, memory=None):
        start = memory[0][0].shape[2] if memory else 0
        return self.run(input_ids, start, memory)


class Notes:
    """A cache that the model writes to."""

    def __init__(self):
        self.kept = None


class ByNotes(Model):
    def forward(self, input_ids, notes):
        start = notes.kept[0][0].shape[2] if notes.kept else 0
        out, notes.kept = self.run(input_ids, start, notes.kept)
        return out


class ByBoth(Model):
    """The caller passes a cache, and the number of its tokens."""

    def forward(self, input_ids, number, cache=None):
        return self.run(input_ids, number, cache)


class Counting(Model):
    """Counts the cached tokens itself."""

    number = 0

    def reset_cache(self):
        self.number = 0

    def forward(self, input_ids):
        start, self.number = self.number, self.number + input_ids.shape[1]
        return self.run(input_ids, start % (LENGTH - input_ids.shape[1] + 1), None)[0]


class ByPosition(Model):
    """The caller passes positions."""

    def forward(self, input_ids, input_pos):
        return self.run(input_ids, int(input_pos[0]), None)[0]


class Inside(Model):
    """Prefills and decodes in one forward pass."""

    def sizes(self, length):
        return length - 3, 1, 1, 1

    def forward(self, input_ids):
        found, cache, start = [], None, 0
        for size in self.sizes(input_ids.shape[1]):
            out, cache = self.run(input_ids[:, start : start + size], start, cache)
            found.append(out)
            start += size
        return torch.cat(found, 1)


class Restarting(Inside):
    """Learned positions start at 0 in each step."""

    def places(self, start, many):
        return torch.arange(many)  # sick


class Chunked(Inside):
    def sizes(self, length):
        return length // 2, length // 2 - 2, 1, 1


class Reordered(Inside):
    """Samples change places before the steps."""

    both = False

    def forward(self, input_ids):
        size = input_ids.shape[1] - 3
        out, cache = self.run(input_ids[:, :size], 0, None)
        if self.both:
            cache = [(k.flip(0), v.flip(0)) for k, v in cache]
        steps = []
        for i in range(size, input_ids.shape[1]):
            step, cache = self.run(input_ids.flip(0)[:, i : i + 1], i, cache)
            steps.append(step)
        return torch.cat([out, *steps], 1)


class ReorderedBoth(Reordered):
    both = True


class Generating(Inside):
    """Decodes its own tokens."""

    def forward(self, input_ids):
        out, cache = self.run(input_ids, 0, None)
        found = [out]
        for i in range(2):
            ids = found[-1][:, -1:].argmax(-1)
            step, cache = self.run(ids, input_ids.shape[1] + i, cache)
            found.append(step)
        return torch.cat(found, 1)


class Reading(nn.Module):
    """Cross-attention whose keys are computed once for all steps."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.kept = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), None

    def forward(self, x):
        return x + merged_heads(SDPA(heads_of(self.q(x)), *self.kept))


class Spelling(Inside):
    """Decodes behind an encoder with another number of layers, and sees its results."""

    def __init__(self, *more):
        super().__init__(*more)
        self.encoder = nn.Sequential(Attend(), Attend(), Attend())
        self.head = nn.Sequential(Reading(), self.head)

    def forward(self, sound, ids):
        read = self.head[0]
        read.kept = [heads_of(x) for x in read.kv(self.encoder(sound)).chunk(2, -1)]
        return super().forward(ids)


class SpellingAgain(Restarting, Spelling):
    pass


class SpellingByArgument(Spelling):
    """The encoder runs in each step."""

    def sizes(self, length):
        return (length,)

    def forward(self, sound, ids, cache=None):
        self.cache = cache
        return super().forward(sound, ids), self.cache

    def run(self, ids, start, cache, shown=None):
        start = self.cache[0][0].shape[2] if self.cache else 0
        out, self.cache = super().run(ids, start, self.cache, shown)
        return out, self.cache


class SpellingAgainByArgument(Restarting, SpellingByArgument):
    def sizes(self, length):
        return (length,)


@builder
def spelled(model):
    sound = torch.randn(2, 10, DIM, generator=torch.Generator().manual_seed(0))
    batch = {"sound": sound, "ids": tokens()[0]["input_ids"]}
    return model(Layer, True).requires_grad_(False), [batch], {}


@builder
def made(model, layer=Layer, learned=False, dtype=torch.float32, **more):
    return model(layer, learned).to(dtype).requires_grad_(False), tokens(**more), CAUSAL


_LEFT = {"attention_mask": (torch.tensor([[6], [0]]) <= INDEX).long()}
_INDEX = {"input_pos": INDEX}
PAST, AGAIN, RIGHT = "torch.arange(past", "before you write", made(ByArgument)
_ALONE = {"tried": "with the prefill's results in these calls"}
# Learned positions and reordered samples change more than attention.
_MORE = {"not_tried": "with the prefill's results in these calls", "beside": ("causality-lost",)}
for _name, _code, _sick, _remedy, _twins, _tried in (
    ("positions", Positionless.positions, made(ByArgument, Positionless), PAST, [RIGHT], _ALONE),
    ("complex", PolarAgain.angles, made(ByArgument, PolarAgain), PAST, [made(ByArgument, Polar)], _ALONE),
    ("complex, narrow", PolarNarrow.angles, made(ByArgument, PolarNarrow), PAST, [], _ALONE),
    ("inside", Restarting.places, made(Restarting, learned=True), PAST, [made(Inside, learned=True)], _MORE),
    ("behind an encoder", Restarting.places, spelled(SpellingAgain), PAST, [spelled(Spelling)], _MORE),
    (
        *("beside an encoder", Restarting.places, spelled(SpellingAgainByArgument), PAST),
        *([spelled(SpellingByArgument)], _MORE),
    ),
    ("keys", WithKeysMoved.turn, made(ByArgument, WithKeysMoved), PAST, [made(Inside)], _ALONE),
    ("turned twice", Twice.join, made(ByArgument, Twice), AGAIN, [made(ByArgument, Late)], _ALONE),
    ("turned twice inside", Twice.join, made(Inside, Twice), AGAIN, [made(Inside, Late)], _ALONE),
    ("number", Static.join, made(ByNumber, Shifted), PAST, [made(ByNumber, Static)], _ALONE),
    (
        *("memory", Positionless.positions, made(ByMemory, Positionless), PAST),
        *([made(ByMemory, Layer)], _ALONE),
    ),
    (
        *("object", Positionless.positions, made(ByNotes, Positionless, notes=Notes()), PAST),
        *([made(ByNotes, notes=Notes())], _ALONE),
    ),
    (
        *("own softmax", Positionless.positions, made(Inside, ApartPositionless), PAST),
        *([made(Inside, WrittenApart)], {"beside": ("causality-lost",)}),
    ),
    (
        *("cache and number", Positionless.positions, made(ByBoth, Positionless, number=0), PAST),
        *([made(ByBoth, number=0)], _ALONE),
    ),
    ("counting", Static.join, made(Counting, Shifted), PAST, [made(Counting, Static)], _ALONE),
    ("slot", Static.join, made(ByStart, Shifted), PAST, [made(ByStart, Static)], _ALONE),
    (
        *("slot by positions", Static.join, made(ByPosition, Shifted, **_INDEX), PAST),
        *([made(ByPosition, Static, **_INDEX)], _ALONE),
    ),
    (
        *("window", WindowForgotten.mask, made(ByArgument, WindowForgotten), "the same window"),
        *([made(ByArgument, Windowed), made(CountingWindows, Rolling)], _ALONE),
    ),
    (
        *("padding", PaddingForgotten.mask, made(ByArgument, PaddingForgotten, **_LEFT)),
        *("the same window and padding", [made(ByArgument, **_LEFT)], _ALONE),
    ),
    ("larger keys", Larger.join, made(ByArgument, Larger), "in the same way", [RIGHT], _ALONE),
    ("larger values", Sharper.join, made(ByArgument, Sharper), "Write values", [RIGHT], _ALONE),
    ("reordered", (Layer.join, "# cat"), made(Reordered), "index_select", [made(ReorderedBoth)], _MORE),
    (
        *("written out", Positionless.positions, made(ByArgument, WrittenPositionless), PAST),
        *([made(ByArgument, Written)], {}),
    ),
    ("written values", Sharper.join, made(ByArgument, WrittenSharper), "Write values", [], {}),
    (
        *("einsum", Positionless.positions, made(ByArgument, EinsumPositionless), PAST),
        *([made(ByArgument, ByEinsum)], {}),
    ),
    ("values of an einsum", Sharper.join, made(ByArgument, EinsumSharper), "Write values", [], {}),
    (
        *("scale", OtherScale.attend, made(ByArgument, OtherScale), "such as scale"),
        *([made(ByArgument, OneScale)], {}),
    ),
    ("behind attention", Shifting.forward, made(ByArgument, Shifting), "keep them next to the cache", [], {}),
    (
        *("behind the last attention", None, made(OfOneLayer, Shifting), "Compare q, k, v and the mask", []),
        {"lines": "def forward(self, input_ids, cache=None"},
    ),
):
    sick("decode", _code, _sick, *_twins, name=_name, remedy=_remedy, **_tried)
#: Other healthy decoders.
WELL = {
    "chunked": made(Chunked),
    "quantized": made(ByArgument, Quantized),
    "static inside": made(Inside, Static),
    "in half precision": made(ByArgument, dtype=torch.bfloat16),
}
#: Decoders that cannot be compared, with a part of the reason.
UNCOMPARED = {
    "generating": (made(Generating), "tokens that are not in the batch"),
    "short": (made(ByArgument, lengths=(2,)), "less than three tokens"),
    "step": (made(ByNumber, Static, lengths=(1,), so_far=9), "the tokens of its cache are unknown"),
}


# State between calls


class Kept(nn.Module):
    """A block that sees keys of earlier calls."""

    def __init__(self, _=None):
        super().__init__()
        self.qkv, self.cache = nn.Linear(DIM, 3 * DIM), None
        self.lists = {}
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x):
        q, k, v = (heads_of(y) for y in self.qkv(self.state(x)).chunk(3, -1))
        out = SDPA(q, *self.keys(k, v))
        return x + merged_heads(out)

    def state(self, x):
        return x

    def keys(self, k, v):
        return k, v


class Growing(Kept):
    """The cache is never emptied."""

    def keys(self, k, v):
        if self.cache is not None:
            k, v = (torch.cat(x, 2) for x in zip(self.cache, (k, v), strict=True))
        self.cache = k, v  # sick
        return k, v


class Emptied(Growing):
    def forward(self, x):
        self.cache = None
        return super().forward(x)


class Resettable(Growing):
    def reset_cache(self):
        self.cache = None


class FirstKeys(Kept):
    """Keys of the first call stay in a dict."""

    def keys(self, k, v):
        if "k" not in self.lists:
            self.lists["k"] = k  # sick
        return self.lists["k"], v


class Listed(Kept):
    """A mutable default argument keeps keys of all calls."""

    def keys(self, k, v, seen=[]):  # noqa: B006
        seen.append(k)  # sick
        return torch.cat(seen, 2), torch.cat([v] * len(seen), 2)


class Averaging(Kept):
    """A running mean that evaluation updates too."""

    updates = True

    def state(self, x):
        if self.updates or self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)  # sick
        return x - self.mean


class AveragingInTraining(Averaging):
    updates = False


class Stack(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, DIM), block(), nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.block(self.embed(input_ids)))


class FirstLength(Kept):
    """Keeps the first keys only as a number of calls that nothing uses."""

    calls = 0

    def state(self, x):
        self.calls += 1
        return x


@builder
def stacked(block):
    return Stack(block).requires_grad_(False), tokens(), {}


for _code, _name, _block, *_wells in (
    (Growing.keys, "cache", Growing, Emptied, Kept),
    (FirstKeys.keys, "lists", FirstKeys, FirstLength),
    (Listed.keys, "argument seen", Listed, Kept),
    (Averaging.state, "mean", Averaging, AveragingInTraining),
):
    _says = {"what": f"{_name} keeps data of it", "tried": "the results do not differ"}
    sick("state", _code, *map(stacked, (_block, *_wells)), name=_name, **_says)
_RESET = {"severity": "note", "remedy": "=Call reset_cache() before each new sequence"}
sick("state", Growing.keys, stacked(Resettable), name="with a reset", **_RESET)


# Caches that grow by a copy


class WithPicture(Static):
    """Keys of the tokens, and keys of a picture that each step computes."""

    def join(self, k, v, start, past):
        picture = self.out.weight.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None].expand(len(k), -1, -1, -1)
        k, v = super().join(k, v, start, past)
        return torch.cat([k, picture * 0.5], 2), torch.cat([v, picture * 0.5], 2)

    def mask(self, start, many, k_len, shown):
        mask = super().mask(start, many, k_len - DIM, shown)
        return torch.cat([mask, mask.new_ones(many, DIM)], 1)


class Stacked(Layer):
    """Joins both at once."""

    def join(self, k, v, start, past):
        new = torch.stack([k, v])
        new = new if past is None else torch.cat([torch.stack(past), new], -2)  # cat
        return new[0], new[1]


# The doctor decodes the prefill's tokens, and the last ones are decoded inside.
for _name, _code, _made, _well, _tokens in (
    ("by an argument", Layer.join, RIGHT, made(ByStart, Static), LENGTH),
    ("inside", Layer.join, made(Inside), made(Inside, Static), LENGTH - 3),
    ("stacked", Stacked.join, made(ByArgument, Stacked), made(ByPosition, Static, **_INDEX), LENGTH),
):
    _size = 2 * 2 * 2 * DIM * _tokens * 4  # layers, keys and values, samples
    _says = {"evidence": f"copies {_size / 1024:.1f} KiB", "remedy": "index_copy_", "right": False}
    sick("cache-cat", (_code, "# cat"), _made, _well, name=_name, **_says)
#: A joint sequence of this step's tensors is no cache.
JOINT = made(ByStart, WithPicture)
