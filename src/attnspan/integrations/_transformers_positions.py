"""Packed documents from position ids, in masks that transformers makes without positions.

transformers' encoder masks never read positions. Several decoders do not pass positions on, or make masks of
ones. With this module, each model stores its position ids while it runs, and its masks read them.
"""

import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnspan.base.recorded import is_recorded

from ._patches import Patches
from ._transformers_names import attention_of


class _Running(threading.local):
    """Arguments of the model that a thread runs, and whether its layers need a plan."""

    def __init__(self) -> None:
        # Set in the thread's own dict, where compilers guard on it.
        self.positions: Any = None
        self.plans_only = False


running = _Running()


def positions_of(inputs_embeds: Tensor) -> Tensor | None:
    """Return the positions (B, S), if the running model was called with them and without a mask."""
    given = running.positions
    if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] != inputs_embeds.shape[1]:
        return None
    return given.to(inputs_embeds.device).expand(inputs_embeds.shape[0], -1)


def documents_of(positions: Tensor) -> Tensor | None:
    """Number the document of each token. A document starts where positions (B, S) do not go up by one.

    None if each batch element is one document. On devices and in recorded code only the program knows this,
    so the result is never None there.
    """
    starts = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    if positions.is_cpu and not is_recorded() and not starts.any():
        return None
    return starts.cumsum(-1)


def is_new(cache: Any) -> bool:
    """Return whether all keys belong to this step."""
    return cache is None or (not cache.is_compileable and cache.get_seq_length() == 0)


def follow(patches: Patches, kind: type[PreTrainedModel], name: str) -> None:
    """Let models of a class store their positions while they run, if their attention is ``name``."""
    owner = next(x for x in kind.__mro__ if "forward" in vars(x))
    forward = vars(owner)["forward"]
    if not issubclass(owner, PreTrainedModel) or hasattr(forward, _FOLLOWED):
        return
    names = list(inspect.signature(forward).parameters)[1:]

    def keep_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_of(self.config) != name:
            return forward(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        # As in transformers, a mask means that positions do not describe documents.
        positions = given.get("position_ids") if given.get("attention_mask") is None else None
        before, running.positions = running.positions, positions
        try:
            return forward(self, *args, **kwargs)
        finally:
            running.positions = before

    # torch.compile counts the programs of a code object, and remembers by the name of the code which sizes
    # and numbers vary. Each class has its own, as without this function.
    keep_positions.__code__ = keep_positions.__code__.replace(co_name=f"{owner.__qualname__}.forward")
    setattr(keep_positions, _FOLLOWED, True)
    patches.set(owner, "forward", functools.wraps(forward)(keep_positions))


_FOLLOWED = "attnspan_positions"


def follow_all(patches: Patches, name: str) -> None:
    """Call `follow` for all existing classes."""
    for kind in _kinds(PreTrainedModel):
        follow(patches, kind, name)


def _kinds(kind: type) -> Iterator[type]:
    below: type
    for below in type.__subclasses__(kind):
        yield below
        yield from _kinds(below)
