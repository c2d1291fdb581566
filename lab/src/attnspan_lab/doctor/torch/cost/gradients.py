"""Trainable parameters that change the results and get no gradient, and the line that cuts them off."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, lines_in, lines_of, place_here
from attnspan_lab.doctor.torch.cost.frozen import common_line, finding_of, whole_modules
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text
from attnspan_lab.zoo.step import objective

__all__ = ["cut_lines", "gradient_findings"]

_TOPIC = "trainable parameters without a gradient"
_TRIALS = 16  # maximum number of parameters that are changed alone
_DETACHED, _UNTRACKED, _OPERATOR, _DROPPED = "detach", "no_grad", "operator", "backward"
_INFERENCE = "inference_mode"
_FUNCTION = "function"  # a function of torch without a gradient, such as argmax or a comparison
_NO_BACKWARD = "NotImplemented"  # torch's node behind an operator without a backward
_REMEDIES = {
    _DETACHED: "Remove detach() or .data at this line",
    _UNTRACKED: "Move this line out of torch.no_grad()",
    _INFERENCE: "Move this line out of torch.inference_mode()",
    _OPERATOR: "Register a backward with torch.library.register_autograd, or use operators that have one",
    _FUNCTION: "Use a function with a gradient, such as softmax instead of argmax, sigmoid instead of a "
    "comparison, and x.clone() instead of torch.tensor(x)",
    _DROPPED: "Return a gradient for each input that requires one from this function's backward",
}


class _Cut(NamedTuple):
    """A line at which the graph of the gradients ends."""

    place: Place | None
    kind: str
    name: str
    stack: tuple[Place, ...] = ()

    @property
    def cause(self) -> str:
        """Describe the line."""
        texts = {
            _DETACHED: f"{self.name} ends the graph of gradients at this line",
            _UNTRACKED: f"{self.name} runs without gradients (torch.no_grad) at this line",
            _INFERENCE: f"{self.name} runs in torch.inference_mode at this line",
            _OPERATOR: f"The operator {self.name} has no backward",
            _FUNCTION: f"{self.name} returns a result without a gradient at this line",
            _DROPPED: f"The backward of {self.name} returns no gradient for an input of this line",
        }
        return texts[self.kind]


def gradient_findings(subject: Subject, batch: Any, left: list[str], coverage: Coverage) -> Iterator[Finding]:
    """Yield a finding for each line that cuts off trainable parameters on which the results depend.

    Args:
        subject: A model.
        batch: A batch in whose step other parameters get a gradient.
        left: Trainable parameters that get none.
        coverage: Collects the checks.
    """
    if not left:
        return
    try:
        whole = _whole(subject, batch, left)
    except Exception as error:
        coverage.missed(_TOPIC, f"with other values of them, the step raises {error_text(error)}")
        return
    for name, own, place in whole:
        left = [x for x in left if x not in own]
        if place is not None:
            yield finding_of(subject, batch, name, own, place)
    try:
        names = _influential(subject, batch, left, coverage) if left else []
        cuts = _cuts(subject, batch, names) if names else {}
    except Exception as error:
        coverage.missed(_TOPIC, f"with other values of them, the step raises {error_text(error)}")
        return
    alike = {x: cuts[x]._replace(stack=()) if x in cuts else None for x in names}
    for cut in dict.fromkeys(alike.values()):
        own = [x for x in names if alike[x] == cut]
        text = ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
        have = "has" if len(own) == 1 else "have"
        what = f"{counted(len(own), 'trainable parameter')} {have} no gradient: {text}"
        evidence = ("if you change them, the results change",)
        if cut is None:
            yield Finding("no-gradient", what, (), evidence)
            continue
        tried = _tried(subject, batch, cut, own)
        yield Finding("no-gradient", what, at(cut.place), evidence, cut.cause, _REMEDIES[cut.kind], tried)


def _whole(subject: Subject, batch: Any, left: list[str]) -> list[tuple[str, list[str], Place | None]]:
    """List the submodules that one line cuts off as a whole, with their parameters and this line.

    A submodule that changes no result, such as an unused one, has no line.
    """
    found: list[tuple[str, list[str], Place | None]] = []
    for name, own in whole_modules(subject.model, left):
        known = Coverage()
        if not _influential(subject, batch, own, known, together=True):
            found += [] if known.unchecked else [(name, own, None)]
            continue
        cuts = _cuts(subject, batch, own)
        meant = {_DETACHED, _UNTRACKED, _INFERENCE}
        place = common_line([x.stack for x in cuts.values()])
        if set(cuts) == set(own) and all(x.kind in meant for x in cuts.values()) and place is not None:
            found.append((name, own, place))
    return found


def cut_lines(subject: Subject, batch: Any, names: Iterable[str]) -> tuple[Place, ...]:
    """Find the lines of an eager step that cut parameters off."""
    try:
        return at(*(x.place for x in _cuts(subject, batch, list(names)).values()))
    except Exception:
        return ()  # The step does not run with a recorded graph.


def _influential(
    subject: Subject, batch: Any, names: list[str], coverage: Coverage, *, together: bool = False
) -> list[str]:
    """List the parameters on which the results depend: each is changed and restored, or all together."""
    own = dict(subject.model.named_parameters())

    def results(changed: list[str]) -> list[Tensor]:
        kept = {x: own[x].detach().clone() for x in changed}
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for x in changed:
                    own[x].add_(torch.linspace(0.5, 1, own[x].numel()).view_as(own[x]).to(own[x]))
                torch.manual_seed(0)
                return list(subject.step(subject.model, batch, backward=False).values())
        finally:
            with torch.no_grad():
                for x, before in kept.items():
                    own[x].copy_(before)

    before = results([])

    def differs(changed: list[str]) -> bool:
        return not all(map(torch.equal, results(changed), before))

    if any(bool(x.isnan().any()) for x in before) or differs([]):
        coverage.missed(_TOPIC, "the step returns NaN, or different results for the same batch")
        return []
    if together or not differs(names):
        return names if together and differs(names) else []
    if len(names) > _TRIALS:
        coverage.missed(_TOPIC, f"only {_TRIALS} of the {len(names)} without a gradient were examined")
    return [x for x in names[:_TRIALS] if differs([x])]


def _cuts(subject: Subject, batch: Any, names: list[str]) -> dict[str, _Cut]:
    """Find the first cut behind each parameter, in the forward pass or in a backward function."""
    own = dict(subject.model.named_parameters())
    flow = _Flow({id(own[x]): x for x in names})
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)  # It records forward lines.
    with torch.compiler.set_stance("force_eager"), anomaly:
        subject.model.zero_grad(set_to_none=True)
        with flow:
            results = subject.results(subject.call(subject.model, batch), batch)
        total = objective(results)
        leaves = {id(own[x]): x for x in names}
        dropped = dict(_dropped(total, leaves))
    return {x: cut for x in names if (cut := dropped.get(x) or flow.cuts.get(x)) is not None}


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
                cut = _Cut(stack[0] if stack else None, *_kind(fn), stack)
                for name in names:
                    self.cuts.setdefault(name, cut)
        return out


def _kind(fn: Any) -> tuple[str, str]:
    name = getattr(fn, "__name__", str(fn))
    if name == "__get__":
        name = f".{getattr(getattr(fn, '__self__', None), '__name__', 'data')}"
    if name in ("detach", "detach_", ".data"):
        return _DETACHED, name
    if torch.is_inference_mode_enabled():
        return _INFERENCE, name
    if not torch.is_grad_enabled():
        return _UNTRACKED, name
    if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _OPERATOR, str(fn)
    return _FUNCTION, name


def _dropped(total: Tensor, leaves: dict[int, str]) -> Iterator[tuple[str, _Cut]]:
    """Run the backward pass, and yield parameters behind a function that returns no gradient."""
    nodes, behind = list[Any](), dict[Any, set[str]]()
    _collect(total.grad_fn, nodes)
    for node in nodes:  # A node follows all nodes behind it.
        variable = getattr(node, "variable", None)
        behind[node] = {leaves[id(variable)]} if id(variable) in leaves else set()
        behind[node] = behind[node].union(*(behind[x] for x, _ in node.next_functions if x is not None))
    found: dict[str, _Cut] = {}

    def looked(node: Any) -> Any:
        def look(inputs: Any, outputs: Any) -> None:
            for grad, (other, _) in zip(inputs, node.next_functions, strict=False):
                if grad is None and other is not None and any(x is not None for x in outputs):
                    lines = lines_in("".join(node.metadata.get("traceback_", ())))
                    for name in behind[other]:
                        found.setdefault(name, _Cut(lines[0] if lines else None, _DROPPED, node.name()))

        return look

    hooks = [x.register_hook(looked(x)) for x in nodes if behind[x] and _NO_BACKWARD not in x.name()]
    if hooks:
        total.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    yield from found.items()


def _collect(root: Any, nodes: list[Any]) -> None:
    """List the nodes of a graph, each after the nodes that it passes gradients to."""
    seen, todo = set[Any](), [(root, False)]
    while todo:
        node, done = todo.pop()
        if done:
            nodes.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(x, False) for x, _ in node.next_functions]


class _Attached(TorchFunctionMode):
    """Leaves detach() and .data out at one line, or ignores torch.no_grad()."""

    def __init__(self, cut: _Cut) -> None:
        super().__init__()
        self.cut = cut

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cut.kind == _UNTRACKED and getattr(fn, "__name__", "") != "_set_grad_enabled":
            with torch.enable_grad():
                return fn(*args, **(kwargs or {}))
        if self.cut.kind == _DETACHED and _kind(fn)[0] == _DETACHED and place_here() == self.cut.place:
            return args[0]
        return fn(*args, **(kwargs or {}))


def _tried(subject: Subject, batch: Any, cut: _Cut, names: list[str]) -> str:
    """Run a step without the cut, and count the parameters that get a gradient."""
    if cut.kind not in (_DETACHED, _UNTRACKED):
        return ""
    own = dict(subject.model.named_parameters())
    try:
        with torch.compiler.set_stance("force_eager"), _Attached(cut):
            subject.step(subject.model, batch)
    except Exception as error:  # The step changes these tensors in place, for example.
        return f"without it, the step raises {error_text(error)}"
    reached = sum(own[x].grad is not None for x in names)
    return f"without it, {reached} of {counted(len(names), 'parameter')} got a gradient"
