"""The architectures of transformers: each family of its auto classes, with a small configuration."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import attnspan.integrations.transformers
from attnspan_lab.zoo import _identity
from attnspan_lab.zoo._configurations import BENCH, TINY, small_configuration
from attnspan_lab.zoo._exceptions import (
    BENCHES,
    CHANGES,
    IMAGE_FORMS,
    LEFT_OUT,
    NOT_PACKED,
    NOT_PADDED,
    TOWERS,
)
from attnspan_lab.zoo._images import image_and_text_batch, image_batch
from attnspan_lab.zoo._sounds import sound_batch, sound_to_text_batch
from attnspan_lab.zoo._text import decoder_batch, encoder_batch, sequence_batch
from attnspan_lab.zoo._weights import draw_weights
from attnspan_lab.zoo.architecture import Architecture

__all__ = ["architecture_of_class", "architectures", "left_out"]

# Tasks whose classes represent a family. If there are several, the first one is used.
_TASKS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "encoder-decoder",
    "IMAGE_TEXT_TO_TEXT": "vision-language",
    "MASKED_LM": "encoder",
    "CAUSAL_LM": "decoder",
    "SPEECH_SEQ_2_SEQ": "audio",
    "IMAGE_CLASSIFICATION": "vision",
    "VIDEO_CLASSIFICATION": "vision",
    "CTC": "audio",
    "AUDIO_CLASSIFICATION": "audio",
}
_NAMES = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "attnspan": attnspan.integrations.transformers.NAME,
    "identity": _identity.NAME,
}
_SIZES = {"tiny": TINY, "bench": BENCH}


def architectures() -> list[Architecture]:
    """List the families of transformers that can be built small and use its attention interface.

    `left_out` lists the other families and the reasons. Images and sounds have a fixed size, which does not
    depend on the tokens of a row. A row with an image has at least eight tokens of text. A model without
    ``loss`` in its output is an encoder of images or sounds, and the caller computes the loss.
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
        if name not in left_out()
    ]


def architecture_of_class(name: str) -> Architecture | None:
    """Describe any class of transformers with a configuration, or any model type. It may fail to be built.

    Args:
        name: A class such as ``Gemma3ForCausalLM``, or a model type such as ``bamba``, in any case.
    """
    kinds, of_families = dict[str, str](), dict[str, tuple[str, str]]()
    for task, kind in _TASKS.items():
        for family, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            first = classes if isinstance(classes, str) else classes[0]
            kinds.setdefault(first, kind)
            of_families.setdefault(family, (first, kind))
    of_type = {k.replace("-", "_"): first for k, (first, _) in of_families.items()}
    model_class: Any = getattr(transformers, of_type.get(name.lower().replace("-", "_"), name), None)
    family = getattr(getattr(model_class, "config_class", None), "model_type", "")
    if family not in transformers.CONFIG_MAPPING:
        return None
    class_name = model_class.__name__
    kind = kinds.get(class_name) or of_families.get(family, ("", "encoder"))[1]

    def batch(layout: str, tokens: int, size: str) -> dict[str, Any] | None:
        made = _batch(family, class_name, kind, layout, tokens, size)
        known = set(inspect.signature(model_class.forward).parameters)
        known -= set() if class_name in kinds else {"labels"}  # Other tasks have labels of other shapes.
        return None if made is None else {k: x for k, x in made.items() if k in known}

    return Architecture(
        class_name, "transformers", kind, ("tiny",), partial(_make, family, class_name), batch
    )


def left_out() -> dict[str, str]:
    """The reason for each family that is missing."""
    unknown = "the zoo has no rule for its image inputs"
    return {
        name: LEFT_OUT.get(name, unknown)
        for name, (class_name, _) in _families().items()
        if name in LEFT_OUT or not class_name
    }


@cache
def _families() -> dict[str, tuple[str, str]]:
    """Map each family to its class and kind."""
    found: dict[str, tuple[str, str]] = {}
    for task, kind in _TASKS.items():
        for name, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if (
                kind != "vision-language" or name in IMAGE_FORMS
            ):  # otherwise only its text part, if there is a class for it
                found.setdefault(name, (classes if isinstance(classes, str) else classes[0], kind))
    for kind, names in TOWERS.items():
        for name in names.split():
            found.setdefault(name, (modeling_auto.MODEL_MAPPING_NAMES[name], kind))
    for name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        found.setdefault(name, ("", "vision-language"))
    return found


def _configuration(name: str, class_name: str, size: str) -> transformers.PreTrainedConfig:
    changes = CHANGES.get(name, {}) | (BENCHES.get(name, {}) if size == "bench" else {})
    config = small_configuration(name, _SIZES[size], changes)
    # The text part of a family with other parts.
    whole = isinstance(config, getattr(transformers, class_name).config_class)
    return config if whole else config.get_text_config()


def _make(name: str, class_name: str, implementation: str, size: str) -> nn.Module:
    config = _configuration(name, class_name, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class._from_config(config, attn_implementation=_NAMES[implementation])
    return draw_weights(model)


def _batch(
    name: str, class_name: str, kind: str, layout: str, tokens: int, size: str
) -> dict[str, Any] | None:
    model_class = getattr(transformers, class_name)
    parameters = inspect.signature(model_class.forward).parameters
    if layout == "packed" and (kind != "decoder" or "position_ids" not in parameters or name in NOT_PACKED):
        return None
    mask = "decoder_attention_mask" if kind == "audio" else "attention_mask"
    if layout == "padded" and (mask not in parameters or kind == "vision" or name in NOT_PADDED):
        return None
    vocab, main = _SIZES[size].vocab, model_class.main_input_name
    if kind in _TEXTS:
        batch = _TEXTS[kind](layout, tokens, vocab)
    elif kind == "vision-language":
        model = _make(name, class_name, "eager", size)
        batch = image_and_text_batch(layout, tokens, vocab, model, IMAGE_FORMS[name], parameters)
    elif kind == "vision":
        batch = image_batch(_configuration(name, class_name, size), parameters)
    elif "decoder_input_ids" in parameters:
        batch = sound_to_text_batch(layout, tokens, vocab, main, _configuration(name, class_name, size))
    else:
        batch = sound_batch(main, _configuration(name, class_name, size), parameters)
    return batch | ({"use_cache": False} if "use_cache" in parameters else {})


_TEXTS: dict[str, Callable[[str, int, int], dict[str, Any]]] = {
    "decoder": decoder_batch,
    "encoder": encoder_batch,
    "encoder-decoder": sequence_batch,
}
