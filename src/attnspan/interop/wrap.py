"""`wrap`: someone else's attention function as an operator that compilers and exporters understand."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnspan.base.plain import check_plain
from attnspan.errors import DtypeError, UsageError, expect
from attnspan.kernels.math import has_autocast
from attnspan.masks import Mask
from attnspan.torch._attention import Layout
from attnspan.torch.compile import save_also

from ._check import Report, check
from ._contract import REQUIRED, Declarations, Outputs, Parameters, read_parameters
from ._contract import DeclarationError as DeclarationError
from ._kernel import NAMESPACE, Backward, Derivative, flop_formula, register
from ._operators import Op

__all__ = ["DeclarationError", "Wrapped", "wrap"]

Strides = Literal["any", "unit", "contiguous", "bshd", "bhsd"]


class Wrapped:
    """A kernel as an opaque operator; made by `wrap`, called as the kernel is.

    Attributes:
        op: The operator ``attnspan_wrapped::name``, for checkpointing policies and graph passes.
        backward_op: ``attnspan_wrapped::name_backward``, or None without a derivative.
        kernel: The function that was wrapped.

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
        # Plain tuples, which a compiler reads without tracing through the parameters.
        self._names, self._autocast = parameters.names, autocast
        self._defaults = tuple(item.default for item in parameters.items)
        self._positional = sum([not item.keyword for item in parameters.items])
        self._varying = tuple(item.varying for item in parameters.items)
        self._tensors = tuple(i for i, item in enumerate(parameters.items) if item.type == "Tensor")
        self._cast = tuple(name in parameters.required[:3] for name in self._names)

    def __repr__(self) -> str:
        return f"<{self.op._schema.name}({self.parameters.schema})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel: its positional arguments, its keywords, its defaults.

        Raises:
            ValueError: The kernel returned something else than was declared.
            TypeError: Arguments that the operator does not have; no tensor where it takes one.
            RuntimeError: Other arguments of another type than the operator's.
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
            remedy = "Call it as the kernel; annotate a parameter without a type, or give wrap schema=..."
            expect(False, repr(self), expected, got, remedy, error=UsageError)
        for name, x in zip(self._names, values, strict=True):
            check_plain(name, x)
        for place in self._tensors:
            if not isinstance(x := values[place], Tensor):
                what, expected = f"{self.op._schema.name}: {self._names[place]}", "a torch.Tensor"
                remedy = "Convert it with torch.as_tensor"
                raise DtypeError(what, expected=expected, got=type(x).__name__, remedy=remedy)
        for place, varies in enumerate(self._varying):
            if varies and values[place] is not None and not isinstance(values[place], Tensor):
                # A product, because compilers know how to leave the number of a product open.
                values[place] = torch.ones((), dtype=torch.float64) * values[place]
        return self._autocasted(values) if self._autocast else values

    def _autocasted(self, values: list[Any]) -> list[Any]:
        device = values[self._cast.index(True)].device.type
        if not has_autocast(device) or not torch.is_autocast_enabled(device):
            return values
        dtype = torch.get_autocast_dtype(device) if self._autocast is True else self._autocast
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
        """Check the operator on one call: its declaration, `torch.library.opcheck`, and float64.

        Args:
            *args: Arguments of the kernel.
            mask: What each query may see, for the oracle; None for what the kernel's parameters ``causal`` or
                ``is_causal``, ``cu_seqlens_q`` and ``cu_seqlens_k`` say, else everything.
            oracle: A function of all arguments by name (floating tensors in float64) to compare with, for
                kernels that compute something else than attention under a mask and a scale.
            within: Largest error that is accepted, as a multiple of SDPA's on the same inputs.
            **kwargs: Keyword arguments of the kernel.

        Returns:
            The errors. Print it.

        Raises:
            ValueError: The outputs are not as declared, differ from call to call, share memory from call to
                call, or err more than ``within`` times as much as SDPA; or an input changes.
            torch.library.OpCheckError: The operator breaks another of torch's rules.

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
    """Turn an attention function that compilers cannot trace into one operator that they need not trace.

    Under ``torch.compile`` the call is then one node: no graph break, no recompilation for what varies from
    call to call. The kernel must be a function of its arguments, write to none of them and return new
    tensors. docs/wrap.md has recipes.

    Args:
        kernel: flash-attn's function, one that calls a C library, or any Python function of tensors.
        name: Of the operator, ``attnspan_wrapped::name``; once per process.
        schema: The kernel's arguments in torch's schema language, where its signature does not tell them.
            Parameters without annotation take the type of their default; those without a default are tensors.
        outputs: What it returns, verified at every call: "out" (contiguous, q's shape with v's last dim, q's
            dtype), "out like q" (also q's strides), "lse" (contiguous float32 (B, H, S), or (H, T) in layout
            "thd"), or a function of arguments by their names that returns an empty tensor; several as a
            sequence of names or a mapping of names to either.
        backward: A function that takes by name what it needs, ``dout`` and ``dlse`` (after the outputs'
            names; zeros where the loss does not use the output), inputs and outputs, and returns the
            gradients; or "recompute", which runs the kernel again under autograd; or None: `backward()`
            raises.
        differentiable: Names of the inputs that have gradients, in the order in which ``backward`` returns
            them; by default the tensors that every call gives.
        layout: Order of the dims of q, k, v, the first three tensors: "bhsd", "bshd" or "thd".
        strides: What the kernel accepts: "any"; "unit", a last stride of 1; "contiguous"; "bshd" or "bhsd",
            stored as contiguous in that order. An input that breaks it is copied, no other.
        varying: Names of floats whose value changes from call to call, which become tensors: any other float
            is a constant to a compiler, each value another compilation. Integers may vary in any case.
        flops: A function of arguments by their names that counts forward operations; by default
            2 * pairs * (D + Dv) over all pairs, or half of them where ``causal`` is true.
        autocast: Cast q, k, v to autocast's dtype (True) or to a given one in an autocast region. Inside the
            kernel autocast is off in any case.
        check: Verify the outputs of each call (some microseconds).

    Returns:
        A callable with the kernel's parameters.

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
        expect(value in known, what, f"one of {', '.join(known)}", repr(value), "Take one of them")
    parameters = read_parameters(kernel, schema, varying)
    declared = Outputs(outputs, parameters, strides, layout, f"{NAMESPACE}::{name}")
    remedy = 'Give backward=fn or backward="recompute"'
    holds = backward is not None or differentiable is None
    expect(holds, "differentiable", "None without a backward", repr(differentiable), remedy)
    derivative = None if backward is None else Derivative(backward, kernel, declared, differentiable)
    formula = flop_formula(flops, parameters, layout)
    ops = register(name, kernel, declared, derivative, check, formula)
    save_also(ops[0])
    sources = () if derivative is None else derivative.differentiable
    return Wrapped(kernel, ops, parameters, sources, layout, autocast)
