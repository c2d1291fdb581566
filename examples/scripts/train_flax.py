"""Train a flax model on packed documents, with a mask that is an argument of the jitted step.

    pip install ".[jax]" flax optax
    python examples/scripts/train_flax.py

The text is the modules of Python's standard library, as bytes. New documents do not recompile the step.
docs/scripts.md shows the output.
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from attnspan import causal, segments
from attnspan.jax import attention_fn

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 128, 4, 2, 4, 256


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, rngs=rngs, attention_fn=attention_fn
        )
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.positions = nnx.Embed(257, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 257, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, mask) -> jax.Array:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def rows() -> dict[str, np.ndarray]:
    """Pack documents of 64 to 255 bytes into rows (rows, LENGTH + 1). Token 256 begins each document."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [[256, *path.read_bytes()[: 64 + 37 * i % 192]] for i, path in enumerate(files)]
    packed = {
        "tokens": np.concatenate(texts),
        "ids": np.repeat(np.arange(len(texts)), [len(text) for text in texts]),
        "positions": np.concatenate([np.arange(len(text)) for text in texts]),
    }
    count = len(packed["tokens"]) // (LENGTH + 1)
    return {name: x[: count * (LENGTH + 1)].reshape(count, -1) for name, x in packed.items()}


traced = 0


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    global traced
    traced += 1

    def loss_of(model: GPT) -> jax.Array:
        ids = batch["ids"]
        mask = causal() & segments(ids[:, :-1])  # an array of ids: other documents do not recompile
        logits = model(batch["tokens"][:, :-1], batch["positions"][:, :-1], mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return losses.mean(where=ids[:, 1:] == ids[:, :-1])  # no target in another document

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 60) -> list[float]:
    data, model = rows(), GPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    losses = []
    for step in range(steps):
        at = np.arange(BATCH * step, BATCH * (step + 1)) % len(data["tokens"])
        batch = {name: jnp.asarray(x[at], jnp.int32) for name, x in data.items()}
        losses.append(float(train_step(model, optimizer, batch)))
        if step in (0, steps // 2, steps - 1):
            print(f"step {step + 1}: loss {losses[-1]:.2f}")
    print(f"compilations: {traced}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
