"""Architecture of the zoo: a model that another library builds from a small random configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IMPLEMENTATIONS", "LAYOUTS", "MODES", "Architecture"]

#: Attentions that are compared. "identity" returns the values: what then fails is the model's own.
IMPLEMENTATIONS = ("eager", "sdpa", "flex", "attnspan", "identity")
#: Batches: all tokens valid; documents in one row; rows of unequal lengths.
LAYOUTS = ("plain", "packed", "padded")
#: As it is; as one graph of torch.compile.
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Architecture:
    """One model, and its batches.

    Attributes:
        name: As its library calls it: the `model_type` in transformers, the class in diffusers.
        library: "transformers" or "diffusers".
        kind: "decoder", "encoder", "encoder-decoder", "vision-language", "vision", "audio" or "diffusion".
        sizes: "tiny", of two layers; some have "bench" too: 12 layers or more of head_dim 64.
        make: From an implementation and a size to a float32 model in training mode, without dropout; the
            weights are the same for each implementation.
        batch: From a layout, the tokens of a row and a size to the arguments of the model, the same at each
            call; None where the architecture has no such layout.
    """

    name: str
    library: str
    kind: str
    sizes: tuple[str, ...]
    make: Callable[[str, str], nn.Module]
    batch: Callable[[str, int, str], dict[str, Any] | None]
