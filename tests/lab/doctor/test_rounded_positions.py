"""Positions that a 16-bit float counts, and twins that count in float32."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_masked import examined
from torch import Tensor, nn

pytestmark = pytest.mark.slow

WIDTH, HEADS, LENGTH = 32, 2, 300


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Rotary(nn.Module):
    """One layer with rotary positions, in bfloat16. `how` says in which dtype positions are counted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.qkv = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.bfloat16()

    def angles(self, n: int) -> Tensor:
        if self.how == "well":
            return torch.outer(torch.arange(n).float(), self.inv_freq.float())
        if self.how == "counted":
            t = torch.arange(n, dtype=self.inv_freq.dtype)  # sick: counted
            return torch.outer(t, self.inv_freq)
        if self.how == "converted":
            t = torch.arange(n).to(self.inv_freq)  # sick: converted
            return torch.outer(t.float(), self.inv_freq.float())
        return torch.outer(torch.arange(n).float(), self.inv_freq.float()).bfloat16()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        angles = torch.cat([self.angles(x.shape[1])] * 2, -1)
        cos, sin = angles.cos().to(x), angles.sin().to(x)  # sick: rounded
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def _subject(how: str) -> Any:
    torch.manual_seed(0)
    return Rotary(how), [{"input_ids": torch.randint(64, (2, LENGTH))}]


WHATS = {
    "counted": "Positions collide: bfloat16 distinguishes 279 of 300 positions",
    "converted": "Positions collide: bfloat16 distinguishes 279 of 300 positions",
    "rounded": "Angles of positions are rounded to multiples of 2 rad in bfloat16",
}


@pytest.mark.parametrize("how", WHATS)
def test_the_line_that_rounds_positions_is_named(how: str) -> None:
    found, _ = examined(_subject(how))
    lines, start = inspect.getsourcelines(Rotary)
    (own,) = [x for x in found if x.kind == "positions"]
    assert (own.what, own.severity) == (WHATS[how], "wrong")
    assert own.places[0].line == start + next(i for i, x in enumerate(lines) if f"# sick: {how}" in x)
    assert "16 bits" in own.cause
    assert "float32" in own.remedy


def test_positions_in_float32_are_right_in_a_model_of_bfloat16() -> None:
    found, facts = examined(_subject("well"))
    assert [x.what for x in found if x.severity == "wrong"] == []
    assert "digits of positions" in facts["checked"]
