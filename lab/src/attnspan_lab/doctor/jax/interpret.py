"""Evaluation of a jaxpr, one equation after the other. Calls, loops and branches are entered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import attnspan
from attnspan_lab.doctor.jax.quick import quick
from attnspan_lab.doctor.places import Place, is_users

__all__ = [
    "COMPARISONS",
    "OPAQUE",
    "Interpreter",
    "bind",
    "constants",
    "equations",
    "evaluated",
    "folder_of",
    "inner",
    "is_jaxs",
    "is_own",
    "jaxprs",
    "place_of_function",
    "places_of",
]

#: Kernels, whose operators the doctor does not see.
OPAQUE = ("ffi_call", "pallas_call", "custom_partitioning", "custom_vmap_call")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_CALLS = ("jit", "remat2", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


class Interpreter:
    """Evaluates jaxprs. A subclass defines `apply`, and the values that equations pass on.

    Attributes:
        depth: Number of loops around the present equation.
        backward: Whether the equation is part of a backward pass, or of a recomputation for it.
    """

    def __init__(self) -> None:
        self._callers: list[tuple[Place, ...]] = []
        self.depth, self.backward = 0, False

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluate an equation that is no call, loop or branch."""
        raise NotImplementedError

    def array(self, value: Any) -> Any:
        """Return the array of a value."""
        return value

    def value(self, array: Any, sources: Sequence[Any] = ()) -> Any:
        """Return the value of an array that was made from other values."""
        del sources
        return array

    def carried(self, value: Any) -> Any:
        """Return the value that a loop passes to its next step."""
        return value

    def left(self, values: list[Any]) -> list[Any]:
        """Return the values that leave a loop."""
        return values

    def at(self, eqn: Any) -> tuple[Place, ...]:
        """List the user's lines of an equation, the innermost first.

        JAX traces its own functions once for all callers, so their equations have the caller's line.
        """
        return self._callers[-1] if self._callers else places_of(eqn)

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr on values."""
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, values, strict=True))

        def read(var: Any) -> Any:
            if isinstance(var, Literal):
                aval: Any = var.aval
                return self.value(np.asarray(var.val, aval.dtype))
            return env[var]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [read(x) for x in eqn.invars]), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        before = self.backward
        self.backward = before or _in_backward(eqn)
        try:
            return self._evaluated(eqn, values)
        finally:
            self.backward = before

    def _evaluated(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.call(eqn, values)
        if name == "cond":
            return self.enter(params["branches"][int(self.array(values[0]))], values[1:])
        if name == "while":
            return self._looped(self._while, params, values)
        if name == "scan" and params["length"]:
            return self._looped(self._scan, params, values)
        return self.apply(eqn, values)

    def call(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluate the function that an equation calls."""
        called = inner(eqn)[0]
        own = is_jaxs(_open(called)[0]) and not self._callers
        self._callers += [places_of(eqn)] if own else []
        try:
            return self.enter(called, values)
        finally:
            del self._callers[len(self._callers) - own :]

    def enter(self, closed: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr with its constants."""
        jaxpr, consts = _open(closed)
        return self.run(jaxpr, [self.value(x) for x in consts], values)

    def _looped(
        self, run: Callable[[Any, list[Any]], list[Any]], params: Any, values: list[Any]
    ) -> list[Any]:
        self.depth += 1
        try:
            made = run(params, values)
        finally:
            self.depth -= 1
        return self.left(made)

    def _while(self, params: Any, values: list[Any]) -> list[Any]:
        n, m = params["cond_nconsts"], params["body_nconsts"]
        cond, body, state = values[:n], values[n : n + m], values[n + m :]
        while bool(self.array(self.enter(params["cond_jaxpr"], [*cond, *state])[0])):
            state = [*map(self.carried, state)]
            state = self.enter(params["body_jaxpr"], [*body, *state])
        return state

    def _scan(self, params: Any, values: list[Any]) -> list[Any]:
        n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, state, many = values[:n], values[n:m], values[m:]
        steps, made = range(params["length"]), []
        for i in reversed(steps) if params["reverse"] else steps:
            own = [self.value(self.array(x)[i], (x,)) for x in many]
            out = self.enter(params["jaxpr"], [*consts, *map(self.carried, state), *own])
            state = out[: m - n]
            made.append(out[m - n :])
        made = made[::-1] if params["reverse"] else made
        stacked = [
            self.value(jnp.stack([self.array(x) for x in column]), column)
            for column in zip(*made, strict=True)
        ]
        return [*state, *stacked]


def bind(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Run an equation's operator on arrays."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        made = eqn.primitive.bind(*functions, *arrays, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def evaluated(eqn: Any, arrays: list[Any]) -> list[Any]:
    """Run an equation's operator on arrays, in NumPy if possible."""
    fast = quick(eqn, arrays)
    return bind(eqn, arrays) if fast is None else [fast]


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _in_backward(eqn: Any) -> bool:
    """Whether an equation belongs to a backward pass, or computes its inputs again."""
    stack = str(eqn.source_info.name_stack)
    return "transpose(" in stack or "rematted_computation" in stack


def inner(eqn: Any) -> list[Any]:
    """List the jaxprs that an equation contains."""
    values = [x for v in eqn.params.values() for x in (v if isinstance(v, (tuple, list)) else (v,))]
    return [x for x in values if hasattr(x, "eqns") or hasattr(x, "jaxpr")]


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Yield a jaxpr and all jaxprs in it: of calls, loops and branches."""
    yield jaxpr
    yield from (x for eqn in equations(jaxpr) for x in inner(eqn))


def constants(jaxpr: Any) -> Iterator[Any]:
    """Yield the arrays that a jaxpr and all jaxprs in it capture."""
    return (y for x in jaxprs(jaxpr) for y in _open(x)[1])


def equations(jaxpr: Any, name: str = "") -> Iterator[Any]:
    """Yield the equations of a jaxpr with this operator, or all, also those in calls, loops and branches."""
    for eqn in _open(jaxpr)[0].eqns:
        if name in ("", eqn.primitive.name):
            yield eqn
        for x in inner(eqn):
            yield from equations(x, name)


def is_jaxs(jaxpr: Any) -> bool:
    """Whether a jaxpr is a function of JAX or attnspan, such as jax.numpy.where."""
    return any(folder_of(x) in str(jaxpr.debug_info.func_src_info) for x in (jax, attnspan))


@cache
def folder_of(package: Any) -> str:
    """Return the folder of a package."""
    return f"{Path(package.__file__).parent}/"


@cache
def _libraries() -> tuple[str, ...]:
    specs = map(find_spec, ("jax", "flax", "optax", "haiku", "equinox", "einops"))
    return tuple(f"{Path(x.origin).parent}/" for x in specs if x is not None and x.origin)


def places_of(eqn: Any) -> tuple[Place, ...]:
    """List the user's lines in the source information of an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return tuple(Place(x.file_name, x.line_num, x.function_name) for x in frames if is_own(x.file_name))


def place_of_function(debug_info: Any) -> tuple[Place, ...]:
    """Find the line where a traced function of the user's is defined."""
    said = re.search(r"(\S+) at (.+):(\d+)$", str(debug_info.func_src_info))
    return (Place(said[2], int(said[3]), said[1]),) if said is not None and is_own(said[2]) else ()


def is_own(file: str) -> bool:
    """Whether a file is the user's, and not part of JAX or of its libraries."""
    return is_users(file) and not file.startswith(_libraries())
