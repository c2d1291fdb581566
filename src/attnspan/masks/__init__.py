"""Masks as immutable expressions, composed with `&` and `|`, lowered to spans."""

from attnspan.base.pytrees import register_pytrees as register_pytrees

from .bounds import Spans as Spans
from .by_index import cache as cache
from .by_index import causal as causal
from .by_index import full as full
from .by_index import global_keys as global_keys
from .by_index import key_padding as key_padding
from .by_index import spans as spans
from .by_index import window as window
from .by_value import from_block_mask as from_block_mask
from .by_value import from_dense as from_dense
from .by_value import from_predicate as from_predicate
from .by_value import keys as keys
from .expression import Mask as Mask
from .expression import Prepared as Prepared
from .intervals import Interval as Interval
from .intervals import Rows as Rows
from .lowering import Lowering as Lowering
from .lowering import SpansLargerThanMask as SpansLargerThanMask
from .packed import documents as documents
from .packed import groups as groups
from .packed import prefix as prefix
from .packed import segments as segments

__all__ = [
    "Interval",
    "Lowering",
    "Mask",
    "Prepared",
    "Rows",
    "Spans",
    "SpansLargerThanMask",
    "cache",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_predicate",
    "full",
    "global_keys",
    "groups",
    "key_padding",
    "keys",
    "prefix",
    "register_pytrees",
    "segments",
    "spans",
    "window",
]
