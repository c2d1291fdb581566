"""Definitions of operators, and the text of their schemas from the rows of `attnspan.call.schema`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnspan.call.schema import Array, Row

from . import compat

#: The operators. The decorator custom_op would add Python wrappers to every call.
library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
#: A unit last stride needs only the stride order of eager mode. Exact strides would add copies.
KEEPS_STRIDE_ORDER = torch.Tag.needs_fixed_stride_order


def define(
    name: str, signature: str, fake: Callable[..., Any], *tags: torch.Tag, **kernels: Callable[..., Any]
) -> compat.OpOverload:
    """Define an operator, or an overload, that compilers accept, with a kernel for each dispatch key."""
    library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.attnspan, packet), overload or "default")
    for key, kernel in kernels.items():
        library.impl(op, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(op, fake, lib=library)
    return op  # type: ignore[no-any-return]


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
