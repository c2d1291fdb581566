"""The operators of a wrapped kernel: forward, backward, their derivatives and their FLOP counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attnspan.errors import expect
from attnspan.torch import compat
from attnspan.torch._autograd import below_autograd, define, differentiate, refuse_derivative, with_autograd
from attnspan.torch.compat import OpOverload as Op

from ._contract import Outputs, Parameters, address, as_tuple, expect_declared, names_in, names_of

NAMESPACE = "attnspan_wrapped"
Backward = Callable[..., Any] | Literal["recompute"]

# The compiler gives the kernel exactly the strides of eager mode.
_STRIDES = torch.Tag.needs_exact_strides
_FIRST_ORDER = 'Call attnspan.torch.attention inside `with attnspan.backend("math"):` instead'
# Libraries, keyed by operator name. An operator exists as long as its library.
_libraries: dict[str, torch.library.Library] = {}


class Derivative:
    """Computation of the inputs' gradients.

    Attributes:
        differentiable: Names of the inputs that have gradients.
        incoming: Names of the outputs whose gradients the backward takes.
        saved: Names of the outputs that it needs.
        recomputes: Whether it runs the kernel again.
    """

    def __init__(
        self, backward: Backward, kernel: Callable[..., Any], outputs: Outputs, names: Sequence[str] | None
    ) -> None:
        self._backward, self._kernel, self._outputs, self._owner = backward, kernel, outputs, outputs.owner
        parameters = outputs.parameters
        self.differentiable = parameters.required if names is None else names_in(names)
        unknown = sorted(set(self.differentiable) - set(parameters.tensors))
        expected, got = f"names of tensor parameters ({', '.join(parameters.tensors)})", ", ".join(unknown)
        holds, remedy = self.differentiable and not unknown, "Pass names of inputs with gradients"
        expect(holds, "differentiable", expected, got or "none", remedy)
        holds, remedy = backward == "recompute" or callable(backward), "Pass a function of dout, q, ..."
        expect(holds, "backward", 'a function, "recompute" or None', repr(backward), remedy)
        self.recomputes = not callable(backward)
        self._needs = (*(f"d{name}" for name in outputs.names), *parameters.names)
        if callable(backward):
            self._needs = names_of(backward, (*self._needs, *outputs.names), "backward")
        self.incoming = tuple(name for name in outputs.names if f"d{name}" in self._needs)
        self.saved = tuple(name for name in outputs.names if name in self._needs)

    def gradients(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> list[Tensor]:
        """Return contiguous gradients of the wanted inputs, in memory that nothing else uses."""
        if callable(self._backward):
            found = as_tuple(self._backward(**{name: named[name] for name in self._needs}))
        else:
            found = self._rerun(named, wanted)
        names = self.differentiable
        expected = f"{len(names)} gradients (of {', '.join(names)})"
        remedy = "Return one for each, or list the inputs with gradients in differentiable=(...)"
        expect_declared(len(found) == len(names), f"{self._owner}, backward", expected, len(found), remedy)
        taken = {address(x) for x in named.values() if isinstance(x, Tensor)}
        pairs = [(name, x) for name, x, want in zip(names, found, wanted, strict=True) if want]
        return [self._own(name, x, named[name], taken) for name, x in pairs]

    def _own(self, name: str, x: Any, like: Tensor, taken: set[int]) -> Tensor:
        if x is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        expected, got = _described(like), _described(x)
        what, remedy = f"{self._owner}, gradient of {name!r}", "Return gradients like their inputs"
        expect_declared(got == expected, what, f"{expected}, as the input", got, remedy)
        # The fake kernel promises contiguous memory that nothing else owns.
        x = x.contiguous()
        own: Tensor = (x.clone() if address(x) in taken else x).detach()
        taken.add(address(own))
        return own

    def _rerun(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Run the kernel again under autograd, and differentiate that run."""
        parameters = self._outputs.parameters
        names = [name for name, want in zip(self.differentiable, wanted, strict=True) if want]
        with with_autograd():
            inputs = {name: named[name].detach().requires_grad_() for name in names}
            values = [inputs.get(name, named[name]) for name in parameters.names]
            found = as_tuple(parameters.call(self._kernel, values))
            incoming = [named[f"d{name}"] for name in self._outputs.names]
            pairs = [(x, dx) for x, dx in zip(found, incoming, strict=True) if x.requires_grad]
            what, got = f"{self._owner}, backward='recompute'", "outputs without a grad_fn"
            expected, remedy = "a kernel that autograd can differentiate", "Pass its gradient as backward=fn"
            expect_declared(pairs, what, expected, got, remedy)
            ys, dys = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(ys, list(inputs.values()), dys, allow_unused=True))
        return tuple(next(grads) if want else None for want in wanted)

    def check_inputs(self, named: Mapping[str, Any]) -> None:
        """Raise if an input requires a gradient that it will not get."""
        own = ", ".join(self.differentiable)
        expected = f"an input without gradient (its backward returns gradients of {own})"
        got, remedy = "a tensor that requires one", "Detach it, or list it in differentiable=(...)"
        for name, x in named.items():
            lost = isinstance(x, Tensor) and x.requires_grad and name not in self.differentiable
            expect_declared(not lost, f"{self._owner}, input {name!r}", expected, got, remedy)

    def check_incoming(self, grads: Mapping[str, Tensor | None]) -> None:
        """Raise if the gradient of an output would be lost."""
        for name, grad in grads.items():
            what, got = f"{self._owner}, gradient of output {name!r}", "a loss that depends on it"
            expected = f"none, because its backward has no parameter d{name}"
            remedy = f"Use {name}.detach(), or pass a backward that takes d{name}"
            expect_declared(grad is None or name in self.incoming, what, expected, got, remedy)


def _described(x: Any) -> str:
    return f"{tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def register(
    name: str,
    kernel: Callable[..., Any],
    outputs: Outputs,
    derivative: Derivative | None,
    check: bool,
    flops: Callable[..., int],
) -> tuple[Op, Op | None]:
    """Define the operators ``attnspan_wrapped::name`` and, with a derivative, ``name_backward``."""
    legal = isinstance(name, str) and name.isidentifier()
    expect(legal, "name", "an identifier", repr(name), "Choose a name such as flash")
    names = [name] if derivative is None else [name, f"{name}_backward"]
    for each in names:
        got, remedy = f"{each!r}, the name of {NAMESPACE}::{each}", "Use that kernel, or another name"
        expect(each not in _libraries, "name", "an unused name", got, remedy)
    library, backward = torch.library.Library(NAMESPACE, "FRAGMENT"), None  # type: ignore[no-untyped-call]
    try:
        forward = _define_forward(library, name, kernel, outputs, check)
        compat.flop_formula(forward.overloadpacket)(flops)
        if derivative is None:
            text = (
                f"{outputs.owner}: expected a kernel with a derivative, got backward() of a kernel that was "
                'wrapped without one. Wrap it with backward=fn, or with backward="recompute" if autograd can '
                "differentiate the kernel, or call it under torch.no_grad()."
            )
            refuse_derivative(library, forward, _FIRST_ORDER, text=text, forward_mode=_FIRST_ORDER)
        else:
            backward = _define_backward(library, names[1], outputs, derivative)
            node = _node(backward, outputs, derivative)
            differentiate(library, forward, node, forward_mode=_FIRST_ORDER)
            # 2.5 times the forward operations, plus the forward pass if it runs again.
            first, halves = len(derivative.incoming), 7 if derivative.recomputes else 5
            inputs = slice(first, first + len(outputs.parameters.names))
            formula = compat.flop_formula(backward.overloadpacket)
            formula(lambda *values, **_: flops(*values[inputs]) * halves // 2)
    except BaseException:
        # A partly defined operator must not keep the name.
        compat.destroy(library)  # type: ignore[no-untyped-call]
        raise
    _libraries.update(dict.fromkeys(names, library))
    return forward, backward


def _define_forward(
    library: torch.library.Library, name: str, kernel: Callable[..., Any], outputs: Outputs, check: bool
) -> Op:
    parameters, single = outputs.parameters, len(outputs.names) == 1
    returns = "Tensor" if single else f"({', '.join(['Tensor'] * len(outputs.names))})"

    def real(*values: Any) -> Any:
        # Inputs are detached, as in compiled code: a kernel may behave differently if they require gradients.
        values = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in values)
        # Autocast ends here, because compiled code also runs the kernel without it.
        with compat.DisableAutocast():
            returned = parameters.call(kernel, map(outputs.conform, values))
        named = dict(zip(parameters.names, values, strict=True))
        found = outputs.verify(returned, named) if check else as_tuple(returned)
        return found[0] if single else found

    def fake(*values: Any) -> Any:
        made = outputs.make(dict(zip(parameters.names, values, strict=True)))
        return made[0] if single else tuple(made)

    return define(
        library, f"{name}({parameters.schema}) -> {returns}", fake, _STRIDES, CompositeExplicitAutograd=real
    )


def _define_backward(
    library: torch.library.Library, name: str, outputs: Outputs, derivative: Derivative
) -> Op:
    parameters, incoming = outputs.parameters, tuple(f"d{x}" for x in derivative.incoming)
    names = (*incoming, *parameters.names, *derivative.saved)

    def real(*values: Any) -> list[Tensor]:
        named = dict(zip(names, values[:-1], strict=True))
        for output, (shape, dtype, device, _) in zip(outputs.names, outputs.expected(named), strict=True):
            if output in derivative.incoming and named[f"d{output}"] is None:
                named[f"d{output}"] = torch.zeros(shape, dtype=dtype, device=device)
        named |= zip(parameters.names, parameters.plain(map(named.get, parameters.names)), strict=True)
        with compat.DisableAutocast():
            conforming = {name: outputs.conform(x) for name, x in named.items()}
            return derivative.gradients(conforming, values[-1])

    def fake(*values: Any) -> list[Tensor]:
        named = dict(zip(names, values[:-1], strict=True))
        pairs = zip(derivative.differentiable, values[-1], strict=True)
        return [named[x].new_empty(named[x].shape) for x, want in pairs if want]

    first, last = [f"Tensor? {x}" for x in incoming], [f"Tensor {x}" for x in derivative.saved]
    schema = ", ".join([*first, parameters.schema, *last, "bool[] gradients_wanted"])
    backward = define(
        library, f"{name}({schema}) -> Tensor[]", fake, _STRIDES, CompositeExplicitAutograd=real
    )
    refuse_derivative(library, backward, _FIRST_ORDER, forward_mode=_FIRST_ORDER)
    return backward


def _node(backward: Op, outputs: Outputs, derivative: Derivative) -> type[torch.autograd.Function]:
    """Return the autograd node that calls ``backward`` for the derivative."""
    names = outputs.parameters.names

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: Any, *values: Any) -> Any:
            ctx.set_materialize_grads(False)
            named = dict(zip(names, values, strict=True))
            derivative.check_inputs(named)
            found = below_autograd(*source)
            made = dict(zip(outputs.names, as_tuple(found), strict=True))
            kept = {name: x for name, x in named.items() if isinstance(x, Tensor)}
            kept |= {name: made[name] for name in derivative.saved}
            ctx.save_for_backward(*kept.values())
            ctx.kept, ctx.others = list(kept), named | dict.fromkeys(kept)
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            given = dict(zip(outputs.names, grads, strict=True))
            derivative.check_incoming(given)
            # Read once, because checkpointing recomputes them at each read.
            saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
            needed = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
            wanted = [needed[name] for name in derivative.differentiable]
            incoming = (given[name] for name in derivative.incoming)
            found = iter(backward(*incoming, *(ctx.others | saved).values(), wanted))
            made = {x: next(found) for x, want in zip(derivative.differentiable, wanted, strict=True) if want}
            return None, *map(made.get, names)

    return Node


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *, layout: str, causal: bool = False) -> int:
    """Count one forward call's operations, 2 * pairs * (D + Dv) (FlashAttention-2, arXiv:2307.08691, 4.1).

    In layout "thd" every pair counts, because documents are unknown. ``causal`` is aligned bottom-right.
    """
    heads, length = (1, 2) if layout == "bhsd" else (-2, -3)
    q_len, k_len = q.shape[length], k.shape[length]
    pairs = q_len * k_len
    if causal:
        # Queries see k_len - q_len + 1 .. k_len keys, but at least 0.
        first, rows = max(k_len - q_len + 1, 1), min(q_len, k_len)
        pairs = rows * (first + k_len) // 2
    batch = 1 if layout == "thd" else q.shape[0]
    return int(2 * batch * q.shape[heads] * pairs * (q.shape[-1] + v.shape[-1]))


def flop_formula(own: Callable[..., int] | None, parameters: Parameters, layout: str) -> Callable[..., int]:
    """Return the operation count for torch's FLOP counter, as a function of the operator's values."""
    reads = () if own is None else names_of(own, parameters.traced, "flops")

    def count(*values: Any, **_: Any) -> int:
        named = dict(zip(parameters.names, values, strict=True))
        if own is not None:
            return int(own(**{name: named[name] for name in reads}))
        causal = bool(named.get("causal", named.get("is_causal", False)))
        return attention_flops(*(named[x] for x in parameters.required[:3]), layout=layout, causal=causal)

    return count
