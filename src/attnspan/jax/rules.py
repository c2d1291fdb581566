"""Attention as JAX sees it: one differentiable function over any backend, with rules for vmap and meshes.

The layers, from outside: a custom derivative (`_attend`), a batching rule (`batched`), a partitioning rule
(`partitioned`), the choice by platform (`_by_platform`), the backend. Each direction has the last four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnspan.call.options import DISTANCE
from attnspan.errors import BackendError

from .backends import BACKENDS, Branch
from .part import OPTIONS, JaxPart
from .partitioning import partitioned
from .promotion import own_promotion
from .varying import axes_of, spread

__all__ = ["SAVE_NAMES", "attend", "batched", "differentiable", "first_order", "remedy_of_forward_mode"]

#: What `jax.checkpoint` has to keep, by the names of its policies, so that no kernel runs twice.
SAVE_NAMES = ("attnspan.out", "attnspan.lse")

_MATH = 'Pass backend="math", or call it `with attnspan.backend("math"):` where no backend is passed'

Branches = tuple[Branch, ...]


# Eager calls then find the compiled program; inside another jit its trace is shared by the layers of a model.
@partial(jax.jit, static_argnames=("branches",))
def attend(part: JaxPart, branches: Branches) -> tuple[Array, Array | None]:
    """Attention in the layout of the part, checked arguments; lse is (B, H, Sq).

    A backend may have a derivative of its own: JAX then differentiates what it calls.
    """
    part = spread(part, axes_of(part))
    own = {b.backend for b in branches if BACKENDS[b.backend].own_derivative}
    if not own:
        return _attend(branches, part)  # type: ignore[no-any-return]
    rest = tuple(branch for branch in branches if branch.backend not in own)

    def run(backend: str, part: JaxPart) -> tuple[Array, Array | None]:
        return BACKENDS[backend].forward(part) if backend in own else (_attend(rest, part)[0], None)

    branches = branches if not rest else (*(b for b in branches if b.backend in own), rest[-1])
    return _by_platform(branches, run, part)  # type: ignore[no-any-return]


def _by_platform(branches: Branches, run: Callable[..., Any], *args: Any) -> Any:
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
    like = jax.tree.leaves(args)[0]
    zero = _refusal.bind(like, text=f"backend={branch.backend!r}", reason=branch.refusal).sum() * 0
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

    ``forward(how, part, *rest)`` gives out and lse; `how` is hashable, and the rest has no gradient. The lse
    may be complex: what a float of it loses is then its imaginary part, which only the derivative sees.
    ``backward(how, want_dbias, part, out, lse, dout, dlse, *rest)`` gives `Gradients`.
    """

    @own_promotion
    def attend_forward(how: Any, *primals: Any) -> tuple[Any, Any]:
        # With symbolic zeros each argument says whether its gradient is wanted: a dense bias's is expensive.
        wanted = primals[0].bias is not None and primals[0].bias.perturbed
        primals = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
        found = zip(forward(how, *primals), SAVE_NAMES, strict=True)
        out, lse = (checkpoint_name(x, name) for x, name in found)
        return (out, lse.real), (primals, out, lse, _Flag(wanted))

    @own_promotion
    def attend_backward(how: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        (part, *rest), out, lse, wanted = saved
        dout, dlse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
        dout = jnp.zeros_like(out) if dout is None else dout
        found = backward(how, wanted.on, part, out, lse, dout, dlse, *rest)
        return part.with_gradients(found), *(None for _ in rest)

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
def _forward(branches: Branches) -> Any:
    def run(part: JaxPart) -> tuple[Array, Array]:
        return _by_platform(branches, _forward_by, part)  # type: ignore[no-any-return]

    return first_order(batched(partitioned(run)))


@own_promotion
def _forward_by(backend: str, part: JaxPart) -> tuple[Array, Array]:
    return BACKENDS[backend].forward(part, fine=True)  # Branches have results of one kind.


@cache
def _backward(branches: Branches, want_dbias: bool) -> Any:
    @own_promotion
    def run_by(backend: str, *args: Any) -> Any:
        return BACKENDS[backend].backward(*args, want_dbias)  # type: ignore[call-arg]

    def run(*args: Any) -> Any:
        return _by_platform(branches, run_by, *args)

    return first_order(batched(partitioned(run), sums=True, want_dbias=want_dbias))


_attend: Any = differentiable(
    lambda branches, part: _forward(branches)(part),
    lambda branches, want_dbias, *args: _backward(branches, want_dbias)(*args),
)


def first_order(run: Any, remedy: str = _MATH) -> Any:
    """`run`, whose derivative is asked for only where a second one of attention is."""
    guarded = jax.custom_jvp(run)
    guarded.defjvp(partial(_refuse_second, remedy))
    return guarded


def _refuse_second(remedy: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "second derivatives of attention: expected first ones, the only ones of a kernel, got a derivative "
        f"of its gradient. {remedy}."
    )


@contextmanager
def remedy_of_forward_mode() -> Iterator[None]:
    """Say what to do where JAX refuses forward mode; in a user's `jit` it does so after the call."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        text = "forward-mode derivatives of attention: expected reverse mode, the only one of a kernel"
        raise NotImplementedError(f"{text}, got jvp. {_MATH}.") from None


def batched(run: Callable[..., Any], *, sums: bool = False, want_dbias: bool = False) -> Any:
    """`run(part, *rest)` with a batching rule: a mapped axis joins the batch, and one call does all of it.

    All results, and all arrays but options, have the batch as their first axis. With ``sums`` the results are
    also gradients of the sinks, and of the bias where `want_dbias`, that are summed over the batch: mapped
    calls must not share those.
    """
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap  # type: ignore[untyped-decorator]
    @own_promotion
    def rule(size: int, flags: list[Any], part: JaxPart, *rest: Any) -> tuple[Any, Any]:
        of_part, *of_rest = flags
        table = part.static.bias_kind == DISTANCE and of_part.bias
        summed = sums and (part.sinks is not None or (want_dbias and part.bias is not None))
        # Sinks and tables have no batch axis that a mapped one could join.
        if of_part.sinks or table or summed:
            return _in_turn(mapped, flags, (part, *rest))
        batch = part.q.shape[1] if of_part.q else part.q.shape[0]
        folded = (_fold(x, flag, size, batch) for x, flag in zip(rest, of_rest, strict=True))
        out = mapped(_fold_part(part, of_part, size, batch), *folded)
        out = jax.tree.map(lambda x: x.reshape(batch, size, *x.shape[1:]).swapaxes(0, 1), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _fold(x: Array | None, mapped: bool | None, size: int, batch: int) -> Array | None:
    """(size, batch|1, ...) or (batch|1, ...) as (batch * size, ...)."""
    if x is None:
        return None
    # The batch first: where it is spread over devices, it stays where it is.
    x = x.swapaxes(0, 1) if mapped else x[:, None]
    return jnp.broadcast_to(x, (batch, size, *x.shape[2:])).reshape(batch * size, *x.shape[2:])


#: Arrays that may have one batch row for all.
_SHARED = ("bounds", "bias", "q_index", "k_index")


def _fold_part(part: JaxPart, flags: Any, size: int, batch: int) -> JaxPart:
    folded: dict[str, Any] = {}
    for name in ("q", "k", "v", *OPTIONS):
        x, mapped = getattr(part, name), getattr(flags, name)
        by_head = name == "sinks" or (name == "bias" and part.static.bias_kind == DISTANCE)
        # What all rows share stays so; seeds are of each row by contract.
        shared = x is None or by_head or (name in _SHARED and not mapped and x.shape[0] == 1)
        folded[name] = x if shared else _fold(x, mapped, size, batch)
    return replace(part, **folded)


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
