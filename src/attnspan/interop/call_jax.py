"""`call_jax`: a JAX function on torch tensors. JAX is imported by the first call, not by this module.

The operators take a list of tensors and the name of a `_functions.JaxCall`: the function and all the rest.
"""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from attnspan.base.installed import require
from attnspan.base.plain import check_plain
from attnspan.errors import expect
from attnspan.torch import compat
from attnspan.torch._watched import constant_when_traced, is_watched
from attnspan.torch.compat import pytree
from attnspan.torch.ops import below_autograd

from ._operators import Op, define, differentiate, refuse_derivative

__all__ = ["RetraceWarning", "SpecializedShapesWarning", "call_jax"]

_PLAIN = (Tensor, torch.nn.Parameter)


class RetraceWarning(UserWarning):
    """`call_jax` traces one function of the source again and again for the same shapes."""


class SpecializedShapesWarning(UserWarning):
    """JAX cannot trace a function for symbolic sizes, so it is compiled once for each size."""


def call_jax(fn: Callable[..., Any], /, *args: Any, **static: Any) -> Any:
    """A JAX function on torch tensors: one operator, in the tensors' memory, with JAX's derivative.

    Args:
        fn: A function of arrays that JAX can trace; jitted or not, it is compiled, once for each set of
            shapes and static arguments. As for `jax.jit`, it is known by its identity: make it once, since a
            closure or a transform that is made at each call is traced at each call (`RetraceWarning`).
        args: Tensors on one device, in any structure that is a pytree of torch (masks are). Anything else is
            passed to ``fn`` unchanged; it must be hashable, and each value is traced separately.
        static: The same by keyword.

    Returns:
        What ``fn`` returns, with a tensor for each array. It shares the array's memory, and on a CPU each
        contiguous tensor at an address that is a multiple of 64 is read where it is.

    Raises:
        TypeError: An element type that JAX lacks or would narrow; an argument that is neither a tensor nor
            hashable; a result of ``fn`` that is not an array.
        ValueError: No tensors, several devices, or one that JAX does not see; in compiled code, torch before
            2.13.
        ImportError: JAX is not installed.
        NotImplementedError: A second derivative; take the inner one in JAX.

    Example:
        >>> import jax.numpy as jnp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = call_jax(lambda x: jnp.sum(x * x), x)
        >>> y.backward()
        >>> y.item(), x.grad.tolist()
        (5.0, [2.0, 4.0])
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_graph(fn, args, static)
    functions = _functions()
    plain = not static and all(isinstance(x, Tensor) for x in args)
    spec, leaves, tensors = (None, (), list(args)) if plain else _split(args, static)
    for x in tensors:
        check_plain("call_jax: argument", x)
    call = functions.JaxCall(fn, spec, leaves, [(x.dtype, x.dim(), x.device) for x in tensors])
    if is_watched() or not all(type(x) in _PLAIN for x in tensors):
        results = call_op(tensors, call.handle if compat.get_proxy_mode() is None else functions.pin(call))
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        results = list(_record(None, call, *tensors))[:-1]  # type: ignore[no-untyped-call]
    else:
        results = call.program([x.shape for x in tensors])(tensors)
    return import_module("jax").tree_util.tree_unflatten(call.tree, results)


def _split(args: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, list[Any], list[Tensor]]:
    """The structure of arguments, their leaves with the class for each tensor, and the tensors."""
    leaves, spec = pytree.tree_flatten((args, static))
    others = [Tensor if isinstance(x, Tensor) else x for x in leaves]
    return spec, others, [x for x in leaves if isinstance(x, Tensor)]


@functools.cache
def _functions() -> Any:
    require("jax", "attnspan.torch.call_jax", "jax")
    return import_module("._functions", __package__)


@functools.cache
def _fake() -> Any:
    return import_module("._fake", __package__)


# Compiled code.

# Older ones take functions of one code for one, and would run the first for the second.
_TELLS_FUNCTIONS_APART = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def _in_graph(fn: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """The call as Dynamo traces it: the function is a constant of the graph, guarded by its identity."""
    what, expected = "call_jax in a compiled function", "torch 2.13 or newer, which guards the function"
    remedy = "Call it outside, or under torch.compiler.disable"
    expect(_TELLS_FUNCTIONS_APART, what, expected, torch.__version__, remedy)
    if isinstance(fn, functools.partial):  # Dynamo takes it for no constant, but its parts.
        return _in_graph(fn.func, (*fn.args, *args), {**fn.keywords, **static})
    spec, leaves, tensors = _split(args, static)
    others = tuple([_number(x) for x in leaves])
    kinds = tuple([(x.dtype, x.dim(), x.device) for x in tensors])
    # Dynamo takes a method for no constant, but its object and its function for two, which it guards.
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn, None)
    handle = _handle_of(owner, method, id(owner), _described(spec), others, kinds)
    results = call_op(tensors, handle)
    return _rebuild(_results_of(handle), results)


def _number(x: Any) -> Any:
    """A static number as it is now, where the compiler would make a symbol of one that varies."""
    return compat.guard_scalar(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _described(spec: Any) -> tuple[Any, ...]:
    """A tree's structure as constants, which Dynamo can hand on."""
    return spec.type, spec._context, tuple([_described(x) for x in spec.children()])


def _spec(described: tuple[Any, ...]) -> pytree.TreeSpec:
    kind, context, children = described
    return pytree.TreeSpec(kind, context, list(map(_spec, children))) if kind else pytree.treespec_leaf()


@constant_when_traced
def _handle_of(fn: Any, method: Any, number: int, spec: Any, leaves: tuple[Any, ...], kinds: Any) -> str:
    del number  # The identity of the function, so that it is guarded.
    fn = fn if method is None else MethodType(method, fn)
    return _functions().pin(_functions().JaxCall(fn, _spec(spec), leaves, kinds))  # type: ignore[no-any-return]


@constant_when_traced
def _results_of(handle: str) -> Any:
    return _functions().find(handle).results()


def _rebuild(nested: tuple[Any, ...], results: list[Tensor]) -> Any:
    """The results in the structure that `_functions.JaxCall.results` describes."""
    if nested[0] == "leaf":
        return results[int(nested[1])] if nested[1] else None
    kind, keys, children = nested
    parts = [_rebuild(x, results) for x in children]
    if kind == "dict":
        return dict(zip(keys, parts, strict=True))
    return parts if kind == "list" else tuple(parts)


# Operators.

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]


def _run(tensors: Sequence[Tensor], handle: str, wanted: Sequence[bool] = ()) -> list[Tensor]:
    return _functions().find(handle).program([x.shape for x in tensors], wanted)(tensors)  # type: ignore[no-any-return]


def _run_backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    sizes: Sequence[int],
    handle: str,
    wanted: Sequence[bool],
    recompute: bool,
    *_: Any,
) -> list[Tensor]:
    call = _functions().find(handle)
    program = call.program(call.shapes_of(sizes), () if recompute else wanted)
    return program.backward(grads, saved, wanted)  # type: ignore[no-any-return]


def _define(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Op:
    return define(_library, f"{schema} -> Tensor[]", real, fake, torch.Tag.needs_fixed_stride_order)


call_op = _define("call_jax(Tensor[] tensors, str handle)", _run, lambda *x: _fake().call(*x))
# The results, then what backward needs besides them and the arguments.
vjp_op = _define(
    "call_jax_vjp(Tensor[] tensors, str handle, bool[] wanted)", _run, lambda *x: _fake().call(*x)
)
# Sizes: of all tensors of the forward call, one after the other. The anchor belongs to the forward call in
# autograd's graph, where what is saved does not show that it depends on the arguments.
backward_op = _define(
    "call_jax_backward(Tensor?[] grads, Tensor[] saved, SymInt[] sizes, str handle, bool[] wanted,"
    " bool recompute, Tensor? anchor=None)",
    _run_backward,
    lambda *x: _fake().backward(*x),
)


class _Node(torch.autograd.Function):
    """A call with a derivative: through the operator, or past it where nothing watches (``keyset`` None).

    Its last result is the anchor: without elements, and with this node.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, given: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = tuple(x.requires_grad for x in tensors)
        ctx.program, ctx.wanted, ctx.recompute = None, wanted, False
        if keyset is None:
            call = given
            program = ctx.program = call.program([x.shape for x in tensors], wanted)
            made = program(tensors)
        else:
            call = _functions().find(given[1])
            program, read = _fake().trace(call, tensors, wanted)
            ctx.recompute = read is not int
            op, also = (call_op, ()) if ctx.recompute else (vjp_op, (wanted,))
            made = below_autograd(op, keyset, (list(tensors), call.handle, *also))
        results = made[: program.count]
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        ctx.set_materialize_grads(False)
        anchor = tensors[0].new_empty(0, dtype=torch.float32)
        ctx.save_for_backward(*program.saved_of(tensors, made), anchor)
        ctx.call, ctx.sizes = call, [n for x in tensors for n in x.shape]
        return *results, anchor

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = list(incoming[:-1])
        if all(x is None for x in grads):
            return (None,) * (2 + len(ctx.wanted))
        *saved, anchor = ctx.saved_tensors
        if ctx.program is not None and not torch.is_grad_enabled() and not is_watched():
            found = ctx.program.backward(grads, saved, ctx.wanted)
        else:
            held = anchor if torch.is_grad_enabled() else None
            found = backward_op(grads, saved, ctx.sizes, ctx.call.handle, ctx.wanted, ctx.recompute, held)
        made = iter(found)
        return None, None, *(next(made) if want else None for want in ctx.wanted)


# The apply of Function itself would ask functorch once more.
_record = super(torch.autograd.Function, _Node).apply  # type: ignore[misc]

_JVP, _GRAD = "Call call_jax(jax.jvp, ...) on a function that holds yours", "call_jax(jax.grad(fn), ...)"
differentiate(_library, call_op, _Node, _JVP, lambda made: list(made)[:-1])
_INNER = f"Take the inner derivative in JAX: {_GRAD}"
_SECOND = f"second derivatives of call_jax: expected first ones, got one of its backward. {_INNER}."
refuse_derivative(_library, backward_op, _SECOND, _INNER, list)
