"""Parts of small models, and builders that make factories of the doctor's subjects."""

from functools import partial, wraps

import torch
import torch.nn.functional as F
from torch import nn

from attnspan import causal, segments
from attnspan.torch import attention

HEADS, DIM, LENGTH, VOCABULARY = 4, 32, 24, 50
SIZE = DIM // HEADS
CAUSAL = {"causal": True}
SDPA = F.scaled_dot_product_attention
INDEX = torch.arange(LENGTH)
EARLIER = INDEX[:, None] >= INDEX  # a query and the keys that it may see
IDS = (INDEX // 9).expand(2, -1)  # three documents
#: Padding behind the tokens.
VALID = (torch.tensor([[15], [20]]) > INDEX).long()


def frozen(x):
    """A key of the arguments of a call. Tensors and functions are equal only to themselves."""
    if isinstance(x, dict):
        return tuple((k, frozen(v)) for k, v in x.items())
    return tuple(map(frozen, x)) if isinstance(x, tuple | list) else x


def builder(build):
    """Delay the calls of a function. Equal calls are one factory, so that its model is examined once."""
    known = {}

    def seeded(args, options):
        torch.manual_seed(0)
        return build(*args, **options)

    @wraps(build)
    def factory(*args, **options):
        return known.setdefault(frozen((args, options)), partial(seeded, args, options))

    return factory


def tokens(lengths=(LENGTH,), batch=2, **more):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (batch, n), generator=generator)} | more for n in lengths]


def heads_of(x, heads=HEADS):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def merged_heads(x):
    return x.transpose(1, 2).flatten(2)


def fused(q, k, v):
    return SDPA(q, k, v, is_causal=True)


def of_segments(q, k, v, segment_ids):
    return attention(q, k, v, mask=causal() & segments(segment_ids))


class Block(nn.Module):
    def __init__(self, attend, kv_heads=HEADS):
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        self.norm = nn.LayerNorm(DIM)
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv = nn.Linear(DIM, 2 * DIM * kv_heads // HEADS)

    def forward(self, x, **given):
        y = self.norm(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = heads_of(self.q(y)), heads_of(k, self.kv_heads), heads_of(v, self.kv_heads)
        return x + self.out(merged_heads(self.attend(q, k, v, **given)))


class Model(nn.Module):
    """A language model with learned or other attention."""

    def __init__(self, attend=fused, block=Block, layers=1, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([block(attend, **options) for _ in range(layers)])
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids, **given):
        return self.head(self.mixed(self.embed(input_ids), **given))

    def mixed(self, x, **given):
        for block in self.blocks:
            x = block(x, **given)
        return x


@builder
def model_of(
    attend=fused, block=Block, expected=CAUSAL, lengths=(LENGTH,), dtype=torch.float32, batch=None, **options
):
    """Make a language model of attention or of blocks. `batch` has more tensors of a batch."""
    return Model(attend, block, **options).to(dtype), tokens(lengths, **(batch or {})), expected


def written(q, k, v, mask=None):
    """Attention that is written out."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v  # sick


class Attend(nn.Module):
    """Self-attention over (B, S, C). Subclasses split heads or attend in other ways."""

    def __init__(self, attend=SDPA):
        super().__init__()
        self.attend = attend
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.out(self.of_tokens(*self.qkv(self.norm(x)).chunk(3, -1)))

    def of_tokens(self, q, k, v):
        return merged_heads(self.of_heads(*map(heads_of, (q, k, v))))

    def of_heads(self, q, k, v):
        return self.attend(q, k, v)


class Cross(nn.Module):
    """Attention to keys of another sequence."""

    def __init__(self, attend=SDPA):
        super().__init__()
        self.attend = attend
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x, memory):
        q, (k, v) = heads_of(self.q(x)), map(heads_of, self.kv(memory).chunk(2, -1))
        return merged_heads(self.attend(q, k, v))


class Latents(nn.Module):
    """A diffusion transformer: tokens are numbers (B, S, C)."""

    def __init__(self, attend, block, layers):
        super().__init__()
        self.blocks = nn.ModuleList([block(attend) for _ in range(layers)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x, t):
        x = x + t[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@builder
def latents(attend=SDPA, block=Attend, layers=2, batch=2, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, DIM, generator=generator)
    return Latents(attend, block, layers), [{"x": x, "t": torch.rand(batch, generator=generator)}]
