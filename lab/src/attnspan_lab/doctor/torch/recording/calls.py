"""Light record of attention calls: their operands, which a check can follow and change.

The watcher is slow and keeps few tensors. This record only intercepts torch's function, and softmax at lines
where the watcher saw attention that is written out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.doctor.places import Place, lines_here, place_here
from attnspan_lab.doctor.torch.cost.kept_graphs import detached
from attnspan_lab.doctor.torch.masks.forms import arguments
from attnspan_lab.doctor.torch.recording.differences import difference
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import error_text

__all__ = [
    "Call",
    "CannotRun",
    "Step",
    "awake",
    "changed_tokens",
    "contracted",
    "copied_model",
    "is_attention",
    "noise",
    "recorded",
    "sdpa",
    "softmax_arguments",
]

#: torch's function, which is not replaced while nn.MultiheadAttention runs.
sdpa = F.scaled_dot_product_attention
_ASLEEP = 1e-3
_PRODUCTS, _MASKING = ("matmul", "bmm", "einsum"), ("masked_fill", "mul", "where", "tril")
_SDPA, _SOFTMAX, _MULTIHEAD = "scaled_dot_product_attention", "softmax", "multi_head_attention_forward"


class CannotRun(RuntimeError):
    """A copy of the model raises with changed inputs or other results of a call."""


@dataclass(eq=False)
class Call:
    """One attention call.

    Attributes:
        number: Number of the call in its step.
        place: The user's line.
        modules: Names of the modules that were running, the innermost last.
        lines: All of the user's lines that lead to the call, as "file:line".
        turns: Number of calls of each of these modules so far, this one included.
        given: Arguments of torch's function, or ``scores`` and ``dim`` of a softmax.
        result: The result.
        after: The first tensor (B, S, C) that reached or left a module after the call.
        masked: The line that sets some weights to 0 after a softmax.
        contracted: The dim of the weights that their product with the values adds up.
        summed: Sums of the weights over this dim.
    """

    number: int
    place: Place | None
    modules: tuple[str, ...]
    given: dict[str, Any]
    result: Tensor
    after: Tensor | None = None
    masked: Place | None = None
    contracted: int = -1
    summed: Tensor | None = None
    lines: tuple[str, ...] = ()
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def is_torchs(self) -> bool:
        """Whether it is a call of torch's function."""
        return "query" in self.given

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the given tensors that are made from tokens."""
        return ("query", "key", "value") if self.is_torchs else ("scores",)

    @property
    def k_len(self) -> int:
        """Number of keys."""
        return int(self.given["key"].shape[-2] if self.is_torchs else self.rows.shape[-1])

    @property
    def rows(self) -> Tensor:
        """The tensor that has a row for each query: q, or the scores."""
        found: Tensor = self.given["query"] if self.is_torchs else self.given["scores"]
        return found

    @property
    def q_len(self) -> int:
        """Number of queries."""
        return self.rows.shape[-2]

    def result_of(self, **given: Any) -> Tensor:
        """Compute the call with other arguments, without dropout."""
        given = {**self.given, **given}
        if self.is_torchs:
            return sdpa(**{**given, "dropout_p": 0.0})
        scores: Tensor = given["scores"]
        return scores.softmax(given["dim"])


#: Changes an input (B, S, C) of a module.
Inject = Callable[[Tensor], Tensor]
#: Computes another result of a call, or returns None to keep its result.
Replace = Callable[[Call], Tensor | None]
#: Calls the copy, once or several times, and returns its results.
Run = Callable[[Subject], dict[str, Tensor]]


class Changes(TypedDict, total=False):
    """Changes of a step.

    Attributes:
        inject: Name of a module, and the change of its inputs (B, S, C).
        turn: The only call of the module whose inputs change, from 1. Default: all calls.
        replace: Computes other results of attention calls.
        run: Calls the copy in another way than once with the batch.
        mode: Watches the functions or the operators of the run.
    """

    inject: tuple[str, Inject]
    turn: int
    replace: Replace | None
    run: Run | None
    mode: TorchFunctionMode | TorchDispatchMode


@dataclass(eq=False)
class Step:
    """A forward pass of a copy in evaluation mode.

    Attributes:
        subject, batch: The step.
        lines: Lines of softmax functions that are part of attention.
        calls: Attention calls in their order.
        results: Results of the model.
        inputs: The first input (B, S, C) of each module.
    """

    subject: Subject
    batch: Any
    lines: Collection[Place]
    calls: list[Call] = field(default_factory=list)
    results: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def again(self, batch: Any = None, **changes: Unpack[Changes]) -> Step:
        """Run the step again with a fresh copy, another batch or other changes."""
        return recorded(self.subject, self.batch if batch is None else batch, self.lines, **changes)

    def differs(self, other: Step) -> float:
        """Return the largest relative difference of the results."""
        return difference(self.results, other.results)


def recorded(subject: Subject, batch: Any, lines: Collection[Place], **changes: Unpack[Changes]) -> Step:
    """Run a forward pass of a copy in evaluation mode, and record its attention calls.

    Raises:
        CannotRun: The model cannot be copied, or raises.
    """
    with _copying(subject):
        subject.restore()
        own = replace(subject, model=copied_model(subject.model), target="", more=[], start=None)
    own.model.eval()
    record, run = _Record(lines, changes), changes.get("run")
    with ExitStack() as hooks, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, module in own.model.named_modules():
            hooks.enter_context(record.hooked(name, module))
        hooks.enter_context(changes.get("mode") or nullcontext())
        hooks.enter_context(record)
        try:
            results = run(own) if run else own.results(own.call(own.model, batch), {})
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"the model raises {error_text(error, 80)}") from error
    kept = {k: x.detach() for k, x in results.items()}
    return Step(subject, batch, lines, record.calls, kept, record.inputs)


def copied_model(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model. Buffers and caches change in a step, and parameters do not, so copies share them."""
    shared: dict[int, Any] = {id(x): x for x in model.parameters()}
    return copy.deepcopy(model, shared | detached(model))


def awake(step: Step) -> Step:
    """Run a step with noise in parameters that are nearly 0, such as new gates, which hide dependencies.

    Raises:
        CannotRun: The model cannot be copied, or raises.
    """

    def asleep(model: torch.nn.Module) -> list[Tensor]:
        return [x for x in model.parameters() if x.numel() and float(x.detach().abs().max()) < _ASLEEP]

    if not asleep(step.subject.model):
        return step
    with _copying(step.subject):
        own = step.subject.copy()
    with torch.no_grad():
        for x in asleep(own.model):
            x.copy_(noise(x))
    return recorded(own, step.batch, step.lines)


@contextmanager
def _copying(subject: Subject) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CannotRun(f"the model cannot be copied: {_uncopied(subject.model, error)}") from error


def _uncopied(model: torch.nn.Module, error: BaseException) -> str:
    """Name the attribute that cannot be copied, and the error."""
    for name, module in model.named_modules():
        for attribute, x in vars(module).items():
            if attribute not in ("_modules", "_parameters"):
                try:
                    copy.deepcopy(x)
                except Exception:
                    return f"{'.'.join(filter(None, (name, attribute)))} raises {error_text(error, 80)}"
    return error_text(error, 80)


def _is_hidden(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.layout == torch.strided


class _Record(TorchFunctionMode):
    def __init__(self, lines: Collection[Place], changes: Changes) -> None:
        super().__init__()
        self.lines, self.changes = lines, changes
        self.calls: list[Call] = []
        self.modules: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.turns: Counter[str] = Counter()
        #: Weights of softmax functions by identity, with their call and the line of a mask.
        self.weights: dict[int, tuple[Tensor, Call, Place | None]] = {}

    @contextmanager
    def hooked(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        """Note the calls of a module, and change its inputs."""
        handles = (
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
            module.register_forward_hook(partial(self._after, name), always_call=True),
        )
        try:
            yield
        finally:
            for x in handles:
                x.remove()

    def _before(self, name: str, _: Any, args: Any, kwargs: Any) -> Any:
        self.modules.append(name)
        self.turns[name] += 1
        tokens = [x for x in tree_leaves((args, kwargs)) if _is_hidden(x)]
        if tokens:
            self.inputs.setdefault(name, tokens[0].detach().clone())
        self._saw(tokens)
        inject, turn = self.changes.get("inject"), self.changes.get("turn", 0)
        if inject is None or inject[0] != name or turn not in (0, self.turns[name]):
            return None
        return tree_map(lambda x: inject[1](x) if _is_hidden(x) else x, (args, kwargs))

    def _after(self, name: str, _: Any, __: Any, out: Any) -> None:
        if self.modules and self.modules[-1] == name:
            self.modules.pop()
        self._saw([x for x in tree_leaves(out) if _is_hidden(x)])

    def _saw(self, tokens: list[Tensor]) -> None:
        for call in reversed(self.calls) if tokens else ():
            if call.after is not None:
                break
            call.after = tokens[0]

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(fn, "__name__", "")
        if name == _SDPA:
            return self._noted(fn, arguments(args, kwargs), args, kwargs)
        if name == _SOFTMAX:
            given = softmax_arguments(args, kwargs)
            if _has_one_key(given) or is_attention(given, self.lines):
                return self._softmax(fn, args, kwargs)
        if name == _MULTIHEAD:
            with self._inside():
                return fn(*args, **kwargs)
        out = fn(*args, **kwargs)
        if self.weights and name.strip("_") in (*_PRODUCTS, *_MASKING):
            self._use(name.strip("_"), args, out)
        return out

    def _use(self, name: str, args: Any, out: Any) -> None:
        """Note a mask on weights, or their product with the values."""
        place = next((i for i, x in enumerate(args) if id(x) in self.weights), None)
        if place is None or not isinstance(out, Tensor):
            return
        weights = args[place]
        call, masked = self.weights[id(weights)][1:]
        if name in _MASKING:
            if out.shape == weights.shape and _is_masked(weights, out):
                self.weights[id(out)] = out, call, place_here()
            return
        dim = contracted(args[0], place - 1, weights.dim()) if name == "einsum" else -1 - (place == 1)
        if call.summed is None and dim is not None:
            call.masked, call.contracted = masked, dim % weights.dim()
            call.summed = weights.detach().float().sum(dim)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Intercept functions that nn.MultiheadAttention calls, while torch has this mode switched off."""
        kept = {x: getattr(F, x) for x in (_SDPA, _SOFTMAX)}

        def attend(*args: Any, **kwargs: Any) -> Any:
            return self._noted(kept[_SDPA], arguments(args, kwargs), args, kwargs)

        def softmax(*args: Any, **kwargs: Any) -> Any:
            return self._softmax(kept[_SOFTMAX], args, kwargs)

        setattr(F, _SDPA, attend)
        setattr(F, _SOFTMAX, softmax)
        try:
            yield
        finally:
            for name, fn in kept.items():
                setattr(F, name, fn)

    def _softmax(self, fn: Any, args: Any, kwargs: Any) -> Any:
        out = self._noted(fn, softmax_arguments(args, kwargs), args, kwargs)
        self.weights[id(out)] = out, self.calls[-1], None
        return out

    def _noted(self, fn: Any, given: dict[str, Any], args: Any, kwargs: Any) -> Any:
        # A cache may change its keys in place after the call.
        kept = {k: x.detach().clone() if isinstance(x, Tensor) else x for k, x in given.items()}
        call = Call(len(self.calls), place_here(), tuple(self.modules), kept, fn(*args, **kwargs))
        call.lines, call.turns = tuple(lines_here()), {x: self.turns[x] for x in self.modules}
        change = self.changes.get("replace")
        try:
            new = None if change is None else change(call)
        except Exception as error:  # The change of the doctor raises, and not the model.
            raise CannotRun(f"a changed call at {call.place} raises {error_text(error)}") from error
        call.result = call.result if new is None else new
        self.calls.append(call)
        return call.result


def softmax_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the scores and the dim of a softmax."""
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    return {"scores": given["input"], "dim": given.get("dim", -1)}


def is_attention(given: dict[str, Any], lines: Collection[Place]) -> bool:
    """Whether a softmax is part of attention.

    It is if its line is one of ``lines``. A decode step may have a softmax of its own, on another line of the
    same function, which the watched prefill does not run. So a softmax of one query in a function with one of
    ``lines`` counts too.
    """
    place, scores = place_here(), given["scores"]
    if place in lines or place is None:
        return place is not None
    is_step = scores.dim() > 2 and scores.shape[-2] == 1 and given["dim"] in (-1, scores.dim() - 1)
    return is_step and any((x.file, x.function) == (place.file, place.function) for x in lines)


def _has_one_key(given: dict[str, Any]) -> bool:
    """Whether a softmax has scores (..., Sq, 1). The watcher sees no attention there."""
    scores, dim = given["scores"], given["dim"]
    return scores.dim() > 2 and dim in (-1, scores.dim() - 1) and scores.shape[-1] == 1


def _is_masked(weights: Tensor, out: Tensor) -> bool:
    """Whether an operator set some weights to 0 and kept the others."""
    zero = (out == 0) & (weights != 0)
    return bool(zero.any()) and bool(((out == weights) | zero).all()) and not bool(zero.all())


def contracted(equation: Any, number: int, dims: int) -> int | None:
    """Find the only dim of an operand that an einsum adds up."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    given, _, left = equation.replace(" ", "").partition("->")
    letters = given.split(",")[number]
    found = [i for i, x in enumerate(letters) if x not in left]
    return found[0] if len(found) == 1 and len(letters) == dims else None


def noise(x: Tensor) -> Tensor:
    """Make random numbers of the size of a tensor's numbers, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(x.shape, generator=generator, dtype=torch.float32)
    size = x.detach().float().nan_to_num().abs().mean() if x.numel() else torch.ones(())
    return (made * (1 + size.cpu())).to(x)


def changed_tokens(x: Tensor) -> Tensor:
    """Replace each token by another one: a number of the batch, or a vector with noise."""
    if x.is_floating_point():
        return x + noise(x)
    highest = int(x.max())
    return torch.where(x == highest, x - 1 if highest else x + 1, x + 1)
