"""What a kernel returns: the declaration, which is the fake kernel, and its comparison with what came."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ._errors import expect, expect_declared
from ._parameters import ByName, Parameters

Declaration = str | Callable[..., Tensor]
Declarations = Declaration | Sequence[str] | Mapping[str, Declaration]
_SHAPES_ALONE = ("out", "lse")


class Meta(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Any) -> Any:
        """A tensor without its values; anything else as something hashable."""
        if isinstance(x, Tensor):
            return cls(x.shape, x.stride(), x.dtype, x.device)
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
        make = {"out": self._out, "out like q": self._like_q, "lse": self._lse}[declaration]
        needs = (tensors[0], tensors[2]) if declaration == "out" else tensors[:1]
        return ByName(lambda **named: make(*named.values()), needs, "outputs")

    def _out(self, q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    def _like_q(self, q: Tensor) -> Tensor:
        return torch.empty_like(q)

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
        # Of what the declarations read alone: a scale that varies must not fill the cache.
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
        self._expect(x.shape == want.shape, what, f"shape {tuple(want.shape)}", f"{tuple(x.shape)}")
        self._expect(x.dtype == want.dtype, what, f"dtype {want.dtype}", f"{x.dtype}")
        self._expect(x.device == want.device, what, f"device {want.device}", f"{x.device}")
        # Strides of dims of one element, and of empty tensors, address nothing.
        moved = any(n > 1 and a != b for n, a, b in zip(x.shape, x.stride(), want.strides, strict=True))
        self._expect(not (moved and x.numel()), what, f"strides {want.strides}", f"{x.stride()}")

    def _expect(self, condition: bool, what: str, expected: str, got: str) -> None:
        what, remedy = f"{self.owner}, {what}", "Declare what it returns with outputs=..., or mend the kernel"
        expect_declared(condition, what, f"{expected}, as declared", f"{got} from the kernel", remedy)


def as_tuple(found: Any) -> tuple[Any, ...]:
    """One result or several as a tuple, which is empty for None."""
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def address(x: Tensor) -> int:
    """The address of the memory that a tensor views."""
    return x.untyped_storage().data_ptr()
