"""`call_jax`: a JAX function on torch tensors. The first call imports JAX, not this module.

The operators take a list of tensors and the name of a `_functions.JaxCall`, which holds the function and all
other arguments.
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
from attnspan.torch._autograd import below_autograd, define, differentiate, refuse_derivative, tensors_in
from attnspan.torch._watched import constant_when_traced, is_watched
from attnspan.torch.compat import pytree

from ._warnings import RetraceWarning as RetraceWarning
from ._warnings import SpecializedShapesWarning as SpecializedShapesWarning

_PLAIN = (Tensor, torch.nn.Parameter)


def call_jax(fn: Callable[..., Any], /, *args: Any, **static: Any) -> Any:
    """Call a JAX function on torch tensors, as one operator with JAX's derivative and without copies.

    Args:
        fn: A function of arrays that JAX can trace, jitted or not. It compiles once for each set of shapes
            and static arguments. As for `jax.jit`, its identity is the cache key, so create it once. A
            closure or a transform that you create in each call is traced in each call (`RetraceWarning`).
        args: Tensors on one device, in any torch pytree (masks are pytrees). Other values are passed to
            ``fn`` unchanged. They must be hashable, and each value is traced separately.
        static: Keyword arguments, treated in the same way.

    Returns:
        The result of ``fn``, with a tensor for each array. The tensor shares the array's memory. On a CPU,
        JAX reads a contiguous tensor without a copy if its address is a multiple of 64.

    Raises:
        TypeError: JAX lacks or would narrow a dtype, an argument is neither a tensor nor hashable, or a
            result of ``fn`` is not an array.
        ValueError: There are no tensors, or they are on several devices or on a device that JAX does not see.
            In compiled code also if torch is older than 2.13.
        ImportError: JAX is not installed.
        NotImplementedError: A second derivative is needed. Take the inner derivative in JAX.

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
        results = list(_record(call, *tensors))[:-1]  # type: ignore[no-untyped-call]
    else:
        results = call.program([x.shape for x in tensors])(tensors)
    return import_module("jax").tree_util.tree_unflatten(call.tree, results)


def _split(args: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, list[Any], list[Tensor]]:
    """Return the arguments' structure, their leaves with `Tensor` in place of tensors, and the tensors."""
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

# Older versions confuse functions that share code, and would run the first instead of the second.
_TELLS_FUNCTIONS_APART = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def _in_graph(fn: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """Call `fn` as Dynamo traces it: the function is a constant of the graph, guarded by its identity."""
    what, expected = "call_jax in a compiled function", "torch 2.13 or newer, which guards the function"
    remedy = "Call it outside of the compiled function, or under torch.compiler.disable"
    expect(_TELLS_FUNCTIONS_APART, what, expected, torch.__version__, remedy)
    if isinstance(fn, functools.partial):  # For Dynamo, only its parts are constants.
        return _in_graph(fn.func, (*fn.args, *args), {**fn.keywords, **static})
    spec, leaves, tensors = _split(args, static)
    others = tuple([_number(x) for x in leaves])
    kinds = tuple([(x.dtype, x.dim(), x.device) for x in tensors])
    # For Dynamo, a method is not a constant, but its object and its function are, and it guards both.
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn, None)
    handle = _handle_of(owner, method, id(owner), _described(spec), others, kinds)
    results = call_op(tensors, handle)
    return _rebuild(_results_of(handle), results)


def _number(x: Any) -> Any:
    """Return a static number as a constant, because the compiler would turn a varying one into a symbol."""
    return compat.guard_scalar(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _described(spec: Any) -> tuple[Any, ...]:
    """Return a tree's structure as constants, which Dynamo can pass on."""
    return spec.type, compat.context_of(spec), tuple([_described(x) for x in spec.children()])


def _spec(described: tuple[Any, ...]) -> pytree.TreeSpec:
    kind, context, children = described
    return pytree.TreeSpec(kind, context, list(map(_spec, children))) if kind else pytree.treespec_leaf()


@constant_when_traced
def _handle_of(fn: Any, method: Any, number: int, spec: Any, leaves: tuple[Any, ...], kinds: Any) -> str:
    del number  # The function's identity is an argument to get a guard.
    fn = fn if method is None else MethodType(method, fn)
    return _functions().pin(_functions().JaxCall(fn, _spec(spec), leaves, kinds))  # type: ignore[no-any-return]


@constant_when_traced
def _results_of(handle: str) -> Any:
    return _functions().find(handle).results()


def _rebuild(nested: tuple[Any, ...], results: list[Tensor]) -> Any:
    """Return the results in the structure that `_functions.JaxCall.results` describes."""
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


def _run_fake(*given: Any) -> list[Tensor]:
    return _fake().call(*given)  # type: ignore[no-any-return]


_RUN = {"CompositeExplicitAutograd": _run}
_ORDER = torch.Tag.needs_fixed_stride_order
call_op = define(_library, "call_jax(Tensor[] tensors, str handle) -> Tensor[]", _run_fake, _ORDER, **_RUN)
# It returns the results, then the residuals that are neither results nor arguments.
vjp_op = define(
    _library,
    "call_jax_vjp(Tensor[] tensors, str handle, bool[] wanted) -> Tensor[]",
    _run_fake,
    _ORDER,
    **_RUN,
)
# `sizes` are the sizes of all tensors of the forward call in one list. The anchor links the saved tensors to
# the forward call in autograd's graph, because residuals do not show that they depend on the arguments.
backward_op = define(
    _library,
    "call_jax_backward(Tensor?[] grads, Tensor[] saved, SymInt[] sizes, str handle, bool[] wanted,"
    " bool recompute, Tensor? anchor=None) -> Tensor[]",
    lambda *x: _fake().backward(*x),
    _ORDER,
    CompositeExplicitAutograd=_run_backward,
)


class _Node(torch.autograd.Function):
    """A call with a derivative, through the operator, or directly if nothing watches: a `JaxCall`.

    Its last result is the anchor, which has no elements but has this node.
    """

    @staticmethod
    def forward(ctx: Any, source: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = tuple(x.requires_grad for x in tensors)
        ctx.program, ctx.wanted, ctx.recompute = None, wanted, False
        if not isinstance(source, tuple):
            call = source
            program = ctx.program = call.program([x.shape for x in tensors], wanted)
            made = program(tensors)
        else:
            _, keyset, (_, handle) = source
            call = _functions().find(handle)
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
            return (None,) * (1 + len(ctx.wanted))
        *saved, anchor = ctx.saved_tensors
        if ctx.program is not None and not torch.is_grad_enabled() and not is_watched():
            found = ctx.program.backward(grads, saved, ctx.wanted)
        else:
            held = anchor if torch.is_grad_enabled() else None
            found = backward_op(grads, saved, ctx.sizes, ctx.call.handle, ctx.wanted, ctx.recompute, held)
        made = iter(found)
        return None, *(next(made) if want else None for want in ctx.wanted)


# Function.apply itself would call functorch again.
_record = super(torch.autograd.Function, _Node).apply  # type: ignore[misc]

_JVP, _GRAD = "Call call_jax(jax.jvp, ...) on a function that wraps yours", "call_jax(jax.grad(fn), ...)"
differentiate(
    _library, call_op, _Node, forward_mode=_JVP, flat=tensors_in, finish=lambda made: list(made)[:-1]
)
_INNER = f"Take the inner derivative in JAX: {_GRAD}"
_SECOND = (
    f"second derivatives of call_jax: expected first derivatives, got a derivative of its backward. {_INNER}."
)
refuse_derivative(_library, backward_op, _INNER, text=_SECOND, forward_mode=_INNER, flat=tensors_in)
