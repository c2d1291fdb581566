"""Masks from text: a walk over the syntax tree that allows mask calls, `&` and `|`, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ._expression import Mask
from .errors import OptionError


def parse_with(text: str, names: Mapping[str, Callable[..., Mask]]) -> Mask:
    """Read `text`, with the mask functions given by name."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _misread(text, f"{error.msg} at column {error.offset}") from None
    return _mask(tree, text, names)


def _mask(node: ast.expr, text: str, names: Mapping[str, Callable[..., Mask]]) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _mask(node.left, text, names), _mask(node.right, text, names)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.Name):
        return _call(node, [], {}, text, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = [_value(x, text) for x in node.args]
        options = {x.arg: _value(x.value, text) for x in node.keywords if x.arg is not None}
        if len(options) == len(node.keywords):
            return _call(node.func, args, options, text, names)
    raise _misread(text, repr(ast.unparse(node)))


def _call(
    name: ast.Name,
    args: list[object],
    options: dict[str, object],
    text: str,
    names: Mapping[str, Callable[..., Mask]],
) -> Mask:
    if name.id not in names:
        raise OptionError(
            f"mask {text!r}", expected=f"one of {', '.join(names)}", got=name.id, remedy="Name a known mask"
        )
    try:
        return names[name.id](*args, **options)
    except TypeError as error:
        raise OptionError(
            f"mask {text!r}",
            expected=f"arguments that {name.id}() takes",
            got=str(error).removesuffix("."),
            remedy=f"See help(attnspan.{name.id})",
        ) from None


def _value(node: ast.expr, text: str) -> object:
    """An int, str, None, or list of ints."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise _misread(text, repr(ast.unparse(node))) from None
    plain = value is None or type(value) in (int, str)
    if plain or (isinstance(value, list | tuple) and all(type(x) is int for x in value)):
        return list(value) if isinstance(value, tuple) else value
    raise _misread(text, repr(ast.unparse(node)))


def _misread(text: str, got: str) -> OptionError:
    return OptionError(
        f"mask {text!r}",
        expected="mask calls with integers, composed with & and |",
        got=got,
        remedy='Write it like "causal & window(128)"',
    )
