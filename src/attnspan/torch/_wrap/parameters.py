"""The parameters of a wrapped kernel: read from its signature, or from a schema where it has none."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor

from ...errors import OptionError

# Sizes are SymInt whatever the user calls them: an `int` would be a constant, and each new value another
# compilation.
_PLAIN = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}
_LISTS = {int: "SymInt[]", float: "float[]"}
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "bool": "bool",
    "int": "SymInt",
    "SymInt": "SymInt",
    "float": "float",
    "str": "str",
    "List[int]": "SymInt[]",
    "List[SymInt]": "SymInt[]",
    "List[float]": "float[]",
}
# What a default of None stands for in the field's signatures, which carry no annotations.
_KNOWN = {
    **dict.fromkeys(("scale", "sm_scale", "softmax_scale"), "float?"),
    **dict.fromkeys(("alibi_slopes", "attn_bias", "attn_mask", "bias", "mask", "sinks"), "Tensor?"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), "Tensor?"),
}

#: The default of a parameter that has none.
REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Args:
        name: Its name.
        type: Its type in torch's schema language; integers are SymInt.
        default: Its default value, or `REQUIRED`.
        keyword: The kernel takes it by keyword only.
        varying: It is a float, which the operator takes as a tensor of no dims: a compiler would recompile
            for each value of a float.

    Example:
        >>> Parameter("causal", "bool", False).is_tensor
        False
    """

    name: str
    type: str
    default: Any = REQUIRED
    keyword: bool = False
    varying: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it takes a tensor (or None)."""
        return self.type.startswith("Tensor")

    @property
    def schema(self) -> str:
        """The argument of the operator."""
        return f"{self.type.replace('float', 'Tensor') if self.varying else self.type} {self.name}"


@dataclass(frozen=True)
class Parameters:
    """All parameters of a kernel that its operator has, in order.

    Args:
        items: The parameters.
        left_out: Names of optional parameters of the kernel whose type is unknown: the operator lacks them.

    Example:
        >>> def attend(q, k, v, causal=False, softmax_scale=None): ...
        >>> read_parameters(attend).schema
        'Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale'
    """

    items: tuple[Parameter, ...]
    left_out: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(item.name for item in self.items)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of those that take a tensor, optional ones included."""
        return tuple(item.name for item in self.items if item.is_tensor)

    @property
    def traced(self) -> tuple[str, ...]:
        """Names of those that are known where a program is traced: all but varying numbers."""
        return tuple(item.name for item in self.items if not item.varying)

    @property
    def required_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that every call must give."""
        return tuple(item.name for item in self.items if item.type == "Tensor")

    @property
    def schema(self) -> str:
        """The arguments of the operator; without defaults, which the wrapper fills in."""
        return ", ".join(item.schema for item in self.items)

    def plain(self, values: Iterable[Any]) -> list[Any]:
        """The operator's values as the kernel takes them: tuples for lists, numbers for varying ones."""
        plain: list[Any] = []
        for item, value in zip(self.items, values, strict=True):
            if item.varying and isinstance(value, Tensor):
                plain.append(float(value))
            else:
                # The dispatcher hands lists back for tuples; kernels of the field compare with tuples.
                plain.append(tuple(value) if isinstance(value, list) else value)
        return plain

    def call(self, kernel: Callable[..., Any], values: Iterable[Any]) -> Any:
        """Call the kernel with one value for each parameter.

        Example:
            >>> read_parameters(pow, "Tensor base, *, int exp").call(pow, (torch.tensor(2), 5))
            tensor(32)
        """
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for item, value in zip(self.items, self.plain(values), strict=True):
            if item.keyword:
                keywords[item.name] = value
            else:
                positional.append(value)
        return kernel(*positional, **keywords)


def read_parameters(
    kernel: Callable[..., Any], schema: str | None = None, varying: Sequence[str] = ()
) -> Parameters:
    """Read what a kernel takes from its signature, or from ``schema``.

    Args:
        kernel: The function; `functools.partial` and callable objects too.
        schema: Arguments in torch's schema language, where the function has no signature (ctypes, extension
            modules) or one that does not tell the types.
        varying: Names of floats that the operator takes as tensors.

    Raises:
        ValueError: No signature, a type that operators do not have, no tensor, or a varying one that
            is no float.

    Example:
        >>> read_parameters(max, "Tensor q, int n=3").items[1]
        Parameter(name='n', type='SymInt', default=3, keyword=False, varying=False)
    """
    parameters = _from_signature(kernel) if schema is None else _from_schema(schema)
    if not parameters.required_tensors:
        raise OptionError(
            "wrap",
            expected="a kernel with at least one tensor that every call gives",
            got=f"({parameters.schema})",
            remedy="Describe its arguments with schema='Tensor q, Tensor k, Tensor v'",
        )
    floats = [item.name for item in parameters.items if item.type in ("float", "float?")]
    if not set(varying) <= set(floats):
        raise OptionError(
            "varying",
            expected=f"names of parameters that are floats ({', '.join(floats) or 'none'})",
            got=", ".join(varying),
            remedy="Leave out the others; integers may vary in any case",
        )
    items = tuple(replace(item, varying=item.name in varying) for item in parameters.items)
    return Parameters(items, parameters.left_out)


def _from_schema(schema: str) -> Parameters:
    try:
        arguments = torch._C.parse_schema(f"kernel({schema}) -> ()").arguments
    except RuntimeError as error:
        raise OptionError(
            "schema",
            expected="arguments in torch's schema language",
            got=f"{schema!r} ({str(error).strip().splitlines()[0]})",
            remedy="Write for example 'Tensor q, Tensor k, Tensor v, float? softmax_scale=None'",
        ) from None
    items = []
    for argument in arguments:
        text = str(argument.type)
        inner = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        if inner not in _SCHEMA_TYPES:
            raise _unknown_type(argument.name, text)
        if argument.alias_info is not None:
            raise OptionError(
                f"parameter {argument.name!r} of the kernel",
                expected="one that the kernel only reads",
                got="one that it writes",
                remedy="Wrap a function that makes its outputs and returns them",
            )
        optional = "?" if inner != text else ""
        default = argument.default_value if argument.has_default_value() else REQUIRED
        items.append(Parameter(argument.name, _SCHEMA_TYPES[inner] + optional, default, argument.kwarg_only))
    return Parameters(tuple(items))


def _from_signature(kernel: Callable[..., Any]) -> Parameters:
    try:
        signature = _signature(kernel)
    except (TypeError, ValueError):
        raise OptionError(
            f"wrap({getattr(kernel, '__name__', kernel)!r})",
            expected="a function whose signature Python can read",
            got="one without (an extension module's, or a ctypes function)",
            remedy="Give schema='Tensor q, Tensor k, Tensor v, ...'",
        ) from None
    items, left_out = [], set()
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = _type_of(parameter)
        if kind is None:
            left_out.add(parameter.name)
        elif left_out and parameter.kind is not parameter.KEYWORD_ONLY:
            # Those before it are not passed, so its position would be wrong.
            items.append(Parameter(parameter.name, kind, parameter.default, True))
        else:
            keyword = parameter.kind is parameter.KEYWORD_ONLY
            items.append(Parameter(parameter.name, kind, parameter.default, keyword))
    return Parameters(tuple(items), frozenset(left_out))


def _signature(kernel: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(kernel, eval_str=True)
    except (NameError, SyntaxError):  # Annotations of names that exist for type checkers only.
        return inspect.signature(kernel)


def _type_of(parameter: inspect.Parameter) -> str | None:
    """The type in torch's schema language; None where a parameter with a default does not tell it."""
    if parameter.annotation is not REQUIRED and not isinstance(parameter.annotation, str):
        found = _annotated(parameter.annotation)
    elif parameter.default is REQUIRED:
        found = "Tensor"
    elif parameter.default is None:
        found = _KNOWN.get(parameter.name)
    elif isinstance(parameter.default, tuple | list) and parameter.default:
        found = _LISTS.get(type(parameter.default[0]))
    else:
        found = _PLAIN.get(type(parameter.default))
    if found is None and parameter.default is REQUIRED:
        raise _unknown_type(parameter.name, str(parameter.annotation))
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


def _unknown_type(name: str, got: str) -> OptionError:
    return OptionError(
        f"parameter {name!r} of the kernel",
        expected="a tensor, bool, int, float, str, a sequence of ints or floats, or one of these or None",
        got=got,
        remedy="Wrap a function that takes one of these, or give schema='...' without the parameter",
    )
