"""What a kernel returns: the declaration, which is the fake kernel, and its comparison with what came."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import OptionError
from .errors import DeclarationError
from .layouts import conform
from .parameters import Parameters

Declaration = str | Callable[..., Tensor]
Declarations = Declaration | Sequence[str] | Mapping[str, Declaration]

# (shape, strides, dtype, device) of each output.
Expected = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
_KNOWN = ("out", "out like q", "lse")
_REMEMBERED = 1024


def names_wanted(function: Callable[..., Any], available: Iterable[str], role: str) -> tuple[str, ...]:
    """Names of the parameters of a function that is called by name.

    Args:
        function: Chooses by its parameters what it is given.
        available: What can be given; all of it to a function with ``**kwargs``.
        role: What the function is, for the error.

    Raises:
        ValueError: It wants something else, or its signature cannot be read.

    Example:
        >>> names_wanted(lambda v, q: None, ("q", "k", "v"), "outputs")
        ('v', 'q')
    """
    available = tuple(available)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise OptionError(
            role,
            expected="a Python function, which is called by the names of its parameters",
            got=repr(function),
            remedy="Write a lambda around it",
        ) from None
    wanted = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [p.name for p in wanted if p.name not in available and p.default is p.empty]
    if unknown:
        raise OptionError(
            role,
            expected=f"parameters among {', '.join(available)}",
            got=", ".join(unknown),
            remedy="Name the parameters after what the function needs",
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return available
    return tuple(p.name for p in wanted if p.name in available)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a kernel as functions of its inputs, and what calls so far had to return.

    Args:
        names: Of the outputs, in the order in which the kernel returns them.
        makers: For each one a function of the arguments by name that makes an uninitialised tensor.
        parameters: The parameters of the kernel.
        strides: The contract of the inputs' strides.
        layout: Order of the dims of q, k, v.
        owner: The operator, for errors.
        wanted: For each maker the names of the arguments that it takes.
    """

    names: tuple[str, ...]
    makers: tuple[Callable[..., Any], ...]
    parameters: Parameters
    strides: str
    layout: str
    owner: str
    wanted: tuple[tuple[str, ...], ...]
    _places: tuple[int, ...] = field(init=False)
    _seen: dict[Any, Expected] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Note where the arguments are that the declarations read."""
        names = {name for wanted in self.wanted for name in wanted}
        places = tuple(place for place, name in enumerate(self.parameters.names) if name in names)
        object.__setattr__(self, "_places", places)

    def make(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """The outputs, uninitialised: what the operator's fake kernel returns."""
        named = dict(zip(self.parameters.names, values, strict=True))
        made = []
        for name, maker, wanted in zip(self.names, self.makers, self.wanted, strict=True):
            given = {key: named[key] for key in wanted}
            if not getattr(maker, "reads_shapes_only", False):
                # The kernel sees inputs that conform, so a declaration "like q" speaks of those.
                given = dict(zip(given, self.conforming(given.values()), strict=True))
            output = maker(**given)
            if not isinstance(output, Tensor):
                raise DeclarationError(
                    f"{self.owner}, declaration of output {name!r}",
                    expected="a function that returns an empty tensor",
                    got=type(output).__name__,
                    remedy="Return for example q.new_empty(shape)",
                )
            made.append(output)
        return tuple(made)

    def conforming(self, values: Iterable[Any]) -> list[Any]:
        """The values with those tensors copied that break the contract of strides."""
        return [conform(x, self.strides, self.layout) if isinstance(x, Tensor) else x for x in values]

    def expected(self, values: Sequence[Any]) -> Expected:
        """Shapes, strides, dtypes and devices of the outputs for these inputs."""
        # Only what the declarations read: a scale that varies must not fill the memory of this.
        key = tuple([_key(values[place]) for place in self._places])
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            found = self._seen[key] = self._evaluate(values)
        return found

    def _evaluate(self, values: Sequence[Any]) -> Expected:
        with FakeTensorMode():
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                if isinstance(x, Tensor)
                else x
                for x in values
            ]
            return tuple((x.shape, x.stride(), x.dtype, x.device) for x in self.make(fakes))

    def verify(self, returned: Any, values: Sequence[Any], expected: Expected) -> tuple[Tensor, ...]:
        """What the kernel returned, if it is what was declared.

        Raises:
            ValueError: It is something else, or shares memory with an input or another output.
        """
        found = (returned,) if isinstance(returned, Tensor) else returned
        if not isinstance(found, tuple | list) or len(found) != len(self.names):
            got = type(found).__name__ if not isinstance(found, tuple | list) else f"{len(found)} values"
            raise self._lie("", f"{len(self.names)} ({', '.join(self.names)})", got)
        for name, x, want in zip(self.names, found, expected, strict=True):
            self._compare(name, x, want)
        self._refuse_shared_memory(found, values)
        return tuple(found)

    def _compare(self, name: str, x: Any, want: Any) -> None:
        shape, strides, dtype, device = want
        if not isinstance(x, Tensor):
            raise self._lie(name, "a torch.Tensor", type(x).__name__)
        if x.shape == shape and x.stride() == strides and x.dtype == dtype and x.device == device:
            return
        if x.shape != shape:
            raise self._lie(name, f"shape {tuple(shape)}", f"{tuple(x.shape)}")
        if x.dtype != dtype:
            raise self._lie(name, f"dtype {dtype}", f"{x.dtype}")
        if x.device != device:
            raise self._lie(name, f"device {device}", f"{x.device}")
        # Strides of dims of one element, and of empty tensors, address nothing.
        if x.numel() and any(
            size > 1 and a != b for size, a, b in zip(shape, x.stride(), strides, strict=True)
        ):
            raise self._lie(name, f"strides {strides}", f"{x.stride()}")

    def _refuse_shared_memory(self, outputs: Iterable[Tensor], values: Sequence[Any]) -> None:
        owners = {
            _address(x): f"input {name!r}"
            for name, x in zip(self.parameters.names, values, strict=True)
            if isinstance(x, Tensor) and x.numel()
        }
        for name, x in zip(self.names, outputs, strict=True):
            if not x.numel():
                continue
            owner = owners.setdefault(_address(x), f"output {name!r}")
            if owner != f"output {name!r}":
                raise DeclarationError(
                    f"{self.owner}, output {name!r}",
                    expected="memory of its own",
                    got=f"memory that it shares with {owner}",
                    remedy="Let the kernel return a clone",
                )

    def _lie(self, name: str, expected: str, got: str) -> DeclarationError:
        what = f"output {name!r}" if name else "outputs"
        return DeclarationError(
            f"{self.owner}, {what}",
            expected=f"{expected}, as declared",
            got=f"{got} from the kernel",
            remedy="Declare what it returns with outputs=..., or mend the kernel",
        )


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return tuple(x) if isinstance(x, list) else x


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def read_outputs(
    declared: Declarations, parameters: Parameters, strides: str, layout: str, owner: str
) -> Outputs:
    """Bring the forms in which outputs can be declared into one.

    Args:
        declared: A known name, a function, a sequence of known names, or a mapping of names to either.
        parameters: The parameters of the kernel.
        strides: The contract of the inputs' strides.
        layout: Order of the dims of q, k, v.
        owner: The operator, for errors.

    Raises:
        ValueError: An unknown name, a name that a parameter has, or too few tensors for a known name.

    Example:
        >>> from attnspan.torch._wrap.parameters import read_parameters
        >>> parameters = read_parameters(lambda q, k, v: None)
        >>> outputs = read_outputs(("out", "lse"), parameters, "unit", "bshd", "sample")
        >>> q, v = torch.zeros(2, 7, 4, 16), torch.zeros(2, 9, 4, 24)
        >>> [tuple(x.shape) for x in outputs.make((q, v, v))]
        [(2, 7, 4, 24), (2, 4, 7)]
    """
    if isinstance(declared, str) or callable(declared):
        named: dict[str, Declaration] = {"out" if callable(declared) else declared.split()[0]: declared}
    elif isinstance(declared, Mapping):
        named = dict(declared)
    else:
        named = {name.split()[0]: name for name in declared}
    taken = set(named) & {x for name in parameters.names for x in (name, name.removeprefix("d"))}
    if taken or not named:
        raise OptionError(
            "outputs",
            expected="at least one, each with a name that neither a parameter nor its gradient has",
            got=", ".join(sorted(taken)) or "none",
            remedy="Give other names, as a mapping of names to 'out', 'lse' or functions",
        )
    makers = tuple(_known(x, parameters, layout) if isinstance(x, str) else x for x in named.values())
    wanted = tuple(names_wanted(maker, parameters.traced, "outputs") for maker in makers)
    return Outputs(tuple(named), makers, parameters, strides, layout, owner, wanted)


def _known(text: str, parameters: Parameters, layout: str) -> Callable[..., Tensor]:
    if text not in _KNOWN:
        raise OptionError(
            "outputs",
            expected=f"one of {', '.join(map(repr, _KNOWN))}, or a function of the inputs",
            got=repr(text),
            remedy="Give a function, for example lambda q: torch.empty_like(q)",
        )
    roles = parameters.required_tensors
    if text == "out" and len(roles) < 3:
        raise OptionError(
            "outputs",
            expected="q, k, v as the first three tensors, which 'out' speaks of",
            got=f"the tensors {', '.join(roles)}",
            remedy="Give a function of the inputs",
        )
    return _Known(text, roles[0], roles[min(2, len(roles) - 1)], layout)


class _Known:
    """A declaration by name, as a function of the tensors that it speaks of."""

    def __init__(self, text: str, q: str, v: str, layout: str) -> None:
        self._text, self._q, self._v, self._layout = text, q, v, layout
        self.reads_shapes_only = text != "out like q"
        names = (q, v) if text == "out" else (q,)
        kind = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, **named: Tensor) -> Tensor:
        q = named[self._q]
        if self._text == "out":
            return q.new_empty((*q.shape[:-1], named[self._v].shape[-1]))
        if self._text == "out like q":
            return torch.empty_like(q)
        shape = q.shape[:-1] if self._layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return q.new_empty(shape, dtype=torch.float32)
