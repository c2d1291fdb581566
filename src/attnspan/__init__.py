"""attnspan: attention whose mask is data."""

from typing import NoReturn as _NoReturn

from .spans import Spans as Spans  # isort: skip  (first: the function `spans` takes the submodule's place as attribute)
from ._backend import backend as backend
from .masks import Mask as Mask
from .masks import Prepared as Prepared
from .masks import SpansLargerThanMask as SpansLargerThanMask
from .masks import cache as cache
from .masks import causal as causal
from .masks import documents as documents
from .masks import from_block_mask as from_block_mask
from .masks import from_dense as from_dense
from .masks import from_predicate as from_predicate
from .masks import full as full
from .masks import global_keys as global_keys
from .masks import groups as groups
from .masks import key_padding as key_padding
from .masks import keys as keys
from .masks import parse as parse
from .masks import prefix as prefix
from .masks import segments as segments
from .masks import spans as spans
from .masks import window as window
from .options import Bias as Bias
from .options import alibi as alibi
from .options import alibi_slopes as alibi_slopes
from .options import dense_bias as dense_bias
from .options import relative as relative
from .options import t5_buckets as t5_buckets

__all__ = [
    "Bias",
    "Mask",
    "Prepared",
    "Spans",
    "SpansLargerThanMask",
    "alibi",
    "alibi_slopes",
    "backend",
    "cache",
    "causal",
    "dense_bias",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_predicate",
    "full",
    "global_keys",
    "groups",
    "key_padding",
    "keys",
    "parse",
    "prefix",
    "relative",
    "segments",
    "spans",
    "t5_buckets",
    "window",
]


def __getattr__(name: str) -> _NoReturn:
    if name in ("attention", "explain"):
        # An ImportError, as `from attnspan import ...` replaces the text of an AttributeError by its own.
        raise ImportError(
            f"attnspan.{name}: expected the name of a framework, got none. Write `from attnspan.torch import "
            f"{name}`, or `from attnspan.jax import {name}`"
        )
    raise AttributeError(f"module 'attnspan' has no attribute {name!r}")
