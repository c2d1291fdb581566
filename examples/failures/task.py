"""A task whose loss goes to 0 if, and only if, every token sees its own segment: copying within segments.

A segment repeats a motif of random tokens. From its second repetition on, each token equals the token one
motif earlier. A token that sees another segment, or that lacks its own, can only guess.

Shapes: B batch size, S tokens of a packed sequence, E width, H heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, MOTIF, SEQ_LEN, BATCH = 16, 6, 120, 2
WIDTH, HEADS, HEAD_DIM, LAYERS = 64, 2, 32, 2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Tokens, ids, positions inside of their segments, and the tokens to come, each (B, S)."""

    tokens: Tensor
    ids: Tensor
    positions: Tensor
    targets: Tensor


def make_batch(step: int) -> Batch:
    """The batch of a step, the same in every process; targets that the motif does not decide are -100."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for _ in range(BATCH):
        parts, at, count = [], 0, 0
        while at < SEQ_LEN:
            length = min(int(torch.randint(2 * MOTIF, 6 * MOTIF, (), generator=generator)), SEQ_LEN - at)
            motif = torch.randint(0, VOCABULARY, (MOTIF,), generator=generator)
            positions = torch.arange(length)
            known = (positions >= MOTIF - 1) & (positions < length - 1)
            targets = motif[(positions + 1) % MOTIF].masked_fill(~known, -100)
            parts.append(
                torch.stack([motif[positions % MOTIF], torch.full((length,), count), positions, targets])
            )
            at, count = at + length, count + 1
        rows.append(torch.cat(parts, 1))
    tokens, ids, positions, targets = torch.stack(rows, 1)
    return Batch(tokens, ids.to(torch.int32), positions, targets)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """One pre-norm layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, HEAD_DIM)
        q, k, v = qkv.unbind(2)
        mixed = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.out(mixed.reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two layers with rotary positions that restart in each segment. You pass the attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        frequency = 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("angles", torch.arange(SEQ_LEN)[:, None] * frequency)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        angles = self.angles[positions][:, :, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), attend)
        return self.head(self.norm(x))
