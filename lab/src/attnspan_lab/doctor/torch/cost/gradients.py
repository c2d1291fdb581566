"""Trainable parameters that change the results and get no gradient, and the line that cuts them off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, lines_of, place_here
from attnspan_lab.doctor.torch.cost.frozen import common_line, finding_of, whole_modules
from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.torch.recording.operators import node_place, with_node_places
from attnspan_lab.doctor.torch.steps import outcome_of
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text, listed
from attnspan_lab.zoo.step import objective

__all__ = ["TOPIC", "cut_lines", "gradient_findings"]

#: Name of the check.
TOPIC = "trainable parameters without a gradient"
_TRIALS = 16  # maximum number of parameters that are changed alone
_NO_BACKWARD = "NotImplemented"  # torch's node behind an operator without a backward
#: Cause and remedy of each kind of cut. "function": a function of torch without a gradient.
_KINDS = {
    "detach": ("{} ends the graph of gradients at this line", "Remove detach() or .data at this line"),
    "no_grad": (
        "{} runs without gradients (torch.no_grad) at this line",
        "Move this line out of torch.no_grad()",
    ),
    "inference_mode": (
        "{} runs in torch.inference_mode at this line",
        "Move this line out of torch.inference_mode()",
    ),
    "operator": (
        "The operator {} has no backward",
        "Register a backward with torch.library.register_autograd, or use operators that have one",
    ),
    "function": (
        "{} returns a result without a gradient at this line",
        "Use a function with a gradient, such as softmax instead of argmax, sigmoid instead of a comparison, "
        "and x.clone() instead of torch.tensor(x)",
    ),
    "backward": (
        "The backward of {} returns no gradient for an input of this line",
        "Return a gradient for each input that requires one from this function's backward",
    ),
}
_MEANT = ("detach", "no_grad", "inference_mode")


class _Cut(NamedTuple):
    """A line at which the graph of the gradients ends."""

    kind: str
    name: str
    place: Place | None
    stack: tuple[Place, ...] = ()


def gradient_findings(subject: Subject, batch: Any, left: list[str], coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding for each line that cuts off trainable parameters on which the results depend.

    Args:
        subject: A model.
        batch: A batch in whose step other parameters get a gradient.
        left: Trainable parameters that get none.
        coverage: Collects the checks.

    Raises:
        CannotRun: The step cannot be repeated, or raises with other values of the parameters.
    """
    if not left:
        return
    depends = _dependence(subject, batch)
    for name, own in whole_modules(subject.model, left):
        is_used = depends(own)
        place = _common_line(subject, batch, own) if is_used else None
        if place is not None:
            yield finding_of(subject, batch, name, own, place)
        if place is not None or not is_used:
            left = [x for x in left if x not in own]
    names = left if left and depends(left) else []
    if len(names) > _TRIALS:
        coverage.missed(TOPIC, f"only {_TRIALS} of the {len(names)} without a gradient were examined")
    names = [x for x in names[:_TRIALS] if depends([x])]
    cuts = _cuts(subject, batch, names) if names else {}
    alike = {x: cuts[x]._replace(stack=()) if x in cuts else None for x in names}
    for cut in dict.fromkeys(alike.values()):
        own = [x for x in names if alike[x] == cut]
        have = "has" if len(own) == 1 else "have"
        what = f"{counted(len(own), 'trainable parameter')} {have} no gradient: {listed(own, 4)}"
        evidence = ("if you change them, the results change",)
        if cut is None:
            yield Finding("no-gradient", what, (), evidence)
            continue
        cause, remedy = _KINDS[cut.kind]
        tried = _tried(subject, batch, cut, own)
        yield Finding("no-gradient", what, at(cut.place), evidence, cause.format(cut.name), remedy, tried)


def _common_line(subject: Subject, batch: Any, names: list[str]) -> Place | None:
    """Find the line that cuts all parameters of a submodule off, if it may be meant."""
    cuts = _cuts(subject, batch, names)
    if set(cuts) != set(names) or not all(x.kind in _MEANT for x in cuts.values()):
        return None
    return common_line([x.stack for x in cuts.values()])


def cut_lines(subject: Subject, batch: Any, names: Iterable[str]) -> tuple[Place, ...]:
    """Find the lines of an eager step that cut parameters off."""
    try:
        return at(*(x.place for x in _cuts(subject, batch, list(names)).values()))
    except Exception:
        return ()  # The step does not run with a recorded graph.


def _dependence(subject: Subject, batch: Any) -> Callable[[list[str]], bool]:
    """Make a function that says whether the results depend on parameters: it changes and restores them."""
    own = dict(subject.model.named_parameters())

    def results(names: list[str]) -> list[Tensor]:
        kept = {own[x]: own[x].detach().clone() for x in names}
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for x in kept:
                    x.add_(torch.linspace(0.5, 1, x.numel()).view_as(x).to(x))
                return list(outcome_of(subject, subject.model, batch, backward=False).results.values())
        except Exception as error:
            raise CannotRun(f"with other values of them, the step raises {error_text(error)}") from error
        finally:
            with torch.no_grad():
                for x, before in kept.items():
                    x.copy_(before)

    plain = results([])

    def depends(names: list[str]) -> bool:
        return not all(map(torch.equal, results(names), plain))

    if any(bool(x.isnan().any()) for x in plain) or depends([]):
        raise CannotRun("the step returns NaN, or different results for the same batch")
    return depends


def _cuts(subject: Subject, batch: Any, names: list[str]) -> dict[str, _Cut]:
    """Find the first cut behind each parameter, in the forward pass or in a backward function."""
    own = dict(subject.model.named_parameters())
    leaves = {id(own[x]): x for x in names}
    flow = _Flow(leaves)
    with with_node_places():
        subject.model.zero_grad(set_to_none=True)
        with flow:
            results = subject.results(subject.call(subject.model, batch), batch)
        found = {**flow.cuts, **_dropped(objective(results), leaves)}
    return {x: found[x] for x in names if x in found}


class _Flow(TorchFunctionMode):
    """Follows parameters through functions, and records the first one whose result has no gradient."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.known = {k: frozenset([x]) for k, x in names.items()}
        self.cuts: dict[str, _Cut] = {}
        self.kept: list[Tensor] = []  # Other tensors must not get the ids of these.

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names = frozenset[str]().union(*(self.known.get(id(x), ()) for x in given))
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)] if names else []
        needs = any(x.requires_grad for x in given)
        for x in outs:
            self.known[id(x)] = self.known.get(id(x), frozenset()) | names
            self.kept.append(x)
            if needs and (x.grad_fn is None or _NO_BACKWARD in x.grad_fn.name()):
                stack = tuple(lines_of(sys._getframe(1)))
                cut = _Cut(*_kind(fn), stack[0] if stack else None, stack)
                for name in names:
                    self.cuts.setdefault(name, cut)
        return out


def _kind(fn: Any) -> tuple[str, str]:
    name = getattr(fn, "__name__", str(fn))
    if name == "__get__":
        name = f".{getattr(getattr(fn, '__self__', None), '__name__', 'data')}"
    if name in ("detach", "detach_", ".data"):
        return "detach", name
    if torch.is_inference_mode_enabled():
        return "inference_mode", name
    if not torch.is_grad_enabled():
        return "no_grad", name
    if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "operator", str(fn)
    return "function", name


def _dropped(total: Tensor, leaves: dict[int, str]) -> dict[str, _Cut]:
    """Run the backward pass, and find parameters behind a function that returns no gradient."""
    found: dict[str, _Cut] = {}

    def looked(node: Any) -> Any:
        def look(inputs: Any, outputs: Any) -> None:
            for grad, (other, _) in zip(inputs, node.next_functions, strict=False):
                if grad is None and any(x is not None for x in outputs):
                    behind = {id(getattr(x, "variable", None)) for x in _nodes(other)}
                    for name in (leaves[x] for x in leaves.keys() & behind):
                        found.setdefault(name, _Cut("backward", node.name(), node_place(node)))

        return look

    hooks = [x.register_hook(looked(x)) for x in _nodes(total.grad_fn) if _NO_BACKWARD not in x.name()]
    if hooks:
        total.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return found


def _nodes(root: Any) -> set[Any]:
    """Collect a node of a graph and the nodes that it passes gradients to."""
    seen, todo = set[Any](), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [x for x, _ in node.next_functions]
    return seen


class _Attached(TorchFunctionMode):
    """Leaves detach() and .data out at one line, or ignores torch.no_grad()."""

    def __init__(self, cut: _Cut) -> None:
        super().__init__()
        self.cut = cut

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cut.kind == "no_grad" and getattr(fn, "__name__", "") != "_set_grad_enabled":
            with torch.enable_grad():
                return fn(*args, **(kwargs or {}))
        if self.cut.kind == "detach" == _kind(fn)[0] and place_here() == self.cut.place:
            return args[0]
        return fn(*args, **(kwargs or {}))


def _tried(subject: Subject, batch: Any, cut: _Cut, names: list[str]) -> str:
    """Run a step without the cut, and count the parameters that get a gradient."""
    if cut.kind not in ("detach", "no_grad"):
        return ""
    own = dict(subject.model.named_parameters())
    try:
        with torch.compiler.set_stance("force_eager"), _Attached(cut):
            subject.step(subject.model, batch)
    except Exception as error:  # The step changes these tensors in place, for example.
        return f"without it, the step raises {error_text(error)}"
    reached = sum(own[x].grad is not None for x in names)
    return f"without it, {reached} of {counted(len(names), 'parameter')} got a gradient"
