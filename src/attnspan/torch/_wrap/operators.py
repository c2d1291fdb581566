"""The two operators of a wrapped kernel, as all that traces torch sees them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function,
)
from torch.autograd import forward_ad

from ...errors import OptionError
from .._ops import _below_autograd, _has_tangent, single_level
from .derivative import Derivative
from .errors import DeclarationError
from .outputs import Outputs

NAMESPACE = "attnspan_wrapped"

# What a kernel was shown in eager mode it is shown in compiled code: the very same strides.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
# Libraries by the name of their operator; an operator lives as long as its library.
_libraries: dict[str, torch.library.Library] = {}


def register(
    name: str, kernel: Callable[..., Any], outputs: Outputs, derivative: Derivative | None, check: bool
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload | None]:
    """Define the operators ``attnspan_wrapped::name`` and, with a derivative, ``name_backward``.

    Raises:
        ValueError: The name is taken or is no identifier.
    """
    names = [name] if derivative is None else [name, f"{name}_backward"]
    for each in names:
        _check_name(each)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        forward = _define(library, name, outputs.parameters.schema, _returns(outputs))
        backward = None if derivative is None else _define_backward(library, name, outputs, derivative)
        _implement(library, forward, _Forward(kernel, outputs, check), outputs.make)
        differentiate = _with_derivative(forward, backward, outputs, derivative)
        library.impl(forward, differentiate, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    except BaseException:
        # What was half defined must not keep the name.
        library._destroy()  # type: ignore[no-untyped-call]
        raise
    _libraries.update(dict.fromkeys(names, library))
    return forward, backward


def _check_name(name: str) -> None:
    if not name.isidentifier():
        raise OptionError("name", expected="an identifier", got=repr(name), remedy="Take a name like flash")
    if name in _libraries:
        raise OptionError(
            "name",
            expected="one that no wrapped kernel has in this process",
            got=f"{name!r}, which {NAMESPACE}::{name} has",
            remedy="Keep what wrap() returned and use it again, or take another name",
        )


def _returns(outputs: Outputs) -> str:
    return "Tensor" if len(outputs.names) == 1 else f"({', '.join(['Tensor'] * len(outputs.names))})"


def _define(library: torch.library.Library, name: str, schema: str, returns: str) -> torch._ops.OpOverload:
    library.define(f"{name}({schema}) -> {returns}", tags=_TAGS)  # type: ignore[no-untyped-call]
    return getattr(getattr(torch.ops, NAMESPACE), name).default  # type: ignore[no-any-return]


def _implement(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    real: Callable[..., Any],
    fake: Callable[[Sequence[Any]], Sequence[Tensor]],
) -> None:
    single = len(op._schema.returns) == 1 and str(op._schema.returns[0].type) == "Tensor"

    def made(*values: Any) -> Any:
        found = fake(values)
        return found[0] if single else found

    # One implementation for every device: the kernel says itself what it cannot run.
    library.impl(op, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(op, made, lib=library)


class _Forward:
    """Runs the kernel under its contract: copies where inputs break it, comparison of what comes back."""

    def __init__(self, kernel: Callable[..., Any], outputs: Outputs, check: bool) -> None:
        self._kernel, self._outputs, self._check = kernel, outputs, check

    def __call__(self, *values: Any) -> Any:
        outputs = self._outputs
        # As in compiled code, where inputs have no history: a kernel may ask and then work in another way.
        values = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in values)
        # Autocast ends here, in eager mode as in compiled code, which runs without it.
        with torch._C._DisableAutocast():
            returned = outputs.parameters.call(self._kernel, outputs.conforming(values))
        if self._check:
            found = outputs.verify(returned, values, outputs.expected(values))
            return found[0] if len(found) == 1 else found
        return returned[0] if isinstance(returned, tuple | list) and len(returned) == 1 else returned


def _define_backward(
    library: torch.library.Library, name: str, outputs: Outputs, derivative: Derivative
) -> torch._ops.OpOverload:
    parameters = outputs.parameters
    arguments = [f"Tensor? d{x}" for x in derivative.incoming]
    schema = ", ".join([*arguments, parameters.schema, *(f"Tensor {x}" for x in derivative.saved)])
    backward = _define(library, f"{name}_backward", f"{schema}, bool[] gradients_wanted", "Tensor[]")
    incoming, saved = len(derivative.incoming), len(derivative.saved)
    places = [parameters.names.index(x) for x in derivative.differentiable]

    def real(*values: Any) -> list[Tensor]:
        *values_seen, wanted = values
        inputs = values_seen[incoming : len(values_seen) - saved]
        expected = dict(zip(outputs.names, outputs.expected(inputs), strict=True))
        grads = {}
        for output, x in zip(derivative.incoming, values_seen[:incoming], strict=True):
            shape, _, dtype, device = expected[output]
            grads[f"d{output}"] = torch.zeros(shape, dtype=dtype, device=device) if x is None else x
        names = (*grads, *parameters.names, *derivative.saved)
        kept = values_seen[len(values_seen) - saved :]
        seen = outputs.conforming((*grads.values(), *parameters.plain(inputs), *kept))
        with torch._C._DisableAutocast():
            return derivative.gradients(dict(zip(names, seen, strict=True)), wanted)

    def fake(values: Sequence[Any]) -> list[Tensor]:
        inputs = values[incoming:]
        like = [inputs[place] for place, want in zip(places, values[-1], strict=True) if want]
        return [x.new_empty(x.shape) for x in like]

    _implement(library, backward, real, fake)
    library.impl(backward, _once_only(backward), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    return backward


def _with_derivative(
    forward: torch._ops.OpOverload,
    backward: torch._ops.OpOverload | None,
    outputs: Outputs,
    derivative: Derivative | None,
) -> Callable[..., Any]:
    """The kernel of the forward operator at the autograd key."""
    names = outputs.parameters.names
    tensors = [place for place, item in enumerate(outputs.parameters.items) if item.is_tensor or item.varying]
    differentiable = () if derivative is None else derivative.differentiable
    places = [names.index(name) for name in differentiable]

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
            found = _below_autograd(forward, keyset, values)
            ctx.set_materialize_grads(False)
            if derivative is not None:
                all_outputs = (found,) if isinstance(found, Tensor) else found
                kept = [
                    x for x, name in zip(all_outputs, outputs.names, strict=True) if name in derivative.saved
                ]
                ctx.save_for_backward(*(values[place] for place in tensors), *kept)
                ctx.values = [None if place in tensors else x for place, x in enumerate(values)]
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if derivative is None or backward is None:
                raise _no_derivative(outputs.owner)
            taken = _taken(dict(zip(outputs.names, grads, strict=True)), derivative)
            # Read once: checkpointing computes them anew at each reading.
            saved, values = ctx.saved_tensors, list(ctx.values)
            for place, x in zip(tensors, saved, strict=False):
                values[place] = x
            wanted = [ctx.needs_input_grad[1 + place] for place in places]
            if all(x is None for x in taken):
                return (None,) * (1 + len(values))
            found = iter(backward(*taken, *values, *saved[len(tensors) :], wanted))
            result: list[Tensor | None] = [None] * (1 + len(values))
            for place, want in zip(places, wanted, strict=True):
                result[1 + place] = next(found) if want else None
            return tuple(result)

    def refuse(values: tuple[Any, ...]) -> None:
        for place in tensors:
            x = values[place]
            if derivative is not None and x is not None and x.requires_grad and place not in places:
                raise DeclarationError(
                    f"{outputs.owner}, input {names[place]!r}",
                    expected=f"no gradient: its backward has those of {', '.join(differentiable)}",
                    got="a tensor that requires one",
                    remedy="Give it detached, or name it in differentiable=(...)",
                )

    return _recorder(forward, Node, refuse)


def _taken(grads: dict[str, Tensor | None], derivative: Derivative) -> list[Tensor | None]:
    """The gradients that the backward takes; one that it does not take must not be lost."""
    for name, grad in grads.items():
        if grad is not None and name not in derivative.incoming:
            raise DeclarationError(
                f"{derivative.owner}, gradient of output {name!r}",
                expected=f"none, as its backward has no parameter d{name}",
                got="a loss that depends on it",
                remedy=f"Use {name}.detach(), or give a backward that takes d{name}",
            )
    return [grads[name] for name in derivative.incoming]


def _no_derivative(owner: str) -> NotImplementedError:
    return NotImplementedError(
        f"{owner}: expected a kernel with a derivative, got backward() of one that was wrapped without. "
        'Wrap it with backward=fn, or with backward="recompute" if autograd can differentiate the kernel, '
        "or call it under torch.no_grad()."
    )


def _once_only(backward: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of the backward operator at the autograd key: without it, second derivatives would be 0."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
            del ctx
            return tuple(_below_autograd(backward, keyset, values))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> None:
            del ctx, grads
            raise NotImplementedError(
                f"second derivatives of {backward}: expected first ones, which kernels can have, got "
                'a derivative of its backward. Use attention(..., backend="math") for higher ones.'
            )

    record = _recorder(backward, Node)
    return lambda keyset, *values: list(record(keyset, *values))


def _recorder(
    op: torch._ops.OpOverload,
    function: type[torch.autograd.Function],
    refuse: Callable[[tuple[Any, ...]], None] | None = None,
) -> Callable[..., Any]:
    # The base class's apply: that of Function would hand the call to torch.func once more.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *values: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, values)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, got a dual tensor. "
                'Use attention(..., backend="math") for forward mode.'
            )
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*values)):
            return _below_autograd(op, keyset, values)
        if refuse is not None:
            refuse(values)
        if torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return inner(keyset, *values)
        return record(keyset, *values)

    return kernel
