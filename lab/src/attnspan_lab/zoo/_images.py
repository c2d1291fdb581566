"""Batches of images, and of texts that contain an image."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from attnspan_lab.zoo._text import ROWS, decoder_batch

__all__ = ["FORMS", "image_and_text_batch", "image_batch", "image_inputs"]

#: Forms in which families accept images.
FORMS = ("pixels", "pixels in tiles", "pixels and sizes", "tiles and sizes", "patches and grid")


def image_inputs(form: str, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Draw one image for each of ROWS rows."""
    vision = next((x for x in (getattr(config, n, None) for n in _VISION) if x is not None), config)
    side, channels = _side(vision), getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
    if frames and form == "pixels":
        return {"pixel_values": _noise(ROWS, frames, channels, side, side)}
    if form == "pixels":
        return {"pixel_values": _noise(ROWS, channels, side, side)}
    if form == "pixels in tiles":
        return {"pixel_values": _noise(ROWS, 1, channels, side, side)}
    if form == "pixels and sizes":
        sizes = torch.full((ROWS, 2), side)
        return {"pixel_values": _noise(ROWS, channels, side, side), "image_sizes": sizes}
    if form == "tiles and sizes":
        sizes = torch.full((ROWS, 2), side)
        return {"pixel_values": _noise(ROWS, 2, channels, side, side), "image_sizes": sizes}
    patch, grid = vision.patch_size, 8
    per_patch = channels * getattr(vision, "temporal_patch_size", 1) * patch * patch
    grids = torch.tensor([[1, grid, grid]] * ROWS)
    return {"pixel_values": _noise(ROWS * grid * grid, per_patch), "image_grid_thw": grids}


_VISION = ("vision_config", "vision_tower_config", "vit_config", "visual_config", "vision_model_config")


def _side(vision: PreTrainedConfig) -> int:
    side = getattr(vision, "image_size", None) or getattr(vision, "input_size", None) or 32
    return int(side[0] if isinstance(side, list | tuple) else side)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def image_batch(config: PreTrainedConfig, parameters: Any) -> dict[str, Any]:
    """Make a batch of images, with classes if the model is trained on classes."""
    batch: dict[str, Any] = dict(image_inputs("pixels", config))
    return batch | ({"labels": torch.arange(ROWS) % 2} if "labels" in parameters else {})


def image_and_text_batch(
    layout: str, tokens: int, vocab: int, model: PreTrainedModel, form: str, parameters: Any
) -> dict[str, Any]:
    """Make a batch of four text tokens, an image, and text up to ``tokens``.

    The text has at least 8 tokens.
    """
    images = image_inputs(form, model.config)
    count = _image_tokens(model, images)
    text = decoder_batch(layout, max(tokens - count, 8), vocab)
    config = model.config
    token = getattr(config, "image_token_id", None)
    token = config.image_token_index if token is None else token

    def with_image(x: Tensor, fill: int) -> Tensor:
        return torch.cat([x[:, :4], torch.full((ROWS, count), fill, dtype=x.dtype), x[:, 4:]], 1)

    fills = {"input_ids": int(token), "labels": -100, "attention_mask": 1}
    batch = {name: with_image(x, fills[name]) for name, x in text.items()}
    is_image = batch["input_ids"].eq(fills["input_ids"]).long()
    batch |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in parameters}
    if model.config.model_type == "paligemma":  # The token types mark the prefix and the text after it.
        batch["token_type_ids"] = (torch.arange(is_image.shape[1]) >= count + 6).long().repeat(ROWS, 1)
    return batch | images


def _image_tokens(model: PreTrainedModel, images: dict[str, Tensor]) -> int:
    """Compute the number of tokens of one image."""
    with torch.no_grad():
        holder: Any = model if hasattr(model, "get_image_features") else model.model
        found = holder.get_image_features(**images)
    if not isinstance(found, Tensor | list | tuple):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    if isinstance(found, list | tuple):
        return int(found[0].shape[-2])
    return int(found.numel() // found.shape[-1] // ROWS)
