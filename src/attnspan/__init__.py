"""attnspan: exact attention. You pass the mask as data."""

import typing as _typing

from attnspan.masks.bounds import Spans as Spans  # isort: skip  (first: the function `spans` takes the submodule's place as attribute)
from attnspan.call.backend import backend as backend
from attnspan.call.options import Bias as Bias
from attnspan.call.options import alibi as alibi
from attnspan.call.options import alibi_slopes as alibi_slopes
from attnspan.call.options import dense_bias as dense_bias
from attnspan.call.options import relative as relative
from attnspan.call.options import t5_buckets as t5_buckets
from attnspan.library.text import parse as parse
from attnspan.masks import Mask as Mask
from attnspan.masks import Prepared as Prepared
from attnspan.masks import SpansLargerThanMask as SpansLargerThanMask
from attnspan.masks import cache as cache
from attnspan.masks import causal as causal
from attnspan.masks import documents as documents
from attnspan.masks import from_block_mask as from_block_mask
from attnspan.masks import from_dense as from_dense
from attnspan.masks import from_predicate as from_predicate
from attnspan.masks import full as full
from attnspan.masks import global_keys as global_keys
from attnspan.masks import groups as groups
from attnspan.masks import key_padding as key_padding
from attnspan.masks import keys as keys
from attnspan.masks import prefix as prefix
from attnspan.masks import segments as segments
from attnspan.masks import spans as spans
from attnspan.masks import window as window

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

__version__: str

if not _typing.TYPE_CHECKING:  # A type checker would take every misspelt name for a str.
    from attnspan.base.version import look_up as __getattr__  # noqa: F401
