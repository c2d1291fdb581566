"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971, with the grouped queries of https://arxiv.org/abs/2305.13245.

Shapes: B rows, S tokens of a row, E width, F inner width, H query heads, G key/value heads, D head dimension,
V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan.train.attention import AnyMask, attend, keep_attention
from attnspan.train.config import TrainConfig

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "FeedForward",
    "Rotary",
    "StepFlops",
    "matmul_parameters",
    "rotary_table",
    "rotate",
    "step_flops",
]


class Rotary(NamedTuple):
    """Cosine and sine of each token's angles, (B, S, 1, D / 2) float32, looked up once per step."""

    cos: Tensor
    sin: Tensor


def rotary_table(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, 2 x (S, D / 2) float32; Su et al. 2021, equation 15.

    Args:
        seq_len: S, positions.
        head_dim: D.
        theta: Base of the wavelengths.

    Example:
        >>> cos, sin = rotary_table(3, 4, 10_000.0)
        >>> cos[0].tolist(), sin[0].tolist()
        ([1.0, 1.0], [0.0, 0.0])
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn channel pairs (i, i + D / 2) by the angle of their token, in float32; returned in x's dtype.

    Args:
        x: Queries or keys, (B, S, H, D).
        rotary: Angles of the tokens.

    Example:
        >>> x = torch.randn(1, 2, 3, 4)
        >>> still = Rotary(torch.ones(1, 2, 1, 2), torch.zeros(1, 2, 1, 2))
        >>> torch.equal(rotate(x, still), x)
        True
    """
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat((a * rotary.cos - b * rotary.sin, b * rotary.cos + a * rotary.sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one fused input projection.

    Args:
        config: Widths and heads.

    Example:
        >>> Attention(TrainConfig(dim=32, heads=4, kv_heads=2, head_dim=8)).qkv.weight.shape
        torch.Size([64, 32])
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: AnyMask) -> Tensor:
        batch, seq_len, _ = x.shape
        qkv = self.qkv(x).view(batch, seq_len, self.heads + 2 * self.kv_heads, self.head_dim)
        # Views of the projection: attnspan takes any strides, so v is never copied.
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        out = attend(rotate(q, rotary), rotate(k, rotary), v, mask)
        mixed: Tensor = self.out(out.reshape(batch, seq_len, self.heads * self.head_dim))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU; Shazeer 2020, equation 6.

    Args:
        config: Widths.

    Example:
        >>> FeedForward(TrainConfig(dim=32, hidden=80))(torch.zeros(1, 2, 32)).shape
        torch.Size([1, 2, 32])
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.out(functional.silu(gate) * up)
        return out


_keep_attention = partial(create_selective_checkpoint_contexts, keep_attention)


class Block(nn.Module):
    """One pre-norm decoder layer, the unit of compilation and of activation checkpointing.

    Args:
        config: Widths, norms and what to keep for backward.

    Example:
        >>> Block(TrainConfig(ac="full")).ac
        'full'
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.ac = config.ac
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def layer(self, x: Tensor, rotary: Rotary, mask: AnyMask) -> Tensor:
        """The layer itself, whatever is kept for backward; (B, S, E) to (B, S, E)."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        branch: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + branch

    def forward(self, x: Tensor, rotary: Rotary, mask: AnyMask) -> Tensor:
        if self.ac == "none":
            return self.layer(x, rotary, mask)
        keep: dict[str, Any] = {"context_fn": _keep_attention} if self.ac == "selective" else {}
        out: Tensor = checkpoint(self.layer, x, rotary, mask, use_reentrant=False, **keep)
        return out


class Decoder(nn.Module):
    """The language model.

    Args:
        config: Its shape.
        vocab_size: V.

    Example:
        >>> model = Decoder(TrainConfig(layers=1), vocab_size=257)
        >>> model.head.weight.shape
        torch.Size([257, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, vocab_size, bias=False)
        cos, sin = rotary_table(config.seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        # Residual branches start small, so that the sum over all layers keeps the scale of the embedding.
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=residual if name.endswith(".out.weight") else 0.02)

    def compile_blocks(self) -> None:
        """Compile each block by itself: all of them share one graph, which is small. Shapes never change.

        Calls of SDPA per document break the graph: their shapes are never the same.

        Example:
            >>> Decoder(TrainConfig(layers=1), vocab_size=257).compile_blocks()
        """
        whole = self.config.attention != "sdpa-documents"
        for block in self.blocks:
            if self.config.fsdp:
                # Its hooks gather and free the parameters: they stay outside of the graph.
                block.forward = torch.compile(block.forward, fullgraph=whole, dynamic=False)
            else:
                block.compile(fullgraph=whole, dynamic=False)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard all parameters over ranks (FSDP2), each block by itself; gradients are summed over them.

        Args:
            mesh: All ranks, in one dimension.
        """
        for module in (*self.blocks, self):
            fully_shard(module, mesh=mesh)
            # Each rank's loss is its part of the whole: FSDP's mean would divide it once more.
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]

    def forward(self, tokens: Tensor, positions: Tensor, mask: AnyMask) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: (B, S) int64; over ranks S is what each of them holds.
            positions: Position of each token within its segment, (B, S) int64, below `seq_len`.
            mask: What `prepare_mask` made for the batch, or the plan of its ranks.

        Returns:
            Logits, (B, S, V).
        """
        rotary = Rotary(self.cos[positions][:, :, None], self.sin[positions][:, :, None])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class StepFlops(NamedTuple):
    """Floating-point operations of one training step, recomputation aside.

    Args:
        matmul: Of the dense layers.
        attention: Of attention, visible pairs only.

    Example:
        >>> StepFlops(matmul=2.0, attention=1.0).total
        3.0
    """

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.matmul + self.attention


def matmul_parameters(model: Decoder) -> int:
    """Weights that multiply every token: all matrices but the embedding, which is looked up.

    Args:
        model: The decoder.

    Example:
        >>> config = TrainConfig(dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=16)
        >>> matmul_parameters(Decoder(config, vocab_size=10))  # 8 * (16 + 8 + 32 + 16 + 10)
        656
    """
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def step_flops(model: Decoder, tokens: int, pairs: int) -> StepFlops:
    """FLOPs of forward and backward.

    Dense layers: 2 per weight and token forward, twice that backward. Attention: 4 * D per visible pair and
    query head forward (two products), 2.5 times that backward (five products).

    Args:
        model: The decoder.
        tokens: Tokens of the step, padding included, because the dense layers do not skip it.
        pairs: Visible (query, key) pairs of the step, for one head.

    Example:
        >>> config = TrainConfig(dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=16)
        >>> step_flops(Decoder(config, vocab_size=10), tokens=10, pairs=5)
        StepFlops(matmul=39360.0, attention=560.0)
    """
    config = model.config
    heads = config.layers * config.heads
    return StepFlops(6.0 * matmul_parameters(model) * tokens, 3.5 * 4.0 * pairs * config.head_dim * heads)
