"""The operators ``attnspan::attention`` and ``attnspan::attention_backward``, as tracers of torch see them.

Schemas, kernels for CPU and CUDA, fake kernels, autograd. Tensors are in (B, H, S, D) order with a unit last
stride; results are stored as contiguous (B, S, H, D) whatever the strides of the inputs, so that a fake
kernel does no stride arithmetic and no guard ever depends on a stride. docs/design.md has the contract.
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

# The plain Library instead of the custom_op decorator: the decorator adds Python wrappers to every call.
_library = torch.library.Library("attnspan", "DEF")  # type: ignore[no-untyped-call]
# Strides in the order of eager mode are what a unit last stride needs; exact ones would add copies.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
#: Options in the schemas of both operators. `bias_kind` says how `bias` is read; the indices are those of
#: queries and keys in the whole sequence, for biases of position and dropout. docs/options.md has the meaning
#: of each.
OPTION_SCHEMA = (
    "float softcap=0.0, Tensor? bias=None, int bias_kind=0, Tensor? sinks=None, float dropout_p=0.0,"
    " Tensor? dropout_seed=None, Tensor? q_index=None, Tensor? k_index=None"
)
# `k_len` is the number of keys that a mask was lowered for, where only the running program knows it.
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

# Option arguments of both operators, those of `Options` in their order. Torch leaves trailing defaults out.
_COUNT = len(Options._fields)


def stored_bshd(like: Tensor, heads: int, length: int, dim: int) -> Tensor:
    """An uninitialised (B, H, S, D) tensor that is stored as contiguous (B, S, H, D)."""
    return like.new_empty((like.shape[0], length, heads, dim)).transpose(1, 2)


def new_outputs(q: Tensor, v: Tensor, lse_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse. float32 would lose |lse| * 2^-24 of the weights that backward recomputes."""
    batch, heads, q_len, _ = q.shape
    return stored_bshd(q, heads, q_len, v.shape[3]), q.new_empty((batch, heads, q_len), dtype=lse_dtype)


def readable(x: Tensor) -> Tensor:
    """The tensor itself where its last stride is 1, else the one explicit copy that the kernel needs."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def read_options(options: Options) -> Options | None:
    """The options with arrays as the kernel can read them; None where none is given."""
    softcap, bias, kind, sinks, dropout_p, *rest = options
    if softcap == 0.0 and bias is None and sinks is None and dropout_p == 0.0:
        return None
    if bias is not None:
        bias = readable(bias) if kind == DENSE else bias.contiguous()
    sinks, *rest = [None if x is None else x.contiguous() for x in (sinks, *rest)]
    return Options(softcap, bias, kind, sinks, dropout_p, *rest)


def _kernel_of(x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The kernels of a tensor's device, and what they are told besides the call."""
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
    if lse.numel() == 0:  # No query, so nothing has a gradient; the kernel has nothing to walk over.
        return dq, *(x.zero_() for x in gradients[1:])
    # Kept in names until the kernel is done: it is given addresses. Hooks on saved tensors may have changed
    # the strides of out and lse.
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
    """Uninitialised dq, dk, dv, dbias and dsinks; of what has no gradient, without elements."""
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
    """Both operators run from Python on CPU tensors meanwhile: for what Triton interprets, and to compare."""
    library = torch.library.Library("attnspan", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _implement(library, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


# On CPU the compiled module is the kernel, without a Python call; those above run what Triton interprets, and
# say that the module is missing.
_implement(_library, "CUDA")
if cpu.core is None or not cpu.core.register_torch_operators():
    _implement(_library, "CPU")
triton.around_interpreted.append(python_kernels)
torch.library.register_fake("attnspan::attention", _forward_fake, lib=_library)
torch.library.register_fake("attnspan::attention_backward", _backward_fake, lib=_library)

forward_op = torch.ops.attnspan.attention.default
backward_op = torch.ops.attnspan.attention_backward.default
# The names of version 0.2, which checkpointing policies outside this package compare operators with.
for _name, _op in (("forward", forward_op), ("backward", backward_op)):
    setattr(torch.ops.attnspan, _name, _op.overloadpacket)


def _past_operator(dout: Tensor, *rest: Any) -> tuple[Any, ...] | None:
    """The operator's gradients without it, three quarters of the time of a backward of 16 rows.

    None where the compiled module cannot read a tensor as it is.
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
    """The derivative of the forward operator."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        # What autograd records: a call of the operator, or the results of one that the kernel has done.
        ctx.short = type(source) is tuple
        results = source if ctx.short else below_autograd(forward_op, source, inputs)
        # An unused output then has gradient None, and the kernel skips the lse term.
        ctx.set_materialize_grads(False)
        q, k, v, bounds, scale, *given = inputs
        softcap, bias, kind, sinks, dropout_p, *rest = Options(*given[:_COUNT])
        ctx.numbers = scale, softcap, kind, dropout_p
        kept = [q, k, v, bounds, bias, sinks, *rest]
        # What was made in inference mode cannot be saved, but its copy can.
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
        if want_dbias:  # A dense bias may have q's dtype; its gradient is summed in float32.
            dbias = dbias.to(bias.dtype)
        gradients = (None, dq, dk, dv, None, None, None, dbias, None, dsinks)
        # None for the inputs behind these; torch leaves trailing defaults out, so there may be fewer.
        pairs = zip_longest(gradients[: len(needed)], needed)
        return tuple(x if need else None for x, need in pairs)


class _Backward(torch.autograd.Function):
    """A node that raises: without one, second derivatives would silently be zero."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        del ctx
        return below_autograd(backward_op, keyset, inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        del ctx, grads
        raise NotImplementedError(
            "second derivatives of attnspan::attention: expected first ones, which the kernel has; got a "
            "derivative of attnspan::attention_backward. Run both passes `with "
            'attnspan.backend("math"):` for higher ones.'
        )


def below_autograd(op: compat.OpOverload, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    """Call an operator below autograd, without the derivatives of outer transformations."""
    below = keyset & compat.after_autograd
    if compat.are_functorch_transforms_active():
        # A Function's forward runs with derivatives off, which the outer levels of torch.func must not
        # inherit.
        with (
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
            compat.BelowAutograd(),
        ):
            return op.redispatch(below, *inputs)
    with compat.BelowAutograd():
        return op.redispatch(below, *inputs)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd inside an operator, where torch has switched it off."""
    key = compat.DispatchKey
    excluded = compat.excluded_keys()
    for x in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(x)
    included = compat.included_keys()
    with compat.ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def single_level(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a Function for one level, for kernels that torch.func calls when its own is peeled off.

    That of Function itself, from torch 2.15 on also that of its base class, would ask torch.func once more.
    """
    parts = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), parts).apply  # type: ignore[attr-defined,no-any-return]


def autograd_kernel(op: compat.OpOverload, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The operator's kernel at the autograd key.

    Not torch.library.register_autograd: where no input requires a gradient, the kernel that makes drops the
    tangents of dual tensors, so that forward mode gives zeros; and torch.func cannot differentiate it.
    """
    # The base class's apply: that of Function would hand the call to torch.func once more.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(has_tangent, inputs)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, which the kernel has; got a dual "
                'tensor. Call it `with attnspan.backend("math"):` for forward mode.'
            )
        if not (torch.is_grad_enabled() and compat.any_requires_grad(*inputs)):
            return below_autograd(op, keyset, inputs)
        if compat.are_functorch_transforms_active():
            # torch.func has peeled its level off before this kernel runs; one plain node is left to record.
            with compat.enable_single_level_autograd_function():
                return inner(keyset, *inputs)
        return record(keyset, *inputs)

    return kernel


def has_tangent(x: Any) -> bool:
    """Tell whether forward mode follows a tensor."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


#: Records a call for autograd whose results the kernel has computed outside the operator.
record_forward = super(torch.autograd.Function, _Forward).apply  # type: ignore[misc]

for _op, _function in ((forward_op, _Forward), (backward_op, _Backward)):
    _library.impl(_op, autograd_kernel(_op, _function), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]

for _op, _rule in (
    (forward_op, _vmap.rule(forward_op, backward=False)),
    (backward_op, _vmap.rule(backward_op, backward=True)),
):
    torch.library.register_vmap(_op, _rule, lib=_library)


def visible_pairs(q: Tensor, k: Tensor, bounds: Tensor) -> int:
    """Number of (query, key) pairs that a call computes; all pairs where bounds have no data (fake, meta)."""
    batch, heads, q_len, _ = q.shape
    if isinstance(bounds, compat.FakeTensor) or bounds.is_meta:
        return batch * heads * q_len * k.shape[2]
    lo, hi = bounds.unbind(-1)
    repeats = (batch // bounds.shape[0]) * (heads // bounds.shape[1]) if bounds.shape[0] else 0
    return int((hi - lo).clamp(min=0).sum(dtype=torch.int64)) * repeats


# Without these formulas, counters and memory-budget partitioners think that attention is free.
@compat.flop_formula(torch.ops.attnspan.attention)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> int:
    """Floating-point operations of one call of the forward operator: 2 * visible pairs * (D + Dv).

    FlashAttention-2, arXiv:2307.08691, section 4.1.

    Args:
        q, k, v: Shapes (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32; without data (fake or meta) every pair counts.
        *args, **kwargs: Further arguments and the result, as torch's counter passes them, unused.

    Example:
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> forward_flops(x, x, x, torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2))
        96
    """
    del args, kwargs
    return 2 * visible_pairs(q, k, bounds) * (q.shape[3] + v.shape[3])


@compat.flop_formula(torch.ops.attnspan.attention_backward)
def backward_flops(dout: Tensor, dlse: Tensor | None, *args: Any, **kwargs: Any) -> int:
    """Floating-point operations of one call of the backward operator: 2.5 times those of `forward_flops`."""
    del dout, dlse
    return forward_flops(*args, **kwargs) * 5 // 2
