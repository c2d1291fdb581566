"""Facts about a compiled program, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from attnspan_lab.doctor.jax.interpret import is_own
from attnspan_lab.doctor.places import Place

__all__ = ["Instruction", "Program", "dims_of"]

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$")


@dataclass(frozen=True)
class Instruction:
    """An instruction whose result is stored.

    Attributes:
        result: Name of the result.
        dtype, shape: Of the result, on one device.
        name: "fusion", "dot", "all-gather", ...
        operands: Names of the operands.
        called: Computation of a fusion, or "".
        places: The user's lines, the innermost first.
        contracted: Dims of a product's first operand that the product adds up.
    """

    result: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    operands: tuple[str, ...]
    called: str
    places: tuple[Place, ...]
    contracted: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the result in bytes."""
        bits = "".join(x for x in self.dtype if x.isdigit())
        return self.size * (max(int(bits) // 8, 1) if bits else 1)

    @property
    def dims(self) -> tuple[int, ...]:
        """Sizes other than 1, sorted."""
        return dims_of(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def dims_of(shape: Iterable[int]) -> tuple[int, ...]:
    """List sizes other than 1, sorted."""
    return tuple(sorted(x for x in shape if x != 1))


class Program:
    """The text of a compiled program."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def stored(self) -> list[Instruction]:
        """List instructions outside of fused loops. Only their results are in memory."""
        fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", self.text))
        return [x for name, own in self._computations.items() if name not in fused for x in own]

    @cached_property
    def gathers(self) -> list[Instruction]:
        """List stored results of all-gathers."""
        return [x for x in self.stored if x.name.startswith("all-gather")]

    @cached_property
    def products(self) -> list[Instruction]:
        """List matrix products, also those in fused loops."""
        return [x for own in self._computations.values() for x in own if x.name == "dot"]

    @cached_property
    def work(self) -> dict[Place, int]:
        """Count the multiplications of the matrix products of each line, on one device."""
        found = dict[Place, int]()
        for own in self._computations.values():
            shapes = {x.result: x.shape for x in own}
            for x in own:
                if x.name == "dot" and x.places and (left := shapes.get(x.operands[0])) is not None:
                    work = x.size * prod(left[i] for i in x.contracted)
                    found[x.places[0]] = found.get(x.places[0], 0) + work
        return found

    def at(self, places: tuple[Place, ...]) -> list[Instruction]:
        """List stored results of the innermost of these lines."""
        return [x for x in self.stored if places and places[0] in x.places]

    def factors(self, instruction: Instruction) -> list[tuple[int, ...]]:
        """List the shapes of the operands of the last matrix products that an instruction depends on."""
        named = {x.result: x for x in self.stored}
        todo, known, found = list(instruction.operands), set[str](), []
        while todo:
            name = todo.pop()
            x = named.get(name)
            if x is None or name in known:
                continue
            known.add(name)
            inside = self._computations.get(x.called, []) if x.name != "dot" else self.stored
            products = [y for y in ([x] if x.name == "dot" else inside) if y.name == "dot"]
            read = {z for y in products for z in y.operands}
            found += [z.shape for z in inside if z.result in read]
            todo += () if products else x.operands
        return found

    @cached_property
    def _computations(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        own: list[Instruction] = []
        for line in self.text.splitlines():
            if line.endswith("{") and (name := re.match(r"(?:ENTRY )?%?([\w.-]+) \(", line)):
                own = found.setdefault(name[1], [])
            if said := _INSTRUCTION.match(line):
                result, dtype, sizes, operator, rest = said.groups()
                shape = tuple(int(x) for x in sizes.split(",") if x)
                called, frame = (re.search(x, rest) for x in (r"calls=%?([\w.-]+)", r"stack_frame_id=(\d+)"))
                operands = tuple(re.findall(r"%([\w.-]+)", rest.partition(")")[0]))
                places = self._places(int(frame[1]) if frame else 0)
                fused = called[1] if called else ""
                added = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
                dims = tuple(int(x) for x in added[1].split(",") if x) if added else ()
                own.append(Instruction(result, dtype, shape, operator, operands, fused, places, dims))
        return found

    def _places(self, frame: int) -> tuple[Place, ...]:
        """Follow a stack frame of the text outwards."""
        found = []
        while (row := self._frames.get(frame)) is not None:
            at, parent = self._locations[row["file_location_id"]], row.get("parent_frame_id", 0)
            file, function = self._files.get(at.get("file_name_id", 0), ""), at.get("function_name_id", 0)
            found.append(Place(file, at.get("line", 0), self._functions.get(function, "")))
            frame = parent if parent != frame else 0
        return tuple(x for x in found if x.file and x.line and is_own(x.file))

    def _table(self, title: str) -> dict[int, str]:
        text = self.text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
        rows = (x.partition(" ") for x in text.splitlines())
        return {int(number): rest.strip('"') for number, _, rest in rows if number.isdigit()}

    def _numbers(self, title: str) -> dict[int, dict[str, int]]:
        """Read a table whose rows are names of numbers."""
        rows = self._table(title).items()
        return {i: {k: int(n) for k, n in re.findall(r"(\w+)=(\d+)", x)} for i, x in rows}

    @cached_property
    def _files(self) -> dict[int, str]:
        return self._table("FileNames")

    @cached_property
    def _functions(self) -> dict[int, str]:
        return self._table("FunctionNames")

    @cached_property
    def _locations(self) -> dict[int, dict[str, int]]:
        return self._numbers("FileLocations")

    @cached_property
    def _frames(self) -> dict[int, dict[str, int]]:
        return self._numbers("StackFrames")
