"""Serve requests of many lengths in one batch, with a slot for each and one compiled decoding step.

    python examples/scripts/serve_ragged.py

When a request ends, the next one takes its slot. The other slots wait while its prompt runs.
Then they go on decoding.
docs/scripts.md shows the output.
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from attnspan.torch import StaticCache, attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, SLOTS, MAX_LEN = 256, 128, 4, 2, 2, 4, 192
HEAD_DIM = WIDTH // HEADS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: StaticCache, counts: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        keys, values = cache.update(k, v, counts)  # the last counts[b] tokens of each batch element
        out = attention(q, keys, values, mask=cache.mask(x.shape[1]), layout="bshd")
        return x + self.out(out.flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MAX_LEN, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, caches: nn.ModuleList, counts: Tensor) -> Tensor:
        """The next token of each batch element, (B,)."""
        places = caches[0].positions(tokens.shape[1], counts).clamp(min=0)
        x = self.embed(tokens) + self.positions(places)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, counts)
        return (x[:, -1] @ self.embed.weight.T).argmax(-1)


@dataclass
class Request:
    prompt: Tensor  # (tokens,)
    wanted: int  # tokens to generate
    tokens: list[int] = field(default_factory=list)


def caches(batch: int) -> nn.ModuleList:
    return nn.ModuleList(
        StaticCache(batch, KV_HEADS, MAX_LEN, HEAD_DIM, layout="bshd") for _ in range(LAYERS)
    )


class Server:
    """SLOTS requests at a time."""

    def __init__(self, model: Model) -> None:
        self.model, self.decode = model, torch.compile(model, fullgraph=True)
        self.caches = caches(SLOTS)
        self.slots: list[Request | None] = [None] * SLOTS
        self.times: list[float] = []  # seconds of each decoding step

    def admit(self, waiting: deque[Request]) -> None:
        """Give free slots to waiting requests, and run their prompts together. Other slots have count 0."""
        new = {}
        for slot, request in enumerate(self.slots):
            if request is None and waiting:
                self.slots[slot] = new[slot] = waiting.popleft()
        if not new:
            return
        counts = torch.zeros(SLOTS, dtype=torch.int32)
        prompts = torch.zeros(SLOTS, max(len(x.prompt) for x in new.values()), dtype=torch.int64)
        for slot, request in new.items():
            counts[slot] = len(request.prompt)
            prompts[slot, -len(request.prompt) :] = request.prompt  # padding on the left
        for cache in self.caches:
            cache.reset(list(new))
        found = self.model(prompts, self.caches, counts)
        for slot, request in new.items():
            request.tokens.append(int(found[slot]))
        self.release()

    def step(self) -> None:
        """One token for each slot that is taken."""
        last = torch.tensor([[x.tokens[-1] if x else 0] for x in self.slots])
        counts = torch.tensor([int(x is not None) for x in self.slots], dtype=torch.int32)
        start = time.perf_counter()
        found = self.decode(last, self.caches, counts).tolist()
        self.times.append(time.perf_counter() - start)
        for request, token in zip(self.slots, found, strict=True):
            if request is not None:
                request.tokens.append(token)
        self.release()

    def run(self, requests: list[Request]) -> None:
        waiting = deque(requests)
        while waiting or any(self.slots):
            self.admit(waiting)
            self.step()

    def release(self) -> None:
        """Free the slots of requests that have all their tokens."""
        self.slots = [None if x and len(x.tokens) >= x.wanted else x for x in self.slots]


def alone(model: Model, request: Request) -> list[int]:
    """The tokens of a request in a batch of its own."""
    own, tokens = caches(1), request.prompt[None]
    found: list[int] = []
    for _ in range(request.wanted):
        counts = torch.tensor([tokens.shape[1]], dtype=torch.int32)
        tokens = model(tokens, own, counts)[:, None]
        found.append(int(tokens))
    return found


@torch.inference_mode()
def main(requests: int = 24) -> bool:
    torch.manual_seed(0)
    model = Model()
    sizes = torch.randint(3, 80, (requests, 2)).tolist()
    jobs = [Request(torch.randint(VOCABULARY, (prompt,)), wanted) for prompt, wanted in sizes]
    server = Server(model)
    server.run(jobs)
    count, same = sum(len(x.tokens) for x in jobs), all(x.tokens == alone(model, x) for x in jobs)
    print(
        f"{requests} requests, {count} tokens, {len(server.times)} decoding steps of up to {SLOTS} requests"
    )
    print(f"graphs: {counters['stats']['unique_graphs']}, same tokens as alone: {same}")
    print(f"first step {server.times[0]:.1f} s, median step {median(server.times) * 1e3:.1f} ms")
    return same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    main(parser.parse_args().requests)
