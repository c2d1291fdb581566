"""The text of operators' schemas, from the rows of `attnspan.call.schema`."""

from collections.abc import Sequence

from attnspan.call.schema import Array, Row


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
