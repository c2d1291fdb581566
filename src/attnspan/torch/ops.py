"""The operators ``attnspan::attention`` and ``attnspan::attention_backward``, which torch's tracers see.

This module has their schemas, kernels, fake kernels and autograd. Each operator has two overloads with the
same results. The default overload is the CPU kernel. The overload ``named`` has one more argument, the name
of a backend. No operator chooses a backend. Tensors have the order (B, H, S, D) with a unit last stride.
Results are stored as contiguous (B, S, H, D), whatever the strides of the inputs. A fake kernel then computes
no strides, and no guard depends on a stride. docs/design.md has the contract.
"""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attnspan.backends import Softmax, find
from attnspan.call import Part, schema
from attnspan.call import check_k_len as check_k_len
from attnspan.call.options import DENSE, Options, changes
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.kernels import cpu

from . import _vmap, compat
from ._autograd import BY_MATH, below_autograd, define, differentiate, refuse_derivative
from ._signature import KEEPS_STRIDE_ORDER, arguments, library
from ._watched import is_watched


def _without_backend(rows: tuple[schema.Row, ...]) -> tuple[schema.Row, ...]:
    return tuple(row for row in rows if row is not schema.BACKEND)


#: Backend of the default overloads.
CPU = schema.BACKEND.default
_options_of = itemgetter(*schema.names(schema.OPTIONS))


def stored_bshd(like: Tensor, heads: int, length: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised (B, H, S, D) tensor that is stored as contiguous (B, S, H, D)."""
    return like.new_empty((like.shape[0], length, heads, dim), dtype=dtype).transpose(1, 2)


def new_outputs(q: Tensor, v: Tensor, lse_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse. A float32 lse would give recomputed weights an error of |lse| * 2^-24."""
    batch, heads, q_len, _ = q.shape
    return stored_bshd(q, heads, q_len, v.shape[3]), q.new_empty((batch, heads, q_len), dtype=lse_dtype)


def readable(x: Tensor) -> Tensor:
    """The tensor itself if its last stride is 1, else the copy that the kernel needs."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def read_options(options: Options) -> Options | None:
    """Options with arrays that the kernel can read, or None if the call has no options."""
    if not changes(options):
        return None
    read = options._asdict()
    for name, x in read.items():
        if isinstance(x, Tensor):
            # A dense bias may be expanded, and large.
            dense = name == "bias" and options.bias_kind == DENSE
            read[name] = readable(x) if dense else x.contiguous()
    return Options(**read)


def _part(given: dict[str, Any]) -> Part:
    """The arguments of an operator as a kernel reads them."""
    q, k, v = (readable(given[name]) for name in "qkv")
    options = read_options(Options(*_options_of(given)))
    return Part(q, k, v, given["bounds"].contiguous(), given["scale"], options)


def _forward_kernel(*args: Any) -> tuple[Tensor, Tensor]:
    given = schema.by_name(schema.FORWARD, args)
    q, backend = given["q"], given["backend"]
    if given["k_len"] is not None:
        check_k_len(int(given["k_len"]), given["k"].shape[2])
    out = new_outputs(q, given["v"])[0]
    part = _part(given)
    lse = find("torch", backend).forward(part, out)
    _check_result(backend, "lse", lse, q.shape[:3])
    return out, lse.to(torch.float64).contiguous()


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    given = schema.by_name(schema.BACKWARD, args)
    gradients = _backward_fake(*args)
    of_inputs = len(schema.with_gradient(schema.INPUTS))
    if given["lse"].numel() == 0:  # Without queries all gradients are 0, and kernels do not accept the call.
        return gradients[0], *(x.zero_() for x in gradients[1:])
    # The kernel receives addresses, so these names keep the tensors alive. Hooks on saved tensors may have
    # changed the strides of out and lse.
    part, dlse = _part(given), given["dlse"]
    whole = Softmax(
        *(readable(given["out"]), given["lse"].contiguous(), readable(given["dout"])),
        None if dlse is None else dlse.contiguous(),
        want_dbias=given["want_dbias"],
    )
    backend = given["backend"]
    found = find("torch", backend).backward(part, whole, gradients[:of_inputs])  # type: ignore[misc]
    names, count = schema.with_gradient(schema.OPTIONS), len(gradients) - of_inputs
    known, got = isinstance(found, tuple) and len(found) == count, type(found).__name__
    what = f"backend={backend!r}: backward"
    expect(known, what, f"a tuple of the gradients of {' and '.join(names)}", got, "Return it")
    for name, x, own in zip(names, found, gradients[of_inputs:], strict=True):
        if own.numel():
            _check_result(backend, f"gradient of {name}", x, own.shape)
            own.copy_(x)
    return gradients


def _check_result(backend: str, name: str, x: Any, shape: Any) -> None:
    """Raise unless a backend returned a tensor of this shape. A copy would broadcast another one."""
    known, got = isinstance(x, Tensor), type(x).__name__
    what, remedy = f"backend={backend!r}: {name}", "Change the function of the backend"
    expect(known, what, "a tensor", got, remedy, error=DtypeError)
    expect(x.shape == shape, what, str(tuple(shape)), tuple(x.shape), remedy, error=ShapeError)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    del k, given
    return new_outputs(q, v)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    """Uninitialised gradients. A gradient that is not needed has no elements."""
    given = schema.by_name(schema.BACKWARD, args)
    inputs = (given[name] for name in schema.with_gradient(schema.INPUTS))
    options = [
        given[name] if given.get(f"want_d{name}", True) else None
        for name in schema.with_gradient(schema.OPTIONS)
    ]
    shapes: list[Any] = [(0,) if x is None else tuple(x.shape) for x in options]
    return (
        *(stored_bshd(x, x.shape[1], x.shape[2], x.shape[3]) for x in inputs),
        *(given["q"].new_empty(shape, dtype=torch.float32) for shape in shapes),
    )


def _defined(
    name: str, rows: tuple[schema.Row, ...], results: tuple[str, ...], fake: Any, kernel: Any
) -> tuple[compat.OpOverload, compat.OpOverload]:
    """An operator that runs the CPU kernel, and its overload that names a backend."""
    found = f") -> ({', '.join(f'Tensor {result}' for result in results)})"
    own = define(library, f"{name}({arguments(_without_backend(rows))}{found}", fake, KEEPS_STRIDE_ORDER)
    named = library, f"{name}.named({arguments(rows)}{found}", fake, KEEPS_STRIDE_ORDER
    return own, define(*named, CompositeExplicitAutograd=kernel)


_GRADIENTS = (*schema.with_gradient(schema.INPUTS), *schema.with_gradient(schema.OPTIONS))
forward_op, named_op = _defined(
    "attention", schema.FORWARD, schema.names(schema.RESULTS), _forward_fake, _forward_kernel
)
backward_op, named_backward_op = _defined(
    *("attention_backward", schema.BACKWARD, tuple(f"d{name}" for name in _GRADIENTS)),
    *(_backward_fake, _backward_kernel),
)
# On CPU the compiled module is the default overload, without a Python call. If it is missing, the kernel in
# Python says so.
if cpu.core is None or not cpu.core.register_torch_operators():
    library.impl(forward_op, _forward_kernel, "CPU")  # type: ignore[no-untyped-call]
    library.impl(backward_op, _backward_kernel, "CPU")  # type: ignore[no-untyped-call]

# Names of version 0.2, because checkpointing policies outside this package may compare with them.
for _name, _op in (("forward", forward_op), ("backward", backward_op)):
    setattr(torch.ops.attnspan, _name, _op.overloadpacket)


_inputs_of = itemgetter("q", "k", "v", "out", "lse", "bounds", "scale")


def _past_operator(dout: Tensor, given: dict[str, Any], plain: bool) -> tuple[Any, ...] | None:
    """The operator's gradients without a call of the operator. A ``plain`` call has no options.

    The backward pass of 16 queries then takes three quarters of the time. Returns None if the compiled module
    cannot read a tensor.
    """
    options = None if plain else read_options(Options(*_options_of(given)))
    bias, sinks = given["bias"] if given["want_dbias"] else None, given["sinks"]
    dbias = None if bias is None else torch.empty(bias.shape, dtype=torch.float32)
    dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=torch.float32)
    inputs = _inputs_of(given)
    make = torch.get_num_threads(), torch.empty_strided
    found = cpu.core.gradients(dout, *inputs, *make, cpu.arguments(options), dbias, dsinks)
    return None if found is None else (*found, dbias, dsinks)


_SAVED = tuple(row.name for row in schema.arrays((*schema.INPUTS, *schema.OPTIONS)))
_NUMBERS = tuple(row.name for row in schema.FORWARD if isinstance(row, schema.Number))
_saved_of, _numbers_of = itemgetter(*_SAVED), itemgetter(*_NUMBERS)
_RESULTS_AND_SAVED = (*schema.names(schema.RESULTS), *_SAVED)
_FORWARD_NAMES = schema.names(schema.FORWARD)
_DEFAULTS = {row.name: row.default for row in schema.FORWARD}
# The arguments of the backward operators after `dout` and `dlse`.
_rest_of = {
    backward_op: itemgetter(*schema.names(_without_backend(schema.BACKWARD)[2:])),
    named_backward_op: itemgetter(*schema.names(schema.BACKWARD[2:])),
}


class _Forward(torch.autograd.Function):
    """Derivative of the forward operators."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        # Autograd records a call of an operator, or results that the kernel has already computed.
        ctx.short = type(source[0]) is Tensor
        results = source if ctx.short else below_autograd(source[0], source[1], inputs)
        # The gradient of an unused output is then None, and the kernel skips the lse term.
        ctx.set_materialize_grads(False)
        given = _DEFAULTS | dict(zip(_FORWARD_NAMES, inputs, strict=False))
        ctx.plain = len(inputs) <= len(schema.INPUTS)
        ctx.op = backward_op if ctx.short or source[0] is forward_op else named_backward_op
        ctx.numbers = _numbers_of(given)
        # Autograd cannot save a tensor from inference mode, but it can save a copy.
        kept = [x.clone() if x is not None and x.is_inference() else x for x in _saved_of(given)]
        ctx.save_for_backward(*results, *kept)
        return results  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # The first input is the source. Torch omits trailing defaults.
        needed = dict(zip(_FORWARD_NAMES, ctx.needs_input_grad[1:], strict=False))
        if dout is None and dlse is None:
            return (None,) * (len(needed) + 1)
        given = dict(zip(_RESULTS_AND_SAVED, ctx.saved_tensors, strict=True))
        given |= zip(_NUMBERS, ctx.numbers, strict=True)
        given["want_dbias"] = needed.get("bias", False)
        dout = torch.zeros_like(given["out"]) if dout is None else dout
        found = None
        if ctx.short and dlse is None and not (torch.is_grad_enabled() or dout.is_neg() or is_watched()):
            found = _past_operator(dout, given, ctx.plain) if type(dout) is Tensor else None
        if found is None:
            found = ctx.op(dout, None if dlse is None else dlse.float(), *_rest_of[ctx.op](given))
        grads = dict(zip(_GRADIENTS, found, strict=True))
        if needed.get("bias"):  # A dense bias may have q's dtype, but its gradient is summed in float32.
            grads["bias"] = grads["bias"].to(given["bias"].dtype)
        return None, *[grads.get(name) if need else None for name, need in needed.items()]


#: Record a call for autograd after the kernel has computed its results outside the operator.
record_forward = super(torch.autograd.Function, _Forward).apply  # type: ignore[misc]

for _op in (forward_op, named_op):
    differentiate(library, _op, _Forward)
for _op in (backward_op, named_backward_op):
    refuse_derivative(library, _op, BY_MATH)
for _op in (forward_op, named_op, backward_op, named_backward_op):
    _rule = _vmap.rule(_op, backward=_op in (backward_op, named_backward_op))
    torch.library.register_vmap(_op, _rule, lib=library)


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
