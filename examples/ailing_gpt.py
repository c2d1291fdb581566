"""A small GPT with mistakes, for ``attnspan doctor examples/ailing_gpt.py:factory``.

Its packed documents see each other, it copies keys and values for the heads that share them, and it reads a
length on the host in the middle of the forward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, VOCABULARY = 128, 8, 2, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * KV_HEADS // HEADS)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2 * KV_HEADS, -1).transpose(1, 2).chunk(2, 1)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        longest = position_ids.max().item() + 1
        x = self.embed(input_ids) + self.positions.weight[:longest][position_ids]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def factory() -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, bool]]:
    """The model, batches of packed documents, and what the doctor cannot read from them."""
    torch.manual_seed(0)
    batches = [
        {
            "input_ids": torch.randint(VOCABULARY, (2, length)),
            # Two documents in each row: positions start again.
            "position_ids": torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)]).expand(
                2, -1
            ),
        }
        for length in (64, 96, 80)
    ]
    return GPT(), batches, {"causal": True}
