"""The operators ``attnspan::attention`` and ``attnspan::attention_backward``, which torch's tracers see.

This module has their schemas, kernels for CPU and CUDA, fake kernels and autograd. Tensors have the order
(B, H, S, D) with a unit last stride. Results are stored as contiguous (B, S, H, D), whatever the strides of
the inputs. A fake kernel then computes no strides, and no guard depends on a stride. docs/design.md has the
contract.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnspan.call import check_k_len
from attnspan.call.options import DENSE, Options
from attnspan.kernels import cpu, triton

from . import _vmap, compat
from ._watched import is_watched

__all__ = [
    "OPTION_SCHEMA",
    "autograd_kernel",
    "backward_flops",
    "below_autograd",
    "check_k_len",
    "forward_flops",
    "has_tangent",
    "new_outputs",
    "python_kernels",
    "read_options",
    "readable",
    "record_forward",
    "single_level",
    "stored_bshd",
    "visible_pairs",
    "with_autograd",
]

# This uses Library, because the custom_op decorator adds Python wrappers to every call.
_library = torch.library.Library("attnspan", "DEF")  # type: ignore[no-untyped-call]
# A unit last stride needs only the stride order of eager mode. Exact strides would add copies.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
#: Options in the schemas of both operators. `bias_kind` is the kind of `bias`. The indices are the global
#: indices of queries and keys, for position biases and dropout. docs/options.md explains each option.
OPTION_SCHEMA = (
    "float softcap=0.0, Tensor? bias=None, int bias_kind=0, Tensor? sinks=None, float dropout_p=0.0,"
    " Tensor? dropout_seed=None, Tensor? q_index=None, Tensor? k_index=None"
)
# `k_len` is the number of keys that a mask was lowered for, if only the running program knows it.
_library.define(  # type: ignore[no-untyped-call]
    f"attention(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale, {OPTION_SCHEMA},"
    " Tensor? k_len=None) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
_library.define(  # type: ignore[no-untyped-call]
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor out,"
    f" Tensor lse, float scale, {OPTION_SCHEMA}, bool want_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=_TAGS,
)

# Number of option arguments of both operators, in the order of `Options`. Torch omits trailing defaults.
_COUNT = len(Options._fields)


def stored_bshd(like: Tensor, heads: int, length: int, dim: int) -> Tensor:
    """Uninitialised (B, H, S, D) tensor that is stored as contiguous (B, S, H, D)."""
    return like.new_empty((like.shape[0], length, heads, dim)).transpose(1, 2)


def new_outputs(q: Tensor, v: Tensor, lse_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse. A float32 lse would give recomputed weights an error of |lse| * 2^-24."""
    batch, heads, q_len, _ = q.shape
    return stored_bshd(q, heads, q_len, v.shape[3]), q.new_empty((batch, heads, q_len), dtype=lse_dtype)


def readable(x: Tensor) -> Tensor:
    """The tensor itself if its last stride is 1, else the copy that the kernel needs."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def read_options(options: Options) -> Options | None:
    """Options with arrays that the kernel can read, or None if the call has no options."""
    softcap, bias, kind, sinks, dropout_p, *rest = options
    if softcap == 0.0 and bias is None and sinks is None and dropout_p == 0.0:
        return None
    if bias is not None:
        bias = readable(bias) if kind == DENSE else bias.contiguous()
    sinks, *rest = [None if x is None else x.contiguous() for x in (sinks, *rest)]
    return Options(softcap, bias, kind, sinks, dropout_p, *rest)


def _kernel_of(x: Tensor) -> tuple[Any, dict[str, Any]]:
    """Kernels of a tensor's device, and their additional arguments."""
    on_cpu = x.is_cpu and not triton.interpret.get()
    return (cpu, {"num_threads": torch.get_num_threads()}) if on_cpu else (triton, {})


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, *given: Any
) -> tuple[Tensor, Tensor]:
    out, lse = new_outputs(q, v)
    if given[_COUNT:] not in ((), (None,)):
        check_k_len(int(given[_COUNT]), k.shape[2])
    q, k, v, bounds = readable(q), readable(k), readable(v), bounds.contiguous()
    kernel, more = _kernel_of(q)
    kernel.forward(
        q, k, v, bounds, out, lse, scale=scale, options=read_options(Options(*given[:_COUNT])), **more
    )
    return out, lse


def _backward_kernel(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    bounds, out, lse, scale, *given = rest
    gradients = _backward_fake(dout, dlse, q, k, v, *rest)
    dq, dk, dv, dbias, dsinks = gradients
    if lse.numel() == 0:  # Without queries all gradients are 0, and the kernel does not accept the call.
        return dq, *(x.zero_() for x in gradients[1:])
    # The kernel receives addresses, so these names keep the tensors alive. Hooks on saved tensors may have
    # changed the strides of out and lse.
    dout, q, k, v, out = (readable(x) for x in (dout, q, k, v, out))
    dlse, bounds, lse = None if dlse is None else dlse.contiguous(), bounds.contiguous(), lse.contiguous()
    options = read_options(Options(*given[:_COUNT]))
    kernel, more = _kernel_of(q)
    kernel.backward(
        *(dout, dlse, q, k, v, out, lse, bounds, dq, dk, dv),
        scale=scale,
        options=options,
        dbias=dbias if dbias.numel() else None,
        dsinks=None if options is None or options.sinks is None else dsinks,
        **more,
    )
    return gradients


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    del k, given
    return new_outputs(q, v)


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Uninitialised dq, dk, dv, dbias and dsinks. A gradient that is not needed has no elements."""
    del dout, dlse
    options, want_dbias = Options(*rest[4 : 4 + _COUNT]), rest[4 + _COUNT :] == (True,)
    dq, dk, dv = (stored_bshd(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    wanted = options.bias if want_dbias else None, options.sinks
    shapes: list[Any] = [(0,) if x is None else tuple(x.shape) for x in wanted]
    return dq, dk, dv, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _implement(library: torch.library.Library, key: str, **more: Any) -> None:
    library.impl("attention", _forward_kernel, key, **more)  # type: ignore[no-untyped-call]
    library.impl("attention_backward", _backward_kernel, key, **more)  # type: ignore[no-untyped-call]


@contextmanager
def python_kernels() -> Iterator[None]:
    """Run both operators from Python on CPU tensors, for Triton's interpreter and for comparisons."""
    library = torch.library.Library("attnspan", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _implement(library, "CPU", allow_override=True)
    try:
        yield
    finally:
        compat.destroy(library)


# On CPU the compiled module is the kernel, without a Python call. The Python kernels above run Triton's
# interpreter, and raise if the compiled module is missing.
_implement(_library, "CUDA")
if cpu.core is None or not cpu.core.register_torch_operators():
    _implement(_library, "CPU")
triton.around_interpreted.append(python_kernels)
torch.library.register_fake("attnspan::attention", _forward_fake, lib=_library)
torch.library.register_fake("attnspan::attention_backward", _backward_fake, lib=_library)

forward_op = torch.ops.attnspan.attention.default
backward_op = torch.ops.attnspan.attention_backward.default
# Names of version 0.2, because checkpointing policies outside this package may compare with them.
for _name, _op in (("forward", forward_op), ("backward", backward_op)):
    setattr(torch.ops.attnspan, _name, _op.overloadpacket)


def _past_operator(dout: Tensor, *rest: Any) -> tuple[Any, ...] | None:
    """The operator's gradients without a call of the operator.

    The backward pass of 16 queries then takes three quarters of the time. Returns None if the compiled module
    cannot read a tensor.
    """
    q, k, v, bounds, out, lse, scale, *given, want_dbias = rest
    options = read_options(Options(*given))
    dbias = torch.empty(options.bias.shape, dtype=torch.float32) if want_dbias and options else None
    sinks = None if options is None else options.sinks
    dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=torch.float32)
    make = torch.get_num_threads(), torch.empty_strided
    arguments = cpu.arguments(options), dbias, dsinks
    found = cpu.core.gradients(dout, q, k, v, out, lse, bounds, scale, *make, *arguments)
    return None if found is None else (*found, dbias, dsinks)


class _Forward(torch.autograd.Function):
    """Derivative of the forward operator."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        # Autograd records a call of the operator, or results that the kernel has already computed.
        ctx.short = type(source) is tuple
        results = source if ctx.short else below_autograd(forward_op, source, inputs)
        # The gradient of an unused output is then None, and the kernel skips the lse term.
        ctx.set_materialize_grads(False)
        q, k, v, bounds, scale, *given = inputs
        softcap, bias, kind, sinks, dropout_p, *rest = Options(*given[:_COUNT])
        ctx.numbers = scale, softcap, kind, dropout_p
        kept = [q, k, v, bounds, bias, sinks, *rest]
        # Autograd cannot save a tensor from inference mode, but it can save a copy.
        kept = [x.clone() if x is not None and x.is_inference() else x for x in kept]
        ctx.save_for_backward(*results, *kept)
        return results  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, bounds, bias, sinks, *rest = ctx.saved_tensors
        scale, softcap, kind, dropout_p = ctx.numbers
        needed: tuple[bool, ...] = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needed)
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else dlse.float()
        want_dbias = needed[7:8] == (True,)
        rest = q, k, v, bounds, out, lse, scale, softcap, bias, kind, sinks, dropout_p, *rest, want_dbias
        found = None
        if ctx.short and dlse is None and not (torch.is_grad_enabled() or dout.is_neg() or is_watched()):
            found = _past_operator(dout, *rest) if type(dout) is Tensor else None
        dq, dk, dv, dbias, dsinks = found or backward_op(dout, dlse, *rest)
        if want_dbias:  # A dense bias may have q's dtype, but its gradient is summed in float32.
            dbias = dbias.to(bias.dtype)
        gradients = (None, dq, dk, dv, None, None, None, dbias, None, dsinks)
        # Later inputs get None. Torch omits trailing defaults, so there may be fewer inputs.
        pairs = zip_longest(gradients[: len(needed)], needed)
        return tuple(x if need else None for x, need in pairs)


class _Backward(torch.autograd.Function):
    """A node that raises. Without it, second derivatives would silently be zero."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        del ctx
        return below_autograd(backward_op, keyset, inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        del ctx, grads
        raise NotImplementedError(
            "second derivatives of attnspan::attention: expected first derivatives, which the kernel has, "
            "got a derivative of attnspan::attention_backward. For higher derivatives, run both passes `with "
            'attnspan.backend("math"):`.'
        )


def below_autograd(op: compat.OpOverload, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    """Call an operator below autograd, without the derivatives of outer transforms."""
    below = keyset & compat.after_autograd
    if compat.are_functorch_transforms_active():
        # A Function's forward pass switches derivatives off. The outer levels of torch.func must not inherit
        # this.
        with (
            torch.enable_grad(),
            compat.set_forward_mode_enabled(True),
            compat.BelowAutograd(),
        ):
            return op.redispatch(below, *inputs)
    with compat.BelowAutograd():
        return op.redispatch(below, *inputs)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Enable autograd inside an operator, because torch switches it off there."""
    key = compat.DispatchKey
    excluded = compat.excluded_keys()
    for x in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(x)
    included = compat.included_keys()
    with compat.ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def single_level(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`apply` of a Function for one level, for kernels that run after torch.func has removed its level.

    `Function.apply` would call torch.func again. In torch 2.15 and later, so would `apply` of its base class.
    """
    parts = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (compat.SingleLevelFunction,), parts).apply  # type: ignore[attr-defined,no-any-return]


def autograd_kernel(op: compat.OpOverload, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The operator's kernel at the autograd key.

    torch.library.register_autograd does not work here. If no input requires a gradient, its kernel drops the
    tangents of dual tensors, so forward mode would return zeros. Also, torch.func cannot differentiate it.
    """
    # Use the base class's apply, because Function.apply would pass the call to torch.func again.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if compat.dual_level() >= 0 and any(map(has_tangent, inputs)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, which the kernel has, got a dual "
                'tensor. For forward mode, call it `with attnspan.backend("math"):`.'
            )
        if not (torch.is_grad_enabled() and compat.any_requires_grad(*inputs)):
            return below_autograd(op, keyset, inputs)
        if compat.are_functorch_transforms_active():
            # torch.func has removed its level before this kernel runs, so one plain node is left to record.
            with compat.enable_single_level_autograd_function():
                return inner(keyset, *inputs)
        return record(keyset, *inputs)

    return kernel


def has_tangent(x: Any) -> bool:
    """Whether a tensor has a tangent of forward mode."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


#: Record a call for autograd after the kernel has computed its results outside the operator.
record_forward = super(torch.autograd.Function, _Forward).apply  # type: ignore[misc]

for _op, _function in ((forward_op, _Forward), (backward_op, _Backward)):
    _library.impl(_op, autograd_kernel(_op, _function), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]

for _op, _rule in (
    (forward_op, _vmap.rule(forward_op, backward=False)),
    (backward_op, _vmap.rule(backward_op, backward=True)),
):
    torch.library.register_vmap(_op, _rule, lib=_library)


def visible_pairs(q: Tensor, k: Tensor, bounds: Tensor) -> int:
    """Number of (query, key) pairs that a call computes. Bounds without data (fake, meta) count all pairs."""
    batch, heads, q_len, _ = q.shape
    if isinstance(bounds, compat.FakeTensor) or bounds.is_meta:
        return batch * heads * q_len * k.shape[2]
    lo, hi = bounds.unbind(-1)
    repeats = (batch // bounds.shape[0]) * (heads // bounds.shape[1]) if bounds.shape[0] else 0
    return int((hi - lo).clamp(min=0).sum(dtype=torch.int64)) * repeats


# Without these formulas, FLOP counters and memory-budget partitioners would treat attention as free.
@compat.flop_formula(torch.ops.attnspan.attention)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> int:
    """Floating-point operations of one call of the forward operator: 2 * visible pairs * (D + Dv).

    FlashAttention-2, arXiv:2307.08691, section 4.1.

    Args:
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: int32, shape (B|1, Hq|1, Sq, R, 2). Bounds without data (fake or meta) count every pair.
        *args: Further arguments of the operator, unused.
        **kwargs: Further arguments and the result, from torch's counter, unused.

    Returns:
        The number of operations.

    Example:
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> forward_flops(x, x, x, torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2))
        96
    """
    del args, kwargs
    return 2 * visible_pairs(q, k, bounds) * (q.shape[3] + v.shape[3])


@compat.flop_formula(torch.ops.attnspan.attention_backward)
def backward_flops(dout: Tensor, dlse: Tensor | None, *args: Any, **kwargs: Any) -> int:
    """Floating-point operations of one call of the backward operator: 2.5 times `forward_flops`.

    Args:
        dout: Gradient of the output, unused.
        dlse: Gradient of lse, or None, unused.
        *args: q, k, v, bounds and further arguments, as for `forward_flops`.
        **kwargs: Further arguments and the result, unused.

    Returns:
        The number of operations.

    Example:
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> bounds = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2)
        >>> backward_flops(x, None, x, x, x, bounds)
        240
    """
    del dout, dlse
    return forward_flops(*args, **kwargs) * 5 // 2
