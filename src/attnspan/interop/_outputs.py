"""What a kernel returns: the declaration, which is the fake kernel, and its comparison with what came."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ._errors import expect, expect_declared
from ._parameters import Parameters

Declaration = str | Callable[..., Tensor]
Declarations = Declaration | Sequence[str] | Mapping[str, Declaration]
# (shape, strides, dtype, device) of each output.
Expected = list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
_REMEMBERED = 1024


def conform(x: Any, strides: str, layout: str) -> Any:
    """The value itself if its strides are what the kernel accepts, else a copy that has them."""
    if not isinstance(x, Tensor) or strides == "any" or x.dim() == 0:
        return x
    if strides == "unit":
        return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    if strides in ("bshd", "bhsd") and strides != layout and x.dim() == 4:
        stored = x.transpose(1, 2)
        return x if stored.is_contiguous() else stored.contiguous().transpose(1, 2)
    return x.contiguous()


def names_wanted(function: Callable[..., Any], available: Iterable[str], role: str) -> tuple[str, ...]:
    """Names of the parameters of a function that is called by name: what it wants of what can be given."""
    available = tuple(available)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        expected = "a Python function, which is called by the names of its parameters"
        expect(False, role, expected, repr(function), "Write a lambda around it")
        raise
    wanted = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [p.name for p in wanted if p.name not in available and p.default is p.empty]
    remedy = "Name the parameters after what the function needs"
    expect(not unknown, role, f"parameters among {', '.join(available)}", ", ".join(unknown), remedy)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return available
    return tuple(p.name for p in wanted if p.name in available)


class _Maker(NamedTuple):
    """Makes an uninitialised output of the arguments that it needs."""

    make: Callable[..., Any]
    needs: tuple[str, ...]
    reads_strides: bool = True


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
        expect(bool(declared) and not taken, "outputs", expected, ", ".join(sorted(taken)) or "none", remedy)
        self._makers = [self._maker(x) for x in declared.values()]
        needed = {name for maker in self._makers for name in maker.needs}
        self._places = [place for place, name in enumerate(parameters.names) if name in needed]
        self._seen: dict[Any, Expected] = {}

    def _maker(self, declaration: Declaration) -> _Maker:
        if callable(declaration):
            return _Maker(declaration, names_wanted(declaration, self.parameters.traced, "outputs"))
        tensors = self.parameters.required
        expected, remedy = "one of 'out', 'out like q', 'lse', or a function of inputs", "Give one of these"
        expect(declaration in ("out", "out like q", "lse"), "outputs", expected, repr(declaration), remedy)
        if declaration == "out like q":
            return _Maker(lambda **named: torch.empty_like(named[tensors[0]]), tensors[:1])
        if declaration == "lse":
            return _Maker(lambda **named: self._lse(named[tensors[0]]), tensors[:1], False)
        expected, got = "q, k, v as the first three tensors, which 'out' speaks of", ", ".join(tensors)
        expect(len(tensors) >= 3, "outputs", expected, got, "Give a function of the inputs")
        return _Maker(lambda **named: self._out(*named.values()), (tensors[0], tensors[2]), False)

    def _out(self, q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    def _lse(self, q: Tensor) -> Tensor:
        shape = q.shape[:-1] if self._layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return q.new_empty(shape, dtype=torch.float32)

    def make(self, values: Sequence[Any]) -> list[Tensor]:
        """The outputs, uninitialised: what the operator's fake kernel returns."""
        named = dict(zip(self.parameters.names, values, strict=True))
        made = []
        for name, maker in zip(self.names, self._makers, strict=True):
            given = {key: named[key] for key in maker.needs}
            if maker.reads_strides:  # The kernel sees inputs that conform, so "like q" speaks of those.
                given = {key: conform(x, self._strides, self._layout) for key, x in given.items()}
            output = maker.make(**given)
            what, got = f"{self.owner}, declaration of output {name!r}", type(output).__name__
            expected, remedy = "a function that returns a tensor", "Return for example q.new_empty(shape)"
            expect_declared(isinstance(output, Tensor), what, expected, got, remedy)
            made.append(output)
        return made

    def conforming(self, values: Iterable[Any]) -> list[Any]:
        """The values with those tensors copied that break the contract of strides."""
        return [conform(x, self._strides, self._layout) for x in values]

    def expected(self, values: Sequence[Any]) -> Expected:
        """Shapes, strides, dtypes and devices of the outputs for these inputs."""
        # Only what the declarations read: a scale that varies must not fill the memory of this.
        key = tuple([_key(values[place]) for place in self._places])
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            with FakeTensorMode():
                made = self.make([_fake(x) for x in values])
            found = self._seen[key] = [(x.shape, x.stride(), x.dtype, x.device) for x in made]
        return found

    def verify(self, returned: Any, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """What the kernel returned, if it is what was declared, in memory of its own."""
        found = as_tuple(returned)
        expected = f"{len(self.names)} ({', '.join(self.names)})"
        got = f"{len(found)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        self._expect(len(found) == len(self.names), "outputs", expected, got)
        for name, x, want in zip(self.names, found, self.expected(values), strict=True):
            self._compare(f"output {name!r}", x, want)
        self._expect_own_memory(found, values)
        return found

    def _compare(self, what: str, x: Any, want: Any) -> None:
        if isinstance(x, Tensor) and (x.shape, x.stride(), x.dtype, x.device) == want:
            return
        shape, strides, dtype, device = want
        self._expect(isinstance(x, Tensor), what, "a torch.Tensor", type(x).__name__)
        self._expect(x.shape == shape, what, f"shape {tuple(shape)}", f"{tuple(x.shape)}")
        self._expect(x.dtype == dtype, what, f"dtype {dtype}", f"{x.dtype}")
        self._expect(x.device == device, what, f"device {device}", f"{x.device}")
        # Strides of dims of one element, and of empty tensors, address nothing.
        moved = any(n > 1 and a != b for n, a, b in zip(shape, x.stride(), strides, strict=True))
        self._expect(not (moved and x.numel()), what, f"strides {strides}", f"{x.stride()}")

    def _expect(self, holds: bool, what: str, expected: str, got: str) -> None:
        what, remedy = f"{self.owner}, {what}", "Declare what it returns with outputs=..., or mend the kernel"
        expect_declared(holds, what, f"{expected}, as declared", f"{got} from the kernel", remedy)

    def _expect_own_memory(self, outputs: Iterable[Tensor], values: Sequence[Any]) -> None:
        named = [(f"input {name!r}", x) for name, x in zip(self.parameters.names, values, strict=True)]
        owners = {address(x): name for name, x in named if isinstance(x, Tensor) and x.numel()}
        for name, x in zip(self.names, outputs, strict=True):
            own = f"output {name!r}"
            other = owners.setdefault(address(x), own) if x.numel() else own
            what, got = f"{self.owner}, {own}", f"memory that it shares with {other}"
            expect_declared(other == own, what, "memory of its own", got, "Let the kernel return a clone")


def as_tuple(found: Any) -> tuple[Any, ...]:
    """One result or several as a tuple; nothing is none."""
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def address(x: Tensor) -> int:
    """Where the memory begins that a tensor looks at."""
    return x.untyped_storage().data_ptr()


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return tuple(x) if isinstance(x, list) else x


def _fake(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
