"""The contract with a wrapped kernel: the parameters that it takes, the outputs that it returns."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import torch
from torch import Tensor

from attnspan.errors import OptionError, _Explained, expect
from attnspan.torch import compat

Declaration = str | Callable[..., Tensor]
Declarations = Declaration | Sequence[str] | Mapping[str, Declaration]

#: Marks a parameter without a default.
REQUIRED: Any = inspect.Parameter.empty
_PLAIN = ("Tensor", "bool", "SymInt", "float", "str", "SymInt[]", "float[]")
# Types of common parameters whose default is None and that have no annotation.
_KNOWN = dict.fromkeys(("scale", "sm_scale", "softmax_scale"), "float?")
_KNOWN |= dict.fromkeys(("alibi_slopes", "attn_bias", "attn_mask", "bias", "mask", "sinks"), "Tensor?")
_KNOWN |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), "Tensor?")
# Declarations are evaluated once for each kind of input. This many results are cached.
_MOST_KINDS = 1024


class DeclarationError(_Explained, ValueError):
    """A wrapped kernel or its backward contradicts its declaration.

    Example:
        >>> raise DeclarationError("out", expected="dtype float32", got="bfloat16", remedy="Declare it")
        Traceback (most recent call last):
        attnspan.interop._contract.DeclarationError: out: expected dtype float32, got bfloat16. Declare it.
    """


expect_declared = partial(expect, error=DeclarationError)


class Parameter(NamedTuple):
    """One parameter, with its type in torch's schema language.

    A ``keyword`` parameter is keyword-only. A ``varying`` parameter is a float that the operator takes as a
    tensor.
    """

    name: str
    type: str
    default: Any
    keyword: bool
    varying: bool = False


class Parameters:
    """The parameters of a kernel that its operator has, in order, and the names of some kinds of them."""

    def __init__(self, items: Iterable[Parameter]) -> None:
        self.items = tuple(items)
        self.names = tuple(x.name for x in self.items)
        self.tensors = tuple(x.name for x in self.items if x.type.startswith("Tensor"))
        self.required = tuple(x.name for x in self.items if x.type == "Tensor")
        # Parameters whose values are known at tracing time.
        self.traced = tuple(x.name for x in self.items if not x.varying)
        types = [x.type.replace("float", "Tensor") if x.varying else x.type for x in self.items]
        self.schema = ", ".join(f"{kind} {name}" for kind, name in zip(types, self.names, strict=True))

    def plain(self, values: Iterable[Any]) -> list[Any]:
        """Convert the operator's values to the kernel's: tuples for lists, numbers for varying parameters."""
        return [
            float(x) if item.varying and isinstance(x, Tensor) else tuple(x) if isinstance(x, list) else x
            for item, x in zip(self.items, values, strict=True)
        ]

    def call(self, kernel: Callable[..., Any], values: Iterable[Any]) -> Any:
        """Call the kernel with one of the operator's values for each parameter."""
        given = list(zip(self.items, self.plain(values), strict=True))
        positional = [x for item, x in given if not item.keyword]
        return kernel(*positional, **{item.name: x for item, x in given if item.keyword})


def names_in(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple. A single name may be a string."""
    return (names,) if isinstance(names, str) else tuple(names)


def read_parameters(kernel: Callable[..., Any], schema: str | None, varying: Sequence[str]) -> Parameters:
    """Read the kernel's parameters from ``schema``, or from the kernel's signature without a schema."""
    items = list(_from_signature(kernel) if schema is None else _from_schema(kernel, schema))
    expected, got = "a kernel with at least one required tensor", [x.name for x in items]
    remedy = "Describe its arguments with schema='Tensor q, Tensor k, Tensor v'"
    expect(any(x.type == "Tensor" for x in items), "wrap", expected, got, remedy)
    floats = [x.name for x in items if x.type in ("float", "float?")]
    expected = f"names of parameters that are floats ({', '.join(floats) or 'none'})"
    remedy = "Leave out the others. Integers may always vary"
    varying = names_in(varying)
    expect(set(varying) <= set(floats), "varying", expected, ", ".join(varying), remedy)
    return Parameters(x._replace(varying=x.name in varying) for x in items)


def _from_schema(kernel: Callable[..., Any], schema: str) -> Iterator[Parameter]:
    try:
        arguments = compat.parse_schema(f"kernel({schema}) -> ()").arguments
    except RuntimeError as error:
        expected, got = "arguments in torch's schema language", f"{schema!r} ({str(error).splitlines()[0]})"
        remedy = "Write for example 'Tensor q, Tensor k, Tensor v, float? softmax_scale=None'"
        raise OptionError("schema", expected=expected, got=got, remedy=remedy) from None
    places, moved = _places(kernel), False
    for place, x in enumerate(arguments):
        # Behind a parameter that the schema leaves out, the kernel's positions are others.
        moved = moved or places.get(x.name, place) != place
        kind = _text(x.type)
        _expect_type(kind.removesuffix("?") in _PLAIN, x.name, kind)
        what, remedy = f"parameter {x.name!r} of the kernel", "Wrap a function that returns its outputs"
        expected, got = "a parameter that the kernel only reads", "a parameter that it writes to"
        expect(x.alias_info is None, what, expected, got, remedy)
        default = x.default_value if x.has_default_value() else REQUIRED
        yield Parameter(x.name, kind, default, moved or x.kwarg_only)


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function. None for a function of an extension module, which has no signature."""
    for evaluated in (True, False):  # Some annotations exist for type checkers only.
        with contextlib.suppress(NameError, SyntaxError, TypeError, ValueError):
            return list(inspect.signature(function, eval_str=evaluated).parameters.values())
    return None


def _places(kernel: Callable[..., Any]) -> dict[str, int | None]:
    """The position of each parameter of a kernel, None for a keyword-only parameter."""
    parameters = enumerate(_signature(kernel) or ())
    return {x.name: None if x.kind is x.KEYWORD_ONLY else i for i, x in parameters}


def _text(kind: Any) -> str:
    """Return a parsed type as text, with SymInt for int. An int would be a constant of compiled code."""
    suffix = {"OptionalType": "?", "ListType": "[]"}.get(kind.kind())
    if suffix is None:
        return {"int": "SymInt"}.get(str(kind), str(kind))
    return _text(kind.getElementType()) + suffix


def _from_signature(kernel: Callable[..., Any]) -> Iterator[Parameter]:
    parameters, expected = _signature(kernel), "a function whose signature Python can read"
    got, remedy = "a function without one, such as in an extension module", "Pass schema='Tensor q, ...'"
    expect(parameters is not None, f"wrap({kernel!r})", expected, got, remedy)
    skipped = False
    for x in parameters or ():
        if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
            continue
        kind = _type_of(x)
        _expect_type(kind is not None or x.default is not REQUIRED, x.name, str(x.annotation))
        if kind is None:
            skipped = True  # The operator lacks it, so later positions change.
        else:
            yield Parameter(x.name, kind, x.default, skipped or x.kind is x.KEYWORD_ONLY)


def _type_of(x: inspect.Parameter) -> str | None:
    """Return the type in torch's schema language. None if annotation and default do not determine it."""
    if x.annotation is not REQUIRED and not isinstance(x.annotation, str):
        return _annotated(x.annotation)
    if x.default is REQUIRED:
        return "Tensor"
    if x.default is None:
        return _KNOWN.get(x.name)
    if isinstance(x.default, tuple | list):
        return _annotated(list[type(x.default[0])]) if x.default else None  # type: ignore[misc]
    return _annotated(type(x.default))


def _annotated(annotation: Any) -> str | None:
    arguments = get_args(annotation)
    if NoneType in arguments and len(arguments) == 2:
        inner = _annotated(arguments[arguments[0] is NoneType])
        return None if inner is None else inner + "?"
    if get_origin(annotation) is tuple:
        annotation = compat.tuple_to_list(annotation)
    found = compat.parameter_types().get(annotation)
    return found if found in _PLAIN else None


def _expect_type(condition: bool, name: str, got: str) -> None:
    expected = "a tensor, bool, int, float, str, a sequence of ints or floats, or one of these or None"
    remedy = "Wrap a function that takes one of these, or pass schema='...' without the parameter"
    expect(condition, f"parameter {name!r} of the kernel", expected, got, remedy)


def names_of(function: Callable[..., Any], available: Sequence[str], role: str) -> tuple[str, ...]:
    """Return the parameters of a user's function. The function receives the arguments that they name."""
    wanted, expected = _signature(function), "a Python function with named parameters"
    expect(wanted is not None, role, expected, repr(function), "Wrap it in a lambda")
    wanted = wanted or []
    if any(p.kind is p.VAR_KEYWORD for p in wanted):
        return tuple(available)
    named = [p for p in wanted if p.kind is not p.VAR_POSITIONAL]
    unknown = [p.name for p in named if p.name not in available and p.default is REQUIRED]
    expected, remedy = f"parameters among {', '.join(available)}", "Name its parameters after these arguments"
    expect(not unknown, role, expected, ", ".join(unknown), remedy)
    return tuple(p.name for p in named if p.name in available)


class Outputs:
    """The outputs of a kernel as functions of its inputs. Errors name its operator, ``owner``."""

    def __init__(
        self, declared: Declarations, parameters: Parameters, strides: str, layout: str, owner: str
    ) -> None:
        self.parameters, self.owner = parameters, owner
        self._strides, self._layout = strides, layout
        if isinstance(declared, str) or callable(declared):
            declared = {"out" if callable(declared) else declared.split()[0]: declared}
        elif not isinstance(declared, Mapping):
            declared = {name.split()[0]: name for name in declared}
        self.names = tuple(declared)
        taken = set(declared) & {x for name in parameters.names for x in (name, name.removeprefix("d"))}
        expected = "at least one output, with names that differ from all parameters and their gradients"
        remedy = "Pass a mapping of other names to 'out', 'lse' or functions"
        expect(declared and not taken, "outputs", expected, ", ".join(sorted(taken)) or "none", remedy)
        self._makers = {name: self._maker(x) for name, x in declared.items()}
        self._reads = {name for reads, _ in self._makers.values() for name in reads}
        self._made: dict[Any, list[Any]] = {}

    def _maker(self, declaration: Declaration) -> tuple[tuple[str, ...], Callable[..., Any]]:
        """Return the names of the inputs that an output depends on, and a function of these inputs."""
        if callable(declaration):
            reads = names_of(declaration, self.parameters.traced, "outputs")
            # The user's function receives conforming inputs, as the kernel does.
            return reads, lambda *x: declaration(**dict(zip(reads, map(self.conform, x), strict=True)))
        makers: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
            # Strides are read only if the output depends on them. Otherwise graphs would guard on strides.
            "out": ((0, 2), lambda q, v: q.new_empty((*q.shape[:-1], v.shape[-1]))),
            "out like q": ((0,), lambda q: torch.empty_like(self.conform(q))),
            "lse": ((0,), self._lse),
        }
        expected, remedy = "'out', 'out like q', 'lse', or a function of inputs", "Pass one of these"
        expect(declaration in makers, "outputs", expected, repr(declaration), remedy)
        (places, make), tensors = makers[declaration], self.parameters.required
        expected, remedy = "q, k, v as the first three tensors, which 'out' refers to", "Pass a function"
        expect(len(tensors) > max(places), "outputs", expected, ", ".join(tensors), remedy)
        return tuple(tensors[i] for i in places), make

    def _lse(self, q: Tensor) -> Tensor:
        shape = q.shape[:-1] if self._layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return q.new_empty(shape, dtype=torch.float32)

    def make(self, named: Mapping[str, Any]) -> list[Tensor]:
        """Return uninitialised outputs for these inputs, as the operator's fake kernel does."""
        made = [make(*(named[name] for name in reads)) for reads, make in self._makers.values()]
        expected, remedy = "a function that returns a tensor", "Return a tensor such as q.new_empty(shape)"
        for name, x in zip(self.names, made, strict=True):
            what, got = f"{self.owner}, declaration of output {name!r}", type(x).__name__
            expect_declared(isinstance(x, Tensor), what, expected, got, remedy)
        return made

    def conform(self, x: Any) -> Any:
        """Return the value itself if the kernel accepts its strides, else a copy with accepted strides."""
        strides = self._strides
        if not isinstance(x, Tensor) or strides == "any" or x.dim() == 0:
            return x
        if strides == "unit":
            return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        if strides in ("bshd", "bhsd") and strides != self._layout and x.dim() == 4:
            stored = x.transpose(1, 2)
            return x if stored.is_contiguous() else stored.contiguous().transpose(1, 2)
        return x.contiguous()

    def expected(self, named: Mapping[str, Any]) -> list[Any]:
        """Return the outputs' kinds for these inputs, cached by the inputs that declarations read."""
        read = {name: named[name] for name in self._reads}
        key = tuple(map(_kind, read.values()))
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _MOST_KINDS:
                self._made.clear()
            with compat.FakeTensorMode() as mode:
                fakes = {
                    name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in read.items()
                }
                found = self._made[key] = [_kind(x) for x in self.make(fakes)]
        return found

    def verify(self, returned: Any, named: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the kernel's result if it matches the declaration and shares no memory."""
        found, declared = as_tuple(returned), f"{len(self.names)} ({', '.join(self.names)})"
        got = f"{len(found)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        self._expect(len(found) == len(self.names), "outputs", declared, got)
        owners = {address(x): f"input {n!r}" for n, x in named.items() if isinstance(x, Tensor) and x.numel()}
        for name, x, want in zip(self.names, found, self.expected(named), strict=True):
            own = f"output {name!r}"
            if not isinstance(x, Tensor) or _kind(x) != want:
                self._compare(own, x, want)
            other = owners.setdefault(address(x), own) if x.numel() else own
            if other != own:
                what, expected = f"{self.owner}, {own}", "memory that nothing else uses"
                got, remedy = f"memory that it shares with {other}", "Let the kernel return a clone"
                expect_declared(False, what, expected, got, remedy)
        return found

    def _compare(self, what: str, x: Any, want: Any) -> None:
        self._expect(isinstance(x, Tensor), what, "a torch.Tensor", type(x).__name__)
        *got, strides = _kind(x)
        for name, a, b in zip(("shape", "dtype", "device"), got, want[:-1], strict=True):
            self._expect(a == b, what, f"{name} {b}", str(a))
        # Strides of dims of size 1 and of empty tensors do not matter.
        moved = any(n > 1 and a != b for n, a, b in zip(x.shape, strides, want[-1], strict=True))
        self._expect(not (moved and x.numel()), what, f"strides {want[-1]}", f"{strides}")

    def _expect(self, condition: bool, what: str, expected: str, got: str) -> None:
        what, remedy = f"{self.owner}, {what}", "Declare its outputs with outputs=..., or fix the kernel"
        expect_declared(condition, what, f"{expected}, as declared", f"{got} from the kernel", remedy)


def _kind(x: Any) -> Any:
    """Return everything but the values of a tensor, and a hashable form of any other value."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.device, x.stride()
    return tuple(x) if isinstance(x, list) else x


def as_tuple(found: Any) -> tuple[Any, ...]:
    """Return one result or several as a tuple, which is empty for None."""
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def address(x: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return x.untyped_storage().data_ptr()
