"""`wrap`: a third-party attention function as an operator that compilers and exporters understand."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnspan.base.plain import check_plain
from attnspan.errors import DtypeError, UsageError, expect
from attnspan.kernels._autocast import autocast_dtype
from attnspan.masks import Mask
from attnspan.torch import compat
from attnspan.torch._attention import Layout
from attnspan.torch.compat import OpOverload as Op
from attnspan.torch.compile import save_also

from ._check import Report, check
from ._contract import REQUIRED, Declarations, Outputs, Parameters, read_parameters
from ._contract import DeclarationError as DeclarationError
from ._kernel import NAMESPACE, Backward, Derivative, flop_formula, register

Strides = Literal["any", "unit", "contiguous", "bshd", "bhsd"]


class Wrapped:
    """A kernel as an opaque operator. `wrap` makes it, and you call it as you call the kernel.

    Attributes:
        op: The operator ``attnspan_wrapped::name``, for checkpointing policies and graph passes.
        backward_op: ``attnspan_wrapped::name_backward``, or None without a derivative.
        kernel: The wrapped function.

    Example:
        >>> def attend(q, k, v, causal: bool = False):
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        >>> wrap(attend, name="wrapped_example", backward="recompute")
        <attnspan_wrapped::wrapped_example(Tensor q, Tensor k, Tensor v, bool causal)>
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        ops: tuple[Op, Op | None],
        parameters: Parameters,
        differentiable: tuple[str, ...],
        layout: Layout,
        autocast: bool | torch.dtype,
    ) -> None:
        self.kernel, (self.op, self.backward_op) = kernel, ops
        self.parameters, self.differentiable, self.layout = parameters, differentiable, layout
        # A compiler reads plain tuples without tracing through the parameters.
        self._names, self._autocast = parameters.names, autocast
        self._defaults = tuple(item.default for item in parameters.items)
        self._positional = sum([not item.keyword for item in parameters.items])
        self._varying = tuple(item.varying for item in parameters.items)
        self._tensors = tuple(i for i, item in enumerate(parameters.items) if item.type == "Tensor")
        self._cast = tuple(name in parameters.required[:3] for name in self._names)

    def __repr__(self) -> str:
        return f"<{compat.name_of(self.op)}({self.parameters.schema})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel with its positional arguments, keywords and defaults.

        Raises:
            ValueError: The kernel's result differs from its declaration.
            TypeError: The operator does not have an argument, or an argument must be a tensor and is not.
            RuntimeError: Another argument has a different type than the operator's.
        """
        return self.op(*self._bind(args, kwargs))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        left = self._names[len(args) :]
        values = [*args, *map(kwargs.get, left, self._defaults[len(args) :])]
        unknown = [name for name in kwargs if name not in left]
        missing = [name for name, x in zip(self._names, values, strict=False) if x is REQUIRED]
        if unknown or missing or len(args) > self._positional:
            got = f"{len(args)} by position"
            got += f", unknown or repeated {', '.join(unknown)}" if unknown else ""
            got += f", no {', '.join(missing)}" if missing else ""
            expected = f"arguments among {', '.join(self._names)}, at most {self._positional} by position"
            remedy = "Call it as the kernel. Annotate parameters without a type, or pass schema=... to wrap"
            expect(False, repr(self), expected, got, remedy, error=UsageError)
        for name, x in zip(self._names, values, strict=True):
            check_plain(name, x)
        for place in self._tensors:
            if not isinstance(x := values[place], Tensor):
                what, expected = f"{compat.name_of(self.op)}: {self._names[place]}", "a torch.Tensor"
                remedy = "Convert it with torch.as_tensor"
                raise DtypeError(what, expected=expected, got=type(x).__name__, remedy=remedy)
        for place, varies in enumerate(self._varying):
            if varies and values[place] is not None and not isinstance(values[place], Tensor):
                # Compilers can keep the value of a product symbolic.
                values[place] = torch.ones((), dtype=torch.float64) * values[place]
        return self._autocasted(values) if self._autocast else values

    def _autocasted(self, values: list[Any]) -> list[Any]:
        device = values[self._cast.index(True)].device.type
        own = autocast_dtype(device)
        if own is None:
            return values
        dtype = own if self._autocast is True else self._autocast
        return [
            x.to(dtype) if cast and x.is_floating_point() and x.dtype != torch.float64 else x
            for x, cast in zip(values, self._cast, strict=True)
        ]

    def check(
        self,
        *args: Any,
        mask: Mask | None = None,
        oracle: Callable[..., Any] | None = None,
        within: float = 4.0,
        **kwargs: Any,
    ) -> Report:
        """Check the operator on one call: its declaration, `torch.library.opcheck`, and its errors.

        Errors are measured against float64.

        Args:
            *args: Arguments of the kernel.
            mask: The mask of the call, for the oracle. By default it follows from the kernel's parameters
                ``causal`` or ``is_causal``, ``cu_seqlens_q`` and ``cu_seqlens_k``. Without them, all pairs
                are visible.
            oracle: A function that computes the exact result, for kernels that compute more than attention
                under a mask and a scale. It receives all arguments as keywords, with floating tensors in
                float64.
            within: Largest accepted error, as a multiple of SDPA's error on the same inputs.
            **kwargs: Keyword arguments of the kernel.

        Returns:
            The errors as a `Report`, which you can print.

        Raises:
            ValueError: The outputs differ from their declaration, differ or share memory between calls, or
                have errors of more than ``within`` times SDPA's. Or the kernel changes an input.
            torch.library.OpCheckError: The operator breaks another rule of torch.

        Example:
            >>> def attend(q, k, v):
            ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v)
            >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
            >>> report = wrap(attend, name="check_example", backward="recompute").check(q, k, v)
            >>> sorted(report.errors)
            ['dk', 'dq', 'dv', 'out']
        """
        named = dict(zip(self._names, self._bind(args, kwargs), strict=True))
        return check(self, named, mask, oracle, within)


def wrap(
    kernel: Callable[..., Any],
    *,
    name: str,
    schema: str | None = None,
    outputs: Declarations = "out",
    backward: Backward | None = None,
    differentiable: Sequence[str] | None = None,
    layout: Layout = "bhsd",
    strides: Strides = "unit",
    varying: Sequence[str] = (),
    flops: Callable[..., int] | None = None,
    autocast: bool | torch.dtype = False,
    check: bool = True,
) -> Wrapped:
    """Turn an attention function that compilers cannot trace into one opaque operator.

    Under ``torch.compile``, the call is one node without graph breaks. Integers, and floats in ``varying``,
    may change between calls without a recompilation. The kernel must be a function of its arguments, must not
    write to them, and must return new tensors. docs/wrap.md has recipes.

    Args:
        kernel: Any Python function of tensors, such as flash-attn's function or one that calls a C library.
        name: Name of the operator ``attnspan_wrapped::name``. You can use a name once per process.
        schema: The kernel's arguments in torch's schema language. By default they are read from its
            signature. A parameter without annotation has the type of its default. Without both, it is a
            tensor.
        outputs: Declaration of the outputs, verified at every call. "out" is contiguous with q's dtype and
            q's shape, except v's last dim. "out like q" also has q's strides. "lse" is contiguous float32 (B,
            H, S), or (H, T) in layout "thd". Or pass a function that returns an empty tensor. Its parameters
            name the kernel's arguments that it needs. For several outputs, pass a sequence or a mapping of
            names to declarations.
        backward: A function that returns the gradients. Its parameters name the inputs, outputs and gradients
            of outputs that it needs, such as ``dout`` and ``dlse``. A gradient is zeros if the loss does not
            use its output. With "recompute", the kernel runs again under autograd. With None, `backward()`
            raises.
        differentiable: Names of the inputs that have gradients, in the order in which ``backward`` returns
            them. Default: all required tensors.
        layout: Order of the dims of q, k, v, the first three tensors: "bhsd", "bshd" or "thd".
        strides: Strides that the kernel accepts: "any", "unit" (last stride 1), "contiguous", or "bshd" or
            "bhsd" (contiguous in that order). Only inputs with other strides are copied.
        varying: Names of floats whose value changes between calls. They become tensors. A compiler treats any
            other float as a constant and recompiles for each value. Integers may always vary.
        flops: A function that counts forward operations. Its parameters name the arguments that it needs.
            Default: 2 * pairs * (D + Dv) over all pairs, or half of them if ``causal`` is true.
        autocast: Cast q, k, v in an autocast region: True for autocast's dtype, or a dtype. Autocast is
            always off inside the kernel.
        check: Verify the outputs of each call, which takes some microseconds.

    Returns:
        A `Wrapped`, which you call with the kernel's arguments.

    Raises:
        ValueError: The name is taken, or a description contradicts itself.

    Example:
        >>> def attend(q, k, v, causal=False, softmax_scale=None):  # stands for flash_attn_func
        ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ...     out = torch.nn.functional.scaled_dot_product_attention(
        ...         q, k, v, is_causal=causal, scale=softmax_scale
        ...     )
        ...     return out.transpose(1, 2).contiguous()
        >>> flash = wrap(attend, name="wrap_example", layout="bshd", backward="recompute")
        >>> q = torch.randn(1, 6, 2, 8, requires_grad=True)
        >>> torch.compile(flash, fullgraph=True, backend="aot_eager")(q, q, q, causal=True).shape
        torch.Size([1, 6, 2, 8])
    """
    for what, value, choices in (("layout", layout, Layout), ("strides", strides, Strides)):
        known = get_args(choices)
        expect(value in known, what, f"one of {', '.join(known)}", repr(value), "Pass one of them")
    parameters = read_parameters(kernel, schema, varying)
    declared = Outputs(outputs, parameters, strides, layout, f"{NAMESPACE}::{name}")
    remedy = 'Pass backward=fn or backward="recompute"'
    holds = backward is not None or differentiable is None
    expect(holds, "differentiable", "None without a backward", repr(differentiable), remedy)
    derivative = None if backward is None else Derivative(backward, kernel, declared, differentiable)
    formula = flop_formula(flops, parameters, layout)
    ops = register(name, kernel, declared, derivative, check, formula)
    save_also(ops[0])
    sources = () if derivative is None else derivative.differentiable
    return Wrapped(kernel, ops, parameters, sources, layout, autocast)
