"""Batches of sound."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from attnspan_lab.zoo._text import ROWS, decoder_batch

__all__ = ["sound_batch", "sound_to_text_batch"]

_SAMPLES = 1600
_FRAMES = 128


def sound_batch(main: str, config: PreTrainedConfig, parameters: Any) -> dict[str, Any]:
    """Make a batch of waves or spectra, with texts or classes if the model is trained on them.

    Args:
        main: The model's input, "input_values" or "input_features".
        config: The model's configuration.
        parameters: Parameters of the model's forward.
    """
    bands = int(getattr(config, "num_mel_bins", None) or 16)
    shape: tuple[int, ...] = (ROWS, _SAMPLES) if main == "input_values" else (ROWS, bands, _FRAMES)
    sound = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(3, 7).repeat(ROWS, 1)  # target texts have four tokens
    return {main: sound} | ({"labels": labels} if "labels" in parameters else {})


def sound_to_text_batch(
    layout: str, tokens: int, vocab: int, main: str, config: PreTrainedConfig
) -> dict[str, Any]:
    """Make a batch of sounds, and of texts with ``tokens`` tokens for a decoder."""
    text = decoder_batch(layout, tokens, vocab)
    named = {("labels" if name == "labels" else f"decoder_{name}"): x for name, x in text.items()}
    return sound_batch(main, config, ()) | named
