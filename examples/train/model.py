"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971, with the grouped queries of
https://arxiv.org/abs/2305.13245.

Shapes: B rows, S tokens of a row (of a rank's share of it, with context parallelism), E width, F inner width,
H query heads, G key/value heads, D head dimension, V vocabulary.
"""

# mypy: no-warn-return-any

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attnspan.torch import attention, checkpoint_policy
from train.config import TrainConfig

__all__ = [
    "Decoder",
    "Pieces",
    "keep_attention",
    "rotary_table",
    "rotate",
    "token_loss",
]

IGNORE = -100  # target without loss, torch's default for cross entropy


@dataclass(frozen=True, eq=False)
class Pieces:  # Not a tuple: the compiler would guard on its numbers and recompile.
    """Segments (start, stop) of each row, for one SDPA call per segment."""

    rows: list[list[tuple[int, int]]]


def rotary_table(config: TrainConfig) -> Tensor:
    """Compute cosines and sines of all positions, (2, S, D / 2) float32 (Su et al. 2021, equation 15)."""
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequency = config.rope_theta ** (-channel / config.head_dim)
    angle = torch.arange(config.seq_len, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D / 2) of (B, S, H, D) by the angle of their token, in float32.

    ``rotary`` has the cosine and the sine of each token's angles, (2, B, S, 1, D / 2).
    """
    (cos, sin), (a, b) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Compute attention of one layer: q (B, S, H, D) with k and v (B, S, G, D) to (B, S, H, D).

    The mask is a prepared mask of attnspan, or a plan if several ranks share the rows. With a dense bool
    tensor or `Pieces`, torch's own attention runs.
    """
    if isinstance(mask, Pieces):
        return _attend_pieces(q, k, v, mask)
    if isinstance(mask, Tensor):
        return _sdpa(q, k, v, attn_mask=mask)
    return attention(q, k, v, mask=mask, layout="bshd")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how).transpose(1, 2)


# Not compiled: the pieces differ at each step, so each step would recompile.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
    """Compute causal SDPA for each segment separately. Results of padding carry no loss."""
    outs = []
    for row, borders in enumerate(pieces.rows):
        parts = ((x[row, None, start:stop] for x in (q, k, v)) for start, stop in borders)
        outs.append(torch.cat([_sdpa(*part, is_causal=True) for part in parts], dim=1))
    return torch.cat(outs)


_SDPA = ("flash_attention_for_cpu", "flash_attention", "efficient_attention")


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: save the results of attention, of attnspan and of SDPA."""
    if any(op is getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _SDPA):
        return CheckpointPolicy.MUST_SAVE
    return checkpoint_policy(ctx, op, *args, **kwargs)


class _Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, even if sharded parameters are gathered in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    """Grouped-query attention with one fused input projection."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, mask: Any) -> Tensor:
        # Views of the projection: attnspan accepts any strides, so v is never copied.
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        out = _attend(rotate(q, rotary), rotate(k, rotary), v, mask)
        return self.out(out.flatten(2))


class _FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, equation 6)."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(functional.silu(gate) * up)


_keep_attention = partial(create_selective_checkpoint_contexts, keep_attention)


class _Block(nn.Module):
    """One pre-norm decoder layer, the unit of compilation, sharding and activation checkpointing."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ac = config.ac
        self.attention_norm = _Norm(config.dim, eps=config.norm_eps)
        self.attention = _Attention(config)
        self.feed_forward_norm = _Norm(config.dim, eps=config.norm_eps)
        self.feed_forward = _FeedForward(config)

    def layer(self, x: Tensor, rotary: Tensor, mask: Any) -> Tensor:
        """Compute the layer, (B, S, E) to (B, S, E), without checkpointing."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def forward(self, x: Tensor, rotary: Tensor, mask: Any) -> Tensor:
        if self.ac == "none":
            return self.layer(x, rotary, mask)
        keep: dict[str, Any] = {"context_fn": _keep_attention} if self.ac == "selective" else {}
        return checkpoint(self.layer, x, rotary, mask, use_reentrant=False, **keep)


class Decoder(nn.Module):
    """The language model. It may be built on the meta device and sharded there, before `initialize`."""

    rotary: Tensor

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _Norm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, vocab_size, bias=False)
        # Parameters that every token is multiplied with. The embedding is only looked up.
        linear = (module for module in self.modules() if isinstance(module, nn.Linear))
        self.matmul_weights = sum(module.weight.numel() for module in linear)
        self.register_buffer("rotary", rotary_table(config), persistent=False)

    @torch.no_grad()
    def initialize(self, device: str | torch.device = "cpu") -> Decoder:
        """Draw the weights. They do not depend on the device or the sharding."""
        self.to_empty(device=device)
        config, draw = self.config, torch.Generator().manual_seed(self.config.seed)
        self.rotary.copy_(rotary_table(config))
        # Residual branches start small, so that the sum over all layers has the scale of the embedding.
        residual = 0.02 / math.sqrt(2 * config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            std = residual if name.endswith(".out.weight") else 0.02
            whole = torch.empty(parameter.shape).normal_(std=std, generator=draw).to(device)
            if isinstance(parameter, DTensor):  # Each rank draws the whole tensor and keeps its part.
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)
        return self

    def forward(self, tokens: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Compute the logits of the next token, (B, S, V), from tokens and positions, both (B, S) int64.

        Positions count within segments.
        """
        rotary = self.rotary[:, positions, None]
        x = self.embedding(tokens)
        # The residual stream is float32, even in mixed precision.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        half = self.config.dtype == "bfloat16"
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
            for block in self.blocks:
                x = block(x, rotary, mask)
            return self.head(self.norm(x))

    def step_flops(self, tokens: float, pairs: float) -> tuple[float, float]:
        """Count the FLOPs of a step: of all, and of attention, for tokens and visible pairs of one head.

        Dense layers take 2 FLOPs per weight and token forward, and twice as many backward. Padding counts.
        Attention takes 4 * D FLOPs per visible pair and query head forward (two products), and 2.5 times as
        many backward (five products).
        """
        width = self.config.layers * self.config.heads * self.config.head_dim
        attention = 3.5 * 4.0 * pairs * width
        return 6.0 * self.matmul_weights * tokens + attention, attention


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross entropies of (B, S) targets without `IGNORE`, in nats and float32."""
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
