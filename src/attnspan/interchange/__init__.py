"""Read masks of other attention libraries as attnspan masks, and write attnspan masks in their formats.

You do not need to install the other libraries. Pass NumPy, torch or JAX arrays: the results belong to the
same framework. Readers and writers need the values of their arrays, so you call them outside compiled
functions.
"""

from ._dense import to_dense as to_dense
from ._flashmask import FlashMask as FlashMask
from ._flashmask import from_flashmask as from_flashmask
from ._flashmask import to_flashmask as to_flashmask
from ._jax_masks import from_splash as from_splash
from ._jax_masks import from_tokamax as from_tokamax
from ._ranges import Ranges as Ranges
from ._ranges import from_ranges as from_ranges
from ._ranges import to_ranges as to_ranges
from ._serving import Bits as Bits
from ._serving import PageTable as PageTable
from ._serving import from_bits as from_bits
from ._serving import page_table_from_blocks as page_table_from_blocks
from ._serving import page_table_from_csr as page_table_from_csr
from ._serving import to_bits as to_bits
from ._varlen import Varlen as Varlen
from ._varlen import from_varlen as from_varlen
from ._varlen import to_varlen as to_varlen
from ._xformers import from_xformers as from_xformers

__all__ = [
    "Bits",
    "FlashMask",
    "PageTable",
    "Ranges",
    "Varlen",
    "from_bits",
    "from_flashmask",
    "from_ranges",
    "from_splash",
    "from_tokamax",
    "from_varlen",
    "from_xformers",
    "page_table_from_blocks",
    "page_table_from_csr",
    "to_bits",
    "to_dense",
    "to_flashmask",
    "to_ranges",
    "to_varlen",
]
