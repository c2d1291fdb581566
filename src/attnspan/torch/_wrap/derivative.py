"""The derivative of a wrapped kernel: supplied, found by running the kernel again, or none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import OptionError
from .errors import DeclarationError
from .outputs import Outputs, names_wanted
from .parameters import Parameters

Backward = Callable[..., Any] | Literal["recompute"] | None


@dataclass(frozen=True)
class Derivative:
    """How the gradients of the inputs are found.

    Args:
        differentiable: Names of the inputs that have gradients.
        incoming: Names of the outputs whose gradients the backward takes.
        saved: Names of the outputs that it needs.
        function: Maps all that by name, and which gradients are wanted, to the gradients.
        owner: The operator, for errors.
    """

    differentiable: tuple[str, ...]
    incoming: tuple[str, ...]
    saved: tuple[str, ...]
    function: Callable[[Mapping[str, Any], Sequence[bool]], Any]
    owner: str

    def gradients(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> list[Tensor]:
        """Contiguous gradients, of their own memory, of those differentiable inputs that are wanted.

        Raises:
            ValueError: The backward returned something else than one gradient for each of them.
        """
        found = self.function(named, wanted)
        found = (found,) if isinstance(found, Tensor) else found
        if not isinstance(found, tuple | list) or len(found) != len(self.differentiable):
            got = f"{len(found)}" if isinstance(found, tuple | list) else type(found).__name__
            raise DeclarationError(
                f"{self.owner}, backward",
                expected=f"{len(self.differentiable)} gradients (of {', '.join(self.differentiable)})",
                got=got,
                remedy="Return one for each, or name those that have one with differentiable=(...)",
            )
        taken = {x.untyped_storage().data_ptr() for x in named.values() if isinstance(x, Tensor)}
        kept = []
        for name, x, want in zip(self.differentiable, found, wanted, strict=True):
            if want:
                kept.append(self._own(name, x, named[name], taken))
        return kept

    def _own(self, name: str, x: Any, like: Tensor, taken: set[int]) -> Tensor:
        if x is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        got = f"{tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        expected = f"{tuple(like.shape)}, {like.dtype}, on {like.device}"
        if got != expected:
            raise DeclarationError(
                f"{self.owner}, gradient of {name!r}",
                expected=f"{expected}, as the input",
                got=got,
                remedy="Let the backward return gradients like their inputs, in their order",
            )
        # The compiler was promised contiguous memory that nothing else owns.
        x = x.contiguous()
        if x.untyped_storage().data_ptr() in taken:
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        own: Tensor = x.detach()
        return own


def read_derivative(
    backward: Backward,
    kernel: Callable[..., Any],
    parameters: Parameters,
    outputs: Outputs,
    differentiable: Sequence[str] | None,
    owner: str,
) -> Derivative | None:
    """The derivative that the user described, or None for none.

    Raises:
        ValueError: A name that does not exist, or a backward that is neither a function nor "recompute".

    Example:
        >>> read_derivative(None, None, None, None, None, "sample") is None
        True
    """
    if backward is None:
        if differentiable is not None:
            raise OptionError(
                "differentiable",
                expected="None without a backward",
                got=repr(differentiable),
                remedy='Give backward=fn or backward="recompute"',
            )
        return None
    names = parameters.required_tensors if differentiable is None else tuple(differentiable)
    unknown = sorted(set(names) - set(parameters.tensors))
    if unknown or not names:
        raise OptionError(
            "differentiable",
            expected=f"names of tensor parameters ({', '.join(parameters.tensors)})",
            got=", ".join(unknown) or "none",
            remedy="Name inputs that have a gradient",
        )
    if backward == "recompute":
        rerun = _Recompute(kernel, parameters, outputs, names, owner)
        return Derivative(names, outputs.names, (), rerun, owner)
    if not callable(backward):
        raise OptionError(
            "backward",
            expected='a function, "recompute" or None',
            got=repr(backward),
            remedy='Write backward=fn, with parameters named after what it needs ("dout", "q", "out", ...)',
        )
    gradients = tuple(f"d{name}" for name in outputs.names)
    wanted = names_wanted(backward, (*gradients, *parameters.names, *outputs.names), "backward")
    incoming = tuple(name for name in outputs.names if f"d{name}" in wanted)
    saved = tuple(name for name in outputs.names if name in wanted)

    def call(named: Mapping[str, Any], wanted_gradients: Sequence[bool]) -> Any:
        del wanted_gradients
        return backward(**{name: named[name] for name in wanted})

    return Derivative(names, incoming, saved, call, owner)


@dataclass(frozen=True)
class _Recompute:
    """Runs the kernel again, with autograd, and differentiates that run."""

    kernel: Callable[..., Any]
    parameters: Parameters
    outputs: Outputs
    differentiable: tuple[str, ...]
    owner: str

    def __call__(self, named: Mapping[str, Any], wanted: Sequence[bool]) -> list[Tensor | None]:
        values = {name: named[name] for name in self.parameters.names}
        names = [name for name, want in zip(self.differentiable, wanted, strict=True) if want]
        with with_autograd():
            inputs = [values[name].detach().requires_grad_() for name in names]
            values.update(zip(names, inputs, strict=True))
            returned = self.parameters.call(self.kernel, values.values())
            found = (returned,) if isinstance(returned, Tensor) else returned
            pairs = [
                (x, named[f"d{name}"])
                for name, x in zip(self.outputs.names, found, strict=True)
                if x.requires_grad
            ]
            if not pairs:
                raise DeclarationError(
                    f"{self.owner}, backward='recompute'",
                    expected="a kernel that autograd can differentiate",
                    got="outputs without a grad_fn: it hides its work from autograd",
                    remedy="Give its own backward, as backward=fn",
                )
            ys, dys = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(ys, inputs, dys, allow_unused=True))
        return [next(grads) if want else None for want in wanted]


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd inside an operator, below whose own derivative it is switched off."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for x in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(x)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
