"""The library of operators, and the text of their schemas from the rows of `attnspan.call.schema`."""

from collections.abc import Sequence

import torch

from attnspan.call.schema import Array, Row

#: The operators. The decorator custom_op would add Python wrappers to every call.
library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
#: A unit last stride needs only the stride order of eager mode. Exact strides would add copies.
KEEPS_STRIDE_ORDER = torch.Tag.needs_fixed_stride_order


def arguments(rows: Sequence[Row]) -> str:
    """The arguments of an operator. Trailing arguments have their defaults.

    Example:
        >>> from attnspan.call.schema import INPUTS, OPTIONS
        >>> arguments((*INPUTS[3:], *OPTIONS[:2]))
        'Tensor bounds, float scale, float softcap=0.0, Tensor? bias=None'
    """
    words: list[str] = []
    trailing = True
    for row in reversed(rows):
        kind = row.type if not isinstance(row, Array) else "Tensor?" if row.optional else "Tensor"
        trailing = trailing and (row.default is not None or (isinstance(row, Array) and row.optional))
        words.append(f"{kind} {row.name}={row.default!r}" if trailing else f"{kind} {row.name}")
    return ", ".join(reversed(words))
