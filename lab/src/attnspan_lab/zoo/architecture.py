"""An architecture of the zoo: a model of another library with a small configuration and random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IMPLEMENTATIONS", "LAYOUTS", "MODES", "Architecture"]

#: Compared attentions. "identity" returns the values: failures with it come from the model itself.
IMPLEMENTATIONS = ("eager", "sdpa", "flex", "attnspan", "identity")
#: Batches: all tokens valid, several documents per row, or rows of unequal lengths.
LAYOUTS = ("plain", "packed", "padded")
#: Uncompiled, or compiled to one graph with torch.compile.
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Architecture:
    """One model, and its batches.

    Attributes:
        name: Name in the library: the `model_type` in transformers, the class in diffusers.
        library: "transformers" or "diffusers".
        kind: "decoder", "encoder", "encoder-decoder", "vision-language", "vision", "audio" or "diffusion".
        sizes: "tiny" with two layers, and for some architectures "bench" with 12 layers or more of head dim
            64.
        make: Maps an implementation and a size to a float32 model in training mode, without dropout. The
            weights are the same for each implementation.
        batch: Maps a layout, the tokens of a row and a size to the model's arguments, the same at each call.
            The result is None if the architecture does not support the layout.
    """

    name: str
    library: str
    kind: str
    sizes: tuple[str, ...]
    make: Callable[[str, str], nn.Module]
    batch: Callable[[str, int, str], dict[str, Any] | None]
