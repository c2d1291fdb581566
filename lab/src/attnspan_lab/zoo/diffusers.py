"""Transformer models of diffusers, with small configurations."""

from functools import partial
from typing import Any

import diffusers
import torch
from torch import nn

from attnspan.errors import UsageError, expect
from attnspan.integrations.diffusers import enable
from attnspan_lab.zoo._diffusion import BENCH, TINY, small_configuration, valid_text
from attnspan_lab.zoo._diffusion_models import MODELS
from attnspan_lab.zoo._weights import draw_weights
from attnspan_lab.zoo.architecture import Architecture
from attnspan_lab.zoo.torch_attention import eager, identity, instead_of_sdpa

__all__ = ["architectures", "left_out"]

_SCALES = {"tiny": TINY, "bench": BENCH}


def architectures() -> list[Architecture]:
    """List the transformer models of diffusers. `left_out` lists missing models and the reasons.

    The tokens of a row belong to its image, rounded to a square, or to its two frames. Texts have a fixed
    length. The caller computes the loss.
    """
    return [
        Architecture(
            name=name,
            library="diffusers",
            kind="diffusion",
            sizes=("tiny", "bench") if model.bench else ("tiny",),
            make=partial(_make, name),
            batch=partial(_batch, name),
        )
        for name, model in MODELS.items()
    ]


def left_out() -> dict[str, str]:
    """Map each missing transformer model to the reason."""
    return {
        name: "the zoo does not define its inputs"
        for name in dir(diffusers)
        if "Transformer" in name and name.endswith("Model") and name not in MODELS
    }


def _make(name: str, implementation: str, size: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = small_configuration(name, MODELS[name], _SCALES[size])
        model: nn.Module = getattr(diffusers, name)(**config)
    draw_weights(model)
    for part in model.modules():  # random dropout of labels
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0  # type: ignore[assignment]
    if implementation == "attnspan":
        enable(model)
    elif implementation == "flex":
        _dispatch_to_flex(model)
    elif implementation in ("eager", "identity"):
        instead_of_sdpa(model, eager if implementation == "eager" else identity)
    return model


def _dispatch_to_flex(model: nn.Module) -> None:
    """Call `set_attention_backend("flex")`, and raise if processors ignore the backend."""
    processors = [getattr(part, "processor", None) for part in model.modules()]
    asking = [hasattr(x, "_attention_backend") for x in processors if x is not None]
    wanted, got = "processors that use the attention backend", "some that call torch's function directly"
    remedy, what = "Compare with another implementation", type(model).__name__
    expect(bool(asking) and all(asking), what, wanted, got, remedy, error=UsageError)
    for x in processors:
        if x is not None:
            x._attention_backend = "flex"


def _batch(name: str, layout: str, tokens: int, size: str) -> dict[str, Any] | None:
    model, scale = MODELS[name], _SCALES[size]
    if layout == "packed" or (layout == "padded" and not model.mask):
        return None
    n = max(2, 2 * round((tokens / model.frames) ** 0.5 / 2))
    batch = model.inputs(scale, n)
    if layout == "padded" or model.needs_mask:
        valid = valid_text(scale, layout == "padded")
        if model.image_in_mask:
            valid = torch.cat([valid, valid.new_ones(len(valid), n * n)], 1)
        for mask, dtype in model.mask.items():
            batch[mask] = valid.sum(1) if mask.endswith("lens") else valid.to(dtype)
    return batch
