"""Attention over a single key: the softmax is 1, so queries and keys change no result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnspan_lab.doctor.findings import Finding, texts_of
from attnspan_lab.doctor.places import Place, at, place_here
from attnspan_lab.doctor.torch.isolation.sequences import LABELS
from attnspan_lab.doctor.torch.recording.calls import Call, Step, noise
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted

__all__ = ["OneKey"]

_ROUNDING = 1e-5  # Another query may change the order of additions in a kernel.


@dataclass
class _Line:
    call: Call
    step: Step
    longest: int = 0
    given: bool = True  # In each batch, you passed a sequence of length 1.
    count: int = 0


@dataclass
class OneKey:
    """Lines whose calls have one key in all batches.

    Attributes:
        lines: Calls by line.
        longer: A batch has no dim of length 1.
    """

    lines: dict[Place, _Line] = field(default_factory=dict)
    longer: bool = False

    def add(self, step: Step) -> None:
        """Collect the calls of one batch."""
        given = _has_length_one(step.subject, step.batch)
        self.longer = self.longer or not given
        for call in step.calls:
            if call.place is None or not call.rows.numel() or not _is_attention(step, call):
                continue
            line = self.lines.setdefault(call.place, _Line(call, step))
            line.longest = max(line.longest, call.k_len)
            line.given, line.count = line.given and given, line.count + 1

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each line that never has a second key, if other queries change no result."""
        for place, line in self.lines.items():
            if line.longest > 1 or (line.given and self.longer):
                continue

            def change(call: Call, place: Place = place) -> Tensor | None:
                if call.place != place:
                    return None
                return call.result_of(**{call.operands[0]: noise(call.rows)})

            made = _Made()
            if line.step.differs(line.step.again(replace=change, mode=made)) < _ROUNDING:
                yield _finding(place, line, at(*made.places)[:1])


def _is_attention(step: Step, call: Call) -> bool:
    """Whether weights are multiplied with values. A softmax may also belong to a router with one expert."""
    if call.is_torchs or call.summed is not None:
        return True
    inner = step.subject.model.get_submodule(call.modules[-1]) if call.modules else None
    return isinstance(inner, nn.MultiheadAttention)


def _has_length_one(subject: Subject, batch: Any) -> bool:
    """Whether a tensor of the batch has a dim of length 1, behind the batch axis."""
    named = {k: x for k, x in subject.named(batch).items() if not LABELS.search(k.lower())}
    return any(1 in x.shape[1:] for x in named.values())


class _Made(TorchFunctionMode):
    """Records lines that make a sequence (B, 1, C) of vectors (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.places = list[Place | None]()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = fn(*args, **kwargs)
        if getattr(fn, "__name__", "") in ("unsqueeze", "__getitem__", "view", "reshape", "unflatten"):
            x = args[0] if args else kwargs["input"]
            if x.dim() == 2 and out.dim() == 3 and out.shape == (len(x), 1, x.shape[1]):
                self.places.append(place_here())
        return out


def _finding(place: Place, line: _Line, made: tuple[Place, ...]) -> Finding:
    queries = line.call.q_len if line.call.rows.dim() > 1 else 1
    # A small image may have one patch, and a larger one more.
    images = any(x.dim() > 3 for x in line.step.subject.named(line.step.batch).values())
    case = "cross" if queries > 1 else "short" if line.given or (images and not made) else ""
    texts = texts_of("one-key", case) if case else ("", "")
    sizes = f"{counted(queries, 'query', 'queries')} and 1 key"
    evidence = (
        f"{counted(line.count, 'call')} in all batches, with {sizes}",
        "other queries change no result of the model",
    )
    what = "Attention has only one key here, so no result depends on queries and keys"
    return Finding("one-key", what, at(place, *made), evidence, *texts, severity="note" if case else "")
