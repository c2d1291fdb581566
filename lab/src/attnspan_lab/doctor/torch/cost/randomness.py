"""Random operators of a step: dropout that a checkpoint does not repeat, or that is active in evaluation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, lines_of, on_stack, place_here
from attnspan_lab.doctor.torch.recording.operators import CHECKPOINT, in_backward, named_arguments
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted

_MODULES = f"{Path(torch.nn.modules.__file__).parent}/"
# Dropout draws with one probability for all entries. A tensor of probabilities is a sample of the model.
_DROPOUT = ("native_dropout", "bernoulli_.float", "bernoulli.p", "_fused_dropout")
_UNREACHED = (
    "This torch module is in training mode after model.eval(): the model does not know it as a submodule, or "
    "something calls its train()",
    "Make it an attribute of its module or an entry of an nn.ModuleList, not of a list or a dict",
)
_OWN_GENERATOR = (
    "This line draws from a generator of its own. A checkpoint restores only torch's default generators",
    "Draw from torch's default generator: remove generator=. Or draw before checkpoint(...) and pass the "
    "numbers in",
)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of random operators by line, in the forward pass and when they are recomputed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: Counter[tuple[Any, ...]] = Counter()
        self.again: Counter[tuple[Any, ...]] = Counter()
        self.lines: dict[Place, tuple[Place, ...]] = {}
        self.dropout: dict[Place, tuple[str, bool]] = {}
        self.generators: set[Place] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        place = place_here() if is_random else None
        if place is not None and _probability(op, args, kwargs or {}) != 0.0:
            outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
            key = (place, str(op), *(float(x.detach().double().sum()) for x in outs))
            recomputed = in_backward() and on_stack(CHECKPOINT)
            (self.again if recomputed else self.forward)[key] += 1
            if not recomputed:
                self.lines.setdefault(place, tuple(lines_of(sys._getframe(1))))
            if str(op).removeprefix("aten.").startswith(_DROPOUT):
                self.dropout[place] = str(op), on_stack(_MODULES, place.file)
            if (kwargs or {}).get("generator") is not None:
                self.generators.add(place)
        return out


def _probability(op: Any, args: Any, kwargs: Any) -> float:
    """Return the dropout probability of an attention operator, or 1 for other random operators."""
    if "dropout_p" in (x.name for x in op._schema.arguments):
        return float(named_arguments(op, args, kwargs).get("dropout_p", 0.0))
    return 1.0


def random_findings(subject: Subject, batch: Any) -> Iterator[Finding]:
    """Yield random results that a recomputation does not repeat, and dropout that is active in eval.

    Args:
        subject: The model.
        batch: A batch whose step runs in eager mode.
    """
    yield from _recomputed(subject, batch)
    yield from _in_eval(subject, batch)


def _recomputed(subject: Subject, batch: Any) -> Iterator[Finding]:
    with torch.compiler.set_stance("force_eager"), _Draws() as draws:
        subject.step(subject.model, batch)
    other = draws.again - draws.forward
    for place in dict.fromkeys(key[0] for key in other):
        times = sum(n for key, n in other.items() if key[0] == place)
        lines = draws.lines.get(place, (place,))
        around = [x for x in lines if "checkpoint" in x.text][:1]
        what = "Checkpointing recomputes this random operator with other random numbers: gradients are wrong"
        verb = "differs" if times == 1 else "differ"
        evidence = (f"{counted(times, 'recomputed result')} {verb} from the forward pass",)
        texts = _OWN_GENERATOR if place in draws.generators else ("", "")
        yield Finding("recompute-random", what, (place, *around), evidence, *texts, count=times)


def _in_eval(subject: Subject, batch: Any) -> Iterator[Finding]:
    model, training = subject.model, [x for x in subject.model.modules() if x.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with _Draws() as draws:
                first = subject.step(model, batch, backward=False)
            second = subject.step(model, batch, backward=False)
    finally:
        for module in training:
            module.training = True
    changed = [float((first[x] - second[x]).abs().max()) for x in first if first[x].shape == second[x].shape]
    if not draws.dropout or max(changed, default=0.0) == 0.0:
        return
    evidence = (f"results of two evaluations of one batch differ by up to {max(changed):.1e} (absolute)",)
    for place, (op, is_module) in draws.dropout.items():
        what, texts = "Dropout is active after model.eval()", _UNREACHED if is_module else ("", "")
        yield Finding("dropout-in-eval", what, (place,), (f"operator {op}", *evidence), *texts)
