"""Values of a watched step: each array with its line, its ancestors, and how many elements are distinct."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.jax.quick import free_axes
from attnspan_lab.doctor.places import Place

if TYPE_CHECKING:
    from attnspan_lab.doctor.jax.call import Attention

__all__ = [
    "RESHAPES",
    "Axes",
    "Value",
    "bad",
    "is_float",
    "is_integer",
    "is_key",
    "moved",
    "numpy_of",
    "order_of",
]

#: Free axes of the two operands of a product.
Axes = tuple[tuple[int, ...], tuple[int, ...]]
#: Operators that keep all elements, and only copy or reorder them.
RESHAPES = (
    "broadcast_in_dim",
    "tile",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "sharding_constraint",
    "optimization_barrier",
    "reduce_precision",
)


@dataclass(eq=False)
class Value:
    """An array of a watched step.

    Attributes:
        array: The array.
        name: The operator that made it, "argument" or "constant".
        places: The user's lines that made it, the innermost first.
        parents: The operator's inputs.
        data: Whether it depends on the batch.
        distinct: Upper bound of the number of distinct elements.
        part: Whether it is one block of a longer array, in a loop.
        upcast: Line that converted it to a wider dtype, after the last product.
        call: Attention call whose scores it is made of.
        axes: Axes of queries and keys, if it has a score for each pair.
        nan, inf: Whether it contains NaN or infinity.
        label: Name of the argument, if it is one.
        loop: The innermost of the present loops in whose steps it differs, counted from outside. 0: in none.
        ones: The same array if the values of all attention calls were 1, or None if it is not known.
        mass: Whether it is a sum of softmax weights before their division.
        extra: Whether other numbers were added to this sum, such as a sink.
        count: The numbers that it counts, if it is made from positions.
        sharding: The sharding that a constraint asks for, if a constraint made it.
    """

    array: Any
    name: str = "constant"
    places: tuple[Place, ...] = ()
    parents: tuple[Value, ...] = ()
    data: bool = False
    distinct: int = 0
    part: bool = False
    upcast: Place | None = None
    call: Attention | None = None
    axes: Axes | None = None
    nan: bool = False
    inf: bool = False
    label: str = ""
    loop: int = 0
    ones: Any = None
    mass: bool = False
    extra: bool = False
    count: Any = None
    sharding: Any = None

    def __post_init__(self) -> None:
        self.nan, self.inf = bad(self.array)
        self.distinct = self.distinct or max(self.size, 1)
        self.data = self.data or any(x.data for x in self.parents)
        self.loop = max([self.loop, *(x.loop for x in self.parents)])

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(np.shape(self.array))

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.size * int(self.array.dtype.itemsize)

    def chain(self) -> Iterator[Value]:
        """Yield the value and its ancestors, as long as they have the same elements."""
        value: Value | None = self
        while value is not None:
            yield value
            copies = value.name in RESHAPES or value.distinct < value.size
            value = value.parents[0] if copies and value.parents else None

    def repeated(self) -> Value | None:
        """Find the value that first has each element several times, if any."""
        found = None
        for x in self.chain():
            if x.distinct > 1 and x.size >= 2 * x.distinct:
                found = x
        return found

    def arguments(self) -> set[str]:
        """Name the arguments of the step that it is made from."""
        todo, known, found = [self], {id(self)}, set[str]()
        while todo:
            value = todo.pop()
            found |= {value.label} - {""}
            new = [x for x in value.parents if id(x) not in known]
            known.update(map(id, new))
            todo += new
        return found

    def is_random(self) -> bool:
        """Whether it is made from random numbers without a product, as a mask of dropout."""
        todo, known = [self], {id(self)}
        while todo:
            value = todo.pop()
            if value.name in ("random_bits", "rng_bit_generator"):
                return True
            new = [x for x in value.parents if id(x) not in known and value.name != "dot_general"]
            known.update(map(id, new))
            todo += new
        return False

    def origin(self, what: str) -> Value:
        """Follow NaN or infinity to the operator whose inputs do not have it. ``what`` is "nan" or "inf"."""
        value = self
        while (cause := next((x for x in value.parents if getattr(x, what)), None)) is not None:
            value = cause
        return value


def order_of(array: Any, numbers: Any, operand: int, *, is_v: bool, rows: int) -> str:
    """Find the layout of q, k or v from the dims of a product: "bshd", "bhsd", or "" if it is another one."""
    contract, shape = numbers[0][operand], np.shape(array)
    free = free_axes(len(shape), numbers, operand)
    if len(shape) != 4 or len(free) != 1 or len(contract) != 1 or shape[0] != rows:
        return ""
    token, dim = (contract[0], free[0]) if is_v else (free[0], contract[0])
    return {(1, 3): "bshd", (2, 3): "bhsd"}.get((token, dim), "")


def is_float(array: Any) -> bool:
    """Whether an array has real floating-point numbers, bfloat16 included."""
    dtype = getattr(array, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def is_integer(array: Any) -> bool:
    """Whether an array has integers. Random keys have none."""
    dtype = getattr(array, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.integer))


def is_key(array: Any) -> bool:
    """Whether an array has typed random keys, as from jax.random.key. NumPy has no such arrays."""
    return isinstance(array, jax.Array) and bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def numpy_of(array: Any) -> np.ndarray:
    """Return an array in NumPy, or the numbers of typed random keys."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def bad(array: Any) -> tuple[bool, bool]:
    """Whether an array has NaN, and whether it has infinity."""
    if not is_float(array):
        return False, False
    array = np.asarray(array)
    return bool(np.isnan(array).any()), bool(np.isinf(array).any())


def moved(eqn: Any, shape: tuple[int, ...], out: tuple[int, ...], axis: int) -> int | None:
    """Find the axis of an operator's result that an axis of its input becomes, or None."""
    name, params = eqn.primitive.name, eqn.params
    if name == "transpose":
        return int(list(params["permutation"]).index(axis))
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    if len(shape) == len(out) and name != "reshape":
        return axis
    after = prod(shape[axis + 1 :])
    return next((i for i, n in enumerate(out) if n == shape[axis] and prod(out[i + 1 :]) == after), None)
