"""Pretrain a packed GPT: the whole model as one compiled graph, under autocast.

    python examples/scripts/pretrain_gpt.py

The text is the modules of Python's standard library, as bytes. Rows hold several documents, and no document
attends to another. docs/scripts.md shows the output.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from attnspan import causal, segments
from attnspan.torch import attention

WIDTH, HEADS, KV_HEADS, LAYERS, BATCH, LENGTH = 64, 4, 2, 2, 4, 256
HEAD_DIM = WIDTH // HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, mask) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))  # (B, S, heads, D)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        x = x + self.out(attention(q, k, v, mask=mask, layout="bshd").flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 257, bias=False)

    def forward(self, tokens: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        mask = causal() & segments(ids)  # lowered once in the graph, for all layers
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def rows() -> dict[str, Tensor]:
    """Pack documents of 64 to 255 bytes into rows (rows, LENGTH + 1). Token 256 begins each document."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [[256, *path.read_bytes()[: 64 + 37 * i % 192]] for i, path in enumerate(files)]
    sizes = torch.tensor([len(text) for text in texts])
    count = int(sizes.sum()) // (LENGTH + 1)
    packed = {
        "tokens": torch.tensor([byte for text in texts for byte in text]),
        "ids": torch.arange(len(texts)).repeat_interleave(sizes),
        "positions": torch.cat([torch.arange(n) for n in sizes.tolist()]),
    }
    order = torch.randperm(count)
    return {name: x[: count * (LENGTH + 1)].view(count, -1)[order] for name, x in packed.items()}


def main(steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    data, model = rows(), GPT()
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(steps):
        batch = {name: x[torch.arange(BATCH * step, BATCH * (step + 1)) % len(x)] for name, x in data.items()}
        inputs = {name: x[:, :-1] for name, x in batch.items()}
        same_document = batch["ids"][:, 1:] == batch["ids"][:, :-1]
        targets = torch.where(same_document, batch["tokens"][:, 1:], -100)  # -100: no target
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(**inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step in (0, steps // 2, steps - 1):
            print(f"step {step + 1}: loss {loss.item():.2f}")
    print(f"graphs: {counters['stats']['unique_graphs']}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
