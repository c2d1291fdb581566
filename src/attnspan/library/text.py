"""Masks from text: a walk over the syntax tree that allows only calls of masks, `&` and `|`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from attnspan.errors import OptionError
from attnspan.masks import (
    Mask,
    cache,
    causal,
    documents,
    from_dense,
    full,
    global_keys,
    groups,
    key_padding,
    keys,
    prefix,
    segments,
    spans,
    window,
)

from .generation import block_causal, block_diffusion, draft_blocks, tree
from .grids import morton_natten, morton_order, natten, sasa, sta, tile_order, tiled_natten
from .mixtures import batchify, per_document, per_head, per_row, reordered
from .sequences import dilated, global_sliding, prefix_lm, shared_prefix, strided_order
from .vision import flamingo, selected_blocks, spatial_heads, temporal_heads, vision_cross_attention

#: The most characters of a text that an error shows.
_MOST_SHOWN = 400

_MASKS: tuple[Callable[..., Any], ...] = (
    *(full, causal, window, segments, documents, prefix, groups, key_padding, keys, cache, global_keys),
    *(spans, from_dense),
)
_LIBRARY: tuple[Callable[..., Any], ...] = (
    *(block_causal, block_diffusion, draft_blocks, tree),
    *(morton_natten, morton_order, natten, sasa, sta, tile_order, tiled_natten),
    *(batchify, per_document, per_head, per_row, reordered),
    *(dilated, global_sliding, prefix_lm, shared_prefix, strided_order),
    *(flamingo, selected_blocks, spatial_heads, temporal_heads, vision_cross_attention),
)


def names() -> dict[str, Callable[..., Any]]:
    """Functions that a text may call, by name: the masks of `attnspan.masks` and `attnspan.library`.

    Example:
        >>> names()["window"](2)
        window(2)
    """
    return {x.__name__: x for x in (*_MASKS, *_LIBRARY)}


def parse(text: str) -> Mask:
    """Read a mask from text, for example from a command line. Only calls of masks are evaluated.

    Args:
        text: Calls of functions of `attnspan.masks` and `attnspan.library`, combined with `&`, `|` and
            parentheses. Arguments are numbers, strings, None, masks, or lists of these. Lists of numbers
            become arrays. You may leave out the parentheses of a mask without arguments.

    Raises:
        OptionError: If a part of the text is not understood. The error names that part.

    Example:
        >>> parse("causal & (window(128) | global_keys(4))")
        causal() & (window(128) | global_keys(4))
    """
    return parse_with(text, names())


def parse_with(text: str, names: Mapping[str, Callable[..., Any]]) -> Mask:
    """Read a mask from `text` with other functions, given by their names."""
    try:
        return _Reader(text, names).mask(_parsed(text))
    except (RecursionError, MemoryError):  # Python's parser has its own stack limit
        what, expected = f"mask {_cut(text)!r}", "an expression that Python can parse"
        remedy = "Shorten it, or write it in Python and join its parts in a loop, by & and |"
        raise OptionError(what, expected=expected, got=f"{len(text)} characters", remedy=remedy) from None


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        where = f" at column {error.offset}" if isinstance(error, SyntaxError) else ""
        raise _misread(text, f"{getattr(error, 'msg', error)}{where}") from None


@dataclass
class _Reader:
    """Reader of one text. Equal lists become one array, which `prefix(n, cu) & documents(cu)` needs."""

    text: str
    names: Mapping[str, Callable[..., Any]]
    arrays: dict[str, Any] = field(default_factory=dict)

    def mask(self, node: ast.expr) -> Mask:
        found = self._value(node)
        if not isinstance(found, Mask):
            raise self._misread(node)
        return found

    def _misread(self, node: ast.expr) -> OptionError:
        return _misread(self.text, repr(ast.unparse(node)))

    def _value(self, node: ast.expr) -> Any:
        """Read an argument: a number, a string, None, a mask, a list or a call."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            return self._joined(node)
        if isinstance(node, ast.List | ast.Tuple):
            return self._list(node)
        if isinstance(node, ast.Name):  # the parentheses of a mask without arguments are optional
            return self._call(ast.Call(node, [], []), bare=True)
        if isinstance(node, ast.Call):
            return self._call(node)
        with suppress(ValueError, TypeError):
            value = ast.literal_eval(node)
            if isinstance(value, int | float | str | None):
                return value
        raise self._misread(node)

    def _joined(self, node: ast.BinOp) -> Mask:
        """Read operands from left to right. Python nests them as deep as there are operators."""
        first: ast.expr = node
        later: list[ast.BinOp] = []
        while isinstance(first, ast.BinOp) and isinstance(first.op, ast.BitAnd | ast.BitOr):
            later.append(first)
            first = first.left
        found = self.mask(first)
        for each in reversed(later):
            right = self.mask(each.right)
            found = found & right if isinstance(each.op, ast.BitAnd) else found | right
        return found

    def _list(self, node: ast.List | ast.Tuple) -> Any:
        """Read masks and strings as a list, sizes in parentheses as a tuple, other numbers as an array."""
        items = [self._value(x) for x in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(items)
        if not items or not all(isinstance(x, np.ndarray | int | float) for x in items):
            return items
        try:
            return self.arrays.setdefault(ast.unparse(node), np.array(items))
        except ValueError:
            raise _misread(self.text, f"rows of several lengths in {ast.unparse(node)!r}") from None

    def _call(self, node: ast.Call, bare: bool = False) -> Any:
        if ast.unparse(node.func) == "np.array" and len(node.args) == 1 and not node.keywords:
            return self._value(node.args[0])
        keywords = {x.arg for x in node.keywords}
        if not isinstance(node.func, ast.Name) or None in keywords or len(keywords) < len(node.keywords):
            raise self._misread(node)
        name = node.func.id
        if name not in self.names:
            raise self._unknown(name, bare)
        args = [self._value(x) for x in node.args]
        options = {str(x.arg): self._value(x.value) for x in node.keywords}
        try:
            return self.names[name](*args, **options)
        except TypeError as error:
            what, got = f"mask {_cut(self.text)!r}", str(error).removesuffix(".")
            remedy = f"See help({self.names[name].__module__}.{name})"
            raise OptionError(
                what, expected=f"arguments that {name}() takes", got=got, remedy=remedy
            ) from None

    def _unknown(self, name: str, bare: bool) -> OptionError:
        close = get_close_matches(name, self.names, n=3)
        value = f"Write the value of {name} in its place, such as [0, 10, 22, 32]"
        remedy = f"Write {' or '.join(close)}" if close else value if bare else "Name a known mask"
        expected = "the name of a mask" if close else f"one of {', '.join(self.names)}"
        return OptionError(f"mask {_cut(self.text)!r}", expected=expected, got=name, remedy=remedy)


def _misread(text: str, got: str) -> OptionError:
    expected = "mask calls with numbers and lists of numbers, composed with & and |"
    remedy = 'Write it like "causal & window(128)"'
    return OptionError(f"mask {_cut(text)!r}", expected=expected, got=_cut(got), remedy=remedy)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
