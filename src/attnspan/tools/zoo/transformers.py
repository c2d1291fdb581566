"""The architectures of transformers: each family of its auto classes, from a small configuration."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import attnspan.integrations.transformers
from attnspan.tools.zoo import _identity
from attnspan.tools.zoo._configurations import BENCH, TINY, small_configuration
from attnspan.tools.zoo._exceptions import BENCHES, CHANGES, LEFT_OUT, NOT_PACKED
from attnspan.tools.zoo._text import decoder_batch, encoder_batch, sequence_batch
from attnspan.tools.zoo._weights import draw_weights
from attnspan.tools.zoo.architecture import Architecture

__all__ = ["architectures", "left_out"]

# The tasks whose classes stand for a family; of several, the first.
_TASKS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "encoder-decoder",
    "MASKED_LM": "encoder",
    "CAUSAL_LM": "decoder",
}
_NAMES = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "attnspan": attnspan.integrations.transformers.NAME,
    "identity": _identity.NAME,
}
_SIZES = {"tiny": TINY, "bench": BENCH}
_BATCHES: dict[str, Callable[[str, int, int], dict[str, Any]]] = {
    "decoder": decoder_batch,
    "encoder": encoder_batch,
    "encoder-decoder": sequence_batch,
}


def architectures() -> list[Architecture]:
    """The families of transformers that can be built small and use its attention interface.

    `left_out` says which cannot, and why.
    """
    return [
        Architecture(
            name=name,
            library="transformers",
            kind=kind,
            sizes=("tiny", "bench") if name in BENCHES else ("tiny",),
            make=partial(_make, name, class_name),
            batch=partial(_batch, name, class_name, kind),
        )
        for name, (class_name, kind) in _families().items()
        if name not in LEFT_OUT
    ]


def left_out() -> dict[str, str]:
    """The reason for each family that is missing."""
    return {name: LEFT_OUT[name] for name in _families() if name in LEFT_OUT}


@cache
def _families() -> dict[str, tuple[str, str]]:
    """The class and the kind of each family."""
    found: dict[str, tuple[str, str]] = {}
    for task, kind in _TASKS.items():
        for name, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(name, (classes if isinstance(classes, str) else classes[0], kind))
    return found


def _make(name: str, class_name: str, implementation: str, size: str) -> nn.Module:
    changes = CHANGES.get(name, {}) | (BENCHES.get(name, {}) if size == "bench" else {})
    model_class = getattr(transformers, class_name)
    config = small_configuration(name, _SIZES[size], changes)
    if not isinstance(config, model_class.config_class):  # the text part of a family that has others too
        config = config.get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=_NAMES[implementation])
    return draw_weights(model)


def _batch(
    name: str, class_name: str, kind: str, layout: str, tokens: int, size: str
) -> dict[str, Any] | None:
    parameters = inspect.signature(getattr(transformers, class_name).forward).parameters
    if layout == "packed" and (kind != "decoder" or "position_ids" not in parameters or name in NOT_PACKED):
        return None
    if layout == "padded" and "attention_mask" not in parameters:
        return None
    batch = _BATCHES[kind](layout, tokens, _SIZES[size].vocab)
    return batch | ({"use_cache": False} if "use_cache" in parameters else {})
