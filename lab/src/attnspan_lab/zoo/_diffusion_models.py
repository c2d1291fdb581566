"""The diffusers models of models.toml, and the parts of their inputs."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnspan_lab.zoo._diffusion import (
    CHANNELS,
    ROWS,
    TEXT,
    Model,
    Scale,
    clip,
    latents,
    noise,
    positions,
    turns,
)

__all__ = ["MODELS", "PARTS"]


def _text(s: Scale, _: int) -> dict[str, Any]:
    """Draw an encoded text and diffusion times."""
    return {"encoder_hidden_states": noise(s.text, TEXT), "timestep": torch.tensor([1.0, 5.0])}


def _sizes(_: Scale, n: int) -> dict[str, Any]:
    """Make the sizes that CogView models ask for."""
    size = torch.full((ROWS, 2), 16.0 * n)
    return {"original_size": size, "target_size": size, "crop_coords": torch.zeros(ROWS, 2)}


def _omnigen(s: Scale, n: int) -> dict[str, Any]:
    total = s.text + 1 + n * n
    return {
        "hidden_states": latents(n),
        "timestep": torch.tensor([0.1, 0.5]),
        "input_ids": torch.arange(ROWS * s.text).reshape(ROWS, -1) % 90 + 32,
        "input_img_latents": [],
        "input_image_sizes": {},
        "position_ids": torch.arange(total).repeat(ROWS, 1),
        "attention_mask": torch.ones(ROWS, total, total).tril(),
    }


def _kandinsky(s: Scale, n: int) -> dict[str, Any]:
    """Make the inputs for one sample, because the model accepts only one."""
    return {
        "hidden_states": clip(n)[:1].permute(0, 2, 3, 4, 1).contiguous(),
        "encoder_hidden_states": noise(s.text, TEXT)[:1],
        "timestep": torch.tensor([5.0]),
        "pooled_projections": noise(16)[:1],
        "text_rope_pos": torch.arange(s.text),
        "visual_rope_pos": (torch.arange(2), torch.arange(n), torch.arange(n)),
    }


def _audio(s: Scale, n: int) -> dict[str, Any]:
    rotary = turns(n * n + 1, s.head_dim // 2)
    return {
        "hidden_states": noise(8, n * n),
        "global_hidden_states": noise(1, 16),
        "rotary_embedding": rotary,
    }


def _hunyuan(s: Scale, n: int) -> dict[str, Any]:
    rotary = (torch.ones(n * n, s.head_dim), torch.zeros(n * n, s.head_dim))
    return {"encoder_hidden_states_t5": noise(s.text, TEXT), "image_rotary_emb": rotary}


#: Maps a name to a function of a scale and n, see `Model`.
PARTS: dict[str, Callable[[Scale, int], dict[str, Any]]] = {
    "text": _text,
    "image": lambda s, n: {"hidden_states": latents(n), **_text(s, n)},
    "video": lambda s, n: {"hidden_states": clip(n), **_text(s, n)},
    "patches": lambda _, n: {"hidden_states": noise(n * n, 16)},
    "flux": lambda s, n: {"hidden_states": noise(n * n, 16), **_text(s, n), **positions(3, s, n)},
    "pooled": lambda *_: {"pooled_projections": noise(16)},
    "pooled_by_8": lambda *_: {"pooled_projections": noise(8)},
    "guidance": lambda *_: {"guidance": torch.ones(ROWS)},
    "four_positions": lambda s, n: positions(4, s, n, ROWS),
    "shapes": lambda _, n: {"img_shapes": [(1, n, n)] * ROWS},
    "sizes": _sizes,
    "classes": lambda _, n: {
        "hidden_states": latents(n),
        "timestep": torch.tensor([1, 5]),
        "class_labels": torch.tensor([1, 2]),
    },
    "hunyuan": _hunyuan,
    "audio": _audio,
    "lists": lambda s, n: {
        "x": list(noise(CHANNELS, 1, 2 * n, 2 * n)),
        "t": torch.tensor([0.1, 0.5]),
        "cap_feats": list(noise(s.text, TEXT)),
    },
    "omnigen": _omnigen,
    "ernie": lambda s, n: {
        "hidden_states": noise(CHANNELS, n, n),
        "timestep": torch.tensor([1.0, 5.0]),
        "text_bth": noise(s.text, TEXT),
    },
    "control": lambda _, n: {
        "control_hidden_states": clip(n, 8),
        "control_hidden_states_scale": torch.ones(1),
    },
    "ltx": lambda _, n: {
        "hidden_states": noise(2 * n * n, CHANNELS),
        "num_frames": 2,
        "height": n,
        "width": n,
    },
    "second_text": lambda s, _: {"encoder_hidden_states_2": noise(s.text, 8), "image_embeds": noise(3, 12)},
    "frames_first": lambda _, n: {"hidden_states": clip(n).transpose(1, 2).contiguous()},
    "kandinsky": _kandinsky,
}


def _inputs(names: list[str], s: Scale, n: int) -> dict[str, Any]:
    return {name: x for part in names for name, x in PARTS[part](s, n).items()}


def _model(name: str, given: dict[str, Any]) -> Model:
    changes = {
        field: None if x == "none" else tuple(x) if isinstance(x, list) else x
        for field, x in given.pop("changes", {}).items()
    }
    mask = {field: getattr(torch, dtype) for field, dtype in given.pop("mask", {}).items()}
    inputs = partial(_inputs, given.pop("inputs").split())
    return Model(inputs, changes, mask=mask, frames=2 if "3D" in name else 1, **given)


_TABLES = tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))
MODELS = {name: _model(name, given) for name, given in _TABLES.items()}
