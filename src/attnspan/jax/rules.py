"""Attention for JAX: one differentiable function over any backend, with rules for vmap and meshes.

The layers, from outside: a custom derivative (`_attend`), a batching rule (`batched`), a partitioning rule
(`partitioned`), the selection by platform (`_by_platform`), the backend. The forward and the backward pass
each have the last four layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnspan.backends import Backend
from attnspan.call import schema
from attnspan.errors import BackendError

from .backends import Branch
from .backends import backward as run_backward
from .backends import forward as run_forward
from .part import ARRAYS, GRADIENTS, JaxPart
from .partitioning import partitioned
from .promotion import own_promotion
from .varying import axes_of, spread

_OPTIONS = schema.names(schema.OPTIONS)

#: Names for the policies of `jax.checkpoint`. A policy that saves these results runs no kernel twice.
SAVE_NAMES = ("attnspan.out", "attnspan.lse")

_MATH = 'Pass backend="math", or call attention inside `with attnspan.backend("math"):`'

Branches = tuple[Branch, ...]


# With jit, eager calls find the compiled program, and the layers of a model share one trace.
@partial(jax.jit, static_argnames=("branches",))
@own_promotion
def attend(part: JaxPart, branches: Branches) -> tuple[Array, Array | None]:
    """Compute attention of a checked part in the part's layout. The lse is (B, H, Sq).

    If a backend has its own derivative, JAX differentiates the functions that the backend calls.
    """
    part = spread(part, axes_of(part))
    own = {b.backend for b in branches if b.backend.backward is None}
    if not own:
        return _attend(branches, part)  # type: ignore[no-any-return]
    rest = tuple(branch for branch in branches if branch.backend not in own)

    def run(backend: Backend, part: JaxPart) -> tuple[Array, Array | None]:
        return run_forward(backend, part) if backend in own else (_attend(rest, part)[0], None)

    branches = branches if not rest else (*(b for b in branches if b.backend in own), rest[-1])
    return _by_platform(branches, run, part)  # type: ignore[no-any-return]


def _by_platform(branches: Branches, run: Callable[..., Any], *args: Any) -> Any:
    """Run ``run(backend, *args)`` with the backend of the platform that the program is compiled for."""
    *own, last = branches
    if not own and not last.refusal:
        return run(last.backend, *args)
    runs = {branch.backend: partial(run, branch.backend) for branch in branches}
    # The refused backend may not trace, so another backend's results give the shapes.
    other = partial(_refused, runs[branches[0].backend], last) if last.refusal else runs[last.backend]
    return lax.platform_dependent(*args, default=other, **{b.platform: runs[b.backend] for b in own})


def _refused(run: Callable[..., Any], branch: Branch, *args: Any) -> Any:
    """Return results of `run`'s shapes that raise when they are compiled."""
    like = jax.tree.leaves(args)[0]
    zero = _refusal.bind(like, text=f"backend={branch.backend.name!r}", reason=branch.refusal).sum() * 0
    return jax.tree.map(lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), jax.eval_shape(run, *args))


def _raise(_: Any, __: Any, *, text: str, reason: str) -> Any:
    wanted, remedy = (
        "a backend for the platform that the program is compiled for",
        "Pass another one, or none",
    )
    raise BackendError(text, expected=wanted, got=reason, remedy=remedy)


_refusal = Primitive("attnspan_refusal")
_refusal.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_refusal, _raise)
ad.deflinear2(_refusal, lambda cotangent, _, **__: [cotangent])
batching.primitive_batchers[_refusal] = lambda args, dims, **words: (_refusal.bind(*args, **words), dims[0])


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Return `forward` with `backward` as its derivative.

    ``forward(how, part, *rest)`` returns out and lse. `how` is hashable, and the rest has no gradient. The
    lse may be complex: its imaginary part is the rounding error of its real part, and only the derivative
    reads it. ``backward(how, want_dbias, part, out, lse, dout, dlse, *rest)`` returns `Gradients`.
    """

    @own_promotion
    def attend_forward(how: Any, *primals: Any) -> tuple[Any, Any]:
        # With symbolic zeros, each argument says whether its gradient is wanted. A dense bias's gradient is
        # expensive.
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
    """A bool among residuals that is not an array."""

    on: bool


@cache
def _forward(branches: Branches) -> Any:
    def run(part: JaxPart) -> tuple[Array, Array]:
        return _by_platform(branches, _forward_by, part)  # type: ignore[no-any-return]

    return first_order(batched(partitioned(run)))


@own_promotion
def _forward_by(backend: Backend, part: JaxPart) -> tuple[Array, Array]:
    return run_forward(backend, part, fine=True)  # All branches return results of the same kind.


@cache
def _backward(branches: Branches, want_dbias: bool) -> Any:
    @own_promotion
    def run_by(backend: Backend, *args: Any) -> Any:
        return run_backward(backend, *args, want_dbias)  # type: ignore[call-arg]

    def run(*args: Any) -> Any:
        return _by_platform(branches, run_by, *args)

    return first_order(batched(partitioned(run), sums=True, want_dbias=want_dbias))


_attend: Any = differentiable(
    lambda branches, part: _forward(branches)(part),
    lambda branches, want_dbias, *args: _backward(branches, want_dbias)(*args),
)


def first_order(run: Any, remedy: str = _MATH) -> Any:
    """Return `run`, which raises if a second derivative of attention is needed."""
    guarded = jax.custom_jvp(run)
    guarded.defjvp(partial(_refuse_second, remedy))
    return guarded


def _refuse_second(remedy: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "second derivatives of attention: expected first derivatives, the only ones that kernels have, got a "
        f"derivative of a gradient. {remedy}."
    )


def forward_mode_refused() -> NotImplementedError:
    """Return the error for forward mode. In a user's `jit`, JAX rejects it after the call."""
    text = "forward-mode derivatives of attention: expected reverse mode, the only mode that kernels have"
    return NotImplementedError(f"{text}, got jvp. {_MATH}.")


def batched(run: Callable[..., Any], *, sums: bool = False, want_dbias: bool = False) -> Any:
    """Return `run(part, *rest)` with a batching rule, by which a mapped axis joins the batch in one call.

    All results, and all arrays except options, have the batch as their first axis. With ``sums`` the results
    include gradients of the sinks, and with `want_dbias` of the bias. Both are summed over the batch, so
    mapped calls must not share them.
    """
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap  # type: ignore[untyped-decorator]
    @own_promotion
    def rule(size: int, flags: list[Any], part: JaxPart, *rest: Any) -> tuple[Any, Any]:
        of_part, *of_rest = flags
        kind = part.bias_kind
        wanted = (x for x in GRADIENTS if x in _OPTIONS and (x != "bias" or want_dbias))
        summed = sums and any(getattr(part, name) is not None for name in wanted)
        # Sinks and tables have no batch axis that a mapped axis could join.
        mapped_names = (name for name in ARRAYS if getattr(of_part, name))
        if summed or any(schema.dim(name, "b", kind=kind) is None for name in mapped_names):
            return _in_turn(mapped, flags, (part, *rest))
        batch = part.q.shape[1] if of_part.q else part.q.shape[0]
        folded = (_fold(x, flag, size, batch) for x, flag in zip(rest, of_rest, strict=True))
        out = mapped(_fold_part(part, of_part, size, batch), *folded)
        out = jax.tree.map(lambda x: x.reshape(batch, size, *x.shape[1:]).swapaxes(0, 1), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _fold(x: Array | None, mapped: bool | None, size: int, batch: int) -> Array | None:
    """Reshape (size, batch|1, ...) or (batch|1, ...) to (batch * size, ...)."""
    if x is None:
        return None
    # The batch comes first, so that a batch that is split over devices does not move.
    x = x.swapaxes(0, 1) if mapped else x[:, None]
    return jnp.broadcast_to(x, (batch, size, *x.shape[2:])).reshape(batch * size, *x.shape[2:])


def _fold_part(part: JaxPart, flags: Any, size: int, batch: int) -> JaxPart:
    folded: dict[str, Any] = {}
    for name in ARRAYS:
        x, mapped, kind = getattr(part, name), getattr(flags, name), part.bias_kind
        if x is None or schema.dim(name, "b", kind=kind) is None:
            continue
        # A shared array stays shared.
        if mapped or x.shape[0] != 1 or not schema.is_shared(name, "b", kind):
            folded[name] = _fold(x, mapped, size, batch)
    return replace(part, **folded)


def _in_turn(run: Callable[..., Any], flags: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run one call after the other."""
    leaves: list[Array]
    tree: Any
    leaves, tree = jax.tree.flatten(args)
    moving = jax.tree.leaves(tuple(flags))

    def one(slices: list[Array]) -> Any:
        rest = iter(slices)
        return run(*tree.unflatten([next(rest) if f else x for x, f in zip(leaves, moving, strict=True)]))

    out = lax.map(one, [x for x, f in zip(leaves, moving, strict=True) if f])
    return out, jax.tree.map(lambda _: True, out)
