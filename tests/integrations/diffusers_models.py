"""Models of diffusers from the zoo, and inputs: two samples, the second with a padded text if it may be."""

from typing import Any

import torch

from attnspan_lab.zoo.diffusers import architectures

_KINDS = """SD3Transformer2D FluxTransformer2D Flux2Transformer2D ChromaTransformer2D QwenImageTransformer2D
    WanTransformer3D SkyReelsV2Transformer3D LTXVideoTransformer3D HunyuanVideoTransformer3D
    HunyuanVideo15Transformer3D Lumina2Transformer2D PixArtTransformer2D SanaTransformer2D
    CogVideoXTransformer3D CogView4Transformer2D MochiTransformer3D AuraFlowTransformer2D
    AllegroTransformer3D"""
_ZOO = {x.name: x for x in architectures()}

#: SD3, Flux and so on, by what stands before "Transformer" in the names of their classes.
MODELS = {name.partition("Transformer")[0]: _ZOO[f"{name}Model"] for name in _KINDS.split()}


def build(name: str) -> torch.nn.Module:
    """A model whose attention is torch's, the same each time."""
    return MODELS[name].make("sdpa", "tiny").eval()


def inputs_of(name: str, tokens: int = 64) -> dict[str, Any]:
    """Inputs with about so many tokens of an image, or of two frames."""
    model = MODELS[name]
    padded = model.batch("padded", tokens, "tiny")
    return model.batch("plain", tokens, "tiny") if padded is None else padded
