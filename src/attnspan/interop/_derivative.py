"""The derivative of a wrapped kernel, supplied or found by running it again; and its two operators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ._errors import expect, expect_declared
from ._operators import below_autograd, differentiate, refuse_second_order, with_autograd
from ._outputs import Outputs, address, as_tuple, names_wanted

NAMESPACE = "attnspan_wrapped"
Backward = Callable[..., Any] | Literal["recompute"] | None

# What a kernel was shown in eager mode it is shown in compiled code: the very same strides.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_FIRST_ORDER = 'Use attention(..., backend="math") for this'
# Libraries by the name of their operator; an operator lives as long as its library.
_libraries: dict[str, torch.library.Library] = {}


class Derivative:
    """How the gradients of the inputs are found.

    Attributes:
        differentiable: Names of the inputs that have gradients.
        incoming: Names of the outputs whose gradients the backward takes.
        saved: Names of the outputs that it needs.
    """

    def __init__(
        self, backward: Backward, kernel: Callable[..., Any], outputs: Outputs, names: Sequence[str] | None
    ) -> None:
        self._kernel, self._outputs, self.owner = kernel, outputs, outputs.owner
        self._function: Callable[..., Any]
        parameters = outputs.parameters
        self.differentiable = parameters.required if names is None else tuple(names)
        unknown = sorted(set(self.differentiable) - set(parameters.tensors))
        expected, got = f"names of tensor parameters ({', '.join(parameters.tensors)})", ", ".join(unknown)
        holds, remedy = bool(self.differentiable) and not unknown, "Name inputs that have a gradient"
        expect(holds, "differentiable", expected, got or "none", remedy)
        holds, remedy = backward == "recompute" or callable(backward), "Write a function of dout, q, ..."
        expect(holds, "backward", 'a function, "recompute" or None', repr(backward), remedy)
        self.recomputes = not callable(backward)
        if callable(backward):
            gradients = tuple(f"d{name}" for name in outputs.names)
            needs = names_wanted(backward, (*gradients, *parameters.names, *outputs.names), "backward")
            self.incoming = tuple(name for name in outputs.names if f"d{name}" in needs)
            self.saved = tuple(name for name in outputs.names if name in needs)
            self._function = lambda named, _: backward(**{name: named[name] for name in needs})
        else:
            self.incoming, self.saved, self._function = outputs.names, (), self._rerun

    def gradients(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> list[Tensor]:
        """Contiguous gradients, in memory of their own, of those differentiable inputs that are wanted."""
        found = self._function(named, wanted)
        names, several = self.differentiable, isinstance(found, tuple | list | Tensor)
        got = f"{len(as_tuple(found))}" if several else type(found).__name__
        expected = f"{len(names)} gradients (of {', '.join(names)})"
        remedy = "Return one for each, or name those that have one with differentiable=(...)"
        expect_declared(got == str(len(names)), f"{self.owner}, backward", expected, got, remedy)
        taken = {address(x) for x in named.values() if isinstance(x, Tensor)}
        pairs = [(name, x) for name, x, want in zip(names, as_tuple(found), wanted, strict=True) if want]
        return [self._own(name, x, named[name], taken) for name, x in pairs]

    def _own(self, name: str, x: Any, like: Tensor, taken: set[int]) -> Tensor:
        if x is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        expected, got = _described(like), _described(x)
        what, remedy = f"{self.owner}, gradient of {name!r}", "Return gradients like their inputs"
        expect_declared(got == expected, what, f"{expected}, as the input", got, remedy)
        # The compiler was promised contiguous memory that nothing else owns.
        x = x.contiguous()
        own: Tensor = (x.clone() if address(x) in taken else x).detach()
        taken.add(address(own))
        return own

    def _rerun(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Run the kernel again, with autograd, and differentiate that run."""
        parameters = self._outputs.parameters
        values = {name: named[name] for name in parameters.names}
        names = [name for name, want in zip(self.differentiable, wanted, strict=True) if want]
        with with_autograd():
            inputs = [values[name].detach().requires_grad_() for name in names]
            values.update(zip(names, inputs, strict=True))
            found = as_tuple(parameters.call(self._kernel, values.values()))
            incoming = [named[f"d{name}"] for name in self._outputs.names]
            pairs = [(x, dx) for x, dx in zip(found, incoming, strict=True) if x.requires_grad]
            what, got = f"{self.owner}, backward='recompute'", "outputs without a grad_fn"
            expected, remedy = "a kernel that autograd can differentiate", "Give its own: backward=fn"
            expect_declared(bool(pairs), what, expected, got, remedy)
            ys, dys = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(ys, inputs, dys, allow_unused=True))
        return [next(grads) if want else None for want in wanted]

    def taken(self, grads: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """The gradients that the backward takes; one that it does not take must not be lost."""
        for name, grad in grads.items():
            what, got = f"{self.owner}, gradient of output {name!r}", "a loss that depends on it"
            expected = f"none, as its backward has no parameter d{name}"
            remedy = f"Use {name}.detach(), or give a backward that takes d{name}"
            expect_declared(grad is None or name in self.incoming, what, expected, got, remedy)
        return [grads[name] for name in self.incoming]


def _described(x: Any) -> str:
    return f"{tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def register(
    name: str, kernel: Callable[..., Any], outputs: Outputs, derivative: Derivative | None, check: bool
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload | None]:
    """Define the operators ``attnspan_wrapped::name`` and, with a derivative, ``name_backward``."""
    expect(name.isidentifier(), "name", "an identifier", repr(name), "Take a name like flash")
    names = [name] if derivative is None else [name, f"{name}_backward"]
    for each in names:
        got, remedy = f"{each!r}, which {NAMESPACE}::{each} has", "Use what wrap() returned, or another name"
        expect(each not in _libraries, "name", "one that no other kernel has", got, remedy)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        forward = _define_forward(library, name, kernel, outputs, check)
        backward = None if derivative is None else _define_backward(library, name, outputs, derivative)
        node = _node(forward, backward, outputs, derivative)
        differentiate(library, forward, node, _FIRST_ORDER)
    except BaseException:
        # What was half defined must not keep the name.
        library._destroy()  # type: ignore[no-untyped-call]
        raise
    _libraries.update(dict.fromkeys(names, library))
    return forward, backward


def _define(
    library: torch.library.Library, name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    library.define(f"{name}{schema}", tags=_TAGS)  # type: ignore[no-untyped-call]
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    # One implementation for every device: the kernel says itself what it cannot run.
    library.impl(op, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(op, fake, lib=library)
    return op  # type: ignore[no-any-return]


def _define_forward(
    library: torch.library.Library, name: str, kernel: Callable[..., Any], outputs: Outputs, check: bool
) -> torch._ops.OpOverload:
    single = len(outputs.names) == 1
    returns = "Tensor" if single else f"({', '.join(['Tensor'] * len(outputs.names))})"

    def real(*values: Any) -> Any:
        # As in compiled code, where inputs have no history: a kernel may ask and then work in another way.
        values = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in values)
        # Autocast ends here, in eager mode as in compiled code, which runs without it.
        with torch._C._DisableAutocast():
            returned = outputs.parameters.call(kernel, outputs.conforming(values))
        found = outputs.verify(returned, values) if check else as_tuple(returned)
        return found[0] if single else found

    def fake(*values: Any) -> Any:
        made = outputs.make(values)
        return made[0] if single else tuple(made)

    return _define(library, name, f"({outputs.parameters.schema}) -> {returns}", real, fake)


def _define_backward(
    library: torch.library.Library, name: str, outputs: Outputs, derivative: Derivative
) -> torch._ops.OpOverload:
    parameters = outputs.parameters
    first, count = len(derivative.incoming), len(parameters.items)
    places = [first + parameters.names.index(x) for x in derivative.differentiable]
    names = (*(f"d{x}" for x in derivative.incoming), *parameters.names, *derivative.saved)

    def real(*values: Any) -> list[Tensor]:
        *given, wanted = values
        inputs = given[first : first + count]
        made = dict(zip(outputs.names, outputs.expected(inputs), strict=True))
        for i, output in enumerate(derivative.incoming):
            if given[i] is None:
                shape, _, dtype, device = made[output]
                given[i] = torch.zeros(shape, dtype=dtype, device=device)
        given[first : first + count] = parameters.plain(inputs)
        with torch._C._DisableAutocast():
            return derivative.gradients(dict(zip(names, outputs.conforming(given), strict=True)), wanted)

    def fake(*values: Any) -> list[Tensor]:
        like = [values[place] for place, want in zip(places, values[-1], strict=True) if want]
        return [x.new_empty(x.shape) for x in like]

    arguments = [f"Tensor? d{x}" for x in derivative.incoming]
    saved = [f"Tensor {x}" for x in derivative.saved]
    schema = ", ".join([*arguments, parameters.schema, *saved, "bool[] gradients_wanted"])
    backward = _define(library, f"{name}_backward", f"({schema}) -> Tensor[]", real, fake)
    refuse_second_order(library, backward, str(backward), _FIRST_ORDER)
    return backward


def _node(
    forward: torch._ops.OpOverload,
    backward: torch._ops.OpOverload | None,
    outputs: Outputs,
    derivative: Derivative | None,
) -> type[torch.autograd.Function]:
    """The derivative of the forward operator."""
    names = outputs.parameters.names
    differentiable = () if derivative is None else derivative.differentiable

    def refuse(values: Sequence[Any]) -> None:
        expected = f"no gradient: its backward has those of {', '.join(differentiable)}"
        got, remedy = "a tensor that requires one", "Give it detached, or name it in differentiable=(...)"
        for name, x in zip(names, values, strict=True):
            lost = isinstance(x, Tensor) and x.requires_grad and name not in differentiable
            expect_declared(not lost, f"{outputs.owner}, input {name!r}", expected, got, remedy)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, values: tuple[Any, ...], *tensors: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            if derivative is None:
                return below_autograd(forward, keyset, values)
            refuse(values)
            found = below_autograd(forward, keyset, values)
            made = dict(zip(outputs.names, as_tuple(found), strict=True))
            ctx.save_for_backward(*tensors, *(made[name] for name in derivative.saved))
            ctx.places = [place for place, x in enumerate(values) if isinstance(x, Tensor)]
            ctx.values = [None if isinstance(x, Tensor) else x for x in values]
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if derivative is None or backward is None:
                raise NotImplementedError(
                    f"{outputs.owner}: expected a kernel with a derivative, got backward() of one that was "
                    'wrapped without. Wrap it with backward=fn, or with backward="recompute" if autograd can '
                    "differentiate the kernel, or call it under torch.no_grad()."
                )
            taken = derivative.taken(dict(zip(outputs.names, grads, strict=True)))
            # Read once: checkpointing computes them anew at each reading.
            saved, values = ctx.saved_tensors, list(ctx.values)
            if all(x is None for x in taken):
                return (None,) * (2 + len(ctx.places))
            for place, x in zip(ctx.places, saved, strict=False):
                values[place] = x
            needed = {names[place]: ctx.needs_input_grad[2 + i] for i, place in enumerate(ctx.places)}
            wanted = [needed.get(name, False) for name in differentiable]
            found = iter(backward(*taken, *values, *saved[len(ctx.places) :], wanted))
            made = {name: next(found) for name, want in zip(differentiable, wanted, strict=True) if want}
            return None, None, *(made.get(names[place]) for place in ctx.places)

    return Node
