"""Work that a compiler leaves out: its results are not returned, or they are constants."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.places import is_users
from attnspan_lab.doctor.timing.body import Body
from attnspan_lab.doctor.words import error_text

_TOPIC = "work that the compiler leaves out"
# Values that hold no tensor of the user.
_PLAIN = (bool, int, float, str, bytes, type, range, ModuleType, BuiltinFunctionType, FunctionType)
_LEAST = 0.05  # Smallest share of deleted work that counts.


def unused(body: Body, coverage: Coverage) -> Iterator[tuple[str, float, bool]]:
    """Yield compiled functions that a region calls and whose work the compiler leaves out.

    Each comes with the share of its products, and whether these are constants or not returned.
    """
    for function, given in body.calls():
        name = getattr(function, "__name__", type(function).__name__)
        is_jax = "jax" in sys.modules and hasattr(function, "trace") and hasattr(function, "lower")
        if not (is_jax or hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")):
            continue
        if given is None:
            coverage.missed(
                _TOPIC, f"line {body.place.line} calls {name} with an argument that is no plain name"
            )
            continue
        try:
            deleted, constant = _of_jax(function, *given) if is_jax else (_of_torch(function, *given), 0.0)
        except Exception as error:  # Donated arrays are gone, for example.
            coverage.missed(_TOPIC, f"{name} does not run once more: {error_text(error)}")
            continue
        if deleted > _LEAST:
            yield name, deleted, False
        if constant > _LEAST:
            yield name, constant, True


def _of_jax(function: Any, arguments: list[Any], options: dict[str, Any]) -> tuple[float, float]:
    """Return the shares of products that are not used, and that are constants in the compiled program."""
    from jax.interpreters.partial_eval import dce_jaxpr

    traced = function.trace(*arguments, **options)
    jaxpr = traced.jaxpr.jaxpr
    if not (total := _work(jaxpr)):
        return 0.0, 0.0
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    constant = _constant(jaxpr, {id(x) for x in jaxpr.invars}) / total
    if constant > _LEAST:
        # XLA folds most constants, but not those that take it too long.
        cost = traced.lower().compile().cost_analysis() or {}
        if cost.get("flops", 0.0) > (1 - constant / 2) * total:
            constant = 0.0
    return 1 - _work(needed) / total, constant


def _work(jaxpr: Any) -> float:
    """Count the work of all products and foreign calls of a jaxpr."""
    return sum(_product(x) + sum(map(_work, _inner(x))) for x in jaxpr.eqns)


def _constant(jaxpr: Any, varying: set[int]) -> float:
    """Count the work of products of a jaxpr that depend on no varying value."""
    total = 0.0
    for eqn in jaxpr.eqns:
        varies = any(id(x) in varying for x in eqn.invars)
        total += 0.0 if varies else _product(eqn)
        for one in _inner(eqn):
            same = len(one.invars) == len(eqn.invars)
            pairs = zip(one.invars, eqn.invars, strict=True) if same else ()
            inside = {id(x) for x, y in pairs if id(y) in varying}
            total += _constant(one, inside if same else {id(x) for x in one.invars if varies})
        if varies:
            varying |= {id(x) for x in eqn.outvars}
    return total


def _inner(eqn: Any) -> list[Any]:
    """List the jaxprs within an operator."""
    found = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
    return [x for x in found if hasattr(x, "eqns")]


def _product(eqn: Any) -> float:
    """Count the work of a product or a foreign call, 0 for other operators."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * float(math.prod((*eqn.outvars[0].aval.shape, *(shape[i] for i in contracted))))
    if eqn.primitive.name == "ffi_call":
        return float(sum(math.prod(x.aval.shape) for x in eqn.invars))
    return 0.0


def _of_torch(function: Any, arguments: list[Any], options: dict[str, Any]) -> float:
    """Return 1 if the function returns no tensor, and changes no tensor that it can reach."""
    import torch
    from torch.utils._pytree import tree_leaves

    inner = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "_orig_mod", function)
    captured = _captured(inner)
    given = _tensors([*tree_leaves((arguments, options)), *captured])
    holders = (*arguments, *options.values(), *captured)
    if given is None or any(isinstance(x, (list, dict, set)) for x in holders):
        return 0.0  # The function may put its results there, or into an object of another kind.

    def gradients() -> list[Any]:
        return [x.grad for x in given if x.is_leaf and x.grad is not None]

    def state() -> list[tuple[int, int]]:
        return [(id(x), x._version) for x in (*given, *gradients())]

    before, old = state(), gradients()  # While the old ones live, a new gradient is another object.
    result = function(*arguments, **options)
    returns = any(isinstance(x, torch.Tensor) for x in tree_leaves(result))
    changes = state() != before
    del old
    return 0.0 if changes or returns else 1.0


def _captured(function: Any) -> list[Any]:
    """List the values that a function reads from the scopes around it, and its object."""
    own = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return [function]
    cells = [x.cell_contents for x in function.__closure__ or ()]
    names = {x for x in code.co_names if x in function.__globals__}
    return [*cells, *(function.__globals__[x] for x in names), *([] if own is None else [own])]


def _tensors(values: list[Any]) -> list[Any] | None:
    """List the tensors of some values. None if a value may hold tensors elsewhere."""
    import torch
    from torch.utils._pytree import tree_leaves

    found: list[Any] = []
    for x in tree_leaves(values):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, torch.nn.Module):
            found += [*x.parameters(), *x.buffers()]
        elif isinstance(x, torch.optim.Optimizer):
            found += [y for group in x.param_groups for y in group["params"]]
        elif isinstance(x, FunctionType) and x.__module__ not in sys.stdlib_module_names and _is_users(x):
            inner = _tensors(_captured(x))
            if inner is None:
                return None
            found += inner
        elif not isinstance(x, _PLAIN) and x is not None:
            return None
    return found


def _is_users(function: FunctionType) -> bool:
    return is_users(function.__code__.co_filename) and "site-packages" not in function.__code__.co_filename
