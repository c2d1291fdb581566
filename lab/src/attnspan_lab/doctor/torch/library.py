"""Subjects of transformers and diffusers by the name of a class or a model type."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch

from attnspan_lab.doctor.unfit import Unfit
from attnspan_lab.doctor.words import error_text

if TYPE_CHECKING:
    from torch import nn

    from attnspan_lab.zoo.architecture import Architecture

__all__ = ["of_library"]

_MODELS = re.compile(r"(Model|For[A-Z]\w+|LMHeadModel)$")


def of_library(name: str) -> tuple[nn.Module, list[Any], list[Any]]:
    """Build a class or model type with a tiny configuration and random weights.

    Args:
        name: A class of transformers or diffusers, or a model type of transformers.

    Returns:
        The model, its batches, and batches of other kinds (packed and padded).

    Raises:
        OptionError: There is no such class, or it cannot be built. The error names similar classes.
    """
    from attnspan_lab.zoo.measure import SOURCES, collect
    from attnspan_lab.zoo.plan import TOKENS

    own = _named(name, collect({"transformers": SOURCES["transformers"]}))
    if own is None:
        from attnspan_lab.zoo.transformers import architecture_of_class

        own = architecture_of_class(name) or _named(name, collect({"diffusers": SOURCES["diffusers"]}))
    if own is None:
        similar = _similar(name)
        remedy = f"Did you mean {' or '.join(similar)}" if similar else "Write pkg.module:factory"
        expected = "a class of transformers or diffusers, or a model type"
        raise Unfit("attnspan doctor", expected=expected, got=repr(name), remedy=remedy)
    try:
        model = _made(own)
        plain, more = (
            [x for kind, n in some if (x := own.batch(kind, n, "tiny")) is not None]
            for some in ([("plain", n) for n in TOKENS], [(x, TOKENS[0]) for x in ("packed", "padded")])
        )
        with torch.no_grad():  # The zoo's inputs may not fit a class that it does not know.
            model(**(plain or more)[0])
    except Exception as error:
        got = error_text(error, 160)
        remedy = "Write a factory that returns this model with a small configuration, and batches"
        expected = "a class that the doctor can build small"
        raise Unfit(name, expected=expected, got=got, remedy=remedy) from error
    return model, plain or more[:1], more


def _made(architecture: Architecture) -> nn.Module:
    try:
        return architecture.make("sdpa", "tiny")
    except ValueError:  # The model cannot use torch's attention function.
        return architecture.make("eager", "tiny")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _named(name: str, architectures: list[Architecture]) -> Architecture | None:
    return next((x for x in architectures if _plain(x.name) == _plain(name)), None)


def _similar(name: str) -> list[str]:
    """List the classes and model types with the most similar names."""
    import diffusers
    import transformers
    from transformers import CONFIG_MAPPING

    known = [x for x in dir(transformers) if _MODELS.search(x) and not x.startswith(("TF", "Flax"))]
    known += [x for x in dir(diffusers) if "Transformer" in x and x.endswith("Model")]
    by_plain = {_plain(x): x for x in (*known, *CONFIG_MAPPING)}
    return [by_plain[x] for x in get_close_matches(_plain(name), by_plain, 3, 0.7)]
