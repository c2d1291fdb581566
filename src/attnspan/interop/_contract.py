"""The contract with a wrapped kernel: the parameters that it takes, the outputs that it returns."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import torch
from torch import Tensor
from torch._library.infer_schema import SUPPORTED_PARAM_TYPES, tuple_to_list
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import OptionError, expect
from ._errors import expect_declared

Declaration = str | Callable[..., Tensor]
Declarations = Declaration | Sequence[str] | Mapping[str, Declaration]
_SHAPES_ALONE = ("out", "lse")

#: The default of a parameter that has none.
REQUIRED: Any = inspect.Parameter.empty
_PLAIN = ("Tensor", "bool", "SymInt", "float", "str", "SymInt[]", "float[]")
# What a default of None stands for in the field's signatures, which carry no annotations.
_KNOWN = dict.fromkeys(("scale", "sm_scale", "softmax_scale"), "float?")
_KNOWN |= dict.fromkeys(("alibi_slopes", "attn_bias", "attn_mask", "bias", "mask", "sinks"), "Tensor?")
_KNOWN |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), "Tensor?")


class Parameter(NamedTuple):
    """One parameter, with its type in torch's schema language.

    The kernel takes a ``keyword`` one by name only. A ``varying`` one is a float that the operator takes as a
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
        # Those whose values are known where a program is traced.
        self.traced = tuple(x.name for x in self.items if not x.varying)
        types = [x.type.replace("float", "Tensor") if x.varying else x.type for x in self.items]
        self.schema = ", ".join(f"{kind} {name}" for kind, name in zip(types, self.names, strict=True))

    def plain(self, values: Iterable[Any]) -> list[Any]:
        """The operator's values as the kernel takes them: tuples for lists, numbers for varying ones."""
        return [
            float(x) if item.varying and isinstance(x, Tensor) else tuple(x) if isinstance(x, list) else x
            for item, x in zip(self.items, values, strict=True)
        ]

    def call(self, kernel: Callable[..., Any], values: Iterable[Any]) -> Any:
        """Call the kernel with one of the operator's values for each parameter."""
        given = list(zip(self.items, self.plain(values), strict=True))
        positional = [x for item, x in given if not item.keyword]
        return kernel(*positional, **{item.name: x for item, x in given if item.keyword})


class ByName:
    """A user's function, which is given what its parameters name, and those names."""

    def __init__(self, function: Callable[..., Any], available: Sequence[str], role: str) -> None:
        try:
            wanted = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            expected, remedy = "a Python function, whose parameters have names", "Write a lambda around it"
            raise OptionError(role, expected=expected, got=repr(function), remedy=remedy) from None
        kinds = {p.kind for p in wanted}
        named = [p for p in wanted if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [p.name for p in named if p.name not in available and p.default is REQUIRED]
        expected, remedy = f"parameters among {', '.join(available)}", "Name them after what it needs"
        expect(not unknown, role, expected, ", ".join(unknown), remedy)
        everything = inspect.Parameter.VAR_KEYWORD in kinds
        self.needs = tuple(available if everything else [p.name for p in named if p.name in available])
        self._function = function

    def __call__(self, named: Mapping[str, Any]) -> Any:
        return self._function(**{name: named[name] for name in self.needs})


def read_parameters(kernel: Callable[..., Any], schema: str | None, varying: Sequence[str]) -> Parameters:
    """Read what a kernel takes from ``schema``, without one from the kernel's signature."""
    items = _from_signature(kernel) if schema is None else _from_schema(schema)
    expected, got = "a kernel with at least one tensor that every call gives", [x.name for x in items]
    remedy = "Describe its arguments with schema='Tensor q, Tensor k, Tensor v'"
    expect(any(x.type == "Tensor" for x in items), "wrap", expected, got, remedy)
    floats = [x.name for x in items if x.type in ("float", "float?")]
    expected = f"names of parameters that are floats ({', '.join(floats) or 'none'})"
    remedy = "Leave out the others; integers may vary in any case"
    expect(set(varying) <= set(floats), "varying", expected, ", ".join(varying), remedy)
    return Parameters(x._replace(varying=x.name in varying) for x in items)


def _from_schema(schema: str) -> list[Parameter]:
    try:
        arguments = torch._C.parse_schema(f"kernel({schema}) -> ()").arguments
    except RuntimeError as error:
        expected, got = "arguments in torch's schema language", f"{schema!r} ({str(error).splitlines()[0]})"
        remedy = "Write for example 'Tensor q, Tensor k, Tensor v, float? softmax_scale=None'"
        raise OptionError("schema", expected=expected, got=got, remedy=remedy) from None
    items = []
    for x in arguments:
        kind = _text(x.type)
        _expect_type(kind.removesuffix("?") in _PLAIN, x.name, kind)
        what, remedy = f"parameter {x.name!r} of the kernel", "Wrap a function that returns its outputs"
        expect(x.alias_info is None, what, "one that the kernel only reads", "one that it writes", remedy)
        default = x.default_value if x.has_default_value() else REQUIRED
        items.append(Parameter(x.name, kind, default, x.kwarg_only))
    return items


def _text(kind: Any) -> str:
    """A parsed type as it is written, with SymInt for int, which would be a constant of compiled code."""
    suffix = {"OptionalType": "?", "ListType": "[]"}.get(kind.kind())
    if suffix is None:
        return {"int": "SymInt"}.get(str(kind), str(kind))
    return _text(kind.getElementType()) + suffix


def _from_signature(kernel: Callable[..., Any]) -> list[Parameter]:
    items: list[Parameter] = []
    skipped = False
    for x in _signature(kernel).parameters.values():
        if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
            continue
        kind = _type_of(x)
        _expect_type(kind is not None or x.default is not REQUIRED, x.name, str(x.annotation))
        if kind is None:
            skipped = True  # The operator lacks it, and the positions behind it are others.
        else:
            items.append(Parameter(x.name, kind, x.default, skipped or x.kind is x.KEYWORD_ONLY))
    return items


def _signature(kernel: Callable[..., Any]) -> inspect.Signature:
    try:
        try:
            return inspect.signature(kernel, eval_str=True)
        except (NameError, SyntaxError):  # Annotations of names that exist for type checkers only.
            return inspect.signature(kernel)
    except (TypeError, ValueError):
        expected, got = "a function whose signature Python can read", "one without, as extension modules have"
        remedy = "Give schema='Tensor q, Tensor k, Tensor v, ...'"
        raise OptionError(f"wrap({kernel!r})", expected=expected, got=got, remedy=remedy) from None


def _type_of(x: inspect.Parameter) -> str | None:
    """The type in torch's schema language; None where annotation and default do not tell it."""
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
        annotation = tuple_to_list(annotation)
    found = SUPPORTED_PARAM_TYPES.get(annotation)
    return found if found in _PLAIN else None


def _expect_type(condition: bool, name: str, got: str) -> None:
    expected = "a tensor, bool, int, float, str, a sequence of ints or floats, or one of these or None"
    remedy = "Wrap a function that takes one of these, or give schema='...' without the parameter"
    expect(condition, f"parameter {name!r} of the kernel", expected, got, remedy)


class Meta(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Any) -> Any:
        """A tensor without its values; anything else as something hashable."""
        if isinstance(x, Tensor):
            return cls(tuple(x.shape), x.stride(), x.dtype, x.device)
        return tuple(x) if isinstance(x, list) else x

    def empty(self) -> Tensor:
        """An uninitialised tensor of this kind."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Outputs:
    """The outputs of a kernel as functions of its inputs; ``owner`` is its operator, for errors."""

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
        expected = "at least one, each with a name that neither a parameter nor its gradient has"
        remedy = "Give other names, as a mapping of names to 'out', 'lse' or functions"
        expect(declared and not taken, "outputs", expected, ", ".join(sorted(taken)) or "none", remedy)
        makers = {name: self._maker(x) for name, x in declared.items()}
        # The kernel sees inputs that conform; strides are not asked for where nothing depends on them.
        self._makers = [(n, makers[n], x not in _SHAPES_ALONE) for n, x in declared.items()]
        needed = {name for maker in makers.values() for name in maker.needs}
        self._places = [(i, name) for i, name in enumerate(parameters.names) if name in needed]
        self._inferred = lru_cache(maxsize=1024)(self._infer)

    def _maker(self, declaration: Declaration) -> ByName:
        if callable(declaration):
            return ByName(declaration, self.parameters.traced, "outputs")
        expected, remedy = "one of 'out', 'out like q', 'lse', or a function of inputs", "Give one of these"
        expect(declaration in (*_SHAPES_ALONE, "out like q"), "outputs", expected, repr(declaration), remedy)
        tensors, remedy = self.parameters.required, "Give a function of the inputs"
        expected = "q, k, v as the first three tensors, which 'out' speaks of"
        expect(len(tensors) >= 3 or declaration != "out", "outputs", expected, ", ".join(tensors), remedy)
        makers: dict[str, Callable[..., Tensor]] = {
            "out": _out,
            "out like q": torch.empty_like,
            "lse": self._lse,
        }
        make = makers[declaration]
        needs = (tensors[0], tensors[2]) if declaration == "out" else tensors[:1]
        return ByName(lambda **named: make(*named.values()), needs, "outputs")

    def _lse(self, q: Tensor) -> Tensor:
        shape = q.shape[:-1] if self._layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return q.new_empty(shape, dtype=torch.float32)

    def make(self, named: Mapping[str, Any]) -> list[Tensor]:
        """The outputs, uninitialised, for these inputs: what the operator's fake kernel returns."""
        made = []
        for name, maker, reads_strides in self._makers:
            given = {key: self.conform(named[key]) if reads_strides else named[key] for key in maker.needs}
            output = maker(given)
            what, got = f"{self.owner}, declaration of output {name!r}", type(output).__name__
            expected, remedy = "a function that returns a tensor", "Return for example q.new_empty(shape)"
            expect_declared(isinstance(output, Tensor), what, expected, got, remedy)
            made.append(output)
        return made

    def conform(self, x: Any) -> Any:
        """The value itself if its strides are what the kernel accepts, else a copy that has them."""
        strides = self._strides
        if not isinstance(x, Tensor) or strides == "any" or x.dim() == 0:
            return x
        if strides == "unit":
            return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        if strides in ("bshd", "bhsd") and strides != self._layout and x.dim() == 4:
            stored = x.transpose(1, 2)
            return x if stored.is_contiguous() else stored.contiguous().transpose(1, 2)
        return x.contiguous()

    def expected(self, values: Sequence[Any]) -> list[Meta]:
        """What the outputs are to be for these inputs."""
        # Keyed by the inputs that the declarations read: a varying scale must not fill the cache.
        return self._inferred(*[Meta.of(values[i]) for i, _ in self._places])

    def _infer(self, *kinds: Any) -> list[Meta]:
        with FakeTensorMode():
            given = [x.empty() if isinstance(x, Meta) else x for x in kinds]
            named = {name: x for (_, name), x in zip(self._places, given, strict=True)}
            return [Meta.of(x) for x in self.make(named)]

    def verify(self, returned: Any, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """What the kernel returned, if it is what was declared, in memory of its own."""
        found, expected = as_tuple(returned), f"{len(self.names)} ({', '.join(self.names)})"
        got = f"{len(found)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        self._expect(len(found) == len(self.names), "outputs", expected, got)
        named = zip(self.parameters.names, values, strict=True)
        owners = {address(x): f"input {n!r}" for n, x in named if isinstance(x, Tensor) and x.numel()}
        for name, x, want in zip(self.names, found, self.expected(values), strict=True):
            own = f"output {name!r}"
            if not isinstance(x, Tensor) or Meta.of(x) != want:
                self._compare(own, x, want)
            other = owners.setdefault(address(x), own) if x.numel() else own
            if other != own:
                what, got = f"{self.owner}, {own}", f"memory that it shares with {other}"
                expect_declared(False, what, "memory of its own", got, "Let the kernel return a clone")
        return found

    def _compare(self, what: str, x: Any, want: Meta) -> None:
        self._expect(isinstance(x, Tensor), what, "a torch.Tensor", type(x).__name__)
        got = Meta.of(x)
        for name in ("shape", "dtype", "device"):
            a, b = getattr(got, name), getattr(want, name)
            self._expect(a == b, what, f"{name} {b}", str(a))
        # Strides of dims of one element, and of empty tensors, address nothing.
        moved = any(n > 1 and a != b for n, a, b in zip(x.shape, got.strides, want.strides, strict=True))
        self._expect(not (moved and x.numel()), what, f"strides {want.strides}", f"{got.strides}")

    def _expect(self, condition: bool, what: str, expected: str, got: str) -> None:
        what, remedy = f"{self.owner}, {what}", "Declare what it returns with outputs=..., or mend the kernel"
        expect_declared(condition, what, f"{expected}, as declared", f"{got} from the kernel", remedy)


def _out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def as_tuple(found: Any) -> tuple[Any, ...]:
    """One result or several as a tuple, which is empty for None."""
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def address(x: Tensor) -> int:
    """The address of the memory that a tensor views."""
    return x.untyped_storage().data_ptr()
