"""Masks of other libraries: read them as masks of attnspan, and write masks of attnspan as theirs.

Nothing of another library is imported. Arrays may come from NumPy, torch or JAX, and results are of the same
framework. Readers and writers read values, so you call them outside compiled functions.
"""

from ._flashmask import FlashMask as FlashMask
from ._flashmask import from_flashmask as from_flashmask
from ._flashmask import to_flashmask as to_flashmask

__all__ = ["FlashMask", "from_flashmask", "to_flashmask"]
