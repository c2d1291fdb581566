"""Attention as JAX sees it: one differentiable function over any backend, with rules for vmap and meshes.

The layers, from outside: a custom derivative (`_attend`), a batching rule (`batched`), a partitioning rule
(`partitioned`), the choice by platform (`_by_platform`), the backend. Each direction has the last four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnspan.call.options import DISTANCE
from attnspan.errors import BackendError

from .backends import Branch, Operands, Static, module_of
from .partitioning import partitioned
from .promotion import own_promotion
from .varying import axes_of, spread

__all__ = ["SAVE_NAMES", "How", "attend", "batched", "differentiable", "first_order"]

#: What `jax.checkpoint` has to keep, by the names of its policies, so that no kernel runs twice.
SAVE_NAMES = ("attnspan.out", "attnspan.lse")


class How(NamedTuple):
    """Static part of a call, for which it is compiled: numbers, backends, layout of q, k, v and out."""

    static: Static
    branches: tuple[Branch, ...]
    layout: str


# Eager calls then find the compiled program; inside another jit its trace is shared by the layers of a model.
@partial(jax.jit, static_argnames=("how",))
def attend(q: Array, k: Array, v: Array, given: Operands, how: How) -> tuple[Array, Array | None]:
    """Attention in the layout "bhsd" or "bshd", checked arguments; lse is (B, H, Sq).

    A backend may have a derivative of its own (``OWN_DERIVATIVE``): JAX then differentiates what it calls.
    """
    q, k, v, given = spread((q, k, v, given), axes_of(q, k, v, given))
    own = {b.backend for b in how.branches if getattr(module_of(b.backend), "OWN_DERIVATIVE", False)}
    if not own:
        return _attend(how, q, k, v, given)  # type: ignore[no-any-return]
    rest = tuple(branch for branch in how.branches if branch.backend not in own)

    def run(backend: str, q: Array, k: Array, v: Array, given: Operands) -> tuple[Array, Array | None]:
        if backend not in own:
            return _attend(how._replace(branches=rest), q, k, v, given)[0], None
        q, k, v = (_to_bhsd(x, how.layout) for x in (q, k, v))
        out, lse = module_of(backend).forward(q, k, v, given, how.static)
        return _to_bhsd(out, how.layout), lse

    branches = how.branches if not rest else (*(b for b in how.branches if b.backend in own), rest[-1])
    return _by_platform(branches, run, q, k, v, given)  # type: ignore[no-any-return]


def _by_platform(branches: tuple[Branch, ...], run: Callable[..., Any], *args: Any) -> Any:
    """``run(backend, *args)`` by the backend of the platform that the program is compiled for."""
    *own, last = branches
    if not own and not last.refusal:
        return run(last.backend, *args)
    runs = {branch.backend: partial(run, branch.backend) for branch in branches}
    # What the refused backend cannot trace has the shapes that another one gives.
    other = partial(_refused, runs[branches[0].backend], last) if last.refusal else runs[last.backend]
    return lax.platform_dependent(*args, default=other, **{b.platform: runs[b.backend] for b in own})


def _refused(run: Callable[..., Any], branch: Branch, *args: Any) -> Any:
    """Results of the shapes that `run` gives, which cannot be compiled."""
    zero = _refusal.bind(args[0], text=f"backend={branch.backend!r}", reason=branch.refusal).sum() * 0
    return jax.tree.map(lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), jax.eval_shape(run, *args))


def _raise(_: Any, __: Any, *, text: str, reason: str) -> Any:
    wanted, remedy = "a backend of the platform that the program is compiled for", "Choose another, or none"
    raise BackendError(text, expected=wanted, got=reason, remedy=remedy)


_refusal = Primitive("attnspan_refusal")
_refusal.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_refusal, _raise)
ad.deflinear2(_refusal, lambda cotangent, _, **__: [cotangent])
batching.primitive_batchers[_refusal] = lambda args, dims, **words: (_refusal.bind(*args, **words), dims[0])


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """`forward` with `backward` as its derivative.

    ``forward(how, q, k, v, given, *rest)`` gives out and lse; `how` is hashable, and the rest has no
    gradient. The lse may be complex: what a float of it loses, |lse| * 2^-24 of each weight, is then its
    imaginary part, which only the derivative sees.
    ``backward(how, want_dbias, dout, dlse, q, k, v, given, out, lse, *rest)`` gives `Gradients`.
    """

    @own_promotion
    def attend_forward(how: Any, *primals: Any) -> tuple[Any, Any]:
        # With symbolic zeros each argument says whether its gradient is wanted: a dense bias's is expensive.
        wanted = primals[3].bias is not None and primals[3].bias.perturbed
        primals = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
        found = zip(forward(how, *primals), SAVE_NAMES, strict=True)
        out, lse = (checkpoint_name(x, name) for x, name in found)
        return (out, lse.real), (primals, out, lse, _Flag(wanted))

    @own_promotion
    def attend_backward(how: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        (q, k, v, given, *rest), out, lse, wanted = saved
        dout, dlse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
        dout = jnp.zeros_like(out) if dout is None else dout
        found = backward(how, wanted.on, dout, dlse, q, k, v, given, out, lse, *rest)
        dq, dk, dv, dbias, dsinks = found
        # A dense bias may have q's dtype; its gradient is summed in float32.
        dbias = None if dbias is None else dbias.astype(given.bias.dtype)
        dgiven = Operands(None, dbias, dsinks, None, None, None)  # type: ignore[arg-type]
        return dq, dk, dv, dgiven, *(None for _ in rest)

    @own_promotion
    def primal(how: Any, *primals: Any) -> tuple[Any, Any]:
        out, lse = forward(how, *primals)
        return out, lse.real

    attend = jax.custom_vjp(primal, nondiff_argnums=(0,))
    attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)
    return attend


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Flag:
    """A bool among residuals that is no array."""

    on: bool


@cache
def _forward(how: How) -> Any:
    def run(q: Array, k: Array, v: Array, given: Operands) -> tuple[Array, Array]:
        return _by_platform(how.branches, partial(_forward_of, how), q, k, v, given)  # type: ignore[no-any-return]

    parted = partitioned(run, ("q", "k", "k", "given"), how.static, how.layout)
    return first_order(how.branches[-1].backend, batched(parted, how.static))


@own_promotion
def _forward_of(how: How, backend: str, q: Array, k: Array, v: Array, given: Operands) -> tuple[Array, Array]:
    module = module_of(backend)
    fine = {"fine": True} if getattr(module, "FINE_LSE", False) else {}
    if how.layout in getattr(module, "LAYOUTS", ()):
        return module.forward(q, k, v, given, how.static, layout=how.layout, **fine)  # type: ignore[no-any-return]
    q, k, v = (_to_bhsd(x, how.layout) for x in (q, k, v))
    out, lse = module.forward(q, k, v, given, how.static, **fine)
    # Backends by platform have results of one kind.
    return _to_bhsd(out, how.layout), lse if fine else lax.complex(lse, jnp.zeros_like(lse))


@cache
def _backward(how: How, want_dbias: bool) -> Any:
    def run(*args: Any) -> Any:
        return _by_platform(how.branches, partial(_backward_of, how, want_dbias), *args)

    parted = partitioned(run, ("q", "lse", "q", "k", "k", "given", "q", "lse"), how.static, how.layout)
    mapped = batched(parted, how.static, sums=True, want_dbias=want_dbias)
    return first_order(how.branches[-1].backend, mapped)


@own_promotion
def _backward_of(how: How, want_dbias: bool, backend: str, *args: Any) -> Any:
    module, rest = module_of(backend), (how.static, want_dbias)
    if not getattr(module, "FINE_LSE", False):
        args = (*args[:-1], args[-1].real)
    if how.layout in getattr(module, "LAYOUTS", ()):
        return module.backward(*args, *rest, layout=how.layout)
    dout, dlse, q, k, v, given, out, lse = args
    dout, q, k, v, out = (_to_bhsd(x, how.layout) for x in (dout, q, k, v, out))
    found = module.backward(dout, dlse, q, k, v, given, out, lse, *rest)
    return (*(_to_bhsd(x, how.layout) for x in found[:3]), *found[3:])


_attend: Any = differentiable(
    lambda how, *args: _forward(how)(*args), lambda how, want_dbias, *args: _backward(how, want_dbias)(*args)
)


def first_order(backend: str, run: Any) -> Any:
    """`run`, whose derivative is asked for only where a second one of attention is."""
    guarded = jax.custom_jvp(run)
    guarded.defjvp(partial(_refuse_second, backend))
    return guarded


def _refuse_second(backend: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        f"second derivatives of attention: expected first ones, which backend {backend!r} has; got a "
        'derivative of its gradient. Call it `with attnspan.backend("math"):` for higher ones.'
    )


def _to_bhsd(x: Array, layout: str) -> Array:
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def batched(run: Callable[..., Any], static: Static, *, sums: bool = False, want_dbias: bool = False) -> Any:
    """`run` with a batching rule: a mapped axis joins the batch, so that one call of a kernel does all of it.

    All arrays but those of one `Operands`, and all results, have the batch as their first axis. With ``sums``
    the results are also gradients of the sinks, and of the bias where `want_dbias`, that are summed over the
    batch: mapped calls must not share those.
    """
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap  # type: ignore[untyped-decorator]
    @own_promotion
    def rule(size: int, flags: list[Any], *args: Any) -> tuple[Any, Any]:
        at = next(i for i, x in enumerate(args) if isinstance(x, Operands))
        given, given_flags = args[at], flags[at]
        table = static.bias_kind == DISTANCE and given_flags.bias
        summed = sums and (given.sinks is not None or (want_dbias and given.bias is not None))
        # Sinks and tables have no batch axis that a mapped one could join.
        if given_flags.sinks or table or summed:
            return _in_turn(mapped, flags, args)
        # The first argument is an array with a batch axis.
        batch = args[0].shape[1] if flags[0] else args[0].shape[0]
        folded = [
            _fold_operands(x, f, size, batch, static) if i == at else _fold(x, f, size, batch)
            for i, (x, f) in enumerate(zip(args, flags, strict=True))
        ]
        out = jax.tree.map(lambda x: x.reshape(batch, size, *x.shape[1:]).swapaxes(0, 1), mapped(*folded))
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _fold(x: Array | None, mapped: bool | None, size: int, batch: int) -> Array | None:
    """(size, batch|1, ...) or (batch|1, ...) as (batch * size, ...)."""
    if x is None:
        return None
    # The batch first: where it is spread over devices, it stays where it is.
    x = x.swapaxes(0, 1) if mapped else x[:, None]
    return jnp.broadcast_to(x, (batch, size, *x.shape[2:])).reshape(batch * size, *x.shape[2:])


def _fold_operands(given: Operands, flags: Any, size: int, batch: int, static: Static) -> Operands:
    folded: dict[str, Any] = {}
    for name, x in given._asdict().items():
        mapped = getattr(flags, name)
        by_head = name == "sinks" or (name == "bias" and static.bias_kind == DISTANCE)
        # What all rows share stays so; seeds are of each row by contract.
        shared = x is None or by_head or (not mapped and x.shape[0] == 1 and name != "seeds")
        folded[name] = x if shared else _fold(x, mapped, size, batch)
    return Operands(**folded)


def _in_turn(run: Callable[..., Any], flags: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call after the other."""
    leaves: list[Array]
    tree: Any
    leaves, tree = jax.tree.flatten(args)
    moving = jax.tree.leaves(tuple(flags))

    def one(slices: list[Array]) -> Any:
        rest = iter(slices)
        return run(*tree.unflatten([next(rest) if f else x for x, f in zip(leaves, moving, strict=True)]))

    out = lax.map(one, [x for x, f in zip(leaves, moving, strict=True) if f])
    return out, jax.tree.map(lambda _: True, out)
