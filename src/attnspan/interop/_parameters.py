"""The parameters of a wrapped kernel: read from its signature, or from a schema where it has none."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

from ._errors import expect

# Sizes are SymInt whatever the user calls them: an `int` would be a constant, and each new value another
# compilation.
_PLAIN = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}
_LISTS = {int: "SymInt[]", float: "float[]"}
_SCHEMA = {name: name for name in ("Tensor", "bool", "SymInt", "float", "str")} | {"int": "SymInt"}
_SCHEMA |= {"List[int]": "SymInt[]", "List[SymInt]": "SymInt[]", "List[float]": "float[]"}
# What a default of None stands for in the field's signatures, which carry no annotations.
_KNOWN = dict.fromkeys(("scale", "sm_scale", "softmax_scale"), "float?")
_KNOWN |= dict.fromkeys(("alibi_slopes", "attn_bias", "attn_mask", "bias", "mask", "sinks"), "Tensor?")
_KNOWN |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), "Tensor?")
#: The default of a parameter that has none.
REQUIRED: Any = inspect.Parameter.empty


class Parameter(NamedTuple):
    """One parameter: its type in torch's schema language, and whether the kernel takes it by keyword only.

    A varying one is a float that the operator takes as a tensor: a compiler would recompile for each value.
    """

    name: str
    type: str
    default: Any = REQUIRED
    keyword: bool = False
    varying: bool = False


class Parameters:
    """All parameters of a kernel that its operator has, in order, and names of some kinds of them."""

    def __init__(self, items: Sequence[Parameter], left_out: Iterable[str]) -> None:
        self.items = tuple(items)
        #: Optional parameters of the kernel whose type is unknown: the operator lacks them.
        self.left_out = frozenset(left_out)
        self.names = tuple(x.name for x in items)
        self.tensors = tuple(x.name for x in items if x.type.startswith("Tensor"))
        self.required = tuple(x.name for x in items if x.type == "Tensor")
        # What is known where a program is traced.
        self.traced = tuple(x.name for x in items if not x.varying)
        # Without defaults, which the wrapper fills in.
        types = (x.type.replace("float", "Tensor") if x.varying else x.type for x in items)
        self.schema = ", ".join(f"{kind} {name}" for kind, name in zip(types, self.names, strict=True))

    def plain(self, values: Iterable[Any]) -> list[Any]:
        """The operator's values as the kernel takes them: tuples for lists, numbers for varying ones."""
        return [
            float(x) if item.varying and isinstance(x, Tensor) else tuple(x) if isinstance(x, list) else x
            for item, x in zip(self.items, values, strict=True)
        ]

    def call(self, kernel: Callable[..., Any], values: Iterable[Any]) -> Any:
        """Call the kernel with one value for each parameter."""
        given = list(zip(self.items, self.plain(values), strict=True))
        positional = [x for item, x in given if not item.keyword]
        return kernel(*positional, **{item.name: x for item, x in given if item.keyword})


def read_parameters(kernel: Callable[..., Any], schema: str | None, varying: Sequence[str]) -> Parameters:
    """Read what a kernel takes from its signature, or from ``schema``."""
    items, left_out = _from_signature(kernel) if schema is None else (_from_schema(schema), [])
    got = f"({', '.join(f'{x.type} {x.name}' for x in items)})"
    remedy = "Describe its arguments with schema='Tensor q, Tensor k, Tensor v'"
    has_tensor = any(x.type == "Tensor" for x in items)
    expect(has_tensor, "wrap", "a kernel with at least one tensor that every call gives", got, remedy)
    floats = [x.name for x in items if x.type in ("float", "float?")]
    expected = f"names of parameters that are floats ({', '.join(floats) or 'none'})"
    remedy = "Leave out the others; integers may vary in any case"
    expect(set(varying) <= set(floats), "varying", expected, ", ".join(varying), remedy)
    return Parameters([x._replace(varying=x.name in varying) for x in items], left_out)


def _from_schema(schema: str) -> list[Parameter]:
    try:
        arguments = torch._C.parse_schema(f"kernel({schema}) -> ()").arguments
    except RuntimeError as error:
        got = f"{schema!r} ({str(error).strip().splitlines()[0]})"
        remedy = "Write for example 'Tensor q, Tensor k, Tensor v, float? softmax_scale=None'"
        expect(False, "schema", "arguments in torch's schema language", got, remedy)
    items = []
    for x in arguments:
        text = str(x.type)
        inner = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        _expect_type(inner in _SCHEMA, x.name, text)
        what, remedy = f"parameter {x.name!r} of the kernel", "Wrap a function that returns its outputs"
        expect(x.alias_info is None, what, "one that the kernel only reads", "one that it writes", remedy)
        default = x.default_value if x.has_default_value() else REQUIRED
        items.append(Parameter(x.name, _SCHEMA[inner] + "?" * (inner != text), default, x.kwarg_only))
    return items


def _from_signature(kernel: Callable[..., Any]) -> tuple[list[Parameter], list[str]]:
    items: list[Parameter] = []
    left_out: list[str] = []
    for x in _signature(kernel).parameters.values():
        if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
            continue
        kind = _type_of(x)
        if kind is None:
            left_out.append(x.name)
        else:
            # Behind one that is not passed, a position would be wrong.
            keyword = x.kind is x.KEYWORD_ONLY or bool(left_out)
            items.append(Parameter(x.name, kind, x.default, keyword))
    return items, left_out


def _signature(kernel: Callable[..., Any]) -> inspect.Signature:
    try:
        try:
            return inspect.signature(kernel, eval_str=True)
        except (NameError, SyntaxError):  # Annotations of names that exist for type checkers only.
            return inspect.signature(kernel)
    except (TypeError, ValueError):
        expected, got = "a function whose signature Python can read", "one without, as extension modules have"
        expect(False, f"wrap({kernel!r})", expected, got, "Give schema='Tensor q, Tensor k, Tensor v, ...'")
        raise


def _type_of(x: inspect.Parameter) -> str | None:
    """The type in torch's schema language; None where a parameter with a default does not tell it."""
    if x.annotation is not REQUIRED and not isinstance(x.annotation, str):
        found = _annotated(x.annotation)
    elif x.default is REQUIRED:
        found = "Tensor"
    elif x.default is None:
        found = _KNOWN.get(x.name)
    elif isinstance(x.default, tuple | list) and x.default:
        found = _LISTS.get(type(x.default[0]))
    else:
        found = _PLAIN.get(type(x.default))
    _expect_type(found is not None or x.default is not REQUIRED, x.name, str(x.annotation))
    return found


def _annotated(annotation: Any) -> str | None:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and NoneType in arguments and len(arguments) == 2:
        inner = _annotated(next(kind for kind in arguments if kind is not NoneType))
        return None if inner is None else inner + "?"
    if origin in (tuple, list) and len(set(arguments) - {Ellipsis}) == 1:
        return _LISTS.get(arguments[0])
    return None


def _expect_type(holds: bool, name: str, got: str) -> None:
    expected = "a tensor, bool, int, float, str, a sequence of ints or floats, or one of these or None"
    remedy = "Wrap a function that takes one of these, or give schema='...' without the parameter"
    expect(holds, f"parameter {name!r} of the kernel", expected, got, remedy)
